//! Layers of pages on disk, read ahead of the attention over them.

use crate::errors;
use crate::patience;
use pagoda_core::fence::Completion;
use pagoda_core::ids::{Epoch, Tier};
use pagoda_store::{Filled, LayerOfPages, Mover, Ring, Unread};
use pyo3::prelude::*;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What an open step reads from disk, and the memory that it reads into.
pub(crate) struct Reads {
    ring: Ring,
    /// Where it reads from, for messages.
    directory: PathBuf,
    timeout: Duration,
    /// In the order of need.
    pub(crate) what: Vec<LayerOfPages>,
    pub(crate) traffic: Traffic,
}

/// Reads for an open step.
pub(crate) struct Reader<'a> {
    pub(crate) reads: &'a mut Reads,
    pub(crate) mover: &'a Mover,
    /// The last step that has ended.
    pub(crate) ended: Epoch,
}

/// Why an open step does not get what it reads.
pub(crate) enum Stop {
    Unread(Unread),
    Wait(patience::Stop),
}

impl Stop {
    pub(crate) fn raise(self, py: Python<'_>, core: &pagoda_core::Cache) -> PyErr {
        match self {
            Self::Unread(Unread { group, block, failure }) => {
                errors::failure(py, &failure, &core.holders(group, (Tier::Disk, block)))
            }
            Self::Wait(stop) => stop.raise(py),
        }
    }
}

impl From<patience::Stop> for Stop {
    fn from(stop: patience::Stop) -> Self {
        Self::Wait(stop)
    }
}

/// What attention read from disk in a step.
#[derive(Clone, Copy, Default)]
pub(crate) struct Traffic {
    /// Bytes of pages on disk that attention has used.
    pub(crate) bytes: u64,
    /// Time spent only waiting for the disk.
    pub(crate) waited: Duration,
}

impl Reads {
    pub(crate) fn new(ring: Ring, directory: &Path, timeout: Duration) -> Self {
        let directory = directory.to_owned();
        Self { ring, directory, timeout, what: Vec::new(), traffic: Traffic::default() }
    }

    /// Bytes of the ring.
    pub(crate) fn bytes(&self) -> u64 {
        self.ring.bytes()
    }

    /// How long calls wait for the disk.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// With `zero_on_free`, drops bytes that were read of pages that are gone since.
    pub(crate) fn forget_gone(&mut self) {
        self.ring.forget_gone();
    }

    /// The last step that had ended when the oldest read under way began.
    pub(crate) fn since(&self) -> Option<Epoch> {
        self.ring.since()
    }

    /// Waits for all reads under way.
    pub(crate) fn finish(&mut self, mover: &Mover) -> Result<(), patience::Stop> {
        while let Some(completion) = self.ring.under_way().cloned() {
            self.wait(mover, &completion)?;
        }
        Ok(())
    }

    /// Takes a slot back.
    pub(crate) fn release(&mut self, filled: Filled) {
        self.ring.release(filled);
    }

    /// Sleeps until a read has ended, for `timeout` at most.
    fn wait(&mut self, mover: &Mover, completion: &Completion) -> Result<(), patience::Stop> {
        let (began, waiter) = (Instant::now(), mover.waiter());
        let waited = patience::until(self.timeout, |slice| waiter.wait(completion, slice));
        self.traffic.waited += began.elapsed();
        let late = || patience::Stop::late(&self.directory, self.timeout, "a read took longer");
        if waited.map_err(patience::Stop::Signal)? { Ok(()) } else { Err(late()) }
    }
}

impl Reader<'_> {
    /// Begins to read what is needed from place `next` on. After the last place it goes on at the first, for the next step.
    ///
    /// # Safety
    /// As for [`Ring::read_ahead`].
    pub(crate) unsafe fn read_ahead(&mut self, next: usize) {
        let Reads { ring, what, .. } = &mut *self.reads;
        let (before, after) = what.split_at(next);
        // SAFETY: as the caller promises.
        unsafe { ring.read_ahead(self.mover, after.iter().chain(before), self.ended) };
    }

    /// What is needed at place `at`, if it has arrived.
    ///
    /// # Safety
    /// As for [`Ring::read_ahead`].
    pub(crate) unsafe fn take_if_read(&mut self, at: usize) -> Option<Filled> {
        // SAFETY: as the caller promises.
        unsafe { self.read_ahead(at) };
        if !self.reads.ring.has_next() {
            return None;
        }
        // SAFETY: as the caller promises.
        unsafe { self.take(at) }.ok().flatten()
    }

    /// What is needed at place `at`, once it has arrived; then goes on reading ahead. None if the caller holds all slots.
    ///
    /// # Safety
    /// As for [`Ring::read_ahead`].
    pub(crate) unsafe fn take(&mut self, at: usize) -> Result<Option<Filled>, Stop> {
        // SAFETY: as the caller promises.
        unsafe { self.read_ahead(at) };
        while self.reads.ring.next().is_none() {
            let Some(idle) = self.reads.ring.under_way().cloned() else { return Ok(None) };
            self.reads.wait(self.mover, &idle)?;
            // SAFETY: as the caller promises.
            unsafe { self.read_ahead(at) };
        }
        let completion = self.reads.ring.next().expect("begun").clone();
        self.reads.wait(self.mover, &completion)?;
        let filled = self.reads.ring.take().map_err(Stop::Unread)?;
        self.reads.traffic.bytes += filled.stride * self.reads.what[at].blocks.len() as u64;
        // SAFETY: as the caller promises.
        unsafe { self.read_ahead(at + 1) };
        Ok(Some(filled))
    }
}
