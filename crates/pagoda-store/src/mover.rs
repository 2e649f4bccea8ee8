//! The threads that move blocks in the background: one copies in memory, others write to disk and read from it.

use crate::disk::io::ALIGN;
use crate::disk::{Error, Lane, Store};
use crate::{Slab, lock};
use pagoda_core::fence::{Completion, Failure};
use pagoda_core::ids::{BlockId, GroupId};
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

#[cfg(any(test, feature = "faults"))]
pub mod by_hand;
mod job;

pub use job::Waiter;
use job::{Job, Part, Work};

/// Where a block's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In memory.
    Slab {
        /// Index of the slab, as given to `Mover::new`.
        slab: usize,
        /// Bytes from its start.
        offset: u64,
    },
    /// On disk.
    Disk {
        /// The layer group of the block.
        group: GroupId,
        /// The block.
        block: BlockId,
    },
}

/// One copy; at least one of its sides is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Where the bytes are.
    pub from: Place,
    /// Where they go.
    pub to: Place,
    /// How many: a whole block, if one side is on disk.
    pub bytes: u64,
}

/// One layer of some pages on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerOfPages {
    /// The layer group of the pages.
    pub group: GroupId,
    /// The index of the layer in its group.
    pub layer: usize,
    /// Where the pages are.
    pub blocks: Vec<BlockId>,
}

/// Most pages that one thread writes or reads at a time: one segment's worth, so that other threads have work too.
const DISK_PAGES: usize = 16;

/// Most bytes of a layer that one thread reads at a time: several I/Os deep.
const FETCH_BYTES: u64 = 8 << 20;

/// Background threads over a set of slabs and, if there is one, a store on disk. Copies in memory run in the order in which
/// they were sent, others in any order; dropping the mover finishes them first.
#[derive(Debug)]
pub struct Mover {
    slabs: Vec<Arc<Slab>>,
    store: Option<Arc<Store>>,
    /// Most bytes of a layer in one part.
    fetch_bytes: u64,
    memory: Option<Sender<Part>>,
    disk: Option<Sender<Part>>,
    threads: Vec<JoinHandle<()>>,
    waiter: Waiter,
}

impl Mover {
    /// Starts the threads; for the disk as many as keep it busy.
    pub fn new(slabs: Vec<Arc<Slab>>, disk: Option<&Arc<Store>>) -> Result<Self, Error> {
        let mut mover = Self::without_threads(slabs, disk, FETCH_BYTES);
        let (memory, inbox) = channel::<Part>();
        let slabs = mover.slabs.clone();
        mover.memory = Some(memory);
        mover.start("pagoda-mover", move || {
            for part in inbox {
                let Work::Copies(transfers) = &part.work else { unreachable!("sent to the disk") };
                transfers.iter().for_each(|transfer| copy(&slabs, transfer));
                part.end(Ok(()));
            }
        })?;
        if let Some(store) = disk {
            let (disk, inbox) = channel::<Part>();
            let inbox = Arc::new(Mutex::new(inbox));
            mover.disk = Some(disk);
            for _ in 0..store.lanes() {
                let (lane, slabs, inbox) = (store.lane()?, mover.slabs.clone(), inbox.clone());
                mover.start("pagoda-disk", move || serve(lane, &slabs, &inbox))?;
            }
        }
        Ok(mover)
    }

    fn without_threads(slabs: Vec<Arc<Slab>>, disk: Option<&Arc<Store>>, fetch_bytes: u64) -> Self {
        let (store, threads, waiter) = (disk.cloned(), Vec::new(), Waiter::default());
        Self { slabs, store, fetch_bytes, memory: None, disk: None, threads, waiter }
    }

    fn start(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        self.threads.push(thread.map_err(Error::io("starting a thread"))?);
        Ok(())
    }

    /// Copies in the background; `completion` finishes when all bytes have arrived, or fails when no more will.
    ///
    /// # Safety
    /// Until then nobody may write what is read here, nor touch what is written here.
    ///
    /// # Panics
    /// When a transfer leaves its slab or has no side in memory, or when it needs a disk and there is none.
    pub unsafe fn send(&self, transfers: Vec<Transfer>, completion: Completion) {
        transfers.iter().for_each(|transfer| self.check(transfer));
        let written = transfers.iter().map(Transfer::written).collect();
        let parts = cut(&transfers);
        let job = self.job(parts.len(), transfers.len(), written, completion, None);
        for range in &parts {
            let queue = if transfers[range.start].on_disk().is_some() { &self.disk } else { &self.memory };
            let work = Work::Copies(transfers[range.clone()].to_vec());
            job.begin(queue, work, range.start);
        }
    }

