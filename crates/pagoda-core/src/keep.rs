//! Sequences that are kept on disk, independently of the sequences that they were saved from.
//!
//! Like any sequence, a kept one holds its pages; it also holds their copies on disk. An open page never has a second copy,
//! so its bytes go to a block on disk that belongs to no page.

use crate::audit::check_positions;
use crate::cache::{Cache, GroupKind};
use crate::error::{Error, Result};
use crate::ids::{BlockId, BlockRef, GroupId, KeptId, PageId, SequenceId, Tier};
use crate::limits;
use crate::pages::Slot;
use crate::plan::BlockCopy;
use crate::table::{Left, Span, Table};
use std::collections::HashMap;

/// A sequence as it can be written down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptSequence {
    /// Tokens.
    pub len: u64,
    /// One entry per layer group.
    pub groups: Vec<KeptGroup>,
}

/// The pages of one layer group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptGroup {
    /// The tokens that have left the window.
    pub left: Left,
    /// The spans of the other tokens.
    pub spans: Vec<Span>,
    /// Every entry of the page table.
    pub pages: Vec<KeptPage>,
}

/// One entry of a page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptPage {
    /// The page has left its window.
    Left,
    /// A full page.
    Sealed(BlockId),
    /// An open page: its block, and how many rows are in it.
    Open(BlockId, u32),
}

/// What the core has of a kept sequence.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) len: u64,
    /// Entries of open pages are empty: `tails` has their bytes.
    pub(crate) tables: Vec<Table>,
    pub(crate) tails: Vec<Tail>,
}

/// The bytes of an open page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tail {
    pub(crate) group: GroupId,
    /// Its index in the table.
    index: usize,
    pub(crate) block: BlockId,
    fill: u32,
}

impl Cache {
    /// Keeps a sequence whose sealed pages are all on disk. Returns the copies of open pages, to be made before anything else
    /// happens; call `forget` if they fail.
    pub fn keep(&mut self, id: SequenceId) -> Result<(KeptId, Vec<BlockCopy>)> {
        self.settle();
        let sequence = self.sequences.get_idle(id)?;
        let (len, mut tables) = (sequence.len, sequence.tables.clone());
        if let Some(group) = self.groups.iter().position(|group| group.kind == GroupKind::State) {
            return Err(Error::invalid("sequence", format!("with a state in group {group}"), "pages only"));
        }
        let away = |page: &PageId| self.pages[*page].sealed && self.pages[*page].ready(Tier::Disk).is_none();
        let away = tables.iter().flat_map(Table::held).filter(away).count();
        if away > 0 {
            let limit = "all sealed pages on disk: they arrive there when no step is open";
            return Err(Error::invalid("sequence", format!("{away} page(s) elsewhere"), limit));
        }
        let mut open = Vec::new();
        for (group, table) in self.group_ids().zip(&tables) {
            let pages = table.pages.iter().enumerate().filter_map(|(index, entry)| Some((index, (*entry)?)));
            let pages = pages.filter(|(_, page)| !self.pages[*page].sealed);
            open.extend(pages.map(|(index, page)| (group, index, page)));
        }
        let blocks = self.take_blocks(Tier::Disk, open.iter().map(|(group, ..)| *group))?;
        let (mut tails, mut copies) = (Vec::new(), Vec::new());
        for ((group, index, page), block) in open.into_iter().zip(blocks) {
            let from = self.pages[page].fastest().expect("a referenced page can be read");
            copies.push(self.block_copy(group, (from.tier(), from.block()), (Tier::Disk, block)));
            tails.push(Tail { group, index, block, fill: self.pages[page].fill });
            tables[group.index()].pages[index] = None;
        }
        tables.iter().flat_map(Table::held).for_each(|page| {
            self.pages.add_reference(page);
            self.pages.keep(page);
        });
        Ok((self.insert_kept(Kept { len, tables, tails }), copies))
    }

