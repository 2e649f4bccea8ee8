//! Pages that several sequences of a batch hold, so that attention can read them once for all of these sequences.
//!
//! Sequences that were forked from one another begin with the same pages. Their common prefixes form a tree: all may share a
//! system prompt, and some of them a document after it. This module finds the nodes of that tree that are worth visiting
//! separately.

use std::ops::Range;

use crate::ids::BlockRef;

/// Stored rows that a node must save to be worthwhile: they take about as long as a launch and its partial results.
const SAVED_ROWS_MIN: usize = 1024;
/// Most nodes that one sequence takes part in.
pub const LEVELS_MAX: usize = 4;
/// Most new tokens of a sequence that takes part: more queries fill blocks by themselves.
pub const NEW_TOKENS_MAX: u32 = 16;

/// A sequence of the batch whose tokens form one span that starts at position 0.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Its place in the batch.
    pub place: u32,
    /// Its pages that were full before this step.
    pub pages: &'a [BlockRef],
}

/// Consecutive pages that all members hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Common {
    /// Tokens from the sequence's start.
    pub tokens: Range<u32>,
    /// Which entries of [`Commons::members`] hold them.
    pub members: Range<usize>,
}

/// The result of [`Commons::find`]. The nodes of one sequence follow each other in token order, from token 0 on and without
/// gaps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Commons {
    /// Parents before children.
    pub nodes: Vec<Common>,
    /// The members of all nodes, by their places in the batch.
    pub members: Vec<u32>,
}