    /// Reads one layer of pages in the background, one page after the other, into `slab` from `offset` on. Each page's layer
    /// comes with the padding that it has in the file, and has been verified when `completion` finishes.
    ///
    /// # Safety
    /// Until then nobody may touch the memory that is written here, nor write to these blocks.
    ///
    /// # Panics
    /// When it would leave the slab, when `offset` is not a multiple of [`ALIGN`], or there is no disk.
    pub unsafe fn fetch(&self, what: &LayerOfPages, slab: &Arc<Slab>, offset: u64, completion: Completion) {
        let geometry = self.store.as_ref().expect("a disk").geometry();
        let unit = geometry.stored_run(what.group, what.layer);
        let end = unit.checked_mul(what.blocks.len() as u64).and_then(|bytes| bytes.checked_add(offset));
        assert!(end.is_some_and(|end| end <= slab.bytes() as u64), "{what:?} leaves its slab");
        assert!(offset.is_multiple_of(ALIGN), "offset {offset} is not aligned");
        let most = (self.fetch_bytes / unit).max(1) as usize;
        let parts = what.blocks.chunks(most);
        let job = self.job(parts.len(), what.blocks.len(), Vec::new(), completion, None);
        for (part, blocks) in parts.enumerate() {
            let first = part * most;
            let read = LayerOfPages { blocks: blocks.to_vec(), ..*what };
            job.begin(&self.disk, Work::Layer(read, slab.clone(), offset + unit * first as u64), first);
        }
    }

    /// Gives back, in the background, the space of a range of the disk's arena that has no blocks any more. Later writes to
    /// the range wait for it.
    ///
    /// # Panics
    /// When there is no disk.
    pub fn discard(&self, arena: Range<u64>) {
        let hole = self.store.as_ref().expect("a disk").hole(arena);
        let job = self.job(1, 0, Vec::new(), Completion::new(), None);
        // If the system refuses, the space stays taken, which is no error.
        job.begin(&self.disk, Work::Discard(hole), 0);
    }

    /// Ends, in the background, what was sent as several jobs, of which the first `copied` copies count. `written`: for each
    /// of them the block on disk that it may have been written to. Those of the others give their space back.
    ///
    /// # Panics
    /// When there is no disk.
    pub fn end(
        &self,
        copied: usize,
        written: Vec<Option<(GroupId, BlockId)>>,
        failure: Option<Failure>,
        completion: Completion,
    ) {
        let job = self.job(1, copied, written, completion, failure);
        job.begin(&self.disk, Work::End, copied);
    }

    /// See [`Job::new`].
    fn job(
        &self,
        parts: usize,
        transfers: usize,
        written: Vec<Option<(GroupId, BlockId)>>,
        completion: Completion,
        failure: Option<Failure>,
    ) -> Arc<Job> {
        Job::new(parts, transfers, written, self.store.clone(), self.waiter.clone(), completion, failure)
    }

    /// Copies now, in memory.
    ///
    /// # Safety
    /// As for `send`, until this returns.
    ///
    /// # Panics
    /// When the transfer leaves its slab, or a side is on disk.
    pub unsafe fn copy_now(&self, transfer: &Transfer) {
        self.check(transfer);
        copy(&self.slabs, transfer);
    }

    /// To sleep until a job has finished.
    pub fn waiter(&self) -> Waiter {
        self.waiter.clone()
    }

    fn check(&self, transfer: &Transfer) {
        for place in [transfer.from, transfer.to] {
            let inside = match place {
                Place::Slab { slab, offset } => offset
                    .checked_add(transfer.bytes)
                    .is_some_and(|end| end <= self.slabs[slab].bytes() as u64),
                Place::Disk { .. } => self.store.is_some(),
            };
            assert!(inside, "{transfer:?} leaves its slab");
        }
    }
}

impl Transfer {
    /// The group of the side that is on disk, and whether that side is the target.
    fn on_disk(&self) -> Option<(GroupId, bool)> {
        match (self.from, self.to) {
            (Place::Disk { group, .. }, _) => Some((group, false)),
            (_, Place::Disk { group, .. }) => Some((group, true)),
            _ => None,
        }
    }

