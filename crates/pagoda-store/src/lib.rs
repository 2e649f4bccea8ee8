//! Where the bytes of a cache live, and who moves them: slabs of memory, files on disk, and the threads that copy blocks between
//! them.
//!
//! What goes where is decided in `pagoda-core`.

pub mod disk;
mod mover;
mod slab;

pub use mover::{Mover, Place, Transfer, Waiter};
pub use slab::Slab;
