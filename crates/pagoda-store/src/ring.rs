//! The memory into which layers of pages on disk are read before attention needs them.

use crate::disk::Store;
use crate::mover::{LayerOfPages, Mover};
use crate::slab::Slab;
use pagoda_core::fence::{Completion, Failure};
use pagoda_core::ids::{BlockId, Epoch, GroupId};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Fewest slots: one is processed while others are read.
const SLOTS_MIN: u64 = 3;
/// Most slots, and bytes that are enough for the drive to go on reading while pages in memory are processed.
const SLOTS_MAX: u64 = 64;
const BYTES_ENOUGH: u64 = 256 << 20;

/// Slots, each of which holds one layer of some pages. Reads begin in the order in which they will be needed, and continue
/// from one step into the next: a page on disk never changes while it is there.
#[derive(Debug)]
pub struct Ring {
    store: Arc<Store>,
    slab: Arc<Slab>,
    slot_bytes: u64,
    /// Slots that nobody uses.
    free: Vec<usize>,
    /// Reads that will be needed, the next one first.
    ahead: VecDeque<Reading>,
    /// Reads that will not be needed any more, until they have ended.
    idle: Vec<Reading>,
}

/// A read into a slot, under way or ended.
#[derive(Debug)]
struct Reading {
    slot: usize,
    what: LayerOfPages,
    /// Generations of the pages when the read began.
    generations: Vec<Option<u64>>,
    completion: Completion,
    /// The last step that had ended when the read began.
    since: Epoch,
    /// The last step that had ended when the pages were last seen to be unchanged.
    same: Epoch,
}

/// A slot with verified bytes. Give it back with [`Ring::release`].
#[derive(Debug)]
pub struct Filled {
    slot: usize,
    what: LayerOfPages,
    /// The first byte of the first page's layer.
    pub address: *mut u8,
    /// Bytes from one page to the next.
    pub stride: u64,
}

/// Why a slot could not be filled.
#[derive(Debug)]
pub struct Unread {
    /// The layer group of the first page that could not be read,
    pub group: GroupId,
    /// and its block on disk.
    pub block: BlockId,
    /// What went wrong.
    pub failure: Failure,
}

impl Ring {
    /// A ring whose slots each hold one layer of at most `pages` pages, of any layer group.
    pub fn new(store: &Arc<Store>, pages: usize) -> io::Result<Self> {
        let slot_bytes = pages as u64 * store.geometry().stored_run_max();
        let slab = Slab::new(Self::bytes_of(slot_bytes) as usize)?;
        Ok(Self::over(store, slab, slot_bytes))
    }

    /// Bytes of a ring whose slots have `slot_bytes` each.
    pub fn bytes_of(slot_bytes: u64) -> u64 {
        slot_bytes * BYTES_ENOUGH.div_ceil(slot_bytes).clamp(SLOTS_MIN, SLOTS_MAX)
    }

    /// A ring with as many slots as the memory holds.
    pub fn over(store: &Arc<Store>, slab: Slab, slot_bytes: u64) -> Self {
        let (slots, slab) = (slab.bytes() / slot_bytes as usize, Arc::new(slab));
        let free = (0..slots).rev().collect();
        Self { store: store.clone(), slab, slot_bytes, free, ahead: VecDeque::new(), idle: Vec::new() }
    }

    /// Bytes of all slots. The system provides memory as they are used.
    pub fn bytes(&self) -> u64 {
        self.slab.bytes() as u64
    }

