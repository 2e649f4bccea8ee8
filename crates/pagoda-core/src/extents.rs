//! The block allocator: one arena per tier, cut into extents, an extent into blocks of one group.
//!
//! Groups of different block sizes share the arena: an extent belongs to a group while it holds one of its blocks, and to
//! nobody otherwise. A group's block `i` lies at `i * block_bytes` from the arena base. An extent holds the blocks that lie
//! wholly inside it; a block that would cross a border is never used.

use crate::bitmap::Bitmap;
use crate::error::{Error, Result};
use crate::ids::{BlockId, GroupId};
use crate::limits;
use std::ops::Range;

/// The memory of one tier.
#[derive(Debug)]
pub struct Arena {
    bytes: u64,
    extent_bytes: u64,
    groups: Vec<GroupBlocks>,
    extents: Vec<Extent>,
    /// Extents that no group holds.
    unowned: Bitmap,
    /// Extents that lost their last block since `reclaim`, each listed once; some may have an owner again.
    emptied: Vec<u32>,
}

/// One group's part of an arena.
#[derive(Debug)]
struct GroupBlocks {
    block_bytes: u64,
    /// Free blocks in extents of the group.
    free: u64,
    /// Blocks in extents of the group.
    held: u64,
    /// Blocks that the group could have in extents without an owner.
    unowned: u64,
    /// The extent that blocks are taken from until it is full.
    filling: Option<u32>,
    /// The group's other extents, in one ring for each binary logarithm of their number of free blocks: the first of each
    /// ring.
    with_free: [Option<u32>; 32],
}

#[derive(Debug, Default)]
struct Extent {
    owner: Option<GroupId>,
    first_block: u32,
    blocks: Bitmap,
    /// Its neighbours in a ring of extents with about as many free blocks, if it is in a ring.
    before: u32,
    behind: u32,
    /// Whether it is listed in `Arena::emptied`.
    emptied: bool,
}