    /// The block on disk that this writes to, if any.
    fn written(&self) -> Option<(GroupId, BlockId)> {
        if let Place::Disk { group, block } = self.to { Some((group, block)) } else { None }
    }

    /// The block on disk, and the place in memory.
    fn sides(&self) -> (BlockId, Place) {
        match (self.from, self.to) {
            (Place::Disk { block, .. }, memory) | (memory, Place::Disk { block, .. }) => (block, memory),
            _ => unreachable!("looked at by `on_disk`"),
        }
    }
}

/// Cuts a job into runs of transfers that one thread makes at once.
fn cut(transfers: &[Transfer]) -> Vec<Range<usize>> {
    let mut parts: Vec<Range<usize>> = Vec::new();
    for (index, transfer) in transfers.iter().enumerate() {
        match parts.last_mut() {
            Some(last)
                if transfers[last.start].on_disk() == transfer.on_disk()
                    && (transfer.on_disk().is_none() || last.len() < DISK_PAGES) =>
            {
                last.end = index + 1;
            }
            _ => parts.push(index..index + 1),
        }
    }
    parts
}

/// A disk thread: takes parts until there are no more.
fn serve(mut lane: Lane, slabs: &[Arc<Slab>], inbox: &Mutex<Receiver<Part>>) {
    loop {
        let next = lock(inbox).recv();
        let Ok(part) = next else { return };
        let result = match &part.work {
            Work::Copies(transfers) => transfer(&mut lane, slabs, transfers),
            Work::Layer(what, slab, offset) => read_layer(&mut lane, what, slab, *offset),
            Work::Discard(hole) => hole.punch(),
            Work::End => Ok(()),
        };
        part.end(result);
    }
}

/// Reads a part of a fetch.
fn read_layer(lane: &mut Lane, what: &LayerOfPages, slab: &Slab, offset: u64) -> Result<(), Error> {
    let LayerOfPages { group, layer, blocks } = what;
    let bytes = lane.stored_run(*group, *layer) as usize * blocks.len();
    // SAFETY: `fetch` has seen the range inside of the slab, and whoever called it keeps others away from it.
    let target = unsafe { std::slice::from_raw_parts_mut(slab.base().add(offset as usize), bytes) };
    lane.fetch(*group, blocks, *layer, target)
}

/// Writes pages to disk, or reads them.
fn transfer(lane: &mut Lane, slabs: &[Arc<Slab>], transfers: &[Transfer]) -> Result<(), Error> {
    let (group, writes) = transfers[0].on_disk().expect("sent to the disk");
    let (blocks, memory): (Vec<_>, Vec<_>) = transfers.iter().map(Transfer::sides).unzip();
    if writes {
        return lane.write(group, &blocks, |page, range, target| {
            let source = address(slabs, memory[page], range.start);
            // SAFETY: as in `copy`; `target` is the lane's own.
            unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
        });
    }
    let layers = 0..lane.layers(group);
    lane.read(group, &blocks, layers, |page, range, source| {
        let target = address(slabs, memory[page], range.start);
        // SAFETY: as in `copy`; `source` is the lane's own.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
    })
}

/// The address `ahead` bytes after a place in memory.
fn address(slabs: &[Arc<Slab>], place: Place, ahead: u64) -> *mut u8 {
    let Place::Slab { slab, offset } = place else { unreachable!("a side in memory") };
    // SAFETY: `check` has seen the whole range inside of its slab, and `ahead` is within it.
    unsafe { slabs[slab].base().add((offset + ahead) as usize) }
}

/// Copies within checked bounds.
fn copy(slabs: &[Arc<Slab>], transfer: &Transfer) {
    let (source, target) = (address(slabs, transfer.from, 0), address(slabs, transfer.to, 0));
    // SAFETY: `check` has seen both ranges inside their slabs, which live as long as the caller's `Arc`s; that nobody
    // races on them and that they do not overlap is what the senders promise.
    unsafe { std::ptr::copy_nonoverlapping(source, target, transfer.bytes as usize) };
}

