//! Where the pages of each layer group lie in the file, as arithmetic.
//!
//! A segment is the part of the file for one extent of the disk tier's arena. It holds the blocks of one group, layer by
//! layer, so that one layer of consecutive pages is one run. Headers come first.

use super::format::header_bytes;
use super::io::ALIGN;
use super::{Error, Result};
use pagoda_core::cache::TierMemory;
use pagoda_core::ids::{BlockId, GroupId};
use pagoda_core::limits::{ARENA_BYTES_MAX, BLOCKS_PER_GROUP_MAX, EXTENTS_MAX};
use std::ops::Range;

/// Blocks of the largest group that a segment aims to have, and bytes in all.
const SEGMENT_BLOCKS: u64 = 16;
const SEGMENT_BYTES: u64 = 4 << 20;

/// The fewest segments per group: with a few large ones some groups would have none.
const SEGMENTS_MIN: u64 = 8;

/// The layout of one file with pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    groups: Vec<Group>,
    extent_bytes: u64,
    segment_bytes: u64,
    budget: u64,
}

/// What a segment holds for one layer group.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    /// The range of bytes of each layer in a block.
    runs: Vec<Range<u64>>,
    /// Where in a segment the runs of each layer begin.
    strips: Vec<u64>,
    slots: u64,
    block_bytes: u64,
}

/// A block's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) segment: u64,
    pub(super) slot: u64,
}

impl Geometry {
    /// For blocks whose layers have `runs[group]` bytes each, in a file of at most `budget` bytes.
    pub fn new(runs: &[Vec<u64>], budget: u64) -> Result<Self> {
        let largest = largest_block(runs);
        if runs.iter().any(|runs| block_bytes(runs) == 0) || !(1..=ARENA_BYTES_MAX).contains(&largest) {
            let limit = format!("at least one group, and from 1 to {ARENA_BYTES_MAX} bytes in each");
            return Err(Error::invalid("runs", format!("{runs:?}"), limit));
        }
        let with = |blocks| Self::with(runs, blocks, budget);
        let fewest = fewest_blocks(runs);
        let least = with(fewest).a_segment_each();
        if budget < least {
            let limit = format!("at least {least} bytes, one page of each of {} layer group(s)", runs.len());
            return Err(Error::invalid("disk_memory", budget, limit));
        }
        let mut blocks = (fewest..=most_blocks(runs)).rev();
        let blocks = blocks.find(|&n| with(n).a_segment_each() * SEGMENTS_MIN <= budget);
        with(blocks.unwrap_or(fewest)).numbered()
    }

    /// The same for a file that was made with `described`, perhaps for another budget: segments keep the size that they have
    /// there.
    pub(super) fn as_in(&self, described: &[u64]) -> Result<Self> {
        let lengths = |group: &Group| group.runs.iter().map(|run| run.end - run.start).collect();
        let runs: Vec<Vec<u64>> = self.groups.iter().map(lengths).collect();
        let blocks = described.first().map_or(0, |extent_bytes| extent_bytes / largest_block(&runs));
        let there = (fewest_blocks(&runs)..=most_blocks(&runs)).contains(&blocks);
        let there = there.then(|| Self::with(&runs, blocks, self.budget));
        let Some(there) = there.filter(|there| there.describe() == described) else {
            let (stored, wanted) = (format!("{described:?}"), format!("{:?}", self.describe()));
            return Err(Error::Mismatch {
                what: "the layout of pages",
                arguments: "spec and formats",
                stored,
                wanted,
            });
        };
        let least = there.a_segment_each();
        if self.budget < least {
            let limit = format!("at least {least} bytes, one segment of each layer group as it is on disk");
            return Err(Error::invalid("disk_memory", self.budget, limit));
        }
        there.numbered()
    }

    /// With this many of the largest blocks in a segment.
    fn with(runs: &[Vec<u64>], blocks: u64, budget: u64) -> Self {
        let extent_bytes = blocks * largest_block(runs);
        let groups: Vec<_> = runs.iter().map(|runs| Group::new(runs, extent_bytes)).collect();
        let segment_bytes = groups.iter().map(Group::bytes).max().unwrap_or(0);
        Self { groups, extent_bytes, segment_bytes, budget }
    }