impl Arena {
    /// An arena of `bytes` in extents of `extent_bytes` (the last may be shorter), for groups with the given block sizes. An
    /// arena of 0 bytes is an absent tier.
    pub fn new(bytes: u64, extent_bytes: u64, block_bytes: &[u64]) -> Result<Self> {
        if bytes > limits::ARENA_BYTES_MAX {
            return Err(Error::invalid("bytes", bytes, format!("at most {}", limits::ARENA_BYTES_MAX)));
        }
        if extent_bytes == 0 || bytes.div_ceil(extent_bytes) > limits::EXTENTS_MAX {
            let limit = format!("positive, and at most {} extents in {bytes} bytes", limits::EXTENTS_MAX);
            return Err(Error::invalid("extent_bytes", extent_bytes, limit));
        }
        for &size in block_bytes {
            if size == 0 || size > extent_bytes || bytes / size > limits::BLOCKS_PER_GROUP_MAX {
                let limit = format!(
                    "from 1 to the extent's {extent_bytes} bytes, and at most {} blocks in {bytes} bytes",
                    limits::BLOCKS_PER_GROUP_MAX
                );
                return Err(Error::invalid("block_bytes", size, limit));
            }
        }
        let count = bytes.div_ceil(extent_bytes) as u32;
        let mut unowned = Bitmap::default();
        unowned.reset(count);
        let group = |&block_bytes| {
            let (filling, with_free) = (None, [None; 32]);
            GroupBlocks { block_bytes, free: 0, held: 0, unowned: 0, filling, with_free }
        };
        let mut arena = Self {
            bytes,
            extent_bytes,
            groups: block_bytes.iter().map(group).collect(),
            extents: std::iter::repeat_with(Extent::default).take(count as usize).collect(),
            unowned,
            emptied: Vec::with_capacity(count as usize),
        };
        for index in 0..arena.groups.len() {
            arena.groups[index].unowned = arena.blocks_unowned(GroupId(index as u8));
        }
        Ok(arena)
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes a free block: the lowest one in the extent being filled, then in the group's fullest extent that has one (judged
    /// by the logarithm of its free blocks), then in a fresh extent. The time does not depend on the number of extents.
    pub fn take(&mut self, group: GroupId) -> Option<BlockId> {
        loop {
            let extent = match self.groups[group.index()].filling {
                Some(extent) => extent,
                None => self.next_extent(group)?,
            };
            let slot = &mut self.extents[extent as usize];
            if let Some(local) = slot.blocks.take_lowest() {
                self.groups[group.index()].free -= 1;
                return Some(BlockId::new(slot.first_block + local));
            }
            self.groups[group.index()].filling = None;
        }
    }

    /// Takes this particular block; says whether it exists and was free.
    pub fn take_at(&mut self, group: GroupId, block: BlockId) -> bool {
        let size = self.groups[group.index()].block_bytes;
        if u64::from(block.index()).checked_mul(size).is_none_or(|start| start >= self.bytes) {
            return false;
        }
        let extent = self.extent_of(group, block);
        let (first, len) = self.span_of(group, extent);
        let index = u64::from(block.index());
        if index - first >= len {
            return false;
        }
        if self.unowned.take(extent) {
            self.own(group, extent);
            self.link(group, extent);
        }
        let local = (index - first) as u32;
        let slot = &self.extents[extent as usize];
        if slot.owner != Some(group) || !slot.blocks.contains(local) {
            return false;
        }
        self.unlink(group, extent);
        self.extents[extent as usize].blocks.take(local);
        self.groups[group.index()].free -= 1;
        self.link(group, extent);
        true
    }

    /// Gives a block back. An extent without blocks in use leaves its group.
    pub fn give(&mut self, group: GroupId, block: BlockId) {
        let extent = self.extent_of(group, block);
        self.unlink(group, extent);
        let slot = &mut self.extents[extent as usize];
        debug_assert_eq!(slot.owner, Some(group), "block {block:?} given back to another group");
        slot.blocks.give(block.index() - slot.first_block);
        let blocks = &mut self.groups[group.index()];
        blocks.free += 1;
        if !slot.blocks.is_all_free() {
            self.link(group, extent);
        } else {
            let len = u64::from(slot.blocks.size());
            slot.owner = None;
            blocks.free -= len;
            blocks.held -= len;
            if blocks.filling == Some(extent) {
                blocks.filling = None;
            }
            if !std::mem::replace(&mut slot.emptied, true) {
                self.emptied.push(extent);
            }
            self.unowned.give(extent);
            for index in 0..self.groups.len() {
                self.groups[index].unowned += self.span_of(GroupId(index as u8), extent).1;
            }
        }
    }

    /// Whether `block` is handed out to `group`.
    pub fn is_taken(&self, group: GroupId, block: BlockId) -> bool {
        let slot = &self.extents[self.extent_of(group, block) as usize];
        slot.owner == Some(group) && !slot.blocks.contains(block.index() - slot.first_block)
    }

    /// Blocks of `group` handed out.
    pub fn taken(&self, group: GroupId) -> u64 {
        let blocks = &self.groups[group.index()];
        blocks.held - blocks.free
    }

    /// Blocks that `take` could hand out to `group` now, if no other group takes any.
    pub fn available(&self, group: GroupId) -> u64 {
        self.groups[group.index()].free + self.groups[group.index()].unowned
    }

    /// Byte ranges that have lost their last block since the last call; their memory may be given back.
    pub fn reclaim(&mut self) -> impl Iterator<Item = Range<u64>> + '_ {
        let Self { extent_bytes, bytes, ref mut emptied, ref mut extents, .. } = *self;
        emptied.iter().for_each(|&e| extents[e as usize].emptied = false);
        let idle = emptied.drain(..).filter(|&e| extents[e as usize].owner.is_none());
        idle.map(move |e| {
            let start = u64::from(e) * extent_bytes;
            start..bytes.min(start + extent_bytes)
        })
    }

    fn extent_of(&self, group: GroupId, block: BlockId) -> u32 {
        (u64::from(block.index()) * self.groups[group.index()].block_bytes / self.extent_bytes) as u32
    }

    /// First block and number of blocks of `group` that lie wholly inside an extent.
    fn span_of(&self, group: GroupId, extent: u32) -> (u64, u64) {
        let size = self.groups[group.index()].block_bytes;
        let start = u64::from(extent) * self.extent_bytes;
        let end = self.bytes.min(start + self.extent_bytes);
        let first = start.div_ceil(size);
        (first, (end / size).saturating_sub(first))
    }

