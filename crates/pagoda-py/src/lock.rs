//! Calls of a cache take turns: one lock per cache, and which calls must not wait for it.

use crate::cache::{Cache, Inner};
use crate::errors::{core, invalid_because, released};
use crate::fork;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyDict, PyTuple};
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, Mutex, MutexGuard, PoisonError, TryLockError};

/// An open cache, in the turn of one call.
pub(crate) struct Locked<'a>(Turn<'a, Option<ManuallyDrop<Inner>>>);

/// The turn of a call: the lock, listed in `TURNS` as long as it is held.
struct Turn<'a, T>(MutexGuard<'a, T>);

impl<'a, T> Turn<'a, T> {
    fn begin(lock: &Mutex<T>, guard: MutexGuard<'a, T>) -> Self {
        TURNS.with_borrow_mut(|turns| turns.push(address(lock)));
        Self(guard)
    }
}

impl<T> Drop for Turn<'_, T> {
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
    /// Waits for its turn, then takes note of what has ended since the last one. Refuses in a forked child, in a signal
    /// handler or finaliser that has interrupted a turn of this cache, after a panic, and once the cache is closed.
    pub(crate) fn lock(&self, py: Python<'_>) -> PyResult<Locked<'_>> {
        if self.process != fork::process() {
            return Err(released(py, "cache: made by another process; open one after the fork"));
        }
        self.require_elsewhere(py)?;
        let Ok(guard) = wait_for(&self.inner, py) else {
            let what = "a call of the cache has panicked, and what it had begun is half done; close it";
            return Err(core(py, &pagoda_core::Error::Invariant(what.into())));
        };
        let mut turn = Turn::begin(&self.inner, guard);
        match turn.0.as_mut() {
            None => return Err(released(py, "cache: closed")),
            Some(inner) => inner.settle().map_err(|error| core(py, &error))?,
        }
        Ok(Locked(turn))
    }

    /// Refuses calls that Python runs in the middle of this thread's turn, which would wait for themselves: those of signal
    /// handlers while the turn waits for the disk, and of finalisers while it makes objects.
    pub(crate) fn require_elsewhere(&self, py: Python<'_>) -> PyResult<()> {
        refuse_in_turn_of(&self.inner, py)
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

#[pymethods]
impl Cache {
    /// Makes a call that calls the cache several times, in a turn around theirs: no other such call comes in between. In a
    /// forked child the calls of the cache refuse.
    #[pyo3(signature = (call, *given, **options))]
    fn in_turn<'py>(
        &self,
        call: &Bound<'py, PyAny>,
        given: &Bound<'py, PyTuple>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = call.py();
        if self.process != fork::process() {
            return call.call(given, options);
        }
        self.require_elsewhere(py)?;
        refuse_in_turn_of(&self.turns, py)?;
        let guard = wait_for(&self.turns, py).unwrap_or_else(PoisonError::into_inner);
        let _turn = Turn::begin(&self.turns, guard);
        call.call(given, options)
    }
}

fn wait_for<'a, T>(lock: &'a Mutex<T>, py: Python<'_>) -> LockResult<MutexGuard<'a, T>> {
    match lock.try_lock() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::WouldBlock) => lock.lock_py_attached(py),
        Err(TryLockError::Poisoned(guard)) => Err(guard),
    }
}

fn refuse_in_turn_of<T>(lock: &Mutex<T>, py: Python<'_>) -> PyResult<()> {
    if TURNS.with_borrow(|turns| turns.contains(&address(lock))) {
        return Err(invalid_because(
            py,
            "cache: in use by the call that this signal or finaliser has interrupted",
        ));
    }
    Ok(())
}

fn address<T>(lock: &Mutex<T>) -> usize {
    std::ptr::from_ref(lock).addr()
}

thread_local! {
    /// The addresses of the locks that this thread holds, in the order of taking; they are released in reverse order.
    static TURNS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}