    /// Lets go of a kept sequence.
    pub fn forget(&mut self, id: KeptId) {
        self.settle();
        let Some(kept) = self.kept.remove(&id) else { return };
        for page in kept.tables.iter().flat_map(Table::held) {
            self.pages.unkeep(page);
            self.release_page(page);
        }
        kept.tails.iter().for_each(|tail| self.free_block(Tier::Disk, tail.group, tail.block));
    }

    /// A new sequence with the kept tokens. Returns the copies of open pages, to be made before anything else happens; call
    /// `release` if they fail.
    pub fn revive(&mut self, id: KeptId) -> Result<(SequenceId, Vec<BlockCopy>)> {
        self.settle();
        let Some(kept) = self.kept.get(&id) else {
            return Err(Error::invalid("kept", format!("{id:?}"), "what is kept"));
        };
        let (len, mut tables, tails) = (kept.len, kept.tables.clone(), kept.tails.clone());
        let sequence = self.sequences.insert(len, Vec::new())?;
        let blocks = self.take_blocks(Tier::Device, tails.iter().map(|tail| tail.group));
        let blocks = blocks.inspect_err(|_| drop(self.sequences.remove(sequence)))?;
        tables.iter().flat_map(Table::held).for_each(|page| self.pages.add_reference(page));
        let mut copies = Vec::with_capacity(tails.len());
        for (tail, block) in tails.iter().zip(blocks) {
            let page = self.pages.open(tail.group, block);
            self.pages[page].fill = tail.fill;
            tables[tail.group.index()].pages[tail.index] = Some(page);
            copies.push(self.block_copy(tail.group, (Tier::Disk, tail.block), (Tier::Device, block)));
        }
        for (table, &placement) in tables.iter_mut().zip(&self.placement) {
            // Any version but the group's own, so that the row is built when a step opens.
            table.placement = placement.wrapping_sub(1);
        }
        self.sequences[sequence].tables = tables;
        Ok((sequence, copies))
    }

    /// A kept sequence as it can be written down.
    pub fn describe(&self, id: KeptId) -> Option<KeptSequence> {
        let kept = self.kept.get(&id)?;
        let block = |page: PageId| self.pages[page].ready(Tier::Disk).expect("kept on disk");
        let mut written = write_down(kept.len, &kept.tables, block);
        for tail in &kept.tails {
            written.groups[tail.group.index()].pages[tail.index] = KeptPage::Open(tail.block, tail.fill);
        }
        Some(written)
    }

    /// A stand-in, of the same length, for what `describe` would return if this sequence were kept. Its blocks mean nothing.
    pub fn outline(&self, id: SequenceId) -> Result<KeptSequence> {
        let sequence = self.sequences.get(id)?;
        Ok(write_down(sequence.len, &sequence.tables, |_| BlockId::new(0)))
    }

    /// Takes in sequences that another cache wrote down, over the same blocks. Impossible ones are refused, each with a
    /// reason, and leave nothing behind.
    pub fn adopt(&mut self, all: &[KeptSequence]) -> Vec<Result<KeptId>> {
        let mut known = HashMap::new();
        all.iter().map(|kept| self.adopt_one(kept, &mut known)).collect()
    }

    fn adopt_one(
        &mut self,
        written: &KeptSequence,
        known: &mut HashMap<(GroupId, BlockId), PageId>,
    ) -> Result<KeptId> {
        let tables = self.tables_of(written)?;
        let mut kept = Kept { len: written.len, tables, tails: Vec::new() };
        for (group, written) in self.group_ids().zip(&written.groups) {
            for (index, page) in written.pages.iter().enumerate() {
                if !self.adopt_page(group, index, page, &mut kept, known) {
                    let half = self.insert_kept(kept);
                    self.forget(half);
                    known.retain(|_, page| self.pages.references(*page) > 0);
                    let what = format!("{page:?} of group {}, which is taken or not there", group.0);
                    return Err(unlike(what));
                }
            }
        }
        Ok(self.insert_kept(kept))
    }