    /// Counts the blocks that a group could have in extents without an owner.
    fn blocks_unowned(&self, group: GroupId) -> u64 {
        let unowned = (0..self.extents.len() as u32).filter(|&e| self.unowned.contains(e));
        unowned.map(|e| self.span_of(group, e).1).sum()
    }

    /// Finds the extent to fill next.
    fn next_extent(&mut self, group: GroupId) -> Option<u32> {
        let fullest = self.groups[group.index()].with_free.iter().flatten().next().copied();
        let chosen = match fullest {
            Some(extent) => {
                self.unlink(group, extent);
                extent
            }
            None => self.claim(group)?,
        };
        self.groups[group.index()].filling = Some(chosen);
        Some(chosen)
    }

    /// The ring that an extent of a group belongs in; none for the extent being filled and for those without free blocks.
    fn ring_of(&self, group: GroupId, extent: u32) -> Option<usize> {
        let ring = self.extents[extent as usize].blocks.free().checked_ilog2()?;
        (self.groups[group.index()].filling != Some(extent)).then_some(ring as usize)
    }

    /// Puts an extent at the end of its ring.
    fn link(&mut self, group: GroupId, extent: u32) {
        let Some(ring) = self.ring_of(group, extent) else { return };
        let first = *self.groups[group.index()].with_free[ring].get_or_insert(extent);
        let last = if first == extent { extent } else { self.extents[first as usize].before };
        self.join(last, extent);
        self.join(extent, first);
    }

    /// Takes an extent out of its ring; must come before its number of free blocks changes.
    fn unlink(&mut self, group: GroupId, extent: u32) {
        let Some(ring) = self.ring_of(group, extent) else { return };
        let Extent { before, behind, .. } = self.extents[extent as usize];
        let first = &mut self.groups[group.index()].with_free[ring];
        if *first == Some(extent) {
            *first = (behind != extent).then_some(behind);
        }
        self.join(before, behind);
    }

    fn join(&mut self, before: u32, behind: u32) {
        self.extents[before as usize].behind = behind;
        self.extents[behind as usize].before = before;
    }

    /// Hands the lowest unowned extent that can hold a block to `group`.
    fn claim(&mut self, group: GroupId) -> Option<u32> {
        let (mut too_small, mut found) = (Vec::new(), None);
        while let Some(extent) = self.unowned.take_lowest() {
            if self.span_of(group, extent).1 > 0 {
                found = Some(extent);
                break;
            }
            too_small.push(extent);
        }
        too_small.into_iter().for_each(|extent| self.unowned.give(extent));
        found.inspect(|&extent| self.own(group, extent))
    }

    /// Cuts an extent without an owner into blocks of `group`.
    fn own(&mut self, group: GroupId, extent: u32) {
        let (first, len) = self.span_of(group, extent);
        let slot = &mut self.extents[extent as usize];
        slot.owner = Some(group);
        slot.first_block = first as u32;
        slot.blocks.reset(len as u32);
        let blocks = &mut self.groups[group.index()];
        blocks.held += len;
        blocks.free += len;
        for index in 0..self.groups.len() {
            self.groups[index].unowned -= self.span_of(GroupId(index as u8), extent).1;
        }
    }

