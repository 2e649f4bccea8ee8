//! Migrations between tiers: planning is a pure function, starting and finishing are bookkeeping, and copying happens
//! elsewhere.

use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::fence::{Completion, Failure, Fence};
use crate::ids::{BlockId, GroupId, PageId, SequenceId, TicketId, Tier};
use crate::pages::Slot;
use crate::sequences::Sequence;
use crate::step::Phase;
use crate::table::Table;
use std::collections::HashSet;
use std::ops::Range;

/// What to move. It stays valid as long as its pages do not change or move; executing a stale one is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The sequence it was made for.
    pub sequence: SequenceId,
    /// Where the pages go.
    pub to: Tier,
    /// Whether the pages keep the copy that they are read from now.
    pub keep: bool,
    /// One entry per page: first those that copy, in token order within each layer group, then those that only drop a copy.
    pub(crate) moves: Vec<Move>,
}

/// Which of a sequence's pages a plan takes, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Pages that hold one of these tokens (token axis).
    pub tokens: Range<u64>,
    /// Layer groups, each with the most pages to take from it.
    pub groups: Vec<(GroupId, usize)>,
    /// Keeps the copy that a page is read from now, so that moving it back later costs nothing.
    pub keep: bool,
    /// Starts at the end of the sequence instead of at its beginning.
    pub newest_first: bool,
    /// Only pages that are read from this tier now; from any other than the target if `None`.
    pub from: Option<Tier>,
    /// Only pages that no other sequence holds.
    pub unshared: bool,
    /// Only sealed pages.
    pub sealed: bool,
}

impl Selection {
    /// All pages with one of these tokens, oldest first, without keeping a copy.
    pub fn of(tokens: Range<u64>, groups: Vec<GroupId>) -> Self {
        let groups = groups.into_iter().map(|group| (group, usize::MAX)).collect();
        let (keep, newest_first, unshared, sealed) = (false, false, false, false);
        Self { tokens, groups, keep, newest_first, from: None, unshared, sealed }
    }
}

/// One page of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The page.
    pub page: PageId,
    /// Its generation when the plan was made.
    pub generation: u32,
    /// Its layer group.
    pub group: GroupId,
    /// The tier it is read from.
    pub from: Tier,
    /// Bytes to copy: 0 when the target tier holds a copy already.
    pub bytes: u64,
}

impl Plan {
    /// What happens to each page.
    pub fn moves(&self) -> &[Move] {
        &self.moves
    }

    /// Bytes that executing it copies.
    pub fn bytes(&self) -> u64 {
        self.moves.iter().map(|m| m.bytes).sum()
    }
}

/// One copy of one block, for whoever moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Layer group of both blocks.
    pub group: GroupId,
    /// Where the bytes are.
    pub from: (Tier, BlockId),
    /// Where they go.
    pub to: (Tier, BlockId),
    /// How many: the block size of the group.
    pub bytes: u64,
}

/// A plan under way.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) id: TicketId,
    pub(crate) sequence: SequenceId,
    pub(crate) completion: Completion,
    pub(crate) to: Tier,
    pub(crate) keep: bool,
    /// Moves that copy, in the order of the `BlockCopy`s; then moves that only drop their source.
    pub(crate) moves: Vec<Move>,
    pub(crate) copies: u32,
    /// Whether its failure has been noted.
    pub(crate) failed: bool,
}

/// A plan that failed, wholly or in part.
#[derive(Debug)]
pub(crate) struct Failed {
    ticket: TicketId,
    error: Error,
    /// Shared with others as long as somebody may still ask for the failure.
    completion: Completion,
}

