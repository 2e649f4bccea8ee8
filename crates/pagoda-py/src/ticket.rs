//! Plans and tickets, as Python holds them.

use numpy::PyArray1;
use pagoda_core::fence::Completion;
use pagoda_core::ids::TicketId;
use pyo3::prelude::*;

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
    /// Addresses and bytes of what a device has to copy: `[from, to, bytes]` of each block.
    pub(crate) transfers: Vec<u64>,
}

#[pymethods]
impl Ticket {
    /// uint64: `[from, to, bytes]` of what a device has to copy.
    #[getter]
    fn transfers<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        PyArray1::from_slice(py, &self.transfers)
    }

    /// The first `copied` of the transfers have arrived, all by default, and no other will.
    #[pyo3(signature = (copied=None))]
    fn finish(&self, copied: Option<u32>) {
        self.completion.finish(copied.unwrap_or((self.transfers.len() / 3) as u32));
    }
}
