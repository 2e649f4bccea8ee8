//! Sequences that are kept on disk, whatever becomes of the sequences they were.
//!
//! What is kept holds its pages like a sequence does, and their copies on disk besides. Open pages never have a second copy: of
//! those a block on disk gets the bytes, which belongs to no page.

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
    /// How many tokens have left the window, and behind which.
    pub left: (u64, u64),
    /// First page, rows before the span, tokens, and the position of the first.
    pub spans: Vec<(u32, u32, u32, u64)>,
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
    /// A page with room: its block, and how many rows are in it.
    Open(BlockId, u32),
}

/// What the core has of a kept sequence.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) len: u64,
    /// With nothing in the place of open pages.
    pub(crate) tables: Vec<Table>,
    pub(crate) tails: Vec<Tail>,
}

/// The bytes of an open page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tail {
    pub(crate) group: GroupId,
    /// Where in the table it stands.
    index: usize,
    pub(crate) block: BlockId,
    fill: u32,
}

impl Cache {
    /// Keeps a sequence whose sealed pages are all on disk. Hands out the copies of open pages to make before anything else
    /// happens; `forget` if they fail.
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
            let limit = "all sealed pages on disk: copy them there first";
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
            let (from, to) = ((from.tier(), from.block()), (Tier::Disk, block));
            copies.push(BlockCopy { group, from, to, bytes: self.groups[group.index()].block_bytes });
            tails.push(Tail { group, index, block, fill: self.pages[page].fill });
            tables[group.index()].pages[index] = None;
        }
        tables.iter().flat_map(Table::held).for_each(|page| {
            self.pages.add_reference(page);
            self.pages.keep(page);
        });
        Ok((self.insert_kept(Kept { len, tables, tails }), copies))
    }

    /// Lets go of what is kept.
    pub fn forget(&mut self, id: KeptId) {
        self.settle();
        let Some(kept) = self.kept.remove(&id) else { return };
        for page in kept.tables.iter().flat_map(Table::held) {
            self.pages.unkeep(page);
            self.release_page(page);
        }
        kept.tails.iter().for_each(|tail| self.free_block(Tier::Disk, tail.group, tail.block));
    }

    /// A sequence with the tokens that are kept. Hands out the copies of open pages to make before anything else happens;
    /// `release` it if they fail.
    pub fn revive(&mut self, id: KeptId) -> Result<(SequenceId, Vec<BlockCopy>)> {
        self.settle();
        let Some(kept) = self.kept.get(&id) else {
            return Err(Error::invalid("kept", format!("{id:?}"), "what is kept"));
        };
        let (len, mut tables, tails) = (kept.len, kept.tables.clone(), kept.tails.clone());
        let sequence = self.sequences.insert(len, self.epochs.minted(), Vec::new())?;
        let blocks = self.take_blocks(Tier::Device, tails.iter().map(|tail| tail.group));
        let blocks = blocks.inspect_err(|_| drop(self.sequences.remove(sequence)))?;
        tables.iter().flat_map(Table::held).for_each(|page| self.pages.add_reference(page));
        let mut copies = Vec::with_capacity(tails.len());
        for (tail, block) in tails.iter().zip(blocks) {
            let page = self.pages.open(tail.group, block);
            self.pages[page].fill = tail.fill;
            tables[tail.group.index()].pages[tail.index] = Some(page);
            let (from, to) = ((Tier::Disk, tail.block), (Tier::Device, block));
            copies.push(BlockCopy {
                group: tail.group,
                from,
                to,
                bytes: self.groups[tail.group.index()].block_bytes,
            });
        }
        for (table, &placement) in tables.iter_mut().zip(&self.placement) {
            // Any other than the group's own: the row is looked up when a step opens.
            table.placement = placement.wrapping_sub(1);
        }
        self.sequences[sequence].tables = tables;
        Ok((sequence, copies))
    }

    /// Writes down what is kept.
    pub fn describe(&self, id: KeptId) -> Option<KeptSequence> {
        let kept = self.kept.get(&id)?;
        let groups = self.group_ids().zip(&kept.tables).map(|(group, table)| {
            let page = |entry: &Option<PageId>| match entry {
                Some(page) => KeptPage::Sealed(self.pages[*page].ready(Tier::Disk).expect("kept on disk")),
                None => KeptPage::Left,
            };
            let mut pages: Vec<_> = table.pages.iter().map(page).collect();
            for tail in kept.tails.iter().filter(|tail| tail.group == group) {
                pages[tail.index] = KeptPage::Open(tail.block, tail.fill);
            }
            let span = |span: &Span| (span.first_page, span.skip, span.count, span.position);
            let spans = table.spans.iter().map(span).collect();
            KeptGroup { left: (table.left.after, table.left.count), spans, pages }
        });
        Some(KeptSequence { len: kept.len, groups: groups.collect() })
    }

    /// Takes sequences in that another cache wrote down, over the same blocks. Some may be impossible: those are refused, each
    /// with a reason, and leave nothing behind.
    pub fn adopt(&mut self, all: &[KeptSequence]) -> Vec<Result<KeptId>> {
        let mut known = HashMap::new();
        all.iter().map(|kept| self.adopt_one(kept, &mut known)).collect()
    }

    fn adopt_one(
        &mut self,
        kept: &KeptSequence,
        known: &mut HashMap<(GroupId, BlockId), PageId>,
    ) -> Result<KeptId> {
        let refuse = |what: String| Err(Error::invalid("kept", what, "a sequence of a cache like this one"));
        if kept.groups.len() != self.groups.len() || kept.len > limits::TOKENS_PER_SEQUENCE_MAX {
            return refuse(format!("{} tokens in {} groups", kept.len, kept.groups.len()));
        }
        if let Some(group) = self.groups.iter().position(|group| group.kind == GroupKind::State) {
            return refuse(format!("a state in group {group}"));
        }
        let (mut tables, mut tails) = (Vec::new(), Vec::new());
        for (group, written) in self.group_ids().zip(&kept.groups) {
            let mut table = Table::new(0);
            table.left = Left { after: written.left.0, count: written.left.1 };
            let span = |&(first_page, skip, count, position)| Span { first_page, skip, count, position };
            table.spans = written.spans.iter().map(span).collect();
            table.pages = vec![None; written.pages.len()];
            table.row = vec![BlockRef::new(Tier::Device, BlockId::new(0)); written.pages.len()];
            tables.push((group, table));
        }
        for ((group, table), written) in tables.iter().zip(&kept.groups) {
            let page_size = self.groups[group.index()].page_size();
            let room = |page: &KeptPage| matches!(page, KeptPage::Open(_, fill) if *fill >= page_size);
            let fills = written.pages.iter().map(|page| match page {
                KeptPage::Left => None,
                KeptPage::Sealed(_) => Some(page_size),
                KeptPage::Open(_, fill) => Some(*fill),
            });
            let fills: Vec<_> = fills.collect();
            let checked = self.check_table("it", kept.len, *group, table, &fills);
            if let Err(error) = checked {
                return refuse(error.to_string());
            }
            let pages = table.spans.iter().map(|span| span.rows().div_ceil(page_size)).sum::<u32>();
            if pages as usize != fills.len() || written.pages.iter().any(room) {
                return refuse(format!("{} pages for {pages}", fills.len()));
            }
        }
        for ((group, table), written) in tables.iter_mut().zip(&kept.groups) {
            let group = *group;
            for (index, entry) in written.pages.iter().enumerate() {
                let taken = match *entry {
                    KeptPage::Left => continue,
                    KeptPage::Sealed(block) => match known.get(&(group, block)) {
                        Some(&page) => {
                            self.pages.add_reference(page);
                            table.pages[index] = Some(page);
                            self.pages.keep(page);
                            true
                        }
                        None => self.arenas[Tier::Disk.index()]
                            .take_at(group, block)
                            .then(|| {
                                let page = self.pages.open(group, block);
                                let page_size = self.groups[group.index()].page_size();
                                let adopted = &mut self.pages[page];
                                (adopted.fill, adopted.sealed) = (page_size, true);
                                adopted.slots = [Slot::Empty, Slot::Empty, Slot::Ready { block }];
                                self.pages.keep(page);
                                known.insert((group, block), page);
                                table.pages[index] = Some(page);
                            })
                            .is_some(),
                    },
                    KeptPage::Open(block, fill) => {
                        let taken = self.arenas[Tier::Disk.index()].take_at(group, block);
                        if taken {
                            tails.push(Tail { group, index, block, fill });
                        }
                        taken
                    }
                };
                if !taken {
                    let name = format!("{entry:?} of group {}", group.0);
                    let tables = tables.into_iter().map(|(_, table)| table).collect();
                    let half = self.insert_kept(Kept { len: kept.len, tables, tails });
                    self.forget(half);
                    let live = |page: &PageId| self.pages.references(*page) > 0;
                    known.retain(|_, page| live(page));
                    return refuse(format!("{name}, which is taken or not there"));
                }
            }
        }
        let tables = tables.into_iter().map(|(_, table)| table).collect();
        Ok(self.insert_kept(Kept { len: kept.len, tables, tails }))
    }

    fn insert_kept(&mut self, kept: Kept) -> KeptId {
        let id = KeptId(self.kept_minted);
        self.kept_minted += 1;
        self.kept.insert(id, kept);
        id
    }
}
