//! The bookkeeping of one cache, and the life of its sequences.

use crate::error::{Error, Result};
use crate::extents::Arena;
use crate::fence::Epochs;
use crate::ids::{BlockId, GroupId, KeptId, PageId, SequenceId, Tier};
use crate::keep::Kept;
use crate::limits;
use crate::pages::Pages;
use crate::plan::{Failed, Ticket};
use crate::rest::Searched;
use crate::step::Step;
use crate::table::{Sequences, Table};
use crate::window::Window;
use crate::zeroing::Freed;
use std::collections::BTreeMap;
use std::ops::Range;

/// One layer group: what its blocks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Bytes of a block, on every tier.
    pub block_bytes: u64,
    /// What a block holds.
    pub kind: GroupKind,
    /// Which tokens of a sequence stay; all if `None`, as of states.
    pub window: Option<Window>,
}

impl Group {
    /// Tokens of a page.
    pub(crate) fn page_size(&self) -> u32 {
        match self.kind {
            GroupKind::Paged { page_size } => page_size,
            GroupKind::State => 1,
        }
    }
}

/// What a block of a group holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// `page_size` consecutive tokens.
    Paged {
        /// Tokens in a page.
        page_size: u32,
    },
    /// One version of a fixed state per sequence: every step reads the last one and writes the next.
    State,
}

/// The memory of one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierMemory {
    /// Bytes of the arena; 0 for a tier that is absent.
    pub bytes: u64,
    /// Bytes of an extent, the unit in which groups share the arena.
    pub extent_bytes: u64,
}

/// How many blocks of a group a tier has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// Could be taken now.
    pub free: u64,
    /// Hold a page.
    pub used: u64,
    /// Wait for a fence, or to be zeroed.
    pub draining: u64,
}

/// The bookkeeping of one cache. Not synchronised: one call at a time.
#[derive(Debug)]
pub struct Cache {
    pub(crate) groups: Vec<Group>,
    pub(crate) arenas: [Arena; Tier::COUNT],
    pub(crate) pages: Pages,
    pub(crate) sequences: Sequences,
    pub(crate) step: Step,
    pub(crate) epochs: Epochs,
    /// Blocks that wait to be zeroed, where that is asked for.
    pub(crate) freed: Option<Vec<Freed>>,
    pub(crate) tickets: Vec<Ticket>,
    pub(crate) tickets_minted: u32,
    pub(crate) failures: Vec<Failed>,
    pub(crate) kept: BTreeMap<KeptId, Kept>,
    pub(crate) kept_minted: u64,
    /// Per group: changes whenever a page changes the tier that it is read from.
    pub(crate) placement: Vec<u32>,
    /// By group: which sequences need not be looked through for pages to move.
    pub(crate) searched: Vec<Searched>,
    /// Bytes copied, by source and target tier.
    pub(crate) moved_bytes: [[u64; Tier::COUNT]; Tier::COUNT],
    #[cfg(feature = "broken-fences")]
    pub(crate) broken: Option<crate::fence::Fence>,
}

fn invalid_range(range: &Range<u64>, limit: String) -> Error {
    Error::invalid("start, stop", format!("{}, {}", range.start, range.end), limit)
}

impl Cache {
    /// An empty cache for the given layer groups, over one arena per tier.
    pub fn new(groups: &[Group], tiers: [TierMemory; Tier::COUNT]) -> Result<Self> {
        if groups.is_empty() || groups.len() > limits::GROUPS_MAX {
            return Err(Error::invalid("groups", groups.len(), format!("from 1 to {}", limits::GROUPS_MAX)));
        }
        for group in groups {
            if let GroupKind::Paged { page_size } = group.kind
                && (page_size == 0 || page_size > limits::PAGE_SIZE_MAX)
            {
                let limit = format!("from 1 to {}", limits::PAGE_SIZE_MAX);
                return Err(Error::invalid("page_size", page_size, limit));
            }
            if let Some(Window { sinks, tokens, headroom, .. }) = group.window {
                let kept = u64::from(sinks) + u64::from(tokens) + u64::from(headroom);
                if tokens == 0 || kept > limits::TOKENS_PER_SEQUENCE_MAX || group.kind == GroupKind::State {
                    let value = format!("{tokens} and {sinks} sinks with headroom {headroom}");
                    let limit = format!(
                        "at least 1 token of a paged group, at most {} in all",
                        limits::TOKENS_PER_SEQUENCE_MAX
                    );
                    return Err(Error::invalid("window", value, limit));
                }
            }
        }
        let sizes: Vec<u64> = groups.iter().map(|group| group.block_bytes).collect();
        let arena =
            |tier: Tier| Arena::new(tiers[tier.index()].bytes, tiers[tier.index()].extent_bytes, &sizes);
        Ok(Self {
            groups: groups.to_vec(),
            arenas: [arena(Tier::Device)?, arena(Tier::Host)?, arena(Tier::Disk)?],
            pages: Pages::default(),
            sequences: Sequences::default(),
            step: Step::default(),
            epochs: Epochs::default(),
            freed: None,
            tickets: Vec::new(),
            tickets_minted: 0,
            failures: Vec::new(),
            kept: BTreeMap::new(),
            kept_minted: 0,
            placement: vec![0; groups.len()],
            searched: vec![Searched::default(); groups.len()],
            moved_bytes: Default::default(),
            #[cfg(feature = "broken-fences")]
            broken: None,
        })
    }

    /// A new, empty sequence.
    pub fn create(&mut self) -> Result<SequenceId> {
        let tables = self.placement.iter().map(|&placement| Table::new(placement)).collect();
        self.sequences.insert(0, tables)
    }

