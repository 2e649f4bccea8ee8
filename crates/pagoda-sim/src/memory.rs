//! The memory of the device and the host.

use crate::shape::{POISON, Shape};
use pagoda_core::ids::{BlockId, GroupId, Tier};
use std::ops::Range;

/// A block of one tier.
pub(crate) type Place = (Tier, GroupId, BlockId);

pub(crate) struct Memory {
    tiers: [Vec<u8>; 2],
    block_bytes: Vec<usize>,
}

impl Memory {
    pub(crate) fn new(shape: &Shape) -> Self {
        let tiers = [Tier::Device, Tier::Host].map(|tier| vec![POISON; shape.memory_bytes(tier)]);
        Self { tiers, block_bytes: shape.groups.iter().map(|group| group.block_bytes()).collect() }
    }

    fn range(&self, group: GroupId, block: BlockId) -> Range<usize> {
        let bytes = self.block_bytes[group.index()];
        let start = block.index() as usize * bytes;
        start..start + bytes
    }

    pub(crate) fn block(&self, (tier, group, block): Place) -> &[u8] {
        &self.tiers[tier.index()][self.range(group, block)]
    }

    pub(crate) fn block_mut(&mut self, (tier, group, block): Place) -> &mut [u8] {
        let range = self.range(group, block);
        &mut self.tiers[tier.index()][range]
    }

    /// Copies a range of one block to the same range of another.
    pub(crate) fn copy(&mut self, from: Place, to: Place, range: Range<usize>) {
        let bytes = self.block(from)[range.clone()].to_vec();
        self.block_mut(to)[range].copy_from_slice(&bytes);
    }

    /// Zeroes some blocks.
    pub(crate) fn zero(&mut self, tier: Tier, group: GroupId, blocks: Range<u32>) {
        blocks.for_each(|block| self.block_mut((tier, group, BlockId::new(block))).fill(0));
    }

    /// Whether nothing is there of what was written.
    pub(crate) fn is_blank(bytes: &[u8]) -> bool {
        bytes.iter().all(|byte| [0, POISON].contains(byte))
    }

    /// The bytes of a tier.
    pub(crate) fn tier(&self, tier: Tier) -> &[u8] {
        &self.tiers[tier.index()]
    }

    /// A range of a tier loses its content.
    pub(crate) fn forget(&mut self, tier: Tier, range: Range<u64>) {
        self.tiers[tier.index()][range.start as usize..range.end as usize].fill(POISON);
    }
}
