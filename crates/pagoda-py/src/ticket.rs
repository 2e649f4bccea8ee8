//! Plans and tickets, as Python holds them.

use crate::patience;
use numpy::PyArray1;
use pagoda_core::fence::Completion;
use pagoda_core::ids::TicketId;
use pagoda_core::plan::BlockCopy;
use pagoda_store::Waiter;
use pagoda_store::disk::Store;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Mutex, Weak};
use std::time::Duration;

/// What to move; see `pagoda.Plan`.
#[pyclass(frozen, module = "pagoda._core")]
pub(crate) struct Plan(pub(crate) pagoda_core::plan::Plan);

#[pymethods]
impl Plan {
    /// `(page, group, from, to, bytes)` of every page, in the order in which they are copied.
    #[getter]
    fn copies(&self) -> Vec<(u32, u8, String, String, u64)> {
        let moves = self.0.moves().iter();
        moves
            .map(|m| (m.page.index(), m.group.0, m.from.to_string(), self.0.to.to_string(), m.bytes))
            .collect()
    }

    /// Bytes to copy.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}

/// A plan under way; see `pagoda.Ticket`.
#[pyclass(frozen, module = "pagoda._core")]
pub(crate) struct Ticket {
    pub(crate) id: TicketId,
    pub(crate) completion: Completion,
    /// What whoever drives a device has to copy, and the same as addresses and bytes: `[from, to, bytes]` of each block.
    pub(crate) copies: Vec<BlockCopy>,
    pub(crate) transfers: Vec<u64>,
    /// Those that threads of the disk have been given, by the number of the first.
    pub(crate) on_disk: Mutex<HashMap<usize, Completion>>,
}

#[pymethods]
impl Ticket {
    /// uint64: `[from, to, bytes]` of what is to be copied on behalf of a device; 0 in the place of an address on disk.
    #[getter]
    fn transfers<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        PyArray1::from_slice(py, &self.transfers)
    }
}

/// Copies between the disk and memory of the host that a ticket needs.
#[pyclass(frozen, module = "pagoda._core")]
pub(crate) struct DiskCopies {
    pub(crate) completion: Completion,
    pub(crate) waiter: Waiter,
    /// It goes when the cache is closed, whoever still asks for these.
    pub(crate) store: Weak<Store>,
    /// How long anybody waits for it.
    pub(crate) limit: Duration,
}

#[pymethods]
impl DiskCopies {
    /// Whether they have ended.
    fn done(&self) -> bool {
        self.completion.copied().is_some()
    }

    /// Sleeps until they have. Python signals are seen.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| patience::until(Duration::MAX, |slice| self.waiter.wait(&self.completion, slice)))
            .map(drop)
    }

    /// Sleeps until they have, as long as the disk does anything, and `disk_timeout` more. Python signals are seen.
    fn wait_patiently(&self, py: Python<'_>) -> PyResult<()> {
        let Self { completion, waiter, store, limit } = self;
        // Without a store all copies have ended.
        let Some(store) = store.upgrade() else { return Ok(()) };
        py.detach(|| patience::wait(waiter, completion, &store, *limit)).map_err(|stop| stop.raise(py))
    }

    /// How many of the first have arrived, once they have ended.
    #[getter]
    fn copied(&self) -> Option<u32> {
        self.completion.copied()
    }
}
