//! Jobs of a mover until they are done: their parts, and who waits for them.

use super::{LayerOfPages, Transfer};
use crate::disk::{Error, Hole, Store};
use crate::{Slab, lock};
use pagoda_core::fence::{Completion, Failure};
use pagoda_core::ids::{BlockId, GroupId};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The part of a job that one thread does.
pub(super) struct Part {
    pub(super) work: Work,
    /// The index of its first transfer, or page, in the job.
    pub(super) first: usize,
    pub(super) job: Arc<Job>,
}

pub(super) enum Work {
    Copies(Vec<Transfer>),
    /// Reads into a slab, from an offset on.
    Layer(LayerOfPages, Arc<Slab>, u64),
    /// Gives space on disk back.
    Discard(Hole),
    /// Nothing, but what ends the job.
    End,
}

/// What `send` or `fetch` was given, until its last part is done.
pub(super) struct Job {
    pub(super) completion: Completion,
    waiter: Waiter,
    pub(super) state: Mutex<JobState>,
    /// The store, and for each transfer the block on disk that it writes to, if any.
    store: Option<Arc<Store>>,
    written: Vec<Option<(GroupId, BlockId)>>,
}

pub(super) struct JobState {
    parts_left: usize,
    /// How many transfers, or pages, come before the first that failed.
    pub(super) copied: usize,
    failure: Option<Failure>,
}

/// Sleeps until copies have arrived, without holding on to the mover. It contains the number of unfinished jobs.
#[derive(Clone, Debug, Default)]
pub struct Waiter(Arc<(Mutex<usize>, Condvar)>);

impl Job {
    /// A job of so many parts, which finishes with the last of them. No part ends in the thread that begins it, since the end
    /// may have to wait for the drive. `written`: for each transfer, the block on disk that it writes to. `failure`: why there
    /// are no more.
    pub(super) fn new(
        parts: usize,
        transfers: usize,
        written: Vec<Option<(GroupId, BlockId)>>,
        store: Option<Arc<Store>>,
        waiter: Waiter,
        completion: Completion,
        failure: Option<Failure>,
    ) -> Arc<Self> {
        let state = Mutex::new(JobState { parts_left: parts.max(1), copied: transfers, failure });
        *waiter.unfinished() += 1;
        let job = Arc::new(Self { completion, waiter, state, store, written });
        if parts == 0 {
            job.end(Ok(()), 0);
        }
        job
    }

    /// Hands a part to the threads of a queue.
    pub(super) fn begin(self: &Arc<Self>, queue: &Option<Sender<Part>>, work: Work, first: usize) {
        let part = Part { work, first, job: self.clone() };
        queue.as_ref().expect("lives until drop").send(part).expect("the threads live until drop");
    }

    /// Notes how the part that begins with transfer `first` ended; the last part finishes the job.
    pub(super) fn end(&self, result: Result<(), Error>, first: usize) {
        let Self { completion, waiter, state, store, written } = self;
        let mut state = lock(state);
        if let Err(error) = result
            && first < state.copied
        {
            state.copied = first;
            // Copies in memory do not fail.
            state.failure = store.as_ref().map(|store| store.failure(&error));
        }
        state.parts_left -= 1;
        if state.parts_left == 0 {
            if let Some(store) = store {
                // Pages that count as not written give their space back: otherwise a full drive would stay full.
                for &(group, block) in written.iter().skip(state.copied).flatten() {
                    // If the system refuses, the space stays taken, which is no error.
                    let _ = store.give_back(group, &[block]);
                }
            }
            // Under the lock, so that no waiter falls asleep between this and its last look.
            let mut unfinished = waiter.unfinished();
            *unfinished -= 1;
            match state.failure.take() {
                Some(failure) => completion.fail(state.copied as u32, failure),
                None => completion.finish(state.copied as u32),
            }
            waiter.0.1.notify_all();
        }
    }
}

impl Part {
    pub(super) fn end(self, result: Result<(), Error>) {
        self.job.end(result, self.first);
    }
}

impl Waiter {
    /// Whether every job has finished.
    pub fn is_idle(&self) -> bool {
        *self.unfinished() == 0
    }

    fn unfinished(&self) -> MutexGuard<'_, usize> {
        lock(&self.0.0)
    }

    /// Sleeps until `completion` has finished or `limit` has passed; says whether it has finished.
    pub fn wait(&self, completion: &Completion, limit: Duration) -> bool {
        let start = Instant::now();
        let mut guard = self.unfinished();
        while completion.copied().is_none() {
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return false;
            }
            guard = self.0.1.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