impl Commons {
    /// Removes everything but keeps the memory.
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.members.clear();
    }

    /// Finds the nodes of a batch. The time is proportional to the pages of those sequences that share their first one.
    pub fn find(&mut self, candidates: &mut [Candidate<'_>], page_size: usize) {
        self.clear();
        self.split(candidates, page_size, 0, 0, LEVELS_MAX);
    }

    /// Adds the nodes of candidates that share their first `depth` pages. Nodes already cover the first `taken` of these.
    fn split(
        &mut self,
        candidates: &mut [Candidate<'_>],
        page_size: usize,
        taken: usize,
        depth: usize,
        levels: usize,
    ) {
        if levels == 0 {
            return;
        }
        candidates
            .sort_by_key(|candidate| (candidate.pages.get(depth).map(|page| page.bits()), candidate.place));
        let page_at = |candidate: &Candidate<'_>| candidate.pages.get(depth).copied();
        for group in candidates.chunk_by_mut(|a, b| page_at(a) == page_at(b)) {
            if group.len() < 2 || page_at(&group[0]).is_none() {
                continue;
            }
            let first = group[0].pages;
            let end =
                group[1..].iter().map(|other| prefix(first, other.pages, depth)).min().expect("two or more");
            let worth = (end - taken) * page_size * (group.len() - 1) >= SAVED_ROWS_MIN;
            if worth {
                let start = self.members.len();
                self.members.extend(group.iter().map(|candidate| candidate.place));
                let tokens = (taken * page_size) as u32..(end * page_size) as u32;
                self.nodes.push(Common { tokens, members: start..self.members.len() });
            }
            let (taken, levels) = if worth { (end, levels - 1) } else { (taken, levels) };
            self.split(group, page_size, taken, end, levels);
        }
    }
}

/// The length of the common prefix of two rows that agree up to `depth`.
fn prefix(a: &[BlockRef], b: &[BlockRef], depth: usize) -> usize {
    depth + a[depth..].iter().zip(&b[depth..]).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{BlockId, Tier};
    use proptest::prelude::*;

    fn page(index: usize) -> BlockRef {
        BlockRef::new(Tier::Device, BlockId::new(index as u32))
    }

    /// Rows as forks make them: each begins with a prefix of an earlier one and continues with pages of its own.
    fn rows() -> impl Strategy<Value = Vec<Vec<BlockRef>>> {
        proptest::collection::vec((any::<proptest::sample::Index>(), 0usize..60, 0usize..30), 1..12).prop_map(
            |forks| {
                let mut rows: Vec<Vec<BlockRef>> = Vec::new();
                let mut next = 0;
                for (parent, kept, own) in forks {
                    let mut row =
                        if rows.is_empty() { Vec::new() } else { rows[parent.index(rows.len())].clone() };
                    row.truncate(kept);
                    row.extend((next..next + own).map(page));
                    next += own;
                    rows.push(row);
                }
                rows
            },
        )
    }

    proptest! {
        /// Against a map from each page to its holders.
        #[test]
        fn nodes_are_pages_that_all_members_hold(rows in rows(), page_size in prop_oneof![Just(16usize), Just(64)]) {
            let mut candidates: Vec<_> = rows.iter().enumerate()
                .map(|(place, row)| Candidate { place: place as u32, pages: row }).collect();
            let mut commons = Commons::default();
            commons.find(&mut candidates, page_size);
            let found = commons.clone();
            commons.find(&mut candidates, page_size);
            prop_assert_eq!(&commons, &found, "what was found before is gone");
            let mut covered = vec![0; rows.len()];
            for node in &commons.nodes {
                let members = &commons.members[node.members.clone()];
                prop_assert!(members.len() >= 2 && members.is_sorted());
                let pages = node.tokens.start as usize / page_size..node.tokens.end as usize / page_size;
                prop_assert!(pages.len() * page_size * (members.len() - 1) >= SAVED_ROWS_MIN);
                for &member in members {
                    prop_assert_eq!(&rows[member as usize][pages.clone()], &rows[members[0] as usize][pages.clone()]);
                    prop_assert_eq!(covered[member as usize], pages.start, "in token order, without a gap");
                    covered[member as usize] = pages.end;
                }
            }
            // Nothing large was missed: after the covered pages two rows share too few for a node, unless levels ran out.
            for (i, a) in rows.iter().enumerate() {
                let levels = commons.nodes.iter().filter(|node| commons.members[node.members.clone()].contains(&(i as u32))).count();
                for (j, b) in rows.iter().enumerate().skip(i + 1) {
                    let both = covered[i].min(covered[j]);
                    let more = prefix(a, b, 0).saturating_sub(both);
                    prop_assert!(levels == LEVELS_MAX || more * page_size < SAVED_ROWS_MIN, "{i} and {j} share {more} more");
                }
            }
        }
    }

    /// Each row begins with twenty more of the same pages than the one before.
    #[test]
    fn a_sequence_takes_part_in_no_more_nodes_than_levels() {
        let rows: Vec<Vec<_>> =
            (1..=7).map(|row| (0..20 * row).chain([1000 + row]).map(page).collect()).collect();
        let places = (0..).zip(&rows);
        let mut candidates: Vec<_> = places.map(|(place, pages)| Candidate { place, pages }).collect();
        let mut commons = Commons::default();
        commons.find(&mut candidates, 64);
        let nodes =
            commons.nodes.iter().map(|node| (node.tokens.clone(), &commons.members[node.members.clone()]));
        let nodes: Vec<_> = nodes.collect();
        let all = [0, 1, 2, 3, 4, 5, 6];
        let wanted = [0..1280, 1280..2560, 2560..3840, 3840..5120];
        assert!(
            nodes.into_iter().eq(wanted.into_iter().enumerate().map(|(row, tokens)| (tokens, &all[row..])))
        );
    }

    #[test]
    fn one_page_is_worthwhile_if_many_share_it() {
        for (count, worthwhile) in [(16, false), (17, true)] {
            let rows: Vec<_> = (1..=count).map(|own| [0, own].map(page)).collect();
            let places = (0..).zip(&rows);
            let mut candidates: Vec<_> = places.map(|(place, pages)| Candidate { place, pages }).collect();
            let mut commons = Commons::default();
            commons.find(&mut candidates, 64);
            let all = Common { tokens: 0..64, members: 0..count };
            assert_eq!(commons.nodes, if worthwhile { vec![all] } else { Vec::new() });
        }
    }

    #[test]
    fn a_tree_of_two_levels() {
        let rows: Vec<Vec<BlockRef>> = [[0, 10], [0, 10], [0, 20], [0, 20], [0, 30]]
            .map(|[a, b]| (a * 1000..a * 1000 + 40).chain(b * 1000..b * 1000 + 50).map(page).collect())
            .to_vec();
        let mut candidates: Vec<_> = rows
            .iter()
            .enumerate()
            .map(|(place, row)| Candidate { place: place as u32, pages: row })
            .collect();
        let mut commons = Commons::default();
        commons.find(&mut candidates, 64);
        let nodes: Vec<_> = commons
            .nodes
            .iter()
            .map(|node| (node.tokens.clone(), commons.members[node.members.clone()].to_vec()))
            .collect();
        assert_eq!(
            nodes,
            [(0..2560, vec![0, 1, 2, 3, 4]), (2560..5760, vec![0, 1]), (2560..5760, vec![2, 3])]
        );
    }
}