    /// Checks the counters against the extents.
    pub(crate) fn audit(&self) -> Result<()> {
        for (index, blocks) in self.groups.iter().enumerate() {
            let own = self.extents.iter().filter(|e| e.owner == Some(GroupId(index as u8)));
            let (free, held) = own.fold((0, 0), |(free, held), e| {
                (free + u64::from(e.blocks.free()), held + u64::from(e.blocks.size()))
            });
            if (free, held) != (blocks.free, blocks.held) {
                return Err(Error::Invariant(format!(
                    "group {index} counts {} free of {} blocks, its extents have {free} of {held}",
                    blocks.free, blocks.held
                )));
            }
            let unowned = self.blocks_unowned(GroupId(index as u8));
            if unowned != blocks.unowned {
                return Err(Error::Invariant(format!(
                    "group {index} counts {} blocks in extents without an owner, which have {unowned}",
                    blocks.unowned
                )));
            }
        }
        let mut found = vec![None; self.extents.len()];
        for (index, blocks) in self.groups.iter().enumerate() {
            for (ring, first) in blocks.with_free.iter().enumerate() {
                let mut next = *first;
                while let Some(extent) = next {
                    found[extent as usize] = Some((GroupId(index as u8), ring));
                    let behind = self.extents[extent as usize].behind;
                    next = (Some(behind) != *first).then_some(behind);
                }
            }
        }
        for (index, (extent, found)) in self.extents.iter().zip(found).enumerate() {
            let place = extent.owner.and_then(|owner| Some((owner, self.ring_of(owner, index as u32)?)));
            if found != place {
                return Err(Error::Invariant(format!(
                    "extent {index} is in ring {found:?}, not in {place:?}"
                )));
            }
            if extent.owner.is_none() != self.unowned.contains(index as u32) {
                return Err(Error::Invariant(format!("extent {index} is both owned and not")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn fills_the_fullest_extent_first_and_lowest_first_within_it() {
        let group = GroupId(0);
        let mut arena = Arena::new(40, 10, &[1]).unwrap();
        let blocks: Vec<_> = (0..30).map(|_| arena.take(group).unwrap()).collect();
        assert!(blocks.iter().map(|b| b.index()).eq(0..30));
        for index in [3, 11, 12, 21, 22, 23] {
            arena.give(group, BlockId::new(index));
        }
        let refilled: Vec<_> = (0..7).map(|_| arena.take(group).unwrap().index()).collect();
        assert_eq!(refilled[0], 21, "the extent that was being filled goes on");
        assert_eq!(refilled[3..], [3, 11, 12, 30], "then the fullest, then a fresh one");
    }

    #[test]
    fn an_arena_beyond_limits_is_refused() {
        let (bytes_max, extents_max) = (limits::ARENA_BYTES_MAX, limits::EXTENTS_MAX);
        let blocks_max = limits::BLOCKS_PER_GROUP_MAX;
        for (bytes, extent_bytes, block_bytes, refused) in [
            (bytes_max, bytes_max, bytes_max, None),
            (bytes_max + 1, bytes_max, bytes_max, Some("bytes")),
            (8, 0, 8, Some("extent_bytes")),
            (8 * extents_max, 8, 8, None),
            (8 * extents_max + 1, 8, 8, Some("extent_bytes")),
            (16, 8, 0, Some("block_bytes")),
            (16, 8, 9, Some("block_bytes")),
            (16, 8, 8, None),
            (8 * blocks_max + 7, 8 * blocks_max, 8, None),
            (8 * blocks_max + 8, 8 * blocks_max, 8, Some("block_bytes")),
        ] {
            let argument = match Arena::new(bytes, extent_bytes, &[block_bytes]) {
                Ok(_) => None,
                Err(Error::InvalidArgument { argument, .. }) => Some(argument),
                Err(error) => panic!("{error}"),
            };
            assert_eq!(argument, refused, "{bytes}, {extent_bytes}, {block_bytes}");
        }
    }

    /// If a block is only a little smaller than an extent, nearly every extent contains a border of blocks and no whole block.
    #[test]
    fn any_number_of_extents_may_hold_no_block() {
        let (group, extent_bytes) = (GroupId(0), 1 << 20);
        let mut arena =
            Arena::new(limits::EXTENTS_MAX * extent_bytes, extent_bytes, &[extent_bytes - 1]).unwrap();
        assert_eq!(arena.take(group).map(|b| b.index()), Some(0));
        let next = arena.take(group).unwrap();
        assert_eq!(next.index(), (1 << 20) - 1, "behind the extents that blocks cross the borders of");
        arena.give(group, next);
        arena.audit().unwrap();
    }

    #[test]
    fn an_empty_extent_changes_hands() {
        let mut arena = Arena::new(64, 32, &[8, 32]).unwrap();
        let (small, large) = (GroupId(0), GroupId(1));
        let held: Vec<_> = (0..5).map(|_| arena.take(small).unwrap()).collect();
        assert_eq!((arena.available(small), arena.available(large)), (3, 0));
        arena.give(small, held[4]);
        assert_eq!(arena.available(large), 1);
        assert!(arena.reclaim().eq(std::iter::once(32..64)));
        assert_eq!(arena.take(large).map(|b| b.index()), Some(1));
        assert_eq!(arena.reclaim().count(), 0);
    }

    #[test]
    fn nothing_behind_the_end_of_an_arena_is_given_back() {
        let (group, mut arena) = (GroupId(0), Arena::new(40, 32, &[8]).unwrap());
        let blocks = [(); 5].map(|()| arena.take(group).unwrap());
        blocks.into_iter().for_each(|block| arena.give(group, block));
        let mut ranges: Vec<_> = arena.reclaim().collect();
        ranges.sort_unstable_by_key(|range| range.start);
        assert_eq!(ranges, [0..32, 32..40]);
    }

    /// As an index on disk may name one. Where it would begin is no 64-bit number.
    #[test]
    fn a_block_far_behind_the_end_is_not_taken() {
        let (group, bytes) = (GroupId(0), limits::ARENA_BYTES_MAX);
        let mut arena = Arena::new(bytes, bytes, &[bytes]).unwrap();
        let far = BlockId::new((u64::MAX / bytes + 1) as u32);
        assert!(!arena.take_at(group, far));
        assert!(arena.take_at(group, BlockId::new(0)));
    }

    #[test]
    fn an_extent_that_was_emptied_twice_is_given_back_once() {
        let (group, mut arena) = (GroupId(0), Arena::new(64, 32, &[8]).unwrap());
        for _ in 0..2 {
            for _ in 0..3 {
                let blocks = [(); 6].map(|()| arena.take(group).unwrap());
                blocks.into_iter().for_each(|block| arena.give(group, block));
            }
            let mut ranges: Vec<_> = arena.reclaim().map(|range| range.start).collect();
            ranges.sort_unstable();
            assert_eq!(ranges, [0, 32]);
        }
    }

    proptest! {
        #[test]
        fn blocks_of_all_groups_never_overlap(
            bytes in 1u64..4000,
            extent_bytes in 97u64..400,
            sizes in proptest::collection::vec(1u64..97, 1..4),
            ops in proptest::collection::vec((any::<u8>(), any::<u16>()), 0..400),
        ) {
            let mut arena = Arena::new(bytes, extent_bytes, &sizes).unwrap();
            let mut live: Vec<(GroupId, BlockId)> = Vec::new();
            let mut owner = vec![false; bytes as usize];
            let range = |(g, b): (GroupId, BlockId)| {
                let size = sizes[g.index()];
                (u64::from(b.index()) * size) as usize..((u64::from(b.index()) + 1) * size) as usize
            };
            for (kind, pick) in ops {
                let group = GroupId((u32::from(kind) % sizes.len() as u32) as u8);
                if kind % 7 == 6 {
                    let block = BlockId::new(u32::from(pick) % 64);
                    let last = bytes.div_ceil(extent_bytes) as usize - 1;
                    let (start, end) = (range((group, block)).start, range((group, block)).end);
                    let inside = end as u64 <= bytes && start as u64 / extent_bytes == (end as u64 - 1) / extent_bytes;
                    let extent = (start as u64 / extent_bytes) as usize;
                    let foreign = inside && live.iter().any(|&(other, held)| {
                        other != group && range((other, held)).start as u64 / extent_bytes == extent as u64
                    });
                    let free = inside && extent <= last && !foreign && !owner[start..end].iter().any(|&byte| byte);
                    prop_assert_eq!(arena.take_at(group, block), free);
                    if free {
                        owner[start..end].fill(true);
                        live.push((group, block));
                    }
                } else if kind % 3 > 0 {
                    let could = arena.available(group);
                    match arena.take(group) {
                        Some(block) => {
                            prop_assert!(could > 0);
                            for byte in &mut owner[range((group, block))] {
                                prop_assert!(!std::mem::replace(byte, true), "two blocks on one byte");
                            }
                            live.push((group, block));
                        }
                        None => prop_assert_eq!(could, 0),
                    }
                } else if !live.is_empty() {
                    let gone = live.swap_remove(pick as usize % live.len());
                    owner[range(gone)].fill(false);
                    arena.give(gone.0, gone.1);
                }
                arena.audit().unwrap();
            }
            let distinct: HashSet<_> = live.iter().copied().collect();
            prop_assert_eq!(distinct.len(), live.len());
        }
    }
}
