//! Calls of a cache take turns: one lock per cache, and who must not take it.

use crate::cache::{Cache, Inner};
use crate::errors::{core, invalid_because, released};
use crate::fork;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{MutexGuard, TryLockError};

/// An open cache, in the turn of one call.
pub(crate) struct Locked<'a>(Turn<'a>);

/// The turn of a call, whether the cache is open or not.
struct Turn<'a>(MutexGuard<'a, Option<ManuallyDrop<Inner>>>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        TURNS.with_borrow_mut(Vec::pop);
    }
}

impl Deref for Locked<'_> {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        self.0.0.as_ref().expect("locked open")
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Inner {
        self.0.0.as_mut().expect("locked open")
    }
}

impl Cache {
    /// Waits for its turn. Refused in a forked child, in a signal handler or a finaliser that has interrupted such a turn, after a
    /// panic, and once the cache is closed. What has ended since the last turn is taken note of.
    pub(crate) fn lock(&self, py: Python<'_>) -> PyResult<Locked<'_>> {
        if self.process != fork::process() {
            return Err(released(py, "cache: made by another process; open one after the fork"));
        }
        self.require_elsewhere(py)?;
        let guard = match self.inner.try_lock() {
            Err(TryLockError::WouldBlock) => self.inner.lock_py_attached(py).ok(),
            tried => tried.ok(),
        };
        let Some(guard) = guard else {
            let what = "a call of the cache has panicked, and what it had begun is half done; close it";
            return Err(core(py, &pagoda_core::Error::Invariant(what.into())));
        };
        TURNS.with_borrow_mut(|turns| turns.push(self.address()));
        let mut turn = Turn(guard);
        match turn.0.as_mut() {
            None => return Err(released(py, "cache: closed")),
            Some(inner) => inner.settle().map_err(|error| core(py, &error))?,
        }
        Ok(Locked(turn))
    }

    /// Refuses calls of what Python runs in the middle of this thread's turn, signal handlers while it waits for the disk and
    /// finalisers while it makes objects: they would wait for themselves.
    pub(crate) fn require_elsewhere(&self, py: Python<'_>) -> PyResult<()> {
        if TURNS.with_borrow(|turns| turns.contains(&self.address())) {
            return Err(invalid_because(
                py,
                "cache: in use by the call that this signal or finaliser has interrupted",
            ));
        }
        Ok(())
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
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
    /// The addresses of the caches whose turns this thread has: one, and others that have interrupted it.
    static TURNS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}
