//! Which sequences rest: the order in which they last stepped, and how far it has been searched for pages that may move.

use crate::cache::Cache;
use crate::ids::{GroupId, PageId, SequenceId, Tier};
use crate::table::Table;
use std::collections::{HashSet, VecDeque};

/// The rests of sequences, in the order of their numbers. Ended rests are removed now and then.
#[derive(Debug, Default)]
pub(crate) struct Rests {
    begun: VecDeque<(u64, SequenceId)>,
    last: u64,
}

impl Rests {
    /// Begins a rest of a sequence, which ends its previous one. `goes_on` tells which rests have not ended; there are at
    /// most `most`.
    pub(crate) fn begin(
        &mut self,
        id: SequenceId,
        most: usize,
        goes_on: impl Fn(u64, SequenceId) -> bool,
    ) -> u64 {
        if self.begun.len() > 2 * most + 64 {
            self.begun.retain(|&(rest, id)| goes_on(rest, id));
        }
        self.last += 1;
        self.begun.push_back((self.last, id));
        self.last
    }

    /// The rests from number `first` on.
    pub(crate) fn from(&self, first: u64) -> impl Iterator<Item = (u64, SequenceId)> {
        let at = self.begun.partition_point(|&(rest, _)| rest < first);
        self.begun.range(at..).copied()
    }
}

/// For a layer group, `[source][target][unshared]`: the number of a rest. No sequence with a lower one has a page to move
/// that way. unshared: whether only pages that a single sequence holds count. A page that several sequences held when it was
/// searched may still be treated as shared when only one holds it.
pub(crate) type Searched = [[[u64; 2]; Tier::COUNT]; Tier::COUNT];

impl Cache {
    /// Sequences with pages of a group that a plan would take from one tier to another: up to `most` of them, longest rested
    /// first, none of them in the open step or in `others`. unshared: only pages that no other sequence holds count.
    ///
    /// A sequence that was searched in vain is not searched again until it has stepped or pages have arrived on the source
    /// tier.
    pub fn resting(
        &mut self,
        (from, to): (Tier, Tier),
        group: GroupId,
        unshared: bool,
        most: usize,
        others: &[SequenceId],
    ) -> Vec<SequenceId> {
        self.settle();
        let others: HashSet<_> = others.iter().collect();
        let first = self.searched[group.index()][from.index()][to.index()][usize::from(unshared)];
        let (mut found, mut next) = (Vec::new(), None);
        for (rest, id) in self.sequences.rests.from(first) {
            if found.len() == most {
                next = next.or(Some(rest));
                break;
            }
            if !self.sequences.goes_on(rest, id) {
                continue;
            }
            let is_left_out = self.sequences[id].stepping || others.contains(&id);
            if is_left_out || self.has_movable(id, (from, to), group, unshared) {
                next = next.or(Some(rest));
                found.extend((!is_left_out).then_some(id));
            }
        }
        let next = next.unwrap_or(self.sequences.rests.last + 1);
        self.searched[group.index()][from.index()][to.index()][usize::from(unshared)] = next;
        found
    }

    /// Which of some sequences have pages that a plan would take from one tier to another, and each layer group of such
    /// pages. Released sequences are left out.
    pub fn with_movable(&mut self, way: (Tier, Tier), ids: &[SequenceId]) -> Vec<(SequenceId, GroupId)> {
        self.settle();
        let live = ids.iter().filter(|&&id| self.sequences.get(id).is_ok());
        let all = live.flat_map(|&id| self.group_ids().map(move |group| (id, group)));
        all.filter(|&(id, group)| self.has_movable(id, way, group, false)).collect()
    }

    /// Whether a plan would take a page of a sequence from one tier to another.
    pub(crate) fn has_movable(
        &self,
        id: SequenceId,
        (from, to): (Tier, Tier),
        group: GroupId,
        unshared: bool,
    ) -> bool {
        let mut held = self.sequences[id].tables[group.index()].held();
        held.any(|page| self.movable(page, to, unshared) == Some(from))
    }

    /// The tier that a page is read from, if a plan may take it to `to` now. unshared: and if no other sequence holds it.
    pub(crate) fn movable(&self, id: PageId, to: Tier, unshared: bool) -> Option<Tier> {
        let page = &self.pages[id];
        let from = page.fastest().map(|at| at.tier()).filter(|&from| from != to)?;
        let is_shared = self.pages.references(id) - self.pages.kept(id) > 1;
        (page.may_move_to(to) && page.copies == 0 && !(unshared && is_shared)).then_some(from)
    }

    /// Makes sure that pages are searched again: moves of pages that a sequence holds, or held, have ended, and they may now
    /// move on from the tier that they are read from.
    pub(crate) fn search_anew(&mut self, id: SequenceId, pages: impl Iterator<Item = PageId>) {
        let searched = |(_, group, tier): &(PageId, GroupId, Tier)| {
            self.searched[group.index()][tier.index()].as_flattened().iter().any(|&first| first > 0)
        };
        let pages = pages.map(|page| (page, &self.pages[page]));
        let read = pages.filter_map(|(id, page)| Some((id, page.group, page.fastest()?.tier())));
        let mut read: Vec<_> = read.filter(searched).collect();
        if read.is_empty() {
            return;
        }
        // Most pages of the sequence stay, so the ones that have moved are sorted.
        read.sort_unstable_by_key(|&(page, ..)| page);
        let mut held = vec![false; read.len()];
        let holder = self.sequences.get(id).ok();
        for page in holder.iter().flat_map(|holder| &holder.tables).flat_map(Table::held) {
            if let Ok(at) = read.binary_search_by_key(&page, |&(page, ..)| page) {
                held[at] = true;
            }
        }
        let rest = holder.map_or(0, |holder| holder.rest);
        for ((page, group, tier), is_held) in read.into_iter().zip(held) {
            // The other holders of a shared page are not known: start again at the first rest.
            let is_alone = is_held && self.pages.references(page) - self.pages.kept(page) == 1;
            let from = if is_alone { rest } else { 0 };
            let searched = self.searched[group.index()][tier.index()].as_flattened_mut();
            searched.iter_mut().for_each(|first| *first = from.min(*first));
        }
    }
}
