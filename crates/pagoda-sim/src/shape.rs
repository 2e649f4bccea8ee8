//! The shape of a cache under test, and the bytes that its pages must hold.

use crate::random::{Random, mix};
use pagoda_core::cache::{Group, GroupKind, TierMemory};
use pagoda_core::ids::{GroupId, Tier};
use pagoda_core::window::Window;
use pagoda_store::disk::Geometry;

/// Bytes of a word, the unit in which rows are written and compared.
pub(crate) const WORD: usize = 8;

/// Fills memory before it is first written to; never part of a row.
pub(crate) const POISON: u8 = 0xa5;

/// One layer group: rows of `row_bytes` for each token and layer, layer by layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupShape {
    index: usize,
    pub(crate) page_size: usize,
    pub(crate) layers: usize,
    row_bytes: usize,
    pub(crate) window: Option<Window>,
}

/// The shape of a cache.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) groups: Vec<GroupShape>,
    /// Bytes of the device and of the host; 0 if absent.
    memory: [u64; 2],
    extent_bytes: u64,
    /// Whether freed blocks are zeroed.
    pub(crate) zeroes: bool,
    /// Bytes of the disk tier now, and at most.
    budget: u64,
    budget_max: u64,
}

impl GroupShape {
    fn any(index: usize, random: &mut Random) -> Self {
        let window = random.once_in(3).then(|| Window {
            sinks: [0, random.within(1..8)][random.below(2)] as u32,
            tokens: random.within(1..10) as u32,
            headroom: random.below(8) as u32,
            trailing: random.once_in(2),
        });
        let (page_size, layers) = (random.within(1..6), random.within(1..4));
        Self { index, page_size, layers, row_bytes: WORD * random.within(1..4), window }
    }

    fn run_bytes(&self) -> usize {
        self.page_size * self.row_bytes
    }

    pub(crate) fn block_bytes(&self) -> usize {
        self.layers * self.run_bytes()
    }

    /// A word that is unique to this token and this place.
    fn word(&self, token: u64, layer: usize, word: usize) -> [u8; WORD] {
        mix(token << 8 | (self.index << 6 | layer << 4 | word) as u64).to_le_bytes()
    }

    /// Writes the rows of a token into row `row` of a block.
    pub(crate) fn write(&self, block: &mut [u8], row: usize, token: u64) {
        for layer in 0..self.layers {
            let at = layer * self.run_bytes() + row * self.row_bytes;
            for (word, bytes) in block[at..at + self.row_bytes].chunks_exact_mut(WORD).enumerate() {
                bytes.copy_from_slice(&self.word(token, layer, word));
            }
        }
    }

    /// Whether row `row` of a block holds a token, in all layers and bytes.
    pub(crate) fn holds(&self, block: &[u8], row: usize, token: u64) -> bool {
        (0..self.layers).all(|layer| self.layer_holds(block, layer, row, token))
    }

    /// Like `holds`, for one layer.
    pub(crate) fn layer_holds(&self, block: &[u8], layer: usize, row: usize, token: u64) -> bool {
        self.run_holds(&block[layer * self.run_bytes()..], layer, row, token)
    }

    /// Like `layer_holds`, for the bytes of a block from that layer on.
    pub(crate) fn run_holds(&self, run: &[u8], layer: usize, row: usize, token: u64) -> bool {
        let at = row * self.row_bytes;
        let mut words = run[at..at + self.row_bytes].chunks_exact(WORD).enumerate();
        words.all(|(word, bytes)| bytes == self.word(token, layer, word))
    }
}

impl Shape {
    pub(crate) fn any(random: &mut Random) -> Self {
        let groups: Vec<_> = (0..random.within(1..3)).map(|index| GroupShape::any(index, random)).collect();
        let largest = groups.iter().map(GroupShape::block_bytes).max().unwrap_or(0) as u64;
        let memory = [random.within(10..60), [0, random.within(1..60)][random.below(2)]];
        // A segment has the bytes of at least one block of the largest group; each part of a page takes 4 KiB (docs/layout.md).
        let segment =
            |group: &GroupShape| largest / group.block_bytes() as u64 * 4096 * (1 + group.layers as u64);
        let segment = groups.iter().map(segment).max().unwrap_or(0);
        let budget = segment * groups.len() as u64 * random.within(4..30) as u64;
        Self {
            memory: memory.map(|blocks| blocks as u64 * largest),
            extent_bytes: largest * random.within(1..5) as u64,
            groups,
            zeroes: random.once_in(3),
            budget,
            budget_max: budget * 4,
        }
    }

    /// The geometry of a disk tier of such a cache in an empty directory.
    pub(crate) fn geometry(&self) -> Geometry {
        let runs = |group: &GroupShape| vec![group.run_bytes() as u64; group.layers];
        let runs: Vec<_> = self.groups.iter().map(runs).collect();
        Geometry::new(&runs, self.budget).expect("room for one page of each group")
    }

    /// Makes the disk tier larger: what is kept may be at its very end.
    pub(crate) fn grow(&mut self, random: &mut Random) {
        self.budget = (self.budget * random.within(10..30) as u64 / 10).min(self.budget_max);
    }

    pub(crate) fn group(&self, group: GroupId) -> &GroupShape {
        &self.groups[group.index()]
    }

    pub(crate) fn group_ids(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.groups.len() as u8).map(GroupId)
    }

    /// Bytes of a tier of memory.
    pub(crate) fn memory_bytes(&self, tier: Tier) -> usize {
        self.memory[tier.index()] as usize
    }

    /// Tiers that have memory.
    pub(crate) fn tiers(&self) -> impl Iterator<Item = Tier> + '_ {
        Tier::ALL.into_iter().filter(|&tier| tier == Tier::Disk || self.memory[tier.index()] > 0)
    }

    /// The core of such a cache, over the arena of its disk tier.
    pub(crate) fn cache(&self, on_disk: TierMemory) -> pagoda_core::Cache {
        let group = |group: &GroupShape| Group {
            block_bytes: group.block_bytes() as u64,
            kind: GroupKind::Paged { page_size: group.page_size as u32 },
            window: group.window,
        };
        let groups: Vec<_> = self.groups.iter().map(group).collect();
        let [device, host] = self.memory.map(|bytes| TierMemory { bytes, extent_bytes: self.extent_bytes });
        let mut cache =
            pagoda_core::Cache::new(&groups, [device, host, on_disk]).expect("a cache of this shape");
        if self.zeroes {
            cache.zero_on_free();
        }
        cache
    }
}
