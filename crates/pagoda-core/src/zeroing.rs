//! Freed blocks that must be zeroed before they are handed out again, in caches that ask for it.

use crate::cache::Cache;
use crate::fence::Fence;
use crate::ids::{BlockId, GroupId, Tier};
use crate::step::Phase;
use std::ops::Range;

/// A block that no page has and nothing touches, still with its old bytes.
pub(crate) type Freed = (Tier, GroupId, BlockId);

impl Cache {
    /// From now on a freed block waits for `zero`.
    pub fn zero_on_free(&mut self) {
        self.freed.get_or_insert_default();
    }

    /// Makes freed blocks available again once `zero` has cleared them; it is called with runs of adjacent blocks of one
    /// group. Runs for which it returns false are passed to it again next time.
    pub fn zero(&mut self, mut zero: impl FnMut(Tier, GroupId, Range<u32>) -> bool) {
        self.settle();
        let Some(freed) = &mut self.freed else { return };
        freed.sort_unstable();
        let follows = |a: &Freed, b: &Freed| (a.0, a.1, a.2.index() + 1) == (b.0, b.1, b.2.index());
        let mut left = Vec::new();
        for run in freed.chunk_by(follows) {
            let (tier, group, first) = run[0];
            if zero(tier, group, first.index()..first.index() + run.len() as u32) {
                run.iter().for_each(|&(.., block)| self.arenas[tier.index()].give(group, block));
            } else {
                left.extend_from_slice(run);
            }
        }
        *freed = left;
    }

    /// Takes back a block that nothing can touch any more.
    pub(crate) fn give_block(&mut self, tier: Tier, group: GroupId, block: BlockId) {
        let waits = self.keeps(Fence::Zeros);
        match &mut self.freed {
            // No kernel has seen the blocks of a step that is being refused, so they need no zeroing.
            Some(freed) if waits && self.step.phase != Phase::Entering => freed.push((tier, group, block)),
            _ => self.arenas[tier.index()].give(group, block),
        }
    }
}
