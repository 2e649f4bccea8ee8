//! Pages and the state of their blocks: the one source of truth about what may be read where.

use crate::ids::{BlockId, BlockRef, GroupId, PageId, TicketId, Tier};
use std::collections::{BTreeSet, HashMap, HashSet};

/// What a page has on one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Nothing.
    Empty,
    /// A block that a copy is writing; nobody reads it.
    Filling { block: BlockId, ticket: TicketId },
    /// A block with the page's bytes.
    Ready { block: BlockId },
}

/// A page. With its reference count, a table entry and a row entry it costs 60 bytes.
#[derive(Debug)]
pub(crate) struct Page {
    /// How often this slot was handed out or its bytes were reopened. Plans name it, so that a stale plan is noticed.
    pub(crate) generation: u32,
    /// Valid tokens.
    pub(crate) fill: u32,
    /// Copies in flight that read or write a block of the page.
    pub(crate) copies: u16,
    pub(crate) group: GroupId,
    /// Full and never written again, until reopened under a new generation.
    pub(crate) sealed: bool,
    pub(crate) slots: [Slot; Tier::COUNT],
}

const _: () = assert!(size_of::<Page>() <= 48, "a page must stay within its 64 bytes of metadata");

impl Page {
    /// The fastest copy that can be read.
    pub(crate) fn fastest(&self) -> Option<BlockRef> {
        Tier::ALL.into_iter().find_map(|tier| Some(BlockRef::new(tier, self.ready(tier)?)))
    }

    /// The block on `tier`, if it can be read.
    pub(crate) fn ready(&self, tier: Tier) -> Option<BlockId> {
        match self.slots[tier.index()] {
            Slot::Ready { block } => Some(block),
            Slot::Empty | Slot::Filling { .. } => None,
        }
    }

    /// Whether a plan may take the page there. Pages on disk are written once, so only sealed ones go there.
    pub(crate) fn may_move_to(&self, tier: Tier) -> bool {
        self.sealed || tier != Tier::Disk
    }

    /// Whether an append may write into the page where it lies.
    pub(crate) fn only_on_device(&self) -> bool {
        matches!(self.slots, [Slot::Ready { .. }, Slot::Empty, Slot::Empty])
    }
}

/// How many kinds of pages `Pages::kind` tells apart.
const KINDS: usize = 2 << Tier::COUNT;

/// The bit of `Pages::kind` for pages that are kept on disk.
const KEPT: usize = 1 << Tier::COUNT;

/// Every page of a cache. Reference counts are stored separately, because a fork touches nothing else.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    pages: Vec<Page>,
    references: Vec<u32>,
    /// Pages with a reference, and with more than one.
    held: u64,
    shared: u64,
    /// How often a page is kept on disk.
    kept: HashMap<PageId, u32>,
    /// Pages with blocks on more than one tier, by `kind`, then by layer group.
    spread: [BTreeSet<(GroupId, PageId)>; KINDS],
    vacant: Vec<PageId>,
}

impl Pages {
    /// A new open page with one reference and a block on the device tier.
    pub(crate) fn open(&mut self, group: GroupId, block: BlockId) -> PageId {
        let slots = [Slot::Ready { block }, Slot::Empty, Slot::Empty];
        self.held += 1;
        if let Some(id) = self.vacant.pop() {
            let page = &mut self.pages[id.index() as usize];
            *page = Page {
                generation: page.generation.wrapping_add(1),
                fill: 0,
                copies: 0,
                group,
                sealed: false,
                slots,
            };
            self.references[id.index() as usize] = 1;
            return id;
        }
        let id = PageId::new(self.pages.len() as u32);
        self.pages.push(Page { generation: 0, fill: 0, copies: 0, group, sealed: false, slots });
        self.references.push(1);
        id
    }

    /// Forgets a page that nobody refers to and no copy touches. Its blocks are the caller's to free.
    pub(crate) fn close(&mut self, id: PageId) {
        debug_assert_eq!(self.references(id), 0);
        self.change(id, |pages| pages[id].slots = [Slot::Empty; Tier::COUNT]);
        self.vacant.push(id);
    }

    /// Changes what a page has on a tier; returns what it had.
    pub(crate) fn place(&mut self, id: PageId, tier: Tier, slot: Slot) -> Slot {
        self.change(id, |pages| std::mem::replace(&mut pages[id].slots[tier.index()], slot))
    }

    /// Changes where a page has blocks, or whether it is kept.
    fn change<T>(&mut self, id: PageId, change: impl FnOnce(&mut Self) -> T) -> T {
        let (group, before) = (self[id].group, self.kind(id));
        let result = change(self);
        let after = self.kind(id);
        if before != after {
            if let Some(kind) = before {
                self.spread[kind].remove(&(group, id));
            }
            if let Some(kind) = after {
                self.spread[kind].insert((group, id));
            }
        }
        result
    }