    /// Begins the reads that will be needed, as far as there are slots. `what` is in the order of need and starts with the
    /// first that has not been taken; `since` is the last step that has ended.
    ///
    /// # Safety
    /// Nobody may write to the blocks until their reads have ended (see [`since`](Self::since)).
    ///
    /// # Panics
    /// When a layer of pages does not fit a slot.
    pub unsafe fn read_ahead<'a>(
        &mut self,
        mover: &Mover,
        what: impl Iterator<Item = &'a LayerOfPages>,
        since: Epoch,
    ) {
        let mut known = 0;
        for what in what {
            let Self { ahead, store, .. } = self;
            // If another batch follows, what was read ahead is needed in another order, or only in part.
            let mut guessed = ahead.iter_mut().skip(known);
            if let Some(at) = guessed.position(|reading| reading.is_of(what, store, since)) {
                let reading = ahead.remove(known + at).expect("found there");
                ahead.insert(known, reading);
                known += 1;
                continue;
            }
            self.reclaim();
            // Give up reads that were guessed wrong.
            while self.free.is_empty() && self.ahead.len() > known {
                self.idle.extend(self.ahead.pop_back());
                self.reclaim();
            }
            let Some(slot) = self.free.pop() else { return };
            let unit = self.store.geometry().stored_run(what.group, what.layer);
            assert!(unit * what.blocks.len() as u64 <= self.slot_bytes, "{what:?} does not fit a slot");
            let generations = self.store.generations(what.group, &what.blocks);
            let (what, completion) = (what.clone(), Completion::new());
            // SAFETY: nobody else uses the slot, and the caller keeps others from writing to the blocks.
            unsafe { mover.fetch(&what, &self.slab, self.start(slot), completion.clone()) };
            self.ahead.insert(known, Reading { slot, what, generations, completion, since, same: since });
            known += 1;
        }
        self.idle.extend(self.ahead.drain(known..));
        self.reclaim();
    }

    /// The completion of the read that is needed next: of the first one that the last `read_ahead` was given. None if no slot
    /// was free.
    pub fn next(&self) -> Option<&Completion> {
        self.ahead.front().map(|reading| &reading.completion)
    }

    /// The completion of some read that is under way; of one that is no longer needed, if there is one.
    pub fn under_way(&self) -> Option<&Completion> {
        let mut all = self.idle.iter().chain(&self.ahead).map(|reading| &reading.completion);
        all.find(|completion| completion.copied().is_none())
    }

    /// Whether the next read has succeeded.
    pub fn has_next(&self) -> bool {
        self.next().is_some_and(|read| read.copied().is_some() && read.failure().is_none())
    }

    /// The slot of the next read, or why it could not be filled.
    ///
    /// # Panics
    /// When there is no next read, or it has not ended.
    pub fn take(&mut self) -> Result<Filled, Unread> {
        let Reading { slot, what, completion, .. } =
            self.ahead.pop_front().expect("a read that was waited for");
        let copied = completion.copied().expect("a read that has ended");
        if copied as usize != what.blocks.len() {
            self.give(slot, &what);
            let failure = completion.failure().expect("a read that fails says why").clone();
            return Err(Unread { group: what.group, block: what.blocks[copied as usize], failure });
        }
        let address = self.slab.base().wrapping_add(self.start(slot) as usize);
        let stride = self.store.geometry().stored_run(what.group, what.layer);
        Ok(Filled { slot, what, address, stride })
    }

    /// The layer of one page in a slot, with the padding that it has in the file.
    ///
    /// # Panics
    /// When the slot has no such page.
    pub fn page(&self, filled: &Filled, page: usize) -> &[u8] {
        assert!(page < filled.what.blocks.len(), "page {page} of {:?}", filled.what);
        let start = self.start(filled.slot) + page as u64 * filled.stride;
        assert!(start + filled.stride <= self.bytes(), "{filled:?} is of another ring");
        // SAFETY: the slot is in the slab and holds so many pages, and nobody writes to it until it is given back, which takes it.
        unsafe { std::slice::from_raw_parts(self.slab.base().add(start as usize), filled.stride as usize) }
    }

    /// Takes a slot back.
    pub fn release(&mut self, filled: Filled) {
        self.give(filled.slot, &filled.what);
    }

    /// Lets go of what was read from pages that are gone since, if bytes must be erased with their pages.
    pub fn forget_gone(&mut self) {
        if !self.store.zeroes() {
            return;
        }
        let there = |Reading { what, generations, .. }: &Reading| {
            *generations == self.store.generations(what.group, &what.blocks)
        };
        let (there, gone): (Vec<_>, Vec<_>) = self.ahead.drain(..).partition(there);
        self.ahead = there.into();
        self.idle.extend(gone);
        self.reclaim();
    }

    /// For the oldest read that is still under way: the last step that had ended when it began.
    pub fn since(&self) -> Option<Epoch> {
        let under_way = self.ahead.iter().chain(&self.idle).filter(|r| r.completion.copied().is_none());
        under_way.map(|reading| reading.since).min()
    }

    /// Frees the slots of idle reads that have ended.
    fn reclaim(&mut self) {
        let ended = self.idle.extract_if(.., |reading| reading.completion.copied().is_some());
        for Reading { slot, what, .. } in ended.collect::<Vec<_>>() {
            self.give(slot, &what);
        }
    }

    /// Frees a slot that nobody reads or writes.
    fn give(&mut self, slot: usize, what: &LayerOfPages) {
        if self.store.zeroes() {
            let start = self.start(slot);
            let used = what.blocks.len() as u64 * self.store.geometry().stored_run(what.group, what.layer);
            // SAFETY: nobody reads or writes the slot.
            unsafe { self.slab.zero(start..start + used) };
        }
        self.free.push(slot);
    }

    /// Where a slot begins in the slab.
    fn start(&self, slot: usize) -> u64 {
        slot as u64 * self.slot_bytes
    }
}

