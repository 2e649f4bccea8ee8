//! The disk tier: pages in segments of one file, each layer of each page with a checksum, and a log that says what is kept.
//!
//! docs/layout.md draws the bytes. A page that does not verify is an error with a reason, never data.

mod budget;
pub mod ceiling;
mod error;
mod format;
mod hole;
mod index;
pub mod io;
mod lane;
mod segment;
pub mod sequence;
mod store;

#[cfg(test)]
mod tests;

pub use budget::Budget;
pub use error::Error;
pub use format::{Fingerprint, Record};
pub(crate) use hole::Hole;
pub use index::{Entry, Recovered};
pub use lane::Lane;
pub use segment::Geometry;
pub use store::{Store, Traffic};

/// Shorthand for results of the disk tier.
pub type Result<T> = std::result::Result<T, Error>;