    /// Of a page with blocks on more than one tier: a bit for each of these tiers, and one if it is kept.
    fn kind(&self, id: PageId) -> Option<usize> {
        let slots = self[id].slots.iter().enumerate().filter(|(_, slot)| **slot != Slot::Empty);
        let tiers = slots.fold(0_usize, |tiers, (tier, _)| tiers | 1 << tier);
        (tiers.count_ones() > 1).then(|| if self.kept(id) > 0 { tiers | KEPT } else { tiers })
    }

    /// Pages of a group whose block on `tier` may have become superfluous: it is on a faster tier too or, if kept, on disk, where
    /// all kept pages are. There may be very many others with blocks on more than one tier, and these are not looked at.
    pub(crate) fn spare(&self, tier: Tier, group: GroupId) -> impl Iterator<Item = (PageId, &Page)> {
        let (on, faster) = (1 << tier.index(), (1 << tier.index()) - 1);
        let kinds = (0..KINDS).filter(move |kind| match (kind & on > 0, kind & KEPT > 0) {
            (false, _) => false,
            (true, false) => kind & faster > 0,
            (true, true) => tier != Tier::Disk,
        });
        let first = PageId::new(0);
        let of_group = (group, first)..(GroupId(group.0 + 1), first);
        kinds.flat_map(move |kind| self.spread[kind].range(of_group.clone())).map(|&(_, id)| (id, &self[id]))
    }

    /// Whether the pages with blocks on more than one tier are listed as what they are, and no others.
    pub(crate) fn spread_is_right(&self) -> bool {
        let of_kind = |(kind, pages): (usize, &BTreeSet<_>)| {
            pages.iter().map(move |&(group, id)| (kind, group, id)).collect()
        };
        let listed: Vec<Vec<_>> = self.spread.iter().enumerate().map(of_kind).collect();
        let right = self.iter().filter_map(|(id, page)| Some((self.kind(id)?, page.group, id)));
        listed.into_iter().flatten().collect::<HashSet<_>>() == right.collect()
    }

    /// Sets the generation of every page, as if its bytes had been reopened that often.
    #[cfg(test)]
    pub(crate) fn age(&mut self, generation: u32) {
        self.pages.iter_mut().for_each(|page| page.generation = generation);
    }

    pub(crate) fn references(&self, id: PageId) -> u32 {
        self.references[id.index() as usize]
    }

    pub(crate) fn add_reference(&mut self, id: PageId) {
        let count = &mut self.references[id.index() as usize];
        *count += 1;
        self.shared += u64::from(*count == 2);
    }

    /// Drops a reference and says how many are left.
    pub(crate) fn drop_reference(&mut self, id: PageId) -> u32 {
        let count = &mut self.references[id.index() as usize];
        *count -= 1;
        self.held -= u64::from(*count == 0);
        self.shared -= u64::from(*count == 1);
        *count
    }

    /// Pages with a reference, without those that only a copy still touches.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }

    /// Pages with more than one reference.
    pub(crate) fn shared(&self) -> u64 {
        self.shared
    }

    /// Makes the copy on disk stay, whatever moves.
    pub(crate) fn keep(&mut self, id: PageId) {
        self.change(id, |pages| *pages.kept.entry(id).or_default() += 1);
    }

    /// Undoes one `keep`.
    pub(crate) fn unkeep(&mut self, id: PageId) {
        self.change(id, |pages| {
            let count = pages.kept.get_mut(&id).expect("kept before");
            *count -= 1;
            if *count == 0 {
                pages.kept.remove(&id);
            }
        });
    }

    /// How often the page is kept: this many of its references are not from sequences.
    pub(crate) fn kept(&self, id: PageId) -> u32 {
        self.kept.get(&id).copied().unwrap_or(0)
    }

    /// Every page that holds a block.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PageId, &Page)> {
        let all = self.pages.iter().enumerate().map(|(index, page)| (PageId::new(index as u32), page));
        all.filter(|(_, page)| page.slots != [Slot::Empty; Tier::COUNT])
    }

    pub(crate) fn get(&self, id: PageId) -> Option<&Page> {
        self.pages.get(id.index() as usize)
    }
}

impl std::ops::Index<PageId> for Pages {
    type Output = Page;

    fn index(&self, id: PageId) -> &Page {
        &self.pages[id.index() as usize]
    }
}

impl std::ops::IndexMut<PageId> for Pages {
    fn index_mut(&mut self, id: PageId) -> &mut Page {
        &mut self.pages[id.index() as usize]
    }
}
