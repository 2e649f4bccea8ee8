//! How long a call waits for the disk: as long as that does anything, and `disk_timeout` more. Signals are seen.

use crate::reads::Stop;
use pagoda_core::fence::Completion;
use pagoda_store::Waiter;
use pagoda_store::disk::Store;
use pyo3::prelude::*;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a wait looks for signals.
const SLICE: Duration = Duration::from_millis(50);

/// Sleeps until `awake` says so, which sleeps for the time it is given at most, or for `limit`; says which. Python signals are seen.
pub(crate) fn until(limit: Duration, mut awake: impl FnMut(Duration) -> bool) -> PyResult<bool> {
    let start = Instant::now();
    loop {
        let left = limit.saturating_sub(start.elapsed());
        if awake(SLICE.min(left)) {
            return Ok(true);
        }
        Python::attach(|py| py.check_signals())?;
        if left.is_zero() {
            return Ok(false);
        }
    }
}

/// Sleeps until copies have ended.
pub(crate) fn wait(
    waiter: &Waiter,
    completion: &Completion,
    store: &Store,
    limit: Duration,
) -> Result<(), Stop> {
    sleep(store, limit, signals, |slice| waiter.wait(completion, slice))
}

/// Lets Python handle signals, and says if that raises.
fn signals() -> Result<(), Stop> {
    Python::attach(|py| py.check_signals()).map_err(Stop::Signal)
}

/// Sleeps until `awake` says so, which sleeps for the time it is given at most. Now and then `stop` may end that.
fn sleep(
    store: &Store,
    limit: Duration,
    stop: impl Fn() -> Result<(), Stop>,
    mut awake: impl FnMut(Duration) -> bool,
) -> Result<(), Stop> {
    let (mut traffic, mut since) = (store.traffic(), Instant::now());
    loop {
        let left = limit.saturating_sub(since.elapsed());
        if awake(SLICE.min(left)) {
            return Ok(());
        }
        stop()?;
        let now = store.traffic();
        if now != traffic {
            (traffic, since) = (now, Instant::now());
        } else if left.is_zero() {
            return Err(Stop::Idle(limit));
        }
    }
}

/// Work in a thread of its own, for what the system does not come back from before it is done. Dropping it waits.
pub(crate) struct Apart<T> {
    thread: Option<JoinHandle<T>>,
    ended: Receiver<()>,
}

impl<T: Send + 'static> Apart<T> {
    pub(crate) fn begin(work: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        let (end, ended) = channel();
        let work = move || {
            let result = work();
            // Nobody may be waiting any more.
            let _ = end.send(());
            result
        };
        let thread = std::thread::Builder::new().name("pagoda-keeper".into()).spawn(work)?;
        Ok(Self { thread: Some(thread), ended })
    }

    /// Sleeps until it has ended.
    pub(crate) fn wait(&mut self, store: &Store, limit: Duration) -> Result<(), Stop> {
        sleep(store, limit, signals, |slice| self.ended_in(slice))
    }

    /// Sleeps until it has ended, and then drops what it came to; whoever gives up leaves it to itself. Signals are seen only if
    /// that is asked for.
    pub(crate) fn finish(mut self, store: &Store, limit: Duration, heeds_signals: bool) -> Result<(), Stop> {
        let stop = || if heeds_signals { signals() } else { Ok(()) };
        let ended = sleep(store, limit, stop, |slice| self.ended_in(slice));
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

    /// What it came to, once it has ended.
    pub(crate) fn join(mut self) -> T {
        self.thread.take().expect("joined once").join().expect("a store does not panic")
    }
}

impl<T> Drop for Apart<T> {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // Its outcome is nobody's any more.
            let _ = thread.join();
        }
    }
}
