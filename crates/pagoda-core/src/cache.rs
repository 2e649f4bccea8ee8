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
use crate::sequences::Sequences;
use crate::step::Step;
use crate::table::Table;
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
    /// Which tokens of a sequence are kept; `None`, as for states, keeps all.
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
    /// Blocks that wait to be zeroed; `None` unless the cache zeroes freed blocks.
    pub(crate) freed: Option<Vec<Freed>>,
    pub(crate) tickets: Vec<Ticket>,
    pub(crate) tickets_minted: u32,
    pub(crate) failures: Vec<Failed>,
    pub(crate) kept: BTreeMap<KeptId, Kept>,
    pub(crate) kept_minted: u64,
    /// Per group: changes whenever one of its pages is read from another tier than before.
    pub(crate) placement: Vec<u32>,
    /// Per group: which sequences need not be searched for pages to move.
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

    /// The position at which the next token of a sequence is stored.
    pub fn next_position(&self, id: SequenceId) -> Result<u64> {
        Ok(self.sequences.get(id)?.tables[0].last().end_position())
    }

    /// The smallest length other than 0 that `truncate` accepts. States keep no history, so they cannot be rewound. Windows
    /// can be rewound as long as no query misses a page that has left.
    pub fn rewind_limit(&self, id: SequenceId) -> Result<u64> {
        let sequence = self.sequences.get(id)?;
        let limits = self.groups.iter().zip(&sequence.tables).map(|(group, table)| match group.window {
            _ if group.kind == GroupKind::State => sequence.len,
            Some(window) if table.left.count > 0 => window.least_len(table.left.end()),
            _ => 0,
        });
        Ok(limits.max().unwrap_or(0))
    }

    /// Removes the tokens from `len` on, as if they had never been appended.
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

    /// Removes the tokens `range` from the middle of a sequence: a context shift. No byte moves; positions only grow.
    ///
    /// In groups where pages have left, the sinks must stay, and one window's worth of the tokens that are still there.
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
    pub fn sequence_count(&self) -> u64 {
        self.sequences.count()
    }

    /// How many sequences have ended so far.
    pub fn ended_sequences(&self) -> u64 {
        self.sequences.ended
    }

    /// Whether no sequence has any rows and nothing is kept on disk.
    pub fn is_empty(&self) -> bool {
        self.pages.held() == 0 && self.kept.is_empty()
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

    /// Rows of pages that no sequence's span covers any more: `drop`, `truncate` and windows have left them behind.
    pub fn dead_rows(&self) -> u64 {
        // Only the first and the last page of a span can have rows that it does not cover.
        let tables = self.paged_tables();
        let mut ends: Vec<_> =
            tables.flat_map(|(table, page_size)| table.covered_at_ends(page_size)).collect();
        ends.sort_unstable_by_key(|(page, rows)| (*page, rows.start));
        let mut replaced: Vec<_> = self.step.undo.iter().filter_map(|undo| undo.replaced).collect();
        replaced.sort_unstable();
        let dead = ends.chunk_by(|(one, _), (other, _)| one == other).map(|ends| {
            let page = ends[0].0;
            let undo = replaced.partition_point(|&at| at <= page) - replaced.partition_point(|&at| at < page);
            // Any further reference is from the middle of a span, which covers the whole page.
            let is_whole = self.pages.references(page) > (ends.len() + undo) as u32 + self.pages.kept(page);
            if is_whole { 0 } else { uncovered(self.pages[page].fill, ends.iter().map(|(_, rows)| rows)) }
        });
        dead.sum()
    }

    /// The tables of all paged groups, each with its page size.
    pub(crate) fn paged_tables(&self) -> impl Iterator<Item = (&Table, u32)> {
        let tables = self.sequences.iter().flat_map(|(_, sequence)| self.groups.iter().zip(&sequence.tables));
        tables.filter_map(|(group, table)| match group.kind {
            GroupKind::Paged { page_size } => Some((table, page_size)),
            GroupKind::State => None,
        })
    }

    /// Byte ranges of a tier that have become empty since the last call: the owner of the memory may give them back.
    pub fn reclaim(&mut self, tier: Tier) -> impl Iterator<Item = Range<u64>> + '_ {
        self.settle();
        self.arenas[tier.index()].reclaim()
    }

    pub(crate) fn group_ids(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.groups.len() as u8).map(GroupId)
    }

    pub(crate) fn has_states(&self) -> bool {
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
        self.pop_pages(id, group, pages);
    }

    /// Releases the pages of a table from entry `len` on.
    pub(crate) fn pop_pages(&mut self, id: SequenceId, group: GroupId, len: u32) {
        while self.sequences[id].tables[group.index()].pages.len() > len as usize {
            if let Some(page) = self.sequences[id].tables[group.index()].pop() {
                self.release_page(page);
            }
        }
    }

    pub(crate) fn release_page(&mut self, page: PageId) {
        if self.pages.drop_reference(page) == 0 {
            self.close_page(page);
        }
    }

    /// Takes one block for each of these groups, in this order, or none at all.
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

    /// How many blocks of all tiers have waited for an epoch so far.
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

/// How many of the first `fill` rows lie in none of the ranges, which are sorted by their starts.
pub(crate) fn uncovered<'a>(fill: u32, ranges: impl IntoIterator<Item = &'a Range<u32>>) -> u64 {
    let (_, covered) = ranges.into_iter().fold((0, 0), |(end, sum), range| {
        (end.max(range.end), sum + range.end.saturating_sub(end.max(range.start)))
    });
    u64::from(fill.saturating_sub(covered))
}
