//! What can go wrong on disk, as data.

use std::io;
use std::path::Path;

/// Why the disk tier did not do what it was asked to do. Nothing that was readable before has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused an operation.
    #[error("{operation}: {source}")]
    Io {
        /// The operation that failed.
        operation: &'static str,
        /// With the errno, if the system gave one.
        source: io::Error,
    },
    /// Stored bytes are not those that were written.
    #[error("block {block} of layer group {group}: {reason}")]
    Corrupt {
        /// The page's layer group.
        group: u8,
        /// The block that holds the page.
        block: u32,
        /// What does not match.
        reason: String,
    },
    /// A sync has failed since the pages were written, and may have lost them.
    #[error("{pages} page(s) may have been lost by a sync that failed: promote them, and save again")]
    Unsynced {
        /// How many pages.
        pages: usize,
    },
    /// This program did not write the index.
    #[error("index: {0}")]
    Index(String),
    /// The index has no room for a line.
    #[error(
        "the index is full: {wanted} bytes for a key, its pages and meta, {left} are left of {most}; forget other keys"
    )]
    IndexFull {
        /// Bytes of the line.
        wanted: u64,
        /// Bytes that it may have now.
        left: u64,
        /// The limit.
        most: u64,
    },
    /// Another process has the files.
    #[error("another process or cache has it open")]
    Locked,
    /// The files are of another model, format or size.
    #[error(
        "{what} is {stored} on disk, and {wanted} here: give the {arguments} that it was made with, or another directory"
    )]
    Mismatch {
        /// What differs.
        what: &'static str,
        /// The arguments that the caller gives it with.
        arguments: &'static str,
        /// What the files have.
        stored: String,
        /// What the caller has given.
        wanted: String,
    },
    /// Writing would exceed what may be written to the drive per day.
    #[error("{wanted} bytes to write: {left} are left of disk_writes_per_day = {per_day} a day")]
    OverBudget {
        /// Bytes to write.
        wanted: u64,
        /// Bytes that may be written now.
        left: u64,
        /// The limit.
        per_day: u64,
    },
    /// An argument has a value that the call does not accept.
    #[error("{argument} = {value}: {limit}")]
    Invalid {
        /// Name of the argument.
        argument: &'static str,
        /// What was passed.
        value: String,
        /// What would have been accepted.
        limit: String,
    },
}

impl Error {
    /// The message, with the directory that it is about: somebody may have to change something there.
    pub fn told_of(&self, directory: &Path) -> String {
        match self {
            Self::Invalid { .. } => self.to_string(),
            _ => format!("disk = {}: {self}", directory.display()),
        }
    }

    /// Names the operation that failed.
    pub(crate) fn io(operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { operation, source }
    }

    pub(super) fn invalid(argument: &'static str, value: impl ToString, limit: impl Into<String>) -> Self {
        Self::Invalid { argument, value: value.to_string(), limit: limit.into() }
    }
}