impl Drop for Mover {
    fn drop(&mut self) {
        drop((self.memory.take(), self.disk.take()));
        for thread in self.threads.drain(..) {
            // The threads do not panic: `send` has checked the bounds.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn slabs() -> Vec<Arc<Slab>> {
        (0..2).map(|_| Arc::new(Slab::new(1 << 16).unwrap())).collect()
    }

    fn transfer(from: u64, to: u64, bytes: u64) -> Transfer {
        Transfer {
            from: Place::Slab { slab: 0, offset: from },
            to: Place::Slab { slab: 1, offset: to },
            bytes,
        }
    }

    #[test]
    fn a_finished_job_has_moved_its_bytes() {
        let slabs = slabs();
        let mover = Mover::new(slabs.clone(), None).unwrap();
        for round in 1..100u8 {
            // SAFETY: the mover has no job now.
            unsafe { slabs[0].base().write_bytes(round, 4096) };
            let completion = Completion::new();
            // SAFETY: nobody touches either range until the completion.
            unsafe { mover.send(vec![transfer(0, 8, 2048), transfer(2048, 8192, 2048)], completion.clone()) };
            assert!(mover.waiter().wait(&completion, Duration::from_secs(60)));
            assert_eq!(completion.copied(), Some(2));
            // SAFETY: finished.
            unsafe {
                assert_eq!(slabs[1].base().add(8 + 2047).read(), round);
                assert_eq!(slabs[1].base().add(8192 + 2047).read(), round);
                assert_eq!(slabs[1].base().add(8 + 2048).read(), 0);
            }
        }
    }

    #[test]
    fn a_copy_made_now_moves_its_bytes_and_no_others() {
        let slabs = slabs();
        for at in 0..1 << 16 {
            // SAFETY: nobody else has the slab yet.
            unsafe { slabs[0].base().add(at).write((at % 251) as u8) };
        }
        // SAFETY: nobody else touches the slabs.
        unsafe { Mover::new(slabs.clone(), None).unwrap().copy_now(&transfer(1000, 3000, 2048)) };
        // SAFETY: as above.
        let there = unsafe { std::slice::from_raw_parts(slabs[1].base(), 1 << 16) };
        let right = |at| if (3000..5048).contains(&at) { ((at - 2000) % 251) as u8 } else { 0 };
        assert!((0..).zip(there).all(|(at, &byte)| byte == right(at)));
    }

    #[test]
    fn waiting_gives_up() {
        let mover = Mover::new(slabs(), None).unwrap();
        assert!(!mover.waiter().wait(&Completion::new(), Duration::from_millis(1)));
    }

    #[test]
    fn waiting_may_be_forever() {
        let (mover, completion) = (Mover::new(slabs(), None).unwrap(), Completion::new());
        // SAFETY: nobody touches the slabs.
        unsafe { mover.send(vec![transfer(0, 0, 1 << 16)], completion.clone()) };
        assert!(mover.waiter().wait(&completion, Duration::MAX));
    }

    #[test]
    fn dropping_finishes_what_was_sent() {
        let completion = Completion::new();
        let mover = Mover::new(slabs(), None).unwrap();
        // SAFETY: nobody touches the slabs.
        unsafe { mover.send(vec![transfer(0, 0, 1 << 16)], completion.clone()) };
        drop(mover);
        assert_eq!(completion.copied(), Some(1));
    }

    #[test]
    #[should_panic(expected = "leaves its slab")]
    fn refuses_to_leave_a_slab() {
        let mover = Mover::new(slabs(), None).unwrap();
        // SAFETY: it panics before it copies.
        unsafe { mover.copy_now(&transfer(1, 0, 1 << 16)) };
    }

    #[test]
    #[should_panic(expected = "leaves its slab")]
    fn refuses_to_send_out_of_a_slab() {
        let mover = Mover::new(slabs(), None).unwrap();
        let far = vec![transfer(0, 0, 8), transfer(0, 1, 1 << 16)];
        // SAFETY: it panics before it copies.
        unsafe { mover.send(far, Completion::new()) };
    }

    mod on_disk {
        use super::*;
        use crate::disk::Geometry;
        use crate::disk::io::fault::{Fault, FaultyDisk};

        const GROUP: GroupId = GroupId(0);
        const PAGE: u64 = 5000;
        const PAGES: u64 = 40;

        fn parts() -> (FaultyDisk, Arc<Store>, Vec<Arc<Slab>>) {
            let (disk, geometry) =
                (FaultyDisk::default(), Geometry::new(&[vec![3000, 2000]], 1 << 20).unwrap());
            let store = Arc::new(Store::scratch(&disk, geometry, [1; 16], None).unwrap());
            let slabs: Vec<_> =
                (0..2).map(|_| Arc::new(Slab::new((PAGES * PAGE) as usize).unwrap())).collect();
            for at in 0..PAGES * PAGE {
                // SAFETY: nobody else has the slab yet.
                unsafe { slabs[0].base().add(at as usize).write((at % 249) as u8) };
            }
            (disk, store, slabs)
        }

        fn disk(page: u64) -> Place {
            Place::Disk { group: GROUP, block: BlockId::new(page as u32) }
        }

        fn memory(slab: usize, page: u64) -> Place {
            Place::Slab { slab, offset: page * PAGE }
        }

        fn run(mover: &Mover, transfers: Vec<Transfer>) -> Completion {
            let completion = Completion::new();
            // SAFETY: nobody touches the slabs until the completion.
            unsafe { mover.send(transfers, completion.clone()) };
            assert!(mover.waiter().wait(&completion, Duration::from_secs(60)));
            completion
        }

        #[test]
        fn pages_go_to_disk_and_come_back_mixed_with_copies_in_memory() {
            let (_, store, slabs) = parts();
            let mover = Mover::new(slabs.clone(), Some(&store)).unwrap();
            let out =
                (0..PAGES / 2).map(|page| Transfer { from: memory(0, page), to: disk(page), bytes: PAGE });
            assert_eq!(run(&mover, out.collect()).copied(), Some(20));
            let back = (0..PAGES).map(|page| {
                let from = if page < PAGES / 2 { disk(page) } else { memory(0, page) };
                Transfer { from, to: memory(1, page), bytes: PAGE }
            });
            assert_eq!(run(&mover, back.collect()).copied(), Some(40));
            // SAFETY: the job has finished.
            let back = unsafe { std::slice::from_raw_parts(slabs[1].base(), (PAGES * PAGE) as usize) };
            assert!(back.iter().enumerate().all(|(at, &byte)| byte == (at % 249) as u8));
        }

        #[test]
        fn a_page_goes_alone() {
            let (_, store, slabs) = parts();
            let mover = Mover::new(slabs.clone(), Some(&store)).unwrap();
            for (from, to) in [(memory(0, 3), disk(7)), (disk(7), memory(1, 0))] {
                assert_eq!(run(&mover, vec![Transfer { from, to, bytes: PAGE }]).copied(), Some(1));
            }
            // SAFETY: the job has finished.
            let back = unsafe { std::slice::from_raw_parts(slabs[1].base(), PAGE as usize) };
            assert!((3 * PAGE..).zip(back).all(|(at, &byte)| byte == (at % 249) as u8));
        }

        #[test]
        fn a_failure_counts_what_arrived_before_it_and_says_why() {
            let (faulty, store, slabs) = parts();
            let mover = Mover::new(slabs.clone(), Some(&store)).unwrap();
            let out = |pages: Range<u64>| {
                pages
                    .map(|page| Transfer { from: memory(0, page), to: disk(page), bytes: PAGE })
                    .collect::<Vec<_>>()
            };
            faulty.fail(0, Fault::Errno(rustix::io::Errno::NOSPC.raw_os_error()));
            let failed = run(&mover, out(0..4));
            assert_eq!(failed.copied(), Some(0));
            assert_eq!(run(&mover, out(0..PAGES)).copied(), Some(40), "it goes on when there is space again");
            faulty.with("scratch 1", |bytes| {
                // Finds a layer of page 20 by its bytes, wherever it lies.
                let right: Vec<u8> = (20 * PAGE..20 * PAGE + 3000).map(|at| (at % 249) as u8).collect();
                let at = bytes.windows(3000).position(|bytes| bytes == right).unwrap();
                bytes[at + 1234] ^= 1;
            });
            let back = (0..PAGES).map(|page| Transfer { from: disk(page), to: memory(1, page), bytes: PAGE });
            assert_eq!(run(&mover, back.collect()).copied(), Some(16), "parts of 16 pages");
            assert_eq!(store.traffic().corrupt, 1);
        }

        /// Of one page or two each, as the most bytes of a part allow.
        #[test]
        fn a_layer_is_read_in_parts() {
            let (_, store, slabs) = parts();
            let mut mover = Mover::new(slabs.clone(), Some(&store)).unwrap();
            let out = (0..5).map(|page| Transfer { from: memory(0, page), to: disk(page), bytes: PAGE });
            run(&mover, out.collect());
            let what = LayerOfPages { group: GROUP, layer: 1, blocks: (0..5).map(BlockId::new).collect() };
            for most in [1, 2 * 4096 + 1] {
                mover.fetch_bytes = most;
                let (slab, arrived) = (Arc::new(Slab::new(6 * 4096).unwrap()), Completion::new());
                // SAFETY: nobody touches the slab until it has arrived.
                unsafe { mover.fetch(&what, &slab, 4096, arrived.clone()) };
                assert!(mover.waiter().wait(&arrived, Duration::from_secs(60)));
                assert_eq!(arrived.copied(), Some(5));
                // SAFETY: the job has finished.
                let bytes = unsafe { std::slice::from_raw_parts(slab.base(), 6 * 4096) };
                for (page, read) in bytes[4096..].chunks(4096).enumerate() {
                    let second = page as u64 * PAGE + 3000..(page as u64 + 1) * PAGE;
                    assert!(second.zip(read).all(|(at, &byte)| byte == (at % 249) as u8), "page {page}");
                }
            }
        }

        /// Only the space of one extent; what is written there afterwards stays.
        #[test]
        fn space_is_given_back_in_the_background() {
            let (faulty, store, slabs) = parts();
            let mover = Mover::new(slabs.clone(), Some(&store)).unwrap();
            let extent_bytes = store.geometry().arena().extent_bytes;
            let (there, pages) = (extent_bytes / PAGE, 2 * (extent_bytes / PAGE));
            let out = |pages: Range<u64>| {
                let out = pages.map(|page| Transfer { from: memory(0, page), to: disk(page), bytes: PAGE });
                out.collect::<Vec<_>>()
            };
            let back = |pages: Range<u64>| {
                let back = pages.map(|page| Transfer { from: disk(page), to: memory(1, page), bytes: PAGE });
                back.collect::<Vec<_>>()
            };
            run(&mover, out(0..pages));
            let whole = faulty.with("scratch 1", |bytes| bytes.clone());
            assert!(mover.waiter().is_idle());
            faulty.with("scratch 1", |_| {
                // Meanwhile the disk does not answer.
                mover.discard(extent_bytes..2 * extent_bytes);
                assert!(!mover.waiter().is_idle());
            });
            assert_eq!(store.generations(GROUP, &[BlockId::new(there as u32)]), [None]);
            while !mover.waiter().is_idle() {
                std::thread::yield_now();
            }
            faulty.with("scratch 1", |bytes| {
                // A header, and the layers of 3000 and 2000 bytes.
                let segment = there as usize * 3 * 4096;
                assert!(
                    bytes[..segment] == whole[..segment] && bytes[segment..].iter().all(|&byte| byte == 0)
                );
            });
            assert_eq!(run(&mover, back(there..pages)).copied(), Some(0), "no block has a page");
            assert_eq!(run(&mover, back(0..there)).copied(), Some(there as u32));
            mover.discard(extent_bytes..2 * extent_bytes);
            assert_eq!(run(&mover, out(there..pages)).copied(), Some(there as u32));
            assert_eq!(run(&mover, back(0..pages)).copied(), Some(pages as u32));
        }

        #[test]
        fn a_failure_leaves_no_bytes_of_what_it_counts_as_not_written() {
            let (faulty, store, slabs) = parts();
            let mover = Mover::new(slabs.clone(), Some(&store)).unwrap();
            for page in 0..PAGES {
                // SAFETY: the mover has no job now.
                unsafe {
                    slabs[0].base().add((page * PAGE) as usize).write_bytes(page as u8 + 1, PAGE as usize)
                };
            }
            let there = |page: u64| {
                let row = [page as u8 + 1; 2000];
                faulty.with("scratch 1", |bytes| bytes.windows(2000).any(|bytes| bytes == row))
            };
            let out = (0..PAGES).map(|page| Transfer { from: memory(0, page), to: disk(page), bytes: PAGE });
            let out: Vec<_> = out.collect();
            faulty.fail(1, Fault::Errno(rustix::io::Errno::NOSPC.raw_os_error()));
            let copied = u64::from(run(&mover, out.clone()).copied().unwrap());
            // Two threads write parts of 16 pages, so the second write, which fails, is not of the last part.
            assert!(copied < 32);
            assert!((0..PAGES).all(|page| there(page) == (page < copied)));
            assert_eq!(run(&mover, out).copied(), Some(PAGES as u32));
            assert!((0..PAGES).all(there));
        }
    }
}
