//! Every capacity has a name here and is checked where it enters.

use crate::ids::BlockRef;

/// Layer groups in a cache.
pub const GROUPS_MAX: usize = 64;
/// Tokens in a page.
pub const PAGE_SIZE_MAX: u32 = 1 << 15;
/// Tokens in a sequence, dropped ones included: kernels count them in signed 32-bit integers.
pub const TOKENS_PER_SEQUENCE_MAX: u64 = (1 << 31) - 1;
/// New tokens of a step, over all its sequences: tables hold where those of each sequence begin, in signed 32-bit integers.
pub const TOKENS_PER_STEP_MAX: u64 = (1 << 31) - 1;
/// Live sequences; in this crate's unit tests few enough to create them all.
pub const SEQUENCES_MAX: usize = if cfg!(test) { 1 << 8 } else { 1 << 24 };
/// Bytes in the arena of one tier.
pub const ARENA_BYTES_MAX: u64 = 1 << 48;
/// Blocks of one group in one tier: what a `BlockRef` can name.
pub const BLOCKS_PER_GROUP_MAX: u64 = 1 << BlockRef::INDEX_BITS;
/// Extents in one arena.
pub const EXTENTS_MAX: u64 = 1 << 20;