impl Cache {
    /// Plans to move pages of a sequence to tier `to`.
    ///
    /// Leaves out pages that are already read from there, pages with a copy in flight and, if the target is the disk, open
    /// pages.
    pub fn plan(&self, id: SequenceId, to: Tier, selection: &Selection) -> Result<Plan> {
        let Selection { tokens, groups, keep, newest_first, from: only, unshared, sealed } = selection;
        let sequence = self.sequences.get(id)?;
        if tokens.start > tokens.end || tokens.end > sequence.len {
            let value = format!("({}, {})", tokens.start, tokens.end);
            return Err(Error::invalid("tokens", value, format!("a range within 0..{}", sequence.len)));
        }
        if self.arenas[to.index()].bytes() == 0 {
            return Err(Error::invalid("to", to, "a tier that the cache has memory on"));
        }
        if let Some((group, _)) = groups.iter().find(|(group, _)| group.index() >= self.groups.len()) {
            return Err(Error::invalid("groups", group.0, format!("below {}", self.groups.len())));
        }
        let (mut moves, mut known) = (Vec::new(), HashSet::new());
        for &(group, pages_max) in groups {
            let table = &sequence.tables[group.index()];
            let mut indices = self.table_pages(table, group, tokens.clone());
            if *newest_first {
                indices.reverse();
            }
            let candidates = indices.into_iter().filter_map(|index| table.pages[index]);
            let movable = candidates.filter_map(|id| {
                let (page, from) = (&self.pages[id], self.movable(id, to, *unshared)?);
                let bytes = if page.ready(to).is_some() { 0 } else { self.groups[group.index()].block_bytes };
                let m = Move { page: id, generation: page.generation, group, from, bytes };
                (only.is_none_or(|only| only == from) && (page.sealed || !sealed)).then_some(m)
            });
            // A page that a drop has split is in the table twice. Only movable pages are noted: most pages of a long sequence
            // stay.
            let movable = movable.filter(|m| known.insert(m.page));
            moves.extend(movable.take(pages_max));
        }
        moves.sort_by_key(|m| m.bytes == 0);
        Ok(Plan { sequence: id, to, keep: *keep, moves })
    }

    /// Starts a plan: takes its blocks and returns the copies to make. All or nothing; a stale plan is refused.
    ///
    /// Whoever makes the copies finishes the completion. The pages move at the next call after that which finds no step open.
    pub fn execute(&mut self, plan: &Plan) -> Result<(TicketId, Completion, Vec<BlockCopy>)> {
        self.settle();
        self.sequences.get_idle(plan.sequence)?;
        for m in &plan.moves {
            let fresh = self.pages.get(m.page).is_some_and(|page| {
                let held = self.pages.references(m.page) > 0
                    && (page.generation, page.group) == (m.generation, m.group);
                let copies = if m.bytes > 0 {
                    m.bytes == self.groups[page.group.index()].block_bytes
                        && page.slots[plan.to.index()] == Slot::Empty
                } else {
                    page.ready(plan.to).is_some()
                };
                held && page.may_move_to(plan.to)
                    && page.copies == 0
                    && page.ready(m.from).is_some()
                    && copies
            });
            if !fresh {
                return Err(Error::invalid(
                    "plan",
                    format!("page {}", m.page.index()),
                    "a plan made since its pages last changed",
                ));
            }
        }
        let copied = plan.moves.iter().filter(|m| m.bytes > 0);
        let blocks = self.take_blocks(plan.to, copied.clone().map(|m| m.group))?;
        let id = TicketId::new(self.tickets_minted);
        let mut copies = Vec::with_capacity(blocks.len());
        for (&Move { page, group, from, .. }, block) in copied.zip(blocks) {
            let source = self.pages[page].ready(from).expect("checked above");
            self.pages.place(page, plan.to, Slot::Filling { block, ticket: id });
            copies.push(self.block_copy(group, (from, source), (plan.to, block)));
        }
        for m in &plan.moves {
            self.pages[m.page].copies += 1;
        }
        // Numbers wrap around: every ticket ends long before its number is used again.
        self.tickets_minted = (self.tickets_minted + 1) % u32::MAX;
        let completion = Completion::new();
        if copies.is_empty() {
            completion.finish(0);
        }
        self.tickets.push(Ticket {
            id,
            sequence: plan.sequence,
            completion: completion.clone(),
            to: plan.to,
            keep: plan.keep,
            moves: plan.moves.clone(),
            copies: copies.len() as u32,
            failed: false,
        });
        self.settle();
        Ok((id, completion, copies))
    }

    /// A copy of a whole block.
    pub(crate) fn block_copy(&self, group: GroupId, from: (Tier, BlockId), to: (Tier, BlockId)) -> BlockCopy {
        BlockCopy { group, from, to, bytes: self.groups[group.index()].block_bytes }
    }