impl Reading {
    /// Whether this is a read of these pages and they have not changed since: they cannot while a step holds them. A read
    /// that failed before a step needed it does not count, so that it is repeated.
    fn is_of(&mut self, what: &LayerOfPages, store: &Store, step: Epoch) -> bool {
        if self.what != *what {
            return false;
        }
        if self.same != step {
            if self.completion.failure().is_some()
                || self.generations != store.generations(what.group, &what.blocks)
            {
                return false;
            }
            self.same = step;
        }
        true
    }
}

impl Filled {
    /// A number that no other slot of the ring has.
    pub fn slot(&self) -> usize {
        self.slot
    }
}

// SAFETY: an address in memory that the ring keeps, and that nobody else is given.
unsafe impl Send for Filled {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Error;
    use crate::disk::Geometry;
    use crate::disk::io::fault::{Fault, FaultyDisk};
    use crate::mover::by_hand::ByHand;
    use pagoda_core::ids::BlockId;
    use std::ops::Range;
    use std::time::Duration;

    const GROUP: GroupId = GroupId(0);
    /// Bytes of the two layers of a page.
    const LAYERS: [u64; 2] = [3000, 2000];

    struct World {
        disk: FaultyDisk,
        store: Arc<Store>,
        mover: Mover,
        ring: Ring,
    }

    fn world() -> World {
        let disk = FaultyDisk::default();
        let geometry = Geometry::new(&[LAYERS.to_vec()], 4 << 20).unwrap();
        let store = Arc::new(Store::scratch(&disk, geometry, [1; 16], None).unwrap());
        let mover = Mover::new(Vec::new(), Some(&store)).unwrap();
        let ring = Ring::new(&store, 20).unwrap();
        World { disk, store, mover, ring }
    }

    fn what(layer: usize, blocks: Range<u32>) -> LayerOfPages {
        LayerOfPages { group: GROUP, layer, blocks: blocks.map(BlockId::new).collect() }
    }

    /// A byte of a page, which depends on everything that it could be mistaken for.
    fn byte(version: u8, block: u32, at: u64) -> u8 {
        (u64::from(version) * 101 + u64::from(block) * 31 + at * 7) as u8
    }

    impl World {
        fn write(&self, version: u8, blocks: Range<u32>) {
            let named: Vec<_> = blocks.clone().map(BlockId::new).collect();
            let fill = |page: usize, range: Range<u64>, target: &mut [u8]| {
                range.zip(target).for_each(|(at, to)| *to = byte(version, blocks.start + page as u32, at));
            };
            self.store.lane().unwrap().write(GROUP, &named, fill).unwrap();
        }

        fn ahead(&mut self, what: &[LayerOfPages], step: u64) {
            // SAFETY: the tests write to blocks when nothing is under way.
            unsafe { self.ring.read_ahead(&self.mover, what.iter(), Epoch(step)) };
        }

        fn wait(&self, completion: &Completion) {
            assert!(self.mover.waiter().wait(completion, Duration::from_secs(60)));
        }

        /// Takes the next slot and looks at every byte.
        fn check(&mut self, version: u8, what: &LayerOfPages) {
            self.wait(&self.ring.next().expect("begun").clone());
            let filled = self.ring.take().unwrap();
            let begin = LAYERS[..what.layer].iter().sum::<u64>();
            for (page, block) in what.blocks.iter().enumerate() {
                let found = self.ring.page(&filled, page);
                for at in 0..LAYERS[what.layer] {
                    let right = byte(version, block.index(), begin + at);
                    assert_eq!(found[at as usize], right, "{what:?}, byte {at} of page {page}");
                }
            }
            self.ring.release(filled);
        }

        fn quiet(&mut self) {
            while let Some(completion) = self.ring.under_way().cloned() {
                self.wait(&completion);
            }
        }
    }

