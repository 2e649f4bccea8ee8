//! Calls of a cache take turns: one lock for each, and what must not take it.

use crate::cache::{Cache, Inner};
use crate::errors::{core, invalid_because, released};
use crate::fork;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{MutexGuard, PoisonError};

/// An open cache, in the turn of one call.
pub(crate) struct Locked<'a>(MutexGuard<'a, Option<ManuallyDrop<Inner>>>);

impl Deref for Locked<'_> {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        self.0.as_ref().expect("locked open")
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Inner {
        self.0.as_mut().expect("locked open")
    }
}

impl Cache {
    /// Waits for its turn. Refused in a forked child, in a signal handler that has interrupted such a turn, and once the cache is
    /// closed. What has ended since the last turn is taken note of.
    pub(crate) fn lock(&self, py: Python<'_>) -> PyResult<Locked<'_>> {
        if self.process != fork::process() {
            return Err(released(py, "cache: made by another process; open one after the fork"));
        }
        self.require_elsewhere(py)?;
        let mut guard = match self.inner.try_lock() {
            Ok(guard) => guard,
            Err(_) => self.inner.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner),
        };
        match guard.as_mut() {
            None => return Err(released(py, "cache: closed")),
            Some(inner) => inner.settle().map_err(|error| core(py, &error))?,
        }
        Ok(Locked(guard))
    }

    /// Refuses calls of signal handlers that run while this thread waits for the disk: they would wait for themselves.
    pub(crate) fn require_elsewhere(&self, py: Python<'_>) -> PyResult<()> {
        if WAITING.get() == std::ptr::from_ref(self).addr() {
            return Err(invalid_because(py, "cache: in use by the call that this signal has interrupted"));
        }
        Ok(())
    }

    /// Runs a call of the core.
    pub(crate) fn with<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Inner) -> pagoda_core::Result<T>,
    ) -> PyResult<T> {
        call(&mut *self.lock(py)?).map_err(|error| core(py, &error))
    }
}

thread_local! {
    /// The address of the cache in a call of which this thread is that may wait for the disk.
    static WAITING: Cell<usize> = const { Cell::new(0) };
}

/// While it lives, the thread is in a call that may wait for the disk.
pub(crate) struct Waiting;

impl Waiting {
    pub(crate) fn of(cache: &Cache) -> Self {
        WAITING.set(std::ptr::from_ref(cache).addr());
        Self
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.set(0);
    }
}