    /// The tickets under way that move pages from one tier to another; with `keep`, also those that leave a copy.
    pub fn moves_between(&mut self, from: Tier, to: Tier, keep: bool) -> Vec<(TicketId, Completion)> {
        self.settle();
        let moves = |ticket: &&Ticket| {
            ticket.to == to && (keep || !ticket.keep) && ticket.moves.iter().any(|m| m.from == from)
        };
        self.tickets.iter().filter(moves).map(|t| (t.id, t.completion.clone())).collect()
    }

    /// The tickets under way that move pages of a sequence.
    pub fn moves_of(&mut self, id: SequenceId) -> Result<Vec<(TicketId, Completion)>> {
        self.settle();
        let held = self.sequences.get(id)?.tables.iter().flat_map(Table::held);
        let moving: HashSet<PageId> = held.filter(|page| self.pages[*page].copies > 0).collect();
        let touches = |ticket: &&Ticket| ticket.moves.iter().any(|m| moving.contains(&m.page));
        Ok(self.tickets.iter().filter(touches).map(|t| (t.id, t.completion.clone())).collect())
    }

    /// Frees up to `pages_max` blocks of a group on `tier` that can be spared; returns how many. A block can be spared if its
    /// page is read from a faster tier, or if the page is also on disk and no sequence holds it. Pages that sequence `but_of`
    /// holds are left alone.
    pub fn drop_copies(
        &mut self,
        tier: Tier,
        group: GroupId,
        pages_max: usize,
        but_of: Option<SequenceId>,
    ) -> Result<usize> {
        let spared = but_of.map(|id| self.sequences.get(id)).transpose()?;
        let tables = spared.iter().flat_map(|sequence| &sequence.tables);
        let held: HashSet<PageId> = tables.flat_map(Table::held).collect();
        Ok(self.drop_copies_if(tier, group, pages_max, |page, _| !held.contains(&page)))
    }

    /// Like `drop_copies`, but only takes pages and blocks that are `wanted`.
    pub fn drop_copies_if(
        &mut self,
        tier: Tier,
        group: GroupId,
        pages_max: usize,
        wanted: impl Fn(PageId, BlockId) -> bool,
    ) -> usize {
        self.settle();
        let spare = self.pages.spare(tier, group).filter(|&(id, page)| {
            let kept = self.pages.kept(id);
            let can_be_spared = match tier {
                Tier::Device | Tier::Host if kept == self.pages.references(id) => {
                    page.ready(Tier::Disk).is_some()
                }
                _ => page.fastest().is_some_and(|at| at.tier() < tier),
            };
            page.copies == 0 && page.ready(tier).is_some_and(|block| wanted(id, block)) && can_be_spared
        });
        let spare: Vec<PageId> = spare.map(|(id, _)| id).take(pages_max).collect();
        for &id in &spare {
            if let Slot::Ready { block } = self.pages.place(id, tier, Slot::Empty) {
                self.free_block(tier, group, block);
            }
        }
        spare.len()
    }

    /// The sequences that hold the page stored in a block.
    pub fn holders(&self, group: GroupId, (tier, block): (Tier, BlockId)) -> Vec<SequenceId> {
        self.holding(group, |page| self.pages[page].ready(tier) == Some(block))
    }

    fn holding(&self, group: GroupId, wanted: impl Fn(PageId) -> bool) -> Vec<SequenceId> {
        let holds = |sequence: &Sequence| sequence.tables[group.index()].held().any(&wanted);
        self.sequences.iter().filter(|(_, sequence)| holds(sequence)).map(|(id, _)| id).collect()
    }

    /// Why a ticket failed, if it did. Each failure is reported once: here or by `take_failure`.
    pub fn ticket_failure(&mut self, id: TicketId) -> Option<Error> {
        self.settle();
        let at = self.failures.iter().position(|failure| failure.ticket == id)?;
        Some(self.failures.remove(at).error)
    }

    /// The oldest failure that was not reported and that nobody can ask for any more, because its ticket was dropped.
    pub fn take_failure(&mut self) -> Option<Error> {
        self.settle();
        let at = self.failures.iter().position(|failure| !failure.completion.is_shared())?;
        Some(self.failures.remove(at).error)
    }