    /// Bytes of one segment for each group.
    fn a_segment_each(&self) -> u64 {
        self.segment_bytes * self.groups.len() as u64
    }

    /// Itself, unless it has more segments than can be addressed with the block numbers of each group.
    fn numbered(self) -> Result<Self> {
        let numbered = |group: &Group| {
            ((BLOCKS_PER_GROUP_MAX + 1).saturating_mul(group.block_bytes) - 1) / self.extent_bytes
        };
        let segments_max = self.groups.iter().map(numbered).min().unwrap_or(0).min(EXTENTS_MAX);
        let most = self.segment_bytes.saturating_mul(segments_max).min(ARENA_BYTES_MAX);
        if self.budget > most {
            return Err(Error::invalid("disk_memory", self.budget, format!("at most {most} bytes")));
        }
        Ok(self)
    }

    /// The arena whose extents are these segments.
    pub fn arena(&self) -> TierMemory {
        TierMemory { bytes: self.segments().1 * self.extent_bytes, extent_bytes: self.extent_bytes }
    }

    /// Bytes of a segment, and how many there are.
    pub(super) fn segments(&self) -> (u64, u64) {
        (self.segment_bytes, self.budget / self.segment_bytes)
    }

    /// Where every byte of every group lies; later stores over the same file follow it.
    pub(super) fn describe(&self) -> Vec<u64> {
        let groups = self.groups.iter().flat_map(|group| {
            std::iter::once(group.runs.len() as u64).chain(group.runs.iter().map(|run| run.end - run.start))
        });
        [self.extent_bytes, self.segment_bytes].into_iter().chain(groups).collect()
    }

    /// How many layer groups there are.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// The layers of a group.
    pub fn layers(&self, group: GroupId) -> usize {
        self.groups[group.index()].runs.len()
    }

    /// Where in a block the bytes of a layer lie.
    pub fn run(&self, group: GroupId, layer: usize) -> Range<u64> {
        self.groups[group.index()].runs[layer].clone()
    }

    /// Bytes that a layer of a block takes in the file, padding included.
    pub fn stored_run(&self, group: GroupId, layer: usize) -> u64 {
        stored(&self.groups[group.index()].runs[layer])
    }

    /// The most bytes that a layer of a block takes in the file.
    pub fn stored_run_max(&self) -> u64 {
        self.groups.iter().flat_map(|group| group.runs.iter().map(stored)).max().unwrap_or(ALIGN)
    }

    /// The most bytes that one piece of I/O needs: a layer of a block, or a header.
    pub(super) fn piece_bytes_max(&self) -> u64 {
        self.groups.iter().map(Group::header_bytes).fold(self.stored_run_max(), u64::max)
    }

    /// Bytes that are written for one block.
    pub(super) fn written_bytes(&self, group: GroupId) -> u64 {
        let group = &self.groups[group.index()];
        group.header_bytes() + group.runs.iter().map(stored).sum::<u64>()
    }

    pub(super) fn header_bytes(&self, group: GroupId) -> u64 {
        self.groups[group.index()].header_bytes()
    }

    /// Whether the arena has such a block.
    pub(super) fn has(&self, group: u8, block: u32) -> bool {
        let Some(shape) = self.groups.get(usize::from(group)) else { return false };
        if u64::from(block) >= BLOCKS_PER_GROUP_MAX {
            return false;
        }
        let Some(start) = u64::from(block).checked_mul(shape.block_bytes) else { return false };
        let arena = self.arena().bytes;
        let crosses = |end| start / self.extent_bytes != (end - 1) / self.extent_bytes;
        start.checked_add(shape.block_bytes).is_some_and(|end| end <= arena && !crosses(end))
    }

    /// Where in the file the segment of a block would lie, in an arena like this one of any size.
    pub(super) fn segment_of(&self, group: u8, block: u32) -> Option<Range<u64>> {
        let shape = self.groups.get(usize::from(group))?;
        let segment = u64::from(block).checked_mul(shape.block_bytes)? / self.extent_bytes;
        let start = segment.checked_mul(self.segment_bytes)?;
        Some(start..start.checked_add(self.segment_bytes)?)
    }

