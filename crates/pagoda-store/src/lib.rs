//! Where the bytes of a cache live, and who moves them: slabs of memory, files on disk, and the threads that copy blocks between
//! them.
//!
//! What goes where is decided in `pagoda-core`.

pub mod disk;
mod mover;
mod ring;
mod slab;

#[cfg(any(test, feature = "faults"))]
pub use mover::by_hand;
pub use mover::{LayerOfPages, Mover, Place, Transfer, Waiter};
pub use ring::{Filled, Ring, Unread};
pub use slab::Slab;
