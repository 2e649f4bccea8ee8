//! Bookkeeping of a tiered, paged KV cache.
//!
//! This crate decides and does nothing else: no Python, clock, randomness, I/O or threads, and no address is ever
//! dereferenced. `ARCHITECTURE.md` has the map; start with [`Cache`].
//!
//! A call that is refused returns an error and has changed nothing. A layer group or a place in a batch that does not exist
//! is a bug in the caller: such calls may panic.
//!
//! The owner of the memory asks where rows go and what to copy, does it, and reports when it is done:
//!
//! ```
//! use pagoda_core::Cache;
//! use pagoda_core::cache::{Group, GroupKind, TierMemory};
//! use pagoda_core::ids::{GroupId, Tier};
//! use pagoda_core::plan::Selection;
//!
//! # fn main() -> pagoda_core::Result<()> {
//! // One layer group, with blocks of 4 KiB that hold 16 tokens; no disk.
//! let group = Group { block_bytes: 4096, kind: GroupKind::Paged { page_size: 16 }, window: None };
//! let memory = TierMemory { bytes: 1 << 20, extent_bytes: 1 << 16 };
//! let mut cache = Cache::new(&[group], [memory, memory, TierMemory { bytes: 0, ..memory }])?;
//!
//! // A step appends 40 tokens: rows of blocks, at multiples of `block_bytes` from the base of the device tier.
//! let sequence = cache.create()?;
//! cache.reserve(&[(sequence, 40)])?;
//! assert_eq!(cache.step_slots(0, GroupId(0)).count(), 40);
//! let epoch = cache.commit(None)?;
//! // Its kernels have ended: blocks that are freed from now on need not wait for them.
//! cache.retire(epoch)?;
//!
//! // The first page goes to the host tier, once somebody has made the copies.
//! let plan = cache.plan(sequence, Tier::Host, &Selection::of(0..16, vec![GroupId(0)]))?;
//! let (_ticket, completion, copies) = cache.execute(&plan)?;
//! completion.finish(copies.len() as u32);
//! assert_eq!(cache.block_counts(Tier::Host, GroupId(0)).used, 1);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod audit;
mod bitmap;
pub mod cache;
pub mod common;
pub mod error;
pub mod extents;
pub mod fence;
pub mod ids;
pub mod keep;
pub mod layout;
pub mod limits;
mod pages;
pub mod plan;
mod rest;
mod sequences;
pub mod step;
mod sync;
pub mod table;
#[cfg(test)]
mod tests;
pub mod window;
pub mod work;
mod zeroing;

pub use cache::Cache;
pub use error::{Error, Result};
