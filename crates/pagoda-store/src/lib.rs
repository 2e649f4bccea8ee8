//! Where the bytes of a cache live, and who moves them: host slabs, and the thread that copies blocks between them.
//!
//! What goes where is decided in `pagoda-core`. The disk tier's segments will live here too.

pub mod disk;
mod mover;
mod slab;

pub use mover::{Mover, Place, Transfer, Waiter};
pub use slab::Slab;
