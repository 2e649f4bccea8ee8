//! Names for the things the core hands out. An index, a count and a number of bytes are different types.

use std::fmt;
use std::num::NonZeroU32;

/// A place where blocks live, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Tier {
    /// VRAM, or the budgeted RAM of the CPU backend. The only tier on which rows are appended to pages.
    Device = 0,
    /// Pinned RAM.
    Host = 1,
    /// A file on NVMe.
    Disk = 2,
}

impl Tier {
    /// How many tiers there are.
    pub const COUNT: usize = 3;
    /// Every tier, fastest first.
    pub const ALL: [Self; Self::COUNT] = [Self::Device, Self::Host, Self::Disk];

    /// The position of this tier in arrays with one entry per tier.
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["device", "host", "disk"][self.index()])
    }
}

/// A layer group: layers with the same geometry, row formats and retention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u8);

impl GroupId {
    /// The position of this group in arrays with one entry per group.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

macro_rules! nonzero_index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(NonZeroU32);

        impl $name {
            /// The name of index `index`. Panics at `u32::MAX`, which no arena reaches (see `limits`).
            pub const fn new(index: u32) -> Self {
                match NonZeroU32::new(index.wrapping_add(1)) {
                    Some(raw) => Self(raw),
                    None => panic!("index beyond limits"),
                }
            }

            /// The index, counted from 0.
            pub const fn index(self) -> u32 {
                self.0.get() - 1
            }
        }
    };
}

nonzero_index! {
    /// A block of one group in one tier's arena; its bytes lie at `base + index * block_bytes` of that group.
    BlockId
}
nonzero_index! {
    /// A page: the logical unit that sequences share.
    PageId
}
nonzero_index! {
    /// An executed plan. No two plans under way have the same number.
    TicketId
}

/// A sequence. The generation makes a released handle an error instead of somebody else's sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId {
    /// Slot in the sequence table.
    pub index: u32,
    /// How often that slot was handed out before.
    pub generation: u32,
}

impl SequenceId {
    /// The sequence that callers know by this number.
    pub const fn of_number(number: u64) -> Self {
        Self { index: number as u32, generation: (number >> 32) as u32 }
    }

    /// The number by which callers know it.
    pub const fn number(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(f)
    }
}

/// A sequence that is kept on disk. Never reused within a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeptId(pub u64);

/// A point in the order of steps. Blocks freed at an epoch drain until it has retired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// Where a page is read from: the tier and block of its fastest Ready copy, in 32 bits.
///
/// Page-table rows are runs of these. The group is known from the row.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct BlockRef(u32);

impl BlockRef {
    /// Bits left for the block index; `limits::BLOCKS_PER_GROUP_MAX` keeps every index within them.
    pub const INDEX_BITS: u32 = 30;

    /// Packs a tier and a block.
    pub const fn new(tier: Tier, block: BlockId) -> Self {
        Self((tier as u32) << Self::INDEX_BITS | block.index())
    }

    /// Tier and block packed, as device kernels read them (cuda/pagoda/tables.cuh).
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The tier part.
    pub const fn tier(self) -> Tier {
        Tier::ALL[(self.0 >> Self::INDEX_BITS) as usize]
    }

    /// The block part.
    pub const fn block(self) -> BlockId {
        BlockId::new(self.0 & ((1 << Self::INDEX_BITS) - 1))
    }
}

impl fmt::Debug for BlockRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.tier(), self.block().index())
    }
}