    #[test]
    fn slots_come_in_the_order_of_need_and_are_used_again() {
        let mut world = world();
        world.write(1, 0..40);
        let parts: Vec<_> = (0..2).flat_map(|layer| [what(layer, 0..20), what(layer, 20..37)]).collect();
        for step in 0..20 {
            for next in 0..parts.len() {
                let upcoming = [&parts[next..], &parts[..next]].concat();
                world.ahead(&upcoming, step);
                world.check(1, &parts[next]);
            }
        }
        // Each part was read once per step, and those ahead of the last once more.
        let unit = 4096;
        assert!(world.store.traffic().bytes_read <= unit * (20 * 2 * 37 + 2 * 37));
    }

    #[test]
    fn a_page_that_was_written_since_is_read_again() {
        let mut world = world();
        world.write(1, 0..20);
        world.ahead(&[what(0, 0..20)], 0);
        world.quiet();
        world.write(2, 3..4);
        world.write(2, 0..3);
        world.write(2, 4..20);
        world.ahead(&[what(0, 0..20)], 1);
        world.check(2, &what(0, 0..20));
    }

    #[test]
    fn within_a_step_pages_are_not_looked_up_again() {
        // The negative control: without a step in between, the same read has the old bytes. That is why blocks of a step are
        // held.
        let mut world = world();
        world.write(1, 0..20);
        world.ahead(&[what(0, 0..20)], 0);
        world.quiet();
        world.write(2, 0..20);
        world.ahead(&[what(0, 0..20)], 0);
        world.check(1, &what(0, 0..20));
    }

    #[test]
    fn what_was_expected_otherwise_gives_its_slots_back() {
        let mut world = world();
        world.write(1, 0..40);
        for turn in 0..10 {
            let wrong: Vec<_> = (0..16).map(|n| what(turn % 2, n..n + 2)).collect();
            world.ahead(&wrong, 0);
            let right = what(1, 20..40);
            while world.ring.next().is_none() || world.ring.ahead[0].what != right {
                world.ahead(std::slice::from_ref(&right), 0);
                world.ring.under_way().cloned().iter().for_each(|completion| world.wait(completion));
            }
            world.check(1, &right);
        }
    }

    #[test]
    fn what_another_batch_needs_as_well_is_not_read_again() {
        let mut world = world();
        world.write(1, 0..60);
        let [a, b, c, d] = [what(0, 0..20), what(0, 20..40), what(0, 40..60), what(1, 0..20)];
        world.ahead(&[a.clone(), b, c.clone(), d.clone()], 0);
        world.quiet();
        let before = world.store.traffic().bytes_read;
        let parts = [d, a, c];
        for next in 0..parts.len() {
            world.ahead(&parts[next..], 1);
            world.check(1, &parts[next]);
        }
        assert_eq!(world.store.traffic().bytes_read, before);
    }

    #[test]
    fn slots_are_known_by_their_numbers() {
        let mut world = world();
        world.write(1, 0..3);
        world.ahead(&[0, 1, 2].map(|block| what(0, block..block + 1)), 0);
        world.quiet();
        let mut slots = [(); 3].map(|()| world.ring.take().unwrap().slot());
        slots.sort_unstable();
        assert!(slots.is_sorted_by(|a, b| a < b), "{slots:?}");
    }

    #[test]
    fn slots_of_reads_that_nobody_needs_are_free_once_these_have_ended() {
        let mut world = world();
        world.write(1, 0..40);
        let all: Vec<_> =
            (0..world.ring.free.len() as u32).map(|n| what(n as usize % 2, n / 2..n / 2 + 1)).collect();
        let disk = world.disk.clone();
        disk.with("scratch 1", |_| {
            world.ahead(&all, 0);
            world.ahead(&[], 0);
            assert_eq!(world.ring.free, []);
        });
        world.quiet();
        world.ahead(&[what(0, 20..40)], 0);
        world.check(1, &what(0, 20..40));
    }

