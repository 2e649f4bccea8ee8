//! Where the bytes of a cache lie and who moves them: slabs of memory, files on disk, and the threads that copy blocks
//! between them.
//!
//! `pagoda-core` decides what goes where.
//!
//! A [`Mover`] copies between slabs and a [`Store`](disk::Store), and reports through a completion when it has finished:
//!
//! ```
//! use pagoda_core::fence::Completion;
//! use pagoda_core::ids::{BlockId, GroupId};
//! use pagoda_store::disk::{Geometry, Store, io::Folder};
//! use pagoda_store::{Mover, Place, Slab, Transfer};
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = std::env::temp_dir().join(format!("pagoda-example-{}", std::process::id()));
//! // One layer group, whose blocks have two layers of 2 KiB, in a file that is removed with the store.
//! let geometry = Geometry::new(&[vec![2048, 2048]], 1 << 20)?;
//! let store = Arc::new(Store::scratch(&Folder::open(&directory)?, geometry, *b"an example model", None)?);
//! let slab = Arc::new(Slab::new(1 << 16)?);
//! let mover = Mover::new(vec![slab.clone()], Some(&store))?;
//!
//! // SAFETY: nobody else has the slab.
//! unsafe { slab.base().write_bytes(7, 4096) };
//! let block = Place::Disk { group: GroupId(0), block: BlockId::new(5) };
//! let memory = |offset| Place::Slab { slab: 0, offset };
//! for (from, to) in [(memory(0), block), (block, memory(4096))] {
//!     let arrived = Completion::new();
//!     // SAFETY: nobody touches the slab before they have arrived.
//!     unsafe { mover.send(vec![Transfer { from, to, bytes: 4096 }], arrived.clone()) };
//!     assert!(mover.waiter().wait(&arrived, Duration::MAX));
//!     assert_eq!((arrived.copied(), arrived.failure()), (Some(1), None));
//! }
//! // SAFETY: as above.
//! assert_eq!(unsafe { slab.base().add(2 * 4096 - 1).read() }, 7);
//! # drop((mover, store));
//! # std::fs::remove_dir(&directory)?;
//! # Ok(())
//! # }
//! ```

pub mod disk;
mod mover;
mod ring;
mod slab;

#[cfg(any(test, feature = "faults"))]
pub use mover::by_hand;
pub use mover::{LayerOfPages, Mover, Place, Transfer, Waiter};
pub use ring::{Filled, Ring, Unread};
pub use slab::Slab;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, even if a thread has panicked while it held it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