    pub(super) fn slot(&self, group: GroupId, block: BlockId) -> Slot {
        let (size, index) = (self.groups[group.index()].block_bytes, u64::from(block.index()));
        let segment = index * size / self.extent_bytes;
        Slot { segment, slot: index - (segment * self.extent_bytes).div_ceil(size) }
    }

    /// The blocks of each group that a segment may hold.
    pub(super) fn blocks_in(&self, segment: u64) -> impl Iterator<Item = (GroupId, BlockId)> {
        let (start, end) = (segment * self.extent_bytes, (segment + 1) * self.extent_bytes);
        self.groups.iter().zip((0..).map(GroupId)).flat_map(move |(shape, group)| {
            let blocks = start.div_ceil(shape.block_bytes)..end / shape.block_bytes;
            blocks.map(move |block| (group, BlockId::new(block as u32)))
        })
    }

    /// Where in the file the header of a block lies.
    pub(super) fn header_at(&self, group: GroupId, slot: Slot) -> u64 {
        slot.segment * self.segment_bytes + slot.slot * self.groups[group.index()].header_bytes()
    }

    /// Where in the file a layer of a block lies.
    pub(super) fn run_at(&self, group: GroupId, slot: Slot, layer: usize) -> u64 {
        let shape = &self.groups[group.index()];
        slot.segment * self.segment_bytes + shape.strips[layer] + slot.slot * stored(&shape.runs[layer])
    }

    /// Where in the file everything of `count` blocks of one segment lies; `slot` is the first of them.
    pub(super) fn places(
        &self,
        group: GroupId,
        slot: Slot,
        count: usize,
    ) -> impl Iterator<Item = Range<u64>> {
        let header = (self.header_at(group, slot), self.header_bytes(group));
        let run = move |layer| (self.run_at(group, slot, layer), self.stored_run(group, layer));
        let places = std::iter::once(header).chain((0..self.layers(group)).map(run));
        places.map(move |(start, bytes)| start..start + count as u64 * bytes)
    }

    /// The segments of a range of the arena's bytes.
    pub(super) fn segments_of(&self, arena: Range<u64>) -> Range<u64> {
        arena.start / self.extent_bytes..arena.end.div_ceil(self.extent_bytes)
    }
}

impl Group {
    fn new(runs: &[u64], extent_bytes: u64) -> Self {
        let block_bytes = runs.iter().sum();
        let mut end = 0;
        let runs: Vec<Range<u64>> = runs
            .iter()
            .map(|bytes| {
                end += bytes;
                end - bytes..end
            })
            .collect();
        let mut group = Self { strips: Vec::new(), slots: extent_bytes / block_bytes, block_bytes, runs };
        let mut at = group.slots * group.header_bytes();
        for run in &group.runs {
            group.strips.push(at);
            at += group.slots * stored(run);
        }
        group
    }

    fn header_bytes(&self) -> u64 {
        header_bytes(self.runs.len())
    }

    /// Bytes of a segment of this group.
    fn bytes(&self) -> u64 {
        self.slots * (self.header_bytes() + self.runs.iter().map(stored).sum::<u64>())
    }
}

/// Bytes of a block with these runs; saturates.
fn block_bytes(runs: &[u64]) -> u64 {
    runs.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes))
}

fn largest_block(runs: &[Vec<u64>]) -> u64 {
    runs.iter().map(|runs| block_bytes(runs)).max().unwrap_or(0)
}

/// The fewest of the largest blocks that a segment can have. If the largest block is not a multiple of another one, blocks of
/// that size may lie across the border of two segments; with two of the largest, each segment still holds one.
fn fewest_blocks(runs: &[Vec<u64>]) -> u64 {
    let largest = largest_block(runs);
    if runs.iter().all(|runs| largest.is_multiple_of(block_bytes(runs))) { 1 } else { 2 }
}

/// The most of the largest blocks that a segment can have.
fn most_blocks(runs: &[Vec<u64>]) -> u64 {
    SEGMENT_BLOCKS.max(SEGMENT_BYTES / Geometry::with(runs, 1, 0).segment_bytes)
}