    #[test]
    fn a_slot_holds_pages_of_any_group() {
        let disk = FaultyDisk::default();
        let geometry = Geometry::new(&[vec![100], vec![100, 5000], vec![100]], 4 << 20).unwrap();
        let store = Arc::new(Store::scratch(&disk, geometry, [1; 16], None).unwrap());
        let mover = Mover::new(Vec::new(), Some(&store)).unwrap();
        let (mut ring, group) = (Ring::new(&store, 2).unwrap(), GroupId(1));
        let what = LayerOfPages { group, layer: 1, blocks: [0, 1].map(BlockId::new).to_vec() };
        let fill = |page: usize, range: Range<u64>, target: &mut [u8]| {
            range.zip(target).for_each(|(at, to)| *to = byte(1, page as u32, at));
        };
        store.lane().unwrap().write(group, &what.blocks, fill).unwrap();
        // SAFETY: nobody writes meanwhile.
        unsafe { ring.read_ahead(&mover, std::iter::once(&what), Epoch(0)) };
        assert!(mover.waiter().wait(ring.next().unwrap(), Duration::from_secs(60)));
        let filled = ring.take().unwrap();
        for page in 0..2 {
            let second = (100..5100).map(|at| byte(1, page as u32, at));
            assert!(ring.page(&filled, page)[..5000].iter().copied().eq(second), "page {page}");
        }
    }

    /// What was guessed is given up only for want of slots.
    #[test]
    fn what_comes_first_now_does_not_cost_what_was_read_for_later() {
        let mut world = world();
        world.write(1, 0..60);
        let [a, b, c] = [0, 20, 40].map(|first| what(0, first..first + 20));
        world.ahead(&[a.clone(), b.clone()], 0);
        world.quiet();
        world.ahead(&[c, a, b], 1);
        world.quiet();
        assert_eq!(world.store.traffic().bytes_read, 60 * 4096);
    }

    /// Like pages that two sequences of a batch share.
    #[test]
    fn a_page_that_was_written_since_is_read_again_for_all_who_need_it() {
        let mut world = world();
        world.write(1, 0..20);
        world.ahead(&[what(0, 0..20)], 0);
        world.quiet();
        world.write(2, 0..20);
        let parts = [what(0, 0..20), what(0, 0..20)];
        for next in 0..2 {
            world.ahead(&parts[next..], 1);
            world.check(2, &parts[next]);
        }
    }

    #[test]
    fn a_step_is_under_way_until_its_reads_have_ended() {
        let mut world = world();
        world.write(1, 0..40);
        assert_eq!(world.ring.since(), None);
        let disk = world.disk.clone();
        disk.with("scratch 1", |_| {
            // Meanwhile the disk does not answer.
            world.ahead(&[what(0, 0..20)], 3);
            world.ahead(&[what(0, 0..20), what(1, 0..20)], 4);
            assert_eq!(world.ring.since(), Some(Epoch(3)));
        });
        world.quiet();
        assert_eq!(world.ring.since(), None);
    }

    /// How many slots have bytes other than zero.
    fn dirty(ring: &Ring) -> usize {
        // SAFETY: no read is under way.
        let bytes = unsafe { std::slice::from_raw_parts(ring.slab.base(), ring.slab.bytes()) };
        bytes.chunks(ring.slot_bytes as usize).filter(|slot| slot.iter().any(|&byte| byte != 0)).count()
    }

    #[test]
    fn bytes_of_pages_that_are_gone_are_zeroed_where_that_is_asked_for() {
        for zeroes in [true, false] {
            let mut world = world();
            if zeroes {
                world.store.zero_on_free().unwrap();
            }
            world.write(1, 0..60);
            let parts = [what(0, 0..20), what(1, 0..20), what(0, 20..40), what(0, 40..60)];
            world.ahead(&parts, 0);
            world.check(1, &parts[0]);
            world.quiet();
            assert_eq!(dirty(&world.ring), if zeroes { 3 } else { 4 }, "what is ahead is needed");
            world.store.zero(GROUP, 0..20).unwrap();
            world.ring.forget_gone();
            assert_eq!(dirty(&world.ring), if zeroes { 2 } else { 4 });
            // A read that fails after its bytes have arrived, and one that is no longer needed.
            world.ahead(&parts[2..3], 1);
            world.check(1, &parts[2]);
            world.disk.fail(0, Fault::Flip);
            world.ahead(&[what(1, 20..40)], 1);
            world.quiet();
            world.ring.take().unwrap_err();
            world.ring.forget_gone();
            assert_eq!(dirty(&world.ring) == 0, zeroes);
        }
    }

    #[test]
    fn a_read_is_there_when_it_has_ended_well() {
        let mut world = world();
        world.write(1, 0..20);
        assert!(!world.ring.has_next());
        let disk = world.disk.clone();
        disk.with("scratch 1", |_| {
            world.ahead(&[what(0, 0..20)], 0);
            assert!(!world.ring.has_next());
        });
        world.quiet();
        assert!(world.ring.has_next());
        world.check(1, &what(0, 0..20));
        world.disk.fail(0, Fault::Errno(5));
        world.ahead(&[what(1, 0..20)], 0);
        world.quiet();
        assert!(!world.ring.has_next());
    }

