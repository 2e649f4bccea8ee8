//! A sequence as Python holds it.

use pagoda_core::ids::SequenceId;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Sequences that nobody holds any more; the cache's next step or load releases them. A finaliser may run in the middle of
/// any call, so it only leaves a note here.
#[derive(Clone, Default)]
pub(crate) struct Abandoned(Arc<Mutex<Vec<u64>>>);

impl Abandoned {
    /// Takes all of them.
    pub(crate) fn take(&self) -> Vec<u64> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Holds a sequence. Made in the same call as the sequence, so that no signal comes between the two.
#[pyclass(frozen, module = "pagoda._core")]
pub(crate) struct Handle {
    /// The number that calls of the cache take.
    #[pyo3(get)]
    id: u64,
    abandoned: Abandoned,
    released: AtomicBool,
}

impl Handle {
    pub(crate) fn new(id: SequenceId, abandoned: &Abandoned) -> Self {
        Self { id: id.number(), abandoned: abandoned.clone(), released: AtomicBool::new(false) }
    }
}

#[pymethods]
impl Handle {
    /// Notes that the sequence has been released.
    fn released(&self) {
        self.released.store(true, Ordering::Relaxed);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !*self.released.get_mut() {
            self.abandoned.0.lock().unwrap_or_else(PoisonError::into_inner).push(self.id);
        }
    }
}