    /// A sequence with the same tokens, over the same pages. No byte is copied until one of the two is appended to.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let sequence = self.sequences.get_idle(id)?;
        let (len, tables) = (sequence.len, sequence.tables.clone());
        let child = self.sequences.insert(len, tables)?;
        for page in self.sequences[child].tables.iter().flat_map(Table::held) {
            self.pages.add_reference(page);
        }
        Ok(child)
    }

    /// Tokens in a sequence.
    pub fn token_count(&self, id: SequenceId) -> Result<u64> {
        Ok(self.sequences.get(id)?.len)
    }

    /// The position that the next token of a sequence is to be stored with.
    pub fn next_position(&self, id: SequenceId) -> Result<u64> {
        Ok(self.sequences.get(id)?.tables[0].last().end_position())
    }

    /// The least length that `truncate` takes besides 0. States keep no history: they cannot be rewound. Windows can, as far as
    /// no query will miss a page that has left.
    pub fn rewind_limit(&self, id: SequenceId) -> Result<u64> {
        let sequence = self.sequences.get(id)?;
        let limits = self.groups.iter().zip(&sequence.tables).map(|(group, table)| match group.window {
            _ if group.kind == GroupKind::State => sequence.len,
            Some(window) if table.left.count > 0 => window.least_len(table.left.end()),
            _ => 0,
        });
        Ok(limits.max().unwrap_or(0))
    }

    /// Takes the tokens from `len` on back, as if they had never been appended.
    pub fn truncate(&mut self, id: SequenceId, len: u64) -> Result<()> {
        self.settle();
        let limit = self.rewind_limit(id)?;
        let states = self.has_states();
        let sequence = self.sequences.get_idle(id)?;
        if len > sequence.len || (len < limit && len > 0) {
            let limit = if states {
                format!("0 or {limit}: states cannot be rewound")
            } else if limit > 0 {
                let len = sequence.len;
                format!("0, or from {limit} to {len}: pages behind the window and its headroom have left")
            } else {
                format!("at most {}", sequence.len)
            };
            return Err(Error::invalid("length", len, limit));
        }
        sequence.len = len;
        for group in self.group_ids() {
            self.sequences[id].tables[group.index()].shorten(len);
            self.pop_surplus_pages(id, group);
        }
        Ok(())
    }

    /// Takes the tokens `range` out of the middle: a context shift. No byte moves; positions only grow.
    ///
    /// Where pages have left, windows keep what they need: the sinks, and one window's tokens of those that are there.
    pub fn drop_tokens(&mut self, id: SequenceId, range: Range<u64>) -> Result<()> {
        self.settle();
        let states = self.has_states();
        let sequence = self.sequences.get_idle(id)?;
        if range.start > range.end || range.end > sequence.len {
            return Err(invalid_range(&range, format!("a range within 0..{}", sequence.len)));
        }
        if states && !range.is_empty() {
            return Err(invalid_range(&range, "empty: a state cannot forget".into()));
        }
        if range.is_empty() {
            return Ok(());
        }
        for (group, table) in self.groups.iter().zip(&sequence.tables) {
            let Some(window) = group.window.filter(|_| table.left.count > 0) else { continue };
            let (end, least) = (table.left.end(), window.least_len(table.left.end()));
            let taken = range.end.max(end) - range.start.max(end);
            if range.start < table.left.after || taken > sequence.len - least {
                let limit = format!(
                    "none of the first {}, and at most {} tokens from {end} on: those before have left, and a window is {}",
                    table.left.after,
                    sequence.len - least,
                    window.tokens
                );
                return Err(invalid_range(&range, limit));
            }
        }
        sequence.len -= range.end - range.start;
        for group in self.group_ids() {
            let page_size = self.groups[group.index()].page_size();
            let table = &mut self.sequences[id].tables[group.index()];
            let cut = table.without(range.start, range.end, page_size);
            let before = std::mem::replace(table, cut);
            self.sequences[id].tables[group.index()].held().for_each(|page| self.pages.add_reference(page));
            before.held().for_each(|page| self.release_page(page));
        }
        Ok(())
    }

    /// Ends a sequence. Pages that no other sequence holds become free when their fences allow.
    pub fn release(&mut self, id: SequenceId) -> Result<()> {
        self.settle();
        self.sequences.get_idle(id)?;
        for table in self.sequences.remove(id) {
            table.held().for_each(|page| self.release_page(page));
        }
        Ok(())
    }

    /// How many sequences there are.
    pub fn sequence_count(&self) -> usize {
        self.sequences.iter().count()
    }

    /// Whether no row is left of any sequence, nor of what is kept on disk. Pages that copies under way touch still count.
    pub fn is_empty(&mut self) -> bool {
        self.settle();
        self.pages.is_empty() && self.kept.is_empty()
    }

    /// Block counts of one group on one tier.
    pub fn block_counts(&mut self, tier: Tier, group: GroupId) -> BlockCounts {
        self.settle();
        let (arena, draining) = (&self.arenas[tier.index()], self.draining(tier, group));
        BlockCounts { free: arena.available(group), used: arena.taken(group) - draining, draining }
    }

    /// Blocks of each group that a tier could hand out now, if the other groups took none.
    pub fn free_blocks(&mut self, tier: Tier) -> impl Iterator<Item = u64> + '_ {
        self.settle();
        let arena = &self.arenas[tier.index()];
        self.group_ids().map(|group| arena.available(group))
    }

    /// Bytes copied so far, by source and target tier.
    pub fn moved_bytes(&self) -> [[u64; Tier::COUNT]; Tier::COUNT] {
        self.moved_bytes
    }

    /// Pages that more than one table entry refers to.
    pub fn shared_pages(&self) -> u64 {
        self.pages.shared()
    }

    /// Rows of pages that no sequence's span covers: what `drop`, `truncate` and windows left behind.
    pub fn dead_rows(&self) -> u64 {
        // Only where a span ends can a row of a page be without one.
        let tables = self.paged_tables();
        let mut ends: Vec<_> =
            tables.flat_map(|(table, page_size)| table.covered_at_ends(page_size)).collect();
        ends.sort_unstable_by_key(|(page, rows)| (*page, rows.start));
        let mut replaced: Vec<_> = self.step.undo.iter().filter_map(|undo| undo.replaced).collect();
        replaced.sort_unstable();
        let dead = ends.chunk_by(|(one, _), (other, _)| one == other).map(|ends| {
            let page = ends[0].0;
            let undo = replaced.partition_point(|&at| at <= page) - replaced.partition_point(|&at| at < page);
            // Another reference is from the middle of a span, which covers all of it.
            let is_whole = self.pages.references(page) > (ends.len() + undo) as u32 + self.pages.kept(page);
            if is_whole { 0 } else { uncovered(self.pages[page].fill, ends.iter().map(|(_, rows)| rows)) }
        });
        dead.sum()
    }

    /// Every table of a group that has pages, and their size.
    pub(crate) fn paged_tables(&self) -> impl Iterator<Item = (&Table, u32)> {
        let tables = self.sequences.iter().flat_map(|(_, sequence)| self.groups.iter().zip(&sequence.tables));
        tables.filter_map(|(group, table)| match group.kind {
            GroupKind::Paged { page_size } => Some((table, page_size)),
            GroupKind::State => None,
        })
    }

    /// Byte ranges of a tier that became empty since last asked: the owner of the memory may give them back.
    pub fn reclaim(&mut self, tier: Tier) -> impl Iterator<Item = Range<u64>> + '_ {
        self.settle();
        self.arenas[tier.index()].reclaim()
    }

    pub(crate) fn group_ids(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.groups.len() as u8).map(GroupId)
    }

    fn has_states(&self) -> bool {
        self.groups.iter().any(|group| group.kind == GroupKind::State)
    }

    /// Table indices of the pages that hold tokens of `range`.
    pub(crate) fn table_pages(&self, table: &Table, group: GroupId, range: Range<u64>) -> Vec<usize> {
        match self.groups[group.index()].kind {
            GroupKind::Paged { page_size } => table.pages_of(range, page_size),
            GroupKind::State if range.is_empty() => Vec::new(),
            GroupKind::State => (0..table.pages.len()).collect(),
        }
    }

    /// Releases the pages past the end of a table's last span.
    pub(crate) fn pop_surplus_pages(&mut self, id: SequenceId, group: GroupId) {
        let table = &self.sequences[id].tables[group.index()];
        let pages = match self.groups[group.index()].kind {
            GroupKind::Paged { page_size } => {
                table.last().first_page + table.last().rows().div_ceil(page_size)
            }
            GroupKind::State => u32::from(table.last().count > 0),
        };
        let shrinks = (pages as usize) < table.pages.len();
        while self.sequences[id].tables[group.index()].pages.len() > pages as usize {
            let table = &mut self.sequences[id].tables[group.index()];
            table.row.pop();
            if let Some(page) = table.pages.pop().expect("longer than its spans") {
                self.release_page(page);
            }
        }
        if shrinks {
            let table = &mut self.sequences[id].tables[group.index()];
            table.version = table.version.wrapping_add(1);
        }
    }

    pub(crate) fn release_page(&mut self, page: PageId) {
        if self.pages.drop_reference(page) == 0 {
            self.close_page(page);
        }
    }

    /// A block of each of these groups, in their order, or none at all.
    pub(crate) fn take_blocks(
        &mut self,
        tier: Tier,
        groups: impl Iterator<Item = GroupId> + Clone,
    ) -> Result<Vec<BlockId>> {
        let mut taken = Vec::new();
        for group in groups.clone() {
            let Some(block) = self.arenas[tier.index()].take(group) else {
                let wanted = groups.filter(|other| *other == group).count() as u64;
                let got = taken.iter().filter(|(other, _)| *other == group).count() as u64;
                taken.into_iter().for_each(|(group, block)| self.arenas[tier.index()].give(group, block));
                let (blocks_short, draining) = (wanted - got, self.draining(tier, group));
                let bytes_short = blocks_short * self.groups[group.index()].block_bytes;
                return Err(Error::OutOfBlocks { tier, group, blocks_short, bytes_short, draining });
            };
            taken.push((group, block));
        }
        Ok(taken.into_iter().map(|(_, block)| block).collect())
    }

    /// Whether blocks of any tier wait for an epoch.
    pub fn is_draining(&self) -> bool {
        self.epochs.draining().next().is_some()
    }

    /// Blocks of all tiers that have waited for an epoch, so far.
    pub fn drained_blocks(&self) -> u64 {
        self.epochs.drained()
    }

    /// Blocks of a group that wait for an epoch, or to be zeroed.
    pub(crate) fn draining(&self, tier: Tier, group: GroupId) -> u64 {
        let waiting = self.epochs.draining().map(|d| (d.tier, d.group));
        let freed = self.freed.iter().flatten().map(|&(tier, group, _)| (tier, group));
        waiting.chain(freed).filter(|at| *at == (tier, group)).count() as u64
    }
}