    #[test]
    #[should_panic(expected = "a read that has ended")]
    fn a_slot_is_not_taken_before_its_read_has_ended() {
        let mut world = world();
        world.write(1, 0..20);
        let (disk, mut taken) = (world.disk.clone(), None);
        disk.with("scratch 1", |_| {
            world.ahead(&[what(0, 0..20)], 0);
            taken = Some(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(world.ring.take()))));
        });
        if let Some(Err(panic)) = taken {
            std::panic::resume_unwind(panic);
        }
    }

    #[test]
    fn a_ring_over_lent_memory_has_as_many_slots_as_fit() {
        let mut world = world();
        world.write(1, 0..40);
        let slot = 20 * 4096;
        let memory = Slab::new(3 * slot + 100).unwrap();
        // SAFETY: `memory` outlives the ring.
        world.ring = Ring::over(
            &world.store,
            unsafe { Slab::lent(memory.base().expose_provenance(), 3 * slot + 100) },
            slot as u64,
        );
        let parts: Vec<_> = (0..2).flat_map(|layer| [what(layer, 0..20), what(layer, 20..40)]).collect();
        world.ahead(&parts, 0);
        assert_eq!((world.ring.ahead.len(), world.ring.free.len()), (3, 0));
        parts[..3].iter().for_each(|part| world.check(1, part));
        world.quiet();
    }

    #[test]
    fn a_read_that_fails_says_why_and_the_next_one_goes_on() {
        let mut world = world();
        world.write(1, 0..20);
        world.disk.fail(0, Fault::Errno(5));
        world.ahead(&[what(0, 0..20), what(1, 0..20)], 0);
        world.quiet();
        let failures: Vec<_> = (0..2).filter_map(|_| world.ring.take().err()).collect();
        let [Unread { group: GROUP, block, failure: Failure::Io(reason) }] = &failures[..] else {
            panic!("{failures:?}")
        };
        assert_eq!(*block, BlockId::new(0));
        assert!(reason.contains("os error 5"), "{reason}");
        world.ahead(&[what(0, 0..20)], 0);
        world.check(1, &what(0, 0..20));
    }

    #[test]
    fn another_layer_of_the_same_pages_is_another_read() {
        let mut world = world();
        world.write(1, 0..20);
        for (step, layer) in [0, 1, 0].into_iter().enumerate() {
            world.ahead(&[what(layer, 0..20), what(1 - layer, 0..20)], step as u64);
            world.quiet();
            world.check(1, &what(layer, 0..20));
            // Read ahead by the time the next step begins, but that step begins with the other layer.
            world.ahead(&[what(layer, 0..20)], step as u64);
            world.quiet();
        }
    }

    /// In whatever order its parts end.
    #[test]
    fn a_read_of_which_several_parts_fail_has_what_came_before_the_first_of_them() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut world = world();
            world.write(1, 0..3);
            let mut lane = world.store.lane().unwrap();
            let mut reads = ByHand::new(&world.store, 4096);
            reads.read_ahead(&mut world.ring, [what(0, 0..3)].iter(), Epoch(0));
            let [third, second, first] = [2, 1, 0].map(|at| Some(reads.take(at)));
            let mut parts = [first, second, third];
            for at in order {
                let mut part = parts[at].take().unwrap();
                let refused = |why: &'static str| {
                    Err(Error::Io { operation: why, source: io::ErrorKind::Other.into() })
                };
                let result = match at {
                    0 => part.read(&mut lane),
                    1 => refused("the second"),
                    _ => refused("the third"),
                };
                part.end(result);
            }
            let Unread { block, failure: Failure::Io(why), .. } = world.ring.take().unwrap_err() else {
                panic!("a failure of I/O")
            };
            assert!(block == BlockId::new(1) && why.contains("the second"), "{order:?}: {block:?}, {why}");
        }
    }

    #[test]
    fn a_read_ahead_that_failed_is_no_error_of_the_next_step() {
        let mut world = world();
        world.write(1, 0..20);
        world.disk.fail(0, Fault::Errno(5));
        world.ahead(&[what(0, 0..20), what(1, 0..20)], 0);
        world.quiet();
        world.ahead(&[what(0, 0..20), what(1, 0..20)], 1);
        world.check(1, &what(0, 0..20));
        world.check(1, &what(1, 0..20));
    }
}
