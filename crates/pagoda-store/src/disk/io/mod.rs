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

/// The most bytes of one I/O. Larger ones are cut, so that several are under way at once.
pub const IO_BYTES_MAX: usize = 1 << 20;

/// A directory with the files of one store.
pub trait Directory: Debug + Send + Sync {
    /// Where it is, for messages.
    fn path(&self) -> &Path;

    /// How page I/O in its files is done.
    fn access(&self) -> Access;

    /// A file without a name, which is gone when it is closed.
    fn scratch(&self) -> io::Result<Arc<dyn File>>;

    /// The file `name`, created if it does not exist, for this process alone until it is closed; and the directory, to be
    /// used by the holder of that file. Once the file has lost its name, this directory replaces nothing any more, since it
    /// may be another process's by then. Fails with `WouldBlock` if another process has the file.
    fn lock(&self, name: &str) -> io::Result<(Arc<dyn File>, Box<dyn Directory>)>;

    /// The bytes of a small file, safe from a loss of power from then on; none if it does not exist. Fails with
    /// `FileTooLarge` if it has more than `limit`.
    fn read(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>>;

    /// The same directory, to hold on to.
    fn share(&self) -> Box<dyn Directory>;

    /// Shows whether it answers; other callers of its files count as well.
    fn pulse(&self) -> Arc<Pulse>;

    /// Replaces `name` with a file of these bytes, atomically and durably. For each name, one caller at a time.
    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<Arc<dyn File>>;
}

/// An open file. What was written to it may be lost until it is synced.
pub trait File: Debug + Send + Sync {
    /// How long it is.
    fn size(&self) -> io::Result<u64>;

    /// Writes all bytes through the cache of the system, at any offset.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Returns when everything that was written is safe from a loss of power. Fails if the file has lost its name.
    fn sync(&self) -> io::Result<()>;

    /// Gives the space of a range back. From then on it reads as zeros, or as before.
    fn discard(&self, range: Range<u64>) -> io::Result<()>;

    /// Makes a range read as zeros from now on, and gives its space back where the file system can.
    fn zero(&self, range: Range<u64>) -> io::Result<()>;

    /// Makes the next read of a range come from the drive, not from the cache of the system. What is not synced may stay
    /// there.
    fn forget(&self, range: Range<u64>) -> io::Result<()>;

    /// How many queues, each with a thread, keep the drive busy.
    fn lanes(&self) -> usize;

    /// A queue for aligned I/O, for one thread.
    fn lane(&self) -> io::Result<Box<dyn Lane>>;
}

/// One thread's way to a file.
pub trait Lane: Debug + Send {
    /// Runs all operations, several at a time if it can, and returns when each has an outcome.
    fn run(&mut self, ops: &mut [Op<'_>]);
}

/// How page I/O is done, and why not faster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Past the cache of the system.
    pub direct: bool,
    /// Through a ring (`io_uring`); otherwise by one system call each.
    pub uring: bool,
    /// What was tried and failed, with the errno; also says so if there is no drive at all.
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
    /// Bytes that are already done.
    done: usize,
    /// How it ended.
    outcome: Option<io::Result<()>>,
}

impl<'a> Op<'a> {
    /// An operation to run.
    pub fn new(kind: Kind, offset: u64, bytes: &'a mut [u8]) -> Self {
        Self { kind, offset, bytes, done: 0, outcome: None }
    }

    /// What remains to be done: an offset, and bytes.
    fn rest(&mut self) -> (u64, &mut [u8]) {
        (self.offset + self.done as u64, &mut self.bytes[self.done..])
    }

    /// Takes in the result of one system call; returns whether the operation has ended. Interrupted and short ones continue.
    pub(super) fn advance(&mut self, result: io::Result<usize>) -> bool {
        match result {
            Ok(0) if self.done < self.bytes.len() => {
                self.outcome = Some(match self.kind {
                    Kind::Read => {
                        // Past the end of a file that was cut short, pages read as zeros, which do not verify.
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