fn stored(run: &Range<u64>) -> u64 {
    (run.end - run.start).next_multiple_of(ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_core::extents::Arena;
    use proptest::prelude::*;

    /// If a group has small blocks and others large ones, its block numbers run out before those of extents do.
    #[test]
    fn a_budget_has_no_more_blocks_than_numbers() {
        let runs = [vec![1 << 10], vec![4 << 20]];
        let Err(Error::Invalid { argument: "disk_memory", limit, .. }) = Geometry::new(&runs, 16 << 40)
        else {
            panic!("an arena that the core refuses")
        };
        let most = limit.split(' ').nth(2).unwrap().parse::<u64>().unwrap();
        let memory = Geometry::new(&runs, most).unwrap().arena();
        let arena = |bytes| Arena::new(bytes, memory.extent_bytes, &[1 << 10, 4 << 20]);
        assert!(arena(memory.bytes).is_ok());
        assert!(arena(memory.bytes + memory.extent_bytes).is_err());
    }

    #[test]
    fn blocks_beyond_what_integers_count_are_refused() {
        for runs in [vec![u64::MAX, 2], vec![1 << 63], vec![(1 << 48) + 1], vec![0]] {
            let refused = Geometry::new(&[vec![4096], runs], 1 << 30);
            assert!(matches!(refused, Err(Error::Invalid { argument: "runs", .. })), "{refused:?}");
        }
        let of_none = Geometry::new(&[], 1 << 30);
        assert!(matches!(of_none, Err(Error::Invalid { argument: "runs", .. })), "{of_none:?}");
    }

    proptest! {
        /// Every block that the core's allocator can hand out has bytes of its own, within the budget.
        #[test]
        fn blocks_never_overlap_and_stay_inside(
            runs in proptest::collection::vec(proptest::collection::vec(1u64..9000, 1..4), 1..4),
            spare in 0u64..2_000_000,
        ) {
            let least = match Geometry::new(&runs, 0) {
                Err(Error::Invalid { limit, .. }) => limit.split(' ').nth(2).unwrap().parse::<u64>().unwrap(),
                other => panic!("{other:?}"),
            };
            prop_assert!(Geometry::new(&runs, least - 1).is_err());
            let of_least = Geometry::new(&runs, least).unwrap().arena();
            let sizes: Vec<u64> = runs.iter().map(|runs| runs.iter().sum()).collect();
            let mut arena = Arena::new(of_least.bytes, of_least.extent_bytes, &sizes).unwrap();
            for group in 0..runs.len() as u8 {
                prop_assert!(arena.take(GroupId(group)).is_some(), "one page of each");
            }
            let budget = least + spare;
            let geometry = Geometry::new(&runs, budget).unwrap();
            let memory = geometry.arena();
            let mut arena = Arena::new(memory.bytes, memory.extent_bytes, &sizes).unwrap();
            let mut taken: Vec<Range<u64>> = Vec::new();
            for turn in 0.. {
                let group = GroupId((turn % runs.len()) as u8);
                let Some(block) = arena.take(group) else { break };
                prop_assert!(geometry.has(group.0, block.index()));
                let slot = geometry.slot(group, block);
                prop_assert!(slot.segment < geometry.segments().1);
                prop_assert!(geometry.blocks_in(slot.segment).any(|at| at == (group, block)));
                let header = geometry.header_at(group, slot);
                taken.push(header..header + geometry.header_bytes(group));
                for layer in 0..geometry.layers(group) {
                    let at = geometry.run_at(group, slot, layer);
                    taken.push(at..at + geometry.stored_run(group, layer));
                }
            }
            for group in 0..runs.len() as u8 {
                let behind = (memory.bytes / sizes[usize::from(group)]) as u32;
                for block in (0..40.min(behind)).chain(behind.saturating_sub(3)..behind + 3) {
                    let mut arena = Arena::new(memory.bytes, memory.extent_bytes, &sizes).unwrap();
                    prop_assert_eq!(geometry.has(group, block), arena.take_at(GroupId(group), BlockId::new(block)));
                }
            }
            for segment in 0..geometry.segments().1 {
                let mut there = geometry.blocks_in(segment);
                prop_assert!(there.all(|(group, block)| geometry.slot(group, block).segment == segment));
            }
            taken.sort_by_key(|range| range.start);
            prop_assert!(taken.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert!(taken.last().unwrap().end <= budget);
            prop_assert!(taken.iter().all(|range| range.start % ALIGN == 0 && range.end % ALIGN == 0));
        }
    }
}
