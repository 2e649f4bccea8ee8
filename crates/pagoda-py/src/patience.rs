//! How long a call waits for the disk: until the disk has done nothing for `disk_timeout`. Signals are handled meanwhile.

use crate::errors;
use pagoda_core::fence::{Completion, Failure};
use pagoda_store::Waiter;
use pagoda_store::disk::Store;
use pagoda_store::disk::io::Pulse;
use pyo3::prelude::*;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a wait looks for signals.
const SLICE: Duration = Duration::from_millis(50);

/// Why a wait for the disk ended early.
pub(crate) enum Stop {
    /// The drive of a directory took longer than `limit` for something.
    Late { directory: PathBuf, limit: Duration, what: String },
    /// A signal handler raised.
    Signal(PyErr),
}

impl Stop {
    pub(crate) fn late(directory: &Path, limit: Duration, what: &str) -> Self {
        Self::Late { directory: directory.to_owned(), limit, what: what.into() }
    }

    /// Adds what follows from it to the message, if the drive took too long.
    pub(crate) fn and(mut self, then: &str) -> Self {
        if let Self::Late { what, .. } = &mut self {
            *what = format!("{what}; {then}");
        }
        self
    }

    pub(crate) fn raise(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Late { directory, limit, what } => {
                let (directory, seconds) = (directory.display(), limit.as_secs_f64());
                let reason = format!("disk = {directory}: disk_timeout = {seconds}: {what}");
                errors::failure(py, &Failure::Io(reason), &[])
            }
            Self::Signal(error) => error,
        }
    }
}

/// Sleeps until `awake` is true or `limit` has passed; returns which. `awake` gets how long to sleep. Handles Python signals.
pub(crate) fn until(limit: Duration, awake: impl FnMut(Duration) -> bool) -> PyResult<bool> {
    sleep(limit, || false, signals, awake)
}

/// Sleeps until copies have ended; gives up when the disk has done nothing for `limit`. Python signals are handled.
pub(crate) fn wait(
    waiter: &Waiter,
    completion: &Completion,
    store: &Store,
    limit: Duration,
) -> Result<(), Stop> {
    while_busy(store, limit, signals, |slice| waiter.wait(completion, slice))
}

/// Lets Python handle signals; fails if a handler raises.
fn signals() -> PyResult<()> {
    Python::attach(|py| py.check_signals())
}

/// Sleeps until `awake` returns true; gives up when the disk has done nothing for `limit`.
fn while_busy(
    store: &Store,
    limit: Duration,
    stop: impl Fn() -> PyResult<()>,
    awake: impl FnMut(Duration) -> bool,
) -> Result<(), Stop> {
    let mut before = store.progress();
    let moves = || {
        let now = store.progress();
        std::mem::replace(&mut before, now) != now
    };
    or_idle(store.directory(), limit, sleep(limit, moves, stop, awake))
}

fn or_idle(directory: &Path, limit: Duration, ended: PyResult<bool>) -> Result<(), Stop> {
    let idle = || Stop::late(directory, limit, "the drive did nothing for longer");
    if ended.map_err(Stop::Signal)? { Ok(()) } else { Err(idle()) }
}

/// Sleeps until `awake` is true, or `moves` was false for `limit`; returns which. `awake` gets how long to sleep. An error of
/// `stop`, which is called now and then, ends the wait.
fn sleep(
    limit: Duration,
    mut moves: impl FnMut() -> bool,
    stop: impl Fn() -> PyResult<()>,
    mut awake: impl FnMut(Duration) -> bool,
) -> PyResult<bool> {
    let mut since = Instant::now();
    loop {
        let left = limit.saturating_sub(since.elapsed());
        if awake(SLICE.min(left)) {
            return Ok(true);
        }
        stop()?;
        if moves() {
            since = Instant::now();
        } else if left.is_zero() {
            return Ok(false);
        }
    }
}

/// Work in a thread of its own, for system calls that do not return before they are done. Dropping it waits.
pub(crate) struct Apart<T> {
    thread: Option<JoinHandle<T>>,
    ended: Receiver<()>,
}

impl<T: Send + 'static> Apart<T> {
    pub(crate) fn begin(work: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        let (end, ended) = channel();
        let work = move || {
            let result = work();
            // The waiter may have given up.
            let _ = end.send(());
            result
        };
        let thread = std::thread::Builder::new().name("pagoda-keeper".into()).spawn(work)?;
        Ok(Self { thread: Some(thread), ended })
    }

    /// Sleeps until the work has ended; gives up when the disk has done nothing for `limit`.
    pub(crate) fn wait(&mut self, store: &Store, limit: Duration) -> Result<(), Stop> {
        while_busy(store, limit, signals, |slice| self.ended_in(slice))
    }

    /// The result. Gives up when the drive of a directory takes longer than `limit` for an answer; the thread then goes on
    /// alone.
    pub(crate) fn outcome(mut self, directory: &Path, pulse: &Pulse, limit: Duration) -> Result<T, Stop> {
        let mut before = None;
        let moves = || {
            let now = pulse.awaited();
            now.is_none() || std::mem::replace(&mut before, now) != now
        };
        let ended = sleep(limit, moves, signals, |slice| self.ended_in(slice));
        let ended = or_idle(directory, limit, ended);
        if let Err(stop) = ended {
            self.thread = None;
            return Err(stop);
        }
        Ok(self.join())
    }

    /// As `wait`, then drops the result. After giving up the thread goes on alone. `heeds_signals`: handle signals meanwhile.
    pub(crate) fn finish(mut self, store: &Store, limit: Duration, heeds_signals: bool) -> Result<(), Stop> {
        let stop = || if heeds_signals { signals() } else { Ok(()) };
        let ended = while_busy(store, limit, stop, |slice| self.ended_in(slice));
        if ended.is_err() {
            self.thread = None;
        }
        ended
    }

    fn ended_in(&self, limit: Duration) -> bool {
        self.ended.recv_timeout(limit) != Err(RecvTimeoutError::Timeout)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// The result; waits for the work to end.
    pub(crate) fn join(mut self) -> T {
        self.thread.take().expect("joined once").join().expect("a store does not panic")
    }
}

impl<T> Drop for Apart<T> {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // Nobody needs the result any more.
            let _ = thread.join();
        }
    }
}