    /// Applies finished copies. Inside a step, whose tables must not change, it only notes which copies failed.
    pub(crate) fn settle(&mut self) {
        let inside = self.step.phase != Phase::Closed && self.keeps(Fence::Step);
        let mut at = 0;
        while at < self.tickets.len() {
            let ticket = &self.tickets[at];
            let copied =
                if self.keeps(Fence::Completion) { ticket.completion.copied() } else { Some(ticket.copies) };
            if let Some(copied) = copied {
                self.note_failure(at, copied);
                if !inside {
                    let ticket = self.tickets.swap_remove(at);
                    self.finish(&ticket, copied);
                    continue;
                }
            }
            at += 1;
        }
        if inside {
            return;
        }
        while let Some(block) = self.epochs.pop_retired() {
            self.give_block(block.tier, block.group, block.block);
        }
    }

    fn note_failure(&mut self, at: usize, copied: u32) {
        let ticket = &self.tickets[at];
        if ticket.failed || copied >= ticket.copies {
            return;
        }
        let (id, planned, completion) = (ticket.id, ticket.copies, ticket.completion.clone());
        let failed = ticket.moves[copied as usize];
        let sequences = self.holding(failed.group, |page| page == failed.page);
        let cut_short = || Failure::Io("the copy was cut short".into());
        let error = match completion.failure().cloned().unwrap_or_else(cut_short) {
            Failure::Corrupt(reason) => Error::CorruptPage { ticket: id, copied, planned, sequences, reason },
            Failure::Io(reason) => Error::CopyFailed { ticket: id, copied, planned, sequences, reason },
        };
        self.failures.push(Failed { ticket: id, error, completion });
        self.tickets[at].failed = true;
    }

    fn finish(&mut self, ticket: &Ticket, copied: u32) {
        for (index, m) in ticket.moves.iter().enumerate() {
            let index = index as u32;
            let arrived = index < copied || index >= ticket.copies;
            self.pages[m.page].copies -= 1;
            if let Slot::Filling { block, ticket: by } = self.pages[m.page].slots[ticket.to.index()]
                && by == ticket.id
            {
                if arrived {
                    self.pages.place(m.page, ticket.to, Slot::Ready { block });
                    self.moved_bytes[m.from.index()][ticket.to.index()] += m.bytes;
                } else {
                    self.pages.place(m.page, ticket.to, Slot::Empty);
                    self.free_block(ticket.to, m.group, block);
                }
            }
            if self.pages.references(m.page) == 0 {
                self.close_page(m.page);
            } else if arrived {
                // An open page has only one copy.
                let stays = (ticket.keep && self.pages[m.page].sealed)
                    || (m.from == Tier::Disk && self.pages.kept(m.page) > 0);
                if !stays {
                    // A page on its way down also leaves the tiers in between.
                    let behind = ticket.to.index().max(m.from.index() + 1);
                    for &tier in &Tier::ALL[m.from.index()..behind] {
                        if let Slot::Ready { block } = self.pages.place(m.page, tier, Slot::Empty) {
                            self.free_block(tier, m.group, block);
                        }
                    }
                }
                self.placement[m.group.index()] = self.placement[m.group.index()].wrapping_add(1);
            }
        }
        self.search_anew(ticket.sequence, ticket.moves.iter().map(|m| m.page));
    }

    /// Forgets a page without references, once no copy touches it.
    pub(crate) fn close_page(&mut self, id: PageId) {
        if self.pages[id].copies > 0 && self.keeps(Fence::Copies) {
            return;
        }
        let group = self.pages[id].group;
        for tier in Tier::ALL {
            if let Slot::Ready { block } | Slot::Filling { block, .. } = self.pages[id].slots[tier.index()] {
                self.free_block(tier, group, block);
            }
        }
        self.pages.close(id);
    }

    /// Frees a block once the steps that may still touch it have retired.
    pub(crate) fn free_block(&mut self, tier: Tier, group: GroupId, block: BlockId) {
        let waits = self.epochs.pending() && self.step.phase != Phase::Entering;
        if waits && self.keeps(Fence::Epochs) {
            self.epochs.drain(tier, group, block);
        } else {
            self.give_block(tier, group, block);
        }
    }
}