    /// The tables of a sequence that was written down, without its pages.
    fn tables_of(&self, written: &KeptSequence) -> Result<Vec<Table>> {
        let (len, groups) = (written.len, &written.groups);
        if groups.len() != self.groups.len() || len > limits::TOKENS_PER_SEQUENCE_MAX {
            return Err(unlike(format!("{len} tokens in {} groups", groups.len())));
        }
        if let Some(group) = self.groups.iter().position(|group| group.kind == GroupKind::State) {
            return Err(unlike(format!("a state in group {group}")));
        }
        let table = |(group, written): (GroupId, &KeptGroup)| {
            let page_size = self.groups[group.index()].page_size();
            let mut table = Table::new(0);
            (table.left, table.spans) = (written.left, written.spans.clone());
            table.pages = vec![None; written.pages.len()];
            table.row = vec![BlockRef::new(Tier::Device, BlockId::new(0)); written.pages.len()];
            let room = |page: &KeptPage| matches!(page, KeptPage::Open(_, fill) if *fill >= page_size);
            let fills = written.pages.iter().map(|page| match page {
                KeptPage::Left => None,
                KeptPage::Sealed(_) => Some(page_size),
                KeptPage::Open(_, fill) => Some(*fill),
            });
            let fills: Vec<_> = fills.collect();
            let checked = self.check_table("it", len, group, &table, &fills);
            checked.map_err(|error| unlike(error.to_string()))?;
            let pages = table.spans.iter().map(|span| span.rows().div_ceil(page_size)).sum::<u32>();
            if pages as usize != fills.len() || written.pages.iter().any(room) {
                return Err(unlike(format!("{} pages for {pages}", fills.len())));
            }
            Ok(table)
        };
        let tables = self.group_ids().zip(groups).map(table).collect::<Result<Vec<_>>>()?;
        check_positions("it", &tables).map_err(|error| unlike(error.to_string()))?;
        Ok(tables)
    }

    /// Takes in page `index` of a group; false if its block is taken or does not exist. `known`: the sealed pages taken in so
    /// far.
    fn adopt_page(
        &mut self,
        group: GroupId,
        index: usize,
        page: &KeptPage,
        kept: &mut Kept,
        known: &mut HashMap<(GroupId, BlockId), PageId>,
    ) -> bool {
        let disk = &mut self.arenas[Tier::Disk.index()];
        match *page {
            KeptPage::Left => true,
            KeptPage::Open(block, fill) => {
                let taken = disk.take_at(group, block);
                if taken {
                    kept.tails.push(Tail { group, index, block, fill });
                }
                taken
            }
            KeptPage::Sealed(block) => {
                let page = if let Some(&page) = known.get(&(group, block)) {
                    self.pages.add_reference(page);
                    page
                } else if disk.take_at(group, block) {
                    let page = self.pages.open(group, block);
                    let page_size = self.groups[group.index()].page_size();
                    let adopted = &mut self.pages[page];
                    (adopted.fill, adopted.sealed) = (page_size, true);
                    adopted.slots = [Slot::Empty, Slot::Empty, Slot::Ready { block }];
                    known.insert((group, block), page);
                    page
                } else {
                    return false;
                };
                self.pages.keep(page);
                kept.tables[group.index()].pages[index] = Some(page);
                true
            }
        }
    }

    fn insert_kept(&mut self, kept: Kept) -> KeptId {
        let id = KeptId(self.kept_minted);
        self.kept_minted += 1;
        self.kept.insert(id, kept);
        id
    }
}

/// Tables as they are written down if all pages are sealed; `block` says where each page is.
fn write_down(len: u64, tables: &[Table], block: impl Fn(PageId) -> BlockId) -> KeptSequence {
    let groups = tables.iter().map(|table| {
        let page =
            |entry: &Option<PageId>| entry.map_or(KeptPage::Left, |page| KeptPage::Sealed(block(page)));
        KeptGroup {
            left: table.left,
            spans: table.spans.clone(),
            pages: table.pages.iter().map(page).collect(),
        }
    });
    KeptSequence { len, groups: groups.collect() }
}

/// The refusal of a sequence that no cache of this shape can have written down.
fn unlike(what: String) -> Error {
    Error::invalid("kept", what, "a sequence of a cache like this one")
}