/// Of the first `fill` rows, those in none of the ranges, which come in the order of their starts.
pub(crate) fn uncovered<'a>(fill: u32, ranges: impl IntoIterator<Item = &'a Range<u32>>) -> u64 {
    let (_, covered) = ranges.into_iter().fold((0, 0), |(end, sum), range| {
        (end.max(range.end), sum + range.end.saturating_sub(end.max(range.start)))
    });
    u64::from(fill.saturating_sub(covered))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fence::Failure;
    use crate::keep::{KeptGroup, KeptPage, KeptSequence};
    use crate::plan::{Plan, Selection};

    fn cache() -> Cache {
        let group = Group { block_bytes: 64, kind: GroupKind::Paged { page_size: 4 }, window: None };
        let memory = TierMemory { bytes: 1 << 12, extent_bytes: 1 << 8 };
        Cache::new(&[group], [memory, memory, TierMemory { bytes: 0, extent_bytes: 64 }]).unwrap()
    }

    /// A slot whose numbers have all been handed out is not used again: the first of them would be good once more.
    #[test]
    fn a_handle_of_long_ago_is_never_good_again() {
        let mut cache = cache();
        let first = cache.create().unwrap();
        cache.release(first).unwrap();
        cache.sequences.age(first.index, u32::MAX);
        let last = cache.create().unwrap();
        assert_eq!((last.index, last.generation), (first.index, u32::MAX));
        cache.release(last).unwrap();
        let next = cache.create().unwrap();
        assert_ne!(next.index, first.index);
        for gone in [first, last] {
            assert_eq!(cache.token_count(gone), Err(Error::UseAfterRelease { id: gone }));
            assert_eq!(cache.release(gone), Err(Error::UseAfterRelease { id: gone }));
        }
        cache.audit().unwrap();
    }

    #[test]
    fn a_sequence_is_as_long_as_integers_of_kernels_count() {
        let mut cache = cache();
        let sequence = cache.create().unwrap();
        assert!(matches!(cache.reserve(&[(sequence, 1 << 31)]), Err(Error::InvalidArgument { .. })));
        assert!(matches!(cache.reserve(&[(sequence, (1 << 31) - 1)]), Err(Error::OutOfBlocks { .. })));
    }

    /// Where new tokens begin in a batch is counted in 32 bits: without a limit the numbers of a later sequence would be small again.
    #[test]
    fn a_step_has_as_many_tokens_as_integers_of_tables_count() {
        let group = Group { block_bytes: 64, kind: GroupKind::Paged { page_size: 1 << 15 }, window: None };
        let memory = TierMemory { bytes: 1 << 24, extent_bytes: 1 << 20 };
        let mut cache = Cache::new(&[group], [memory; 3]).unwrap();
        let [a, b, c] = [0; 3].map(|_| cache.create().unwrap());
        let most = (1 << 31) - 1;
        let refused = cache.reserve(&[(a, most), (b, most), (c, 3)]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "new_tokens = 4294967297: at most 2147483647 of all sequences together"
        );
        assert!(matches!(cache.reserve(&[(a, most), (b, 1)]), Err(Error::InvalidArgument { .. })));
        cache.audit().unwrap();
        cache.reserve(&[(a, most - 1), (b, 1)]).unwrap();
        cache.rollback().unwrap();
    }

    #[test]
    fn a_cache_is_empty_when_nobody_holds_a_row() {
        let group = Group { block_bytes: 64, kind: GroupKind::Paged { page_size: 4 }, window: None };
        let memory = TierMemory { bytes: 1 << 12, extent_bytes: 1 << 8 };
        let mut cache = Cache::new(&[group], [memory; 3]).unwrap();
        let sequence = cache.create().unwrap();
        assert!(cache.is_empty());
        cache.reserve(&[(sequence, 9)]).unwrap();
        assert!(!cache.is_empty());
        cache.rollback().unwrap();
        assert!(cache.is_empty());
        // A fork holds pages, and copies do for a while. The blocks may still drain.
        cache.reserve(&[(sequence, 9)]).unwrap();
        cache.commit(None).unwrap();
        let fork = cache.fork(sequence).unwrap();
        cache.release(sequence).unwrap();
        assert!(!cache.is_empty());
        let plan = cache.plan(fork, Tier::Host, &Selection::of(0..4, vec![GroupId(0)])).unwrap();
        let (_, completion, copies) = cache.execute(&plan).unwrap();
        cache.truncate(fork, 0).unwrap();
        assert!(!cache.is_empty());
        completion.finish(copies.len() as u32);
        assert!(cache.is_empty());
        assert!(cache.block_counts(Tier::Device, GroupId(0)).draining > 0);
        // Of what is kept here, no page is full.
        cache.reserve(&[(fork, 3)]).unwrap();
        cache.commit(None).unwrap();
        let (kept, _) = cache.keep(fork).unwrap();
        cache.release(fork).unwrap();
        assert!(!cache.is_empty());
        cache.forget(kept);
        assert!(cache.is_empty());
        cache.audit().unwrap();
    }

    /// A page that a sequence was truncated into is reopened by the step that writes there, not by one that is refused.
    #[test]
    fn a_refused_step_leaves_plans_and_truncated_pages_as_they_were() {
        let mut cache = cache();
        let sequence = cache.create().unwrap();
        cache.reserve(&[(sequence, 4)]).unwrap();
        let epoch = cache.commit(None).unwrap();
        cache.retire(epoch).unwrap();
        cache.truncate(sequence, 2).unwrap();
        let mut sealed = Selection::of(0..2, vec![GroupId(0)]);
        sealed.sealed = true;
        let plan = cache.plan(sequence, Tier::Host, &sealed).unwrap();
        assert_eq!(plan.moves().len(), 1);
        assert!(matches!(cache.reserve(&[(sequence, 1 << 20)]), Err(Error::OutOfBlocks { .. })));
        cache.audit().unwrap();
        assert_eq!(cache.plan(sequence, Tier::Host, &sealed).unwrap(), plan);
        cache.execute(&plan).unwrap();
    }

    /// Who has rested longest is the same after a call that names a sequence twice.
    #[test]
    fn wrong_arguments_leave_sequences_at_rest() {
        let mut cache = cache();
        let [first, second] = [0; 2].map(|_| cache.create().unwrap());
        for sequence in [first, second] {
            cache.reserve(&[(sequence, 4)]).unwrap();
            cache.commit(None).unwrap();
        }
        let resting =
            |cache: &mut Cache| cache.resting((Tier::Device, Tier::Host), GroupId(0), false, 2, &[]);
        assert_eq!(resting(&mut cache), [first, second]);
        assert!(matches!(cache.reserve(&[(first, 1), (first, 1)]), Err(Error::InvalidArgument { .. })));
        assert_eq!(resting(&mut cache), [first, second]);
        cache.audit().unwrap();
    }

    /// What moves to disk is nowhere else, also if a copy between the two was left behind.
    #[test]
    fn a_page_that_moves_down_leaves_all_tiers_above() {
        let group = Group { block_bytes: 64, kind: GroupKind::Paged { page_size: 4 }, window: None };
        let memory = TierMemory { bytes: 1 << 12, extent_bytes: 1 << 8 };
        let mut cache = Cache::new(&[group], [memory; 3]).unwrap();
        let sequence = cache.create().unwrap();
        cache.reserve(&[(sequence, 4)]).unwrap();
        let epoch = cache.commit(None).unwrap();
        cache.retire(epoch).unwrap();
        for (to, keep, used) in [
            (Tier::Host, true, [1, 1, 0]),
            (Tier::Disk, false, [0, 0, 1]),
            (Tier::Host, true, [0, 1, 1]),
            (Tier::Device, true, [1, 1, 1]),
            (Tier::Disk, true, [1, 1, 1]),
            (Tier::Disk, false, [0, 0, 1]),
        ] {
            let selection = Selection { keep, ..Selection::of(0..4, vec![GroupId(0)]) };
            let plan = cache.plan(sequence, to, &selection).unwrap();
            let (_, completion, copies) = cache.execute(&plan).unwrap();
            completion.finish(copies.len() as u32);
            cache.audit().unwrap();
            assert_eq!(Tier::ALL.map(|tier| cache.block_counts(tier, GroupId(0)).used), used, "{to} {keep}");
        }
    }

    /// What is written anew when a page moves are the rows that have it.
    #[test]
    fn a_row_stays_as_it_is_when_pages_of_others_move() {
        let mut cache = cache();
        let [mover, other] = [0; 2].map(|_| cache.create().unwrap());
        cache.reserve(&[(mover, 8), (other, 8)]).unwrap();
        cache.commit(None).unwrap();
        let fork = cache.fork(mover).unwrap();
        let batch = [mover, other, fork].map(|id| (id, 0));
        let versions = |cache: &mut Cache| {
            cache.reserve(&batch).unwrap();
            let versions = [0, 1, 2].map(|index| cache.step_row(index, GroupId(0)).1);
            cache.commit(None).unwrap();
            versions
        };
        let before = versions(&mut cache);
        let plan = cache.plan(mover, Tier::Host, &Selection::of(0..4, vec![GroupId(0)])).unwrap();
        let (_, completion, copies) = cache.execute(&plan).unwrap();
        completion.finish(copies.len() as u32);
        let after = versions(&mut cache);
        assert_eq!([0, 1, 2].map(|index| before[index] == after[index]), [false, true, false]);
        cache.audit().unwrap();
    }

    /// A page is moved once, however often the selection, or the table, has it.
    #[test]
    fn a_plan_has_each_page_once() {
        let mut cache = cache();
        let sequence = cache.create().unwrap();
        cache.reserve(&[(sequence, 12)]).unwrap();
        cache.commit(None).unwrap();
        // The second page is in two spans.
        cache.drop_tokens(sequence, 5..7).unwrap();
        let selection = Selection::of(0..10, vec![GroupId(0); 2]);
        let plan = cache.plan(sequence, Tier::Host, &selection).unwrap();
        assert_eq!(plan.moves().len(), 3);
        let (_, completion, copies) = cache.execute(&plan).unwrap();
        completion.finish(copies.len() as u32);
        cache.audit().unwrap();
        assert_eq!(cache.block_counts(Tier::Host, GroupId(0)).used, 3);
    }

    /// Numbers of pages say nothing about whose they are: their blocks have to be of the group that the plan says.
    #[test]
    fn a_plan_of_a_cache_of_another_shape_is_refused() {
        let group = Group { block_bytes: 64, kind: GroupKind::Paged { page_size: 4 }, window: None };
        let large = Group { block_bytes: 256, ..group };
        let memory = TierMemory { bytes: 1 << 12, extent_bytes: 1 << 8 };
        let filled = |groups: &[Group]| {
            let mut cache = Cache::new(groups, [memory; 3]).unwrap();
            let sequence = cache.create().unwrap();
            cache.reserve(&[(sequence, 8)]).unwrap();
            cache.commit(None).unwrap();
            (cache, sequence)
        };
        let (of_two, sequence) = filled(&[group; 2]);
        let plan = of_two.plan(sequence, Tier::Host, &Selection::of(0..8, vec![GroupId(1)])).unwrap();
        let (of_large, sequence) = filled(&[large]);
        let larger = of_large.plan(sequence, Tier::Host, &Selection::of(0..8, vec![GroupId(0)])).unwrap();
        for plan in [plan, larger] {
            let (mut other, _) = filled(&[group; 1]);
            other.reserve(&[(sequence, 8)]).unwrap();
            other.commit(None).unwrap();
            assert!(matches!(other.execute(&plan), Err(Error::InvalidArgument { argument: "plan", .. })));
            other.audit().unwrap();
        }
    }

    /// A state has no place in what is kept, whatever is written down.
    #[test]
    fn a_state_is_not_adopted() {
        let group = Group { block_bytes: 64, kind: GroupKind::State, window: None };
        let memory = TierMemory { bytes: 1 << 12, extent_bytes: 1 << 8 };
        let mut cache = Cache::new(&[group], [memory; 3]).unwrap();
        let span = |count| (0, (1 << 31) - 1, count, 0);
        let written = KeptGroup { left: (0, 0), spans: vec![span(1), span(1)], pages: Vec::new() };
        let kept = KeptSequence { len: 2, groups: vec![written] };
        assert!(cache.adopt(&[kept]).remove(0).is_err());
        cache.audit().unwrap();
    }

    /// Whatever is refused, sequences or blocks, nothing is taken.
    #[test]
    fn what_is_kept_is_not_revived_by_halves() {
        let group = Group { block_bytes: 64, kind: GroupKind::Paged { page_size: 4 }, window: None };
        let memory = TierMemory { bytes: 1 << 8, extent_bytes: 1 << 8 };
        let mut cache = Cache::new(&[group], [memory; 3]).unwrap();
        let sequence = cache.create().unwrap();
        cache.reserve(&[(sequence, 3)]).unwrap();
        let epoch = cache.commit(None).unwrap();
        cache.retire(epoch).unwrap();
        let (kept, _) = cache.keep(sequence).unwrap();
        let used = |cache: &mut Cache| cache.block_counts(Tier::Device, GroupId(0)).used;
        let others: Vec<_> = (1..limits::SEQUENCES_MAX).map(|_| cache.create().unwrap()).collect();
        assert!(matches!(cache.revive(kept), Err(Error::InvalidArgument { argument: "sequences", .. })));
        assert_eq!(used(&mut cache), 1);
        cache.release(others[0]).unwrap();
        cache.reserve(&[(others[1], 12)]).unwrap();
        cache.commit(None).unwrap();
        assert!(matches!(cache.revive(kept), Err(Error::OutOfBlocks { .. })));
        cache.create().unwrap();
        cache.audit().unwrap();
    }

    /// Tokens that have left took their positions with them: without that gap distances would be below 0.
    #[test]
    fn what_has_left_without_a_gap_is_not_adopted() {
        let window = Window { sinks: 4, tokens: 4, headroom: 0, trailing: false };
        let kind = GroupKind::Paged { page_size: 4 };
        let group = Group { block_bytes: 64, kind, window: Some(window) };
        let memory = TierMemory { bytes: 1 << 12, extent_bytes: 1 << 8 };
        for (position, is_right) in [(104, true), (103, false), (4, false)] {
            let mut cache = Cache::new(&[group], [memory; 3]).unwrap();
            let pages = (0..2).map(|block| KeptPage::Sealed(BlockId::new(block))).collect();
            let spans = vec![(0, 0, 4, 0), (1, 0, 4, position)];
            let kept = KeptSequence { len: 108, groups: vec![KeptGroup { left: (4, 100), spans, pages }] };
            let adopted = cache.adopt(&[kept]).remove(0);
            assert_eq!(adopted.is_ok(), is_right, "{adopted:?}");
            let Ok(adopted) = adopted else { continue };
            let (sequence, _) = cache.revive(adopted).unwrap();
            cache.reserve(&[(sequence, 1)]).unwrap();
            let offsets: Vec<_> = cache.step_spans(0, GroupId(0)).map(|span| span.offset).collect();
            assert_eq!(offsets, [0, 0]);
        }
    }

    /// What steps count on: a span without tokens begins at its first page, positions are as high as kernels count, and all groups
    /// go on at the same one.
    #[test]
    fn a_sequence_that_could_not_have_grown_is_not_adopted() {
        let group = Group { block_bytes: 64, kind: GroupKind::Paged { page_size: 4 }, window: None };
        let memory = TierMemory { bytes: 1 << 12, extent_bytes: 1 << 8 };
        let end = limits::TOKENS_PER_SEQUENCE_MAX;
        let empty = |skip, position| (Vec::new(), (0, skip, 0, position));
        let four = |position| (vec![KeptPage::Sealed(BlockId::new(0))], (0, 0, 4, position));
        let two = |position| (vec![KeptPage::Sealed(BlockId::new(0))], (0, 2, 2, position));
        for (len, [first, second], is_right) in [
            (0, [empty(0, 0), empty(0, 0)], true),
            (0, [(vec![KeptPage::Left], (0, 4, 0, 0)), empty(0, 0)], false),
            (0, [empty(0, end), empty(0, end)], true),
            (0, [empty(0, 0), empty(0, end)], false),
            (4, [four(end - 4), four(end - 4)], true),
            (4, [four(end - 3), four(end - 3)], false),
            (4, [four(7), four(8)], false),
            (2, [two(2), two(2)], true),
            (2, [two(1), two(1)], false),
        ] {
            let mut cache = Cache::new(&[group; 2], [memory; 3]).unwrap();
            let named = |(pages, span): &(Vec<_>, _)| KeptGroup {
                left: (0, 0),
                spans: vec![*span],
                pages: pages.clone(),
            };
            let mut second = named(&second);
            second.pages.iter_mut().for_each(|page| *page = KeptPage::Sealed(BlockId::new(4)));
            let kept = KeptSequence { len, groups: vec![named(&first), second] };
            let adopted = cache.adopt(std::slice::from_ref(&kept)).remove(0);
            assert_eq!(adopted.is_ok(), is_right, "{kept:?}: {adopted:?}");
            let Ok(adopted) = adopted else { continue };
            let (sequence, _) = cache.revive(adopted).unwrap();
            if cache.next_position(sequence).unwrap() < end {
                cache.reserve(&[(sequence, 17)]).unwrap();
                cache.commit(None).unwrap();
            }
            cache.drop_tokens(sequence, 0..len).unwrap();
            cache.audit().unwrap();
        }
    }

    #[test]
    fn a_cache_beyond_limits_is_refused() {
        let window = Window { sinks: 0, tokens: 4, headroom: 0, trailing: false };
        let paged =
            |page_size, window| Group { block_bytes: 64, kind: GroupKind::Paged { page_size }, window };
        let windowed = |window| vec![paged(4, Some(window))];
        let most = limits::TOKENS_PER_SEQUENCE_MAX as u32;
        let state = Group { block_bytes: 64, kind: GroupKind::State, window: Some(window) };
        for (groups, refused) in [
            (Vec::new(), Some("groups")),
            (vec![paged(4, None); limits::GROUPS_MAX], None),
            (vec![paged(4, None); limits::GROUPS_MAX + 1], Some("groups")),
            (vec![paged(0, None)], Some("page_size")),
            (vec![paged(limits::PAGE_SIZE_MAX, None)], None),
            (vec![paged(limits::PAGE_SIZE_MAX + 1, None)], Some("page_size")),
            (windowed(Window { tokens: 0, ..window }), Some("window")),
            (windowed(Window { tokens: most, ..window }), None),
            (windowed(Window { tokens: most, headroom: 1, ..window }), Some("window")),
            (windowed(Window { tokens: most, sinks: 1, ..window }), Some("window")),
            (vec![state], Some("window")),
        ] {
            let opened = Cache::new(&groups, [TierMemory { bytes: 1 << 12, extent_bytes: 1 << 8 }; 3]);
            let argument = match opened {
                Ok(_) => None,
                Err(Error::InvalidArgument { argument, .. }) => Some(argument),
                Err(error) => panic!("{error}"),
            };
            assert_eq!(argument, refused, "{groups:?}");
        }
    }

    /// A cache with three tiers, and a sequence in it with so many tokens, which no step reads any more.
    fn filled(tokens: u32) -> (Cache, SequenceId) {
        let group = Group { block_bytes: 64, kind: GroupKind::Paged { page_size: 4 }, window: None };
        let memory = TierMemory { bytes: 1 << 12, extent_bytes: 1 << 8 };
        let mut cache = Cache::new(&[group], [memory; 3]).unwrap();
        let sequence = cache.create().unwrap();
        append(&mut cache, sequence, tokens);
        (cache, sequence)
    }

    fn append(cache: &mut Cache, sequence: SequenceId, tokens: u32) {
        cache.reserve(&[(sequence, tokens)]).unwrap();
        let epoch = cache.commit(None).unwrap();
        cache.retire(epoch).unwrap();
    }

    fn plan(cache: &Cache, sequence: SequenceId, to: Tier, tokens: Range<u64>, keep: bool) -> Plan {
        let selection = Selection { keep, ..Selection::of(tokens, vec![GroupId(0)]) };
        cache.plan(sequence, to, &selection).unwrap()
    }

    fn carry_out(cache: &mut Cache, plan: &Plan) {
        let (_, completion, copies) = cache.execute(plan).unwrap();
        completion.finish(copies.len() as u32);
        cache.settle();
    }

    fn used(cache: &mut Cache) -> [u64; Tier::COUNT] {
        Tier::ALL.map(|tier| cache.block_counts(tier, GroupId(0)).used)
    }

    /// The copies that a plan needs come before the pages that have one: of these it counts how many have arrived.
    #[test]
    fn a_copy_that_failed_is_not_read_whatever_else_a_plan_moves() {
        let (mut cache, sequence) = filled(12);
        let first = plan(&cache, sequence, Tier::Host, 0..4, true);
        carry_out(&mut cache, &first);
        let all = plan(&cache, sequence, Tier::Host, 0..12, false);
        let (ticket, completion, copies) = cache.execute(&all).unwrap();
        assert_eq!(copies.len(), 2);
        completion.fail(1, Failure::Io("gone".into()));
        assert!(matches!(cache.ticket_failure(ticket), Some(Error::CopyFailed { copied: 1, .. })));
        cache.reserve(&[(sequence, 0)]).unwrap();
        let tiers: Vec<_> = cache.step_row(0, GroupId(0)).0.iter().map(|at| at.tier()).collect();
        assert_eq!(tiers, [Tier::Host, Tier::Host, Tier::Device]);
        cache.rollback().unwrap();
        cache.audit().unwrap();
        assert_eq!((used(&mut cache), cache.moved_bytes()[0][1]), ([1, 2, 0], 2 * 64));
    }

    /// Whoever asks for a ticket is told what became of it, and else whoever comes next; nobody twice.
    #[test]
    fn a_failure_is_told_once() {
        for (by_step, asks) in [(false, true), (true, true), (false, false), (true, false)] {
            let (mut cache, sequence) = filled(4);
            let [fork, other] = [cache.fork(sequence).unwrap(), cache.create().unwrap()];
            append(&mut cache, other, 4);
            let to_host = plan(&cache, sequence, Tier::Host, 0..4, false);
            let (ticket, completion, copies) = cache.execute(&to_host).unwrap();
            assert_eq!(cache.holders(GroupId(0), copies[0].from), [sequence, fork]);
            if by_step {
                cache.reserve(&[(other, 1)]).unwrap();
            }
            completion.fail(0, Failure::Corrupt("spoilt".into()));
            assert_eq!(cache.take_failure(), None, "somebody may still ask");
            let told = if asks {
                cache.ticket_failure(ticket)
            } else {
                drop(completion);
                // A step holds it, and notes that it has failed.
                cache.settle();
                if by_step {
                    cache.commit(None).unwrap();
                }
                cache.take_failure()
            };
            let (copied, planned, reason) = (0, 1, "spoilt".into());
            let sequences = vec![sequence, fork];
            assert_eq!(told, Some(Error::CorruptPage { ticket, copied, planned, sequences, reason }));
            if by_step && asks {
                cache.commit(None).unwrap();
            }
            assert_eq!((cache.ticket_failure(ticket), cache.take_failure()), (None, None));
            cache.audit().unwrap();
        }
    }

    #[test]
    fn a_plan_is_refused_once_its_pages_move_have_moved_or_are_others() {
        let (mut cache, sequence) = filled(4);
        let [keeping, to_host, to_disk] = [(Tier::Host, true), (Tier::Host, false), (Tier::Disk, false)]
            .map(|(to, keep)| plan(&cache, sequence, to, 0..4, keep));
        let is_refused = |cache: &mut Cache, plan| {
            let outcome = cache.execute(plan);
            cache.audit().unwrap();
            matches!(outcome, Err(Error::InvalidArgument { argument: "plan", .. }))
        };
        let (ticket, completion, _) = cache.execute(&keeping).unwrap();
        assert!(
            is_refused(&mut cache, &to_host) && is_refused(&mut cache, &to_disk),
            "its page is being copied"
        );
        completion.finish(1);
        assert!(is_refused(&mut cache, &to_host), "there is a copy already");
        // Now a plan has nothing to copy, and is done at once.
        let (next, completion, copies) =
            cache.execute(&plan(&cache, sequence, Tier::Host, 0..4, false)).unwrap();
        assert!(next != ticket && copies.is_empty() && completion.copied() == Some(0));
        assert_eq!(used(&mut cache), [0, 1, 0]);
        let back = plan(&cache, sequence, Tier::Device, 0..4, false);
        carry_out(&mut cache, &back);
        let sealed = plan(&cache, sequence, Tier::Disk, 0..4, false);
        cache.truncate(sequence, 2).unwrap();
        append(&mut cache, sequence, 1);
        assert!(is_refused(&mut cache, &sealed), "it was written to");
        assert!(
            plan(&cache, sequence, Tier::Disk, 0..3, false).moves().is_empty(),
            "an open page stays in memory"
        );
        cache.truncate(sequence, 0).unwrap();
        append(&mut cache, sequence, 4);
        let before = plan(&cache, sequence, Tier::Disk, 0..4, false);
        cache.truncate(sequence, 0).unwrap();
        append(&mut cache, sequence, 4);
        assert_eq!(before.moves()[0].page, plan(&cache, sequence, Tier::Disk, 0..4, false).moves()[0].page);
        assert!(is_refused(&mut cache, &before), "another page has its number");
    }

    #[test]
    fn a_plan_takes_the_pages_that_were_selected() {
        let (mut cache, sequence) = filled(8);
        let fork = cache.fork(sequence).unwrap();
        append(&mut cache, sequence, 6);
        let pages = |selection: Selection| {
            let plan = cache.plan(sequence, Tier::Host, &selection).unwrap();
            plan.moves().iter().map(|m| m.page).collect::<Vec<_>>()
        };
        let all = || Selection::of(0..14, vec![GroupId(0)]);
        let [a, b, c, open] = pages(all())[..] else { panic!("four pages") };
        assert_eq!(pages(Selection { sealed: true, ..all() }), [a, b, c]);
        assert_eq!(pages(Selection { pages_max: 2, ..all() }), [a, b]);
        assert_eq!(pages(Selection { pages_max: 2, newest_first: true, ..all() }), [open, c]);
        assert_eq!(pages(Selection { tokens: 4..9, ..all() }), [b, c]);
        assert_eq!(pages(Selection { unshared: true, ..all() }), [c, open]);
        // Of what a drop has left: tokens 0 and 6 to 13.
        cache.drop_tokens(sequence, 1..6).unwrap();
        for (tokens, expected) in [(0..1, vec![a]), (1..3, vec![b]), (2..4, vec![b, c]), (7..9, vec![open])] {
            let plan = plan(&cache, sequence, Tier::Host, tokens, false);
            assert_eq!(plan.moves().iter().map(|m| m.page).collect::<Vec<_>>(), expected);
        }
        // The fork holds rows 1 to 5 as well.
        assert_eq!(cache.dead_rows(), 0);
        cache.release(fork).unwrap();
        assert_eq!(cache.dead_rows(), 3 + 2);
    }

    /// What is kept stays on disk, and is all that stays once nobody else holds it.
    #[test]
    fn copies_of_what_is_kept_are_spared_in_memory_alone() {
        let (mut cache, sequence) = filled(4);
        let to_disk = plan(&cache, sequence, Tier::Disk, 0..4, true);
        carry_out(&mut cache, &to_disk);
        let (kept, _) = cache.keep(sequence).unwrap();
        let unshared = Selection { unshared: true, ..Selection::of(0..4, vec![GroupId(0)]) };
        assert_eq!(
            cache.plan(sequence, Tier::Host, &unshared).unwrap().moves().len(),
            1,
            "a key is no sequence"
        );
        let dropped = |cache: &mut Cache, tier| {
            let dropped = cache.drop_copies(tier, GroupId(0), 9);
            cache.audit().unwrap();
            dropped
        };
        assert_eq!(Tier::ALL.map(|tier| dropped(&mut cache, tier)), [0, 0, 0]);
        for (to, places) in [(Tier::Host, [0, 1, 1]), (Tier::Disk, [0, 0, 1]), (Tier::Device, [1, 0, 1])] {
            let there = plan(&cache, sequence, to, 0..4, false);
            carry_out(&mut cache, &there);
            assert_eq!(used(&mut cache), places);
            cache.audit().unwrap();
        }
        cache.release(sequence).unwrap();
        assert_eq!(Tier::ALL.map(|tier| dropped(&mut cache, tier)), [1, 0, 0]);
        assert_eq!(used(&mut cache), [0, 0, 1]);
        cache.forget(kept);
        assert_eq!(used(&mut cache), [0, 0, 0]);
        // What is not kept leaves the disk.
        let (mut cache, sequence) = filled(4);
        for (to, places) in [(Tier::Disk, [0, 0, 1]), (Tier::Host, [0, 1, 0])] {
            let there = plan(&cache, sequence, to, 0..4, false);
            carry_out(&mut cache, &there);
            assert_eq!(used(&mut cache), places);
        }
    }

    #[test]
    fn a_plan_of_what_is_not_there_is_refused() {
        let mut cache = cache();
        let sequence = cache.create().unwrap();
        append(&mut cache, sequence, 4);
        let all = |stop, group| Selection::of(0..stop, vec![GroupId(group)]);
        #[expect(clippy::reversed_empty_ranges, reason = "it is what is refused")]
        let backwards = Selection { tokens: 3..2, ..all(4, 0) };
        for (to, selection, refused) in [
            (Tier::Host, all(5, 0), "tokens"),
            (Tier::Host, backwards, "tokens"),
            (Tier::Host, all(4, 1), "groups"),
            (Tier::Disk, all(4, 0), "to"),
        ] {
            let planned = cache.plan(sequence, to, &selection);
            assert!(
                matches!(planned, Err(Error::InvalidArgument { argument, .. }) if argument == refused),
                "{planned:?}"
            );
        }
        assert_eq!(cache.plan(sequence, Tier::Host, &all(4, 0)).unwrap().moves().len(), 1);
    }

    /// What another cache cannot have written down is refused, at once or halfway, and spoils nothing of those that come behind it.
    #[test]
    fn a_sequence_of_another_shape_is_not_adopted() {
        let window = Window { sinks: 0, tokens: 4, headroom: 0, trailing: false };
        let whole = Group { block_bytes: 64, kind: GroupKind::Paged { page_size: 4 }, window: None };
        let windowed = Group { window: Some(window), ..whole };
        let memory = TierMemory { bytes: 1 << 12, extent_bytes: 1 << 8 };
        let sealed = |block| KeptPage::Sealed(BlockId::new(block));
        let open = |block, fill| KeptPage::Open(BlockId::new(block), fill);
        let of = |pages| KeptGroup { left: (0, 0), spans: vec![(0, 0, 6, 0)], pages };
        let six = |groups| KeptSequence { len: 6, groups };
        let right = six(vec![of(vec![sealed(0), open(1, 2)])]);
        let most = limits::TOKENS_PER_SEQUENCE_MAX;
        let passed = |count| {
            let written =
                KeptGroup { left: (0, count), spans: vec![(0, 0, 4, most - 4)], pages: vec![sealed(2)] };
            KeptSequence { len: count + 4, groups: vec![written] }
        };
        for (group, kept, is_right) in [
            (whole, six(Vec::new()), false),
            (whole, six([&right.groups[..], &right.groups].concat()), false),
            (whole, six(vec![of(vec![sealed(0), open(1, 2), KeptPage::Left])]), false),
            (whole, six(vec![of(vec![sealed(0), open(1, 2), sealed(2)])]), false),
            (whole, six(vec![of(vec![sealed(0), open(1, 4)])]), false),
            (whole, six(vec![of(vec![sealed(0), open(64, 2)])]), false),
            (windowed, passed(most - 4), true),
            (windowed, passed(most - 3), false),
        ] {
            let mut cache = Cache::new(&[group], [memory; 3]).unwrap();
            let adopted = cache.adopt(&[kept.clone(), right.clone()]);
            assert_eq!(adopted[0].is_ok(), is_right, "{kept:?}: {adopted:?}");
            cache.audit().unwrap();
            if group == whole {
                assert_eq!(cache.describe(*adopted[1].as_ref().unwrap()), Some(right.clone()));
            }
        }
    }

    #[test]
    fn tickets_and_pages_go_on_when_their_numbers_begin_anew() {
        let mut cache = cache();
        cache.tickets_minted = u32::MAX - 2;
        let sequence = cache.create().unwrap();
        cache.reserve(&[(sequence, 4)]).unwrap();
        let epoch = cache.commit(None).unwrap();
        cache.retire(epoch).unwrap();
        for to in [Tier::Host, Tier::Device].into_iter().cycle().take(6) {
            let selection = Selection::of(0..4, vec![GroupId(0)]);
            let plan = cache.plan(sequence, to, &selection).unwrap();
            let (_, completion, copies) = cache.execute(&plan).unwrap();
            assert_eq!(copies.len(), 1);
            completion.finish(1);
            cache.audit().unwrap();
        }
        cache.pages.age(u32::MAX);
        cache.truncate(sequence, 2).unwrap();
        cache.reserve(&[(sequence, 1)]).unwrap();
        cache.rollback().unwrap();
        cache.audit().unwrap();
    }
}
