//! Bookkeeping of a tiered, paged KV cache.
//!
//! Everything here is decided, nothing is done: no Python, clock, randomness, I/O or thread, and no address is
//! ever dereferenced. `ARCHITECTURE.md` has the map; [`Cache`] is the way in.

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
pub mod step;
mod sync;
pub mod table;
pub mod window;
pub mod work;
mod zeroing;

pub use cache::Cache;
pub use error::{Error, Result};
