//! The interface of the disk tier to a file system, and its implementations: system calls (`psync`), `io_uring`, and in tests a
//! disk with faults.

mod folder;
mod psync;
mod pulse;
#[cfg(target_os = "linux")]
mod uring;

#[cfg(any(test, feature = "faults"))]
pub mod fault;

pub use folder::{Folder, abandon, scratch_in, space_in};
pub use pulse::Pulse;

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Offsets, lengths and addresses of page I/O are multiples of this.
pub const ALIGN: u64 = 4096;

/// The most bytes of one I/O: larger ones are cut, so that there is depth.
pub const IO_BYTES_MAX: usize = 1 << 20;

/// A directory with the files of one store.
pub trait Directory: Debug + Send + Sync {
    /// Where it is, for messages.
    fn path(&self) -> &Path;

    /// How page I/O in its files is done.
    fn access(&self) -> Access;

    /// A file that has no name and goes when it is closed.
    fn scratch(&self) -> io::Result<Arc<dyn File>>;

    /// The file `name`, made if it is not there, for this process alone until it is closed; and the directory as its holder has it,
    /// who replaces nothing there once that file has lost its name: the directory may be another process's by then. Fails with
    /// `WouldBlock` if another has the file.
    fn lock(&self, name: &str) -> io::Result<(Arc<dyn File>, Box<dyn Directory>)>;

    /// The bytes of a small file, as a loss of power leaves them from then on; none if it is not there. Fails with `FileTooLarge` if
    /// it has more than `limit`.
    fn read(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>>;

    /// The same directory, to hold on to.
    fn share(&self) -> Box<dyn Directory>;

    /// Whether it answers; other callers of its files count as well.
    fn pulse(&self) -> Arc<Pulse>;

    /// Puts a file with these bytes in the place of `name`, at once and for good; one caller at a time for each.
    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<Arc<dyn File>>;
}

/// An open file. What it was asked to write may be lost until it is synced.
pub trait File: Debug + Send + Sync {
    /// How long it is.
    fn size(&self) -> io::Result<u64>;

    /// Writes all bytes through the cache of the system, at any offset.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Comes back when all that was written is safe from a loss of power. Fails where a file has lost its name.
    fn sync(&self) -> io::Result<()>;

    /// Gives the space of a range back. It reads as zeros from then on, or as before.
    fn discard(&self, range: Range<u64>) -> io::Result<()>;

    /// Makes a range read as zeros from now on, and gives its space back where the file system can.
    fn zero(&self, range: Range<u64>) -> io::Result<()>;

    /// Has what is read next of a range come from the drive, not from the cache of the system; what is not synced may stay there.
    fn forget(&self, range: Range<u64>) -> io::Result<()>;

    /// How many queues, each with a thread, keep the drive busy.
    fn lanes(&self) -> usize;

    /// A queue of one's own, for aligned I/O.
    fn lane(&self) -> io::Result<Box<dyn Lane>>;
}

/// One thread's way to a file.
pub trait Lane: Debug + Send {
    /// Runs all operations, several at a time where it can, and comes back when the last has an outcome.
    fn run(&mut self, ops: &mut [Op<'_>]);
}

/// How page I/O is done, and why not better.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Past the cache of the system.
    pub direct: bool,
    /// Through a ring; else by one system call each.
    pub uring: bool,
    /// What was tried and failed, with the errno, and whether there is no drive at all.
    pub refused: Vec<String>,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// From the file.
    Read,
    /// To the file.
    Write,
}

/// One aligned I/O.
#[derive(Debug)]
pub struct Op<'a> {
    /// Which way.
    pub kind: Kind,
    /// Where in the file.
    pub offset: u64,
    /// What to fill or to write.
    pub bytes: &'a mut [u8],
    /// Bytes of it that are done.
    done: usize,
    /// How it ended.
    outcome: Option<io::Result<()>>,
}

impl<'a> Op<'a> {
    /// An operation to run.
    pub fn new(kind: Kind, offset: u64, bytes: &'a mut [u8]) -> Self {
        Self { kind, offset, bytes, done: 0, outcome: None }
    }

    /// What is still to do: an offset, and bytes.
    fn rest(&mut self) -> (u64, &mut [u8]) {
        (self.offset + self.done as u64, &mut self.bytes[self.done..])
    }

    /// Takes in what one system call did; says whether the operation has ended. Interrupted and short ones go on.
    fn advance(&mut self, result: io::Result<usize>) -> bool {
        match result {
            Ok(0) if self.done < self.bytes.len() => {
                self.outcome = Some(match self.kind {
                    Kind::Read => {
                        // Behind the end of a file that was cut short: zeros verify as nothing, page by page.
                        self.bytes[self.done..].fill(0);
                        Ok(())
                    }
                    Kind::Write => Err(io::ErrorKind::WriteZero.into()),
                });
            }
            Ok(count) => {
                self.done += count;
                if self.done == self.bytes.len() {
                    self.outcome = Some(Ok(()));
                }
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => self.outcome = Some(Err(error)),
        }
        self.outcome.is_some()
    }

    /// How the operation ended.
    ///
    /// # Panics
    /// Before it has been run.
    pub fn outcome(self) -> io::Result<()> {
        self.outcome.expect("run by a lane")
    }
}
