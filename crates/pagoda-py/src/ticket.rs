//! Plans and tickets: how Python holds them, how they are made, started and waited for.

use crate::cache::{Cache, Engine, Inner, tier_named};
use crate::errors::{core, invalid, unavailable};
use crate::patience;
use numpy::PyArray1;
use pagoda_core::fence::{Completion, Failure};
use pagoda_core::ids::{GroupId, SequenceId, TicketId, Tier};
use pagoda_core::plan::{BlockCopy, Selection};
use pagoda_store::Waiter;
use pagoda_store::disk::Store;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
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

    /// The number of pages, without making a list of them.
    fn __len__(&self) -> usize {
        self.0.moves().len()
    }
}

/// A plan under way; see `pagoda.Ticket`.
#[pyclass(frozen, module = "pagoda._core")]
pub(crate) struct Ticket {
    pub(crate) id: TicketId,
    pub(crate) completion: Completion,
    /// What the engine of a device has to copy, and the same as addresses and bytes: `[from, to, bytes]` of each block.
    pub(crate) copies: Vec<BlockCopy>,
    pub(crate) transfers: Vec<u64>,
    /// The copies that disk threads have been given, by the number of the first.
    pub(crate) on_disk: Mutex<HashMap<usize, Completion>>,
    /// Whether no more copies are made, see `end_copies`.
    ends: AtomicBool,
    /// What the core has reported about it.
    failure: OnceLock<pagoda_core::Error>,
}

impl Ticket {
    fn new(id: TicketId, completion: Completion, copies: Vec<BlockCopy>, transfers: Vec<u64>) -> Self {
        let (on_disk, ends, failure) = (Mutex::default(), AtomicBool::new(false), OnceLock::new());
        Self { id, completion, copies, transfers, on_disk, ends, failure }
    }
}

#[pymethods]
impl Ticket {
    /// uint64: `[from, to, bytes]` of what the engine of a device has to copy; 0 stands for an address on disk.
    #[getter]
    fn transfers<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        PyArray1::from_slice(py, &self.transfers)
    }
}

/// Copies between the disk and host memory that a ticket needs, or its end.
#[pyclass(frozen, module = "pagoda._core")]
pub(crate) struct DiskCopies {
    pub(crate) completion: Completion,
    pub(crate) waiter: Waiter,
    /// Weak, so that closing the cache drops the store even while someone holds these copies.
    pub(crate) store: Weak<Store>,
    /// How long calls wait for the disk.
    pub(crate) limit: Duration,
}

/// Why copies that a device makes did not all arrive.
#[derive(FromPyObject)]
pub(crate) enum Why<'py> {
    /// For the reason that copies of the disk have.
    OnDisk(PyRef<'py, DiskCopies>),
    /// For a reason that the engine gives.
    Told(String),
}

#[pymethods]
impl DiskCopies {
    /// Whether they have ended.
    fn done(&self) -> bool {
        self.completion.copied().is_some()
    }

    /// Sleeps until they have ended. Python signals are handled.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| patience::until(Duration::MAX, |slice| self.waiter.wait(&self.completion, slice)))
            .map(drop)
    }

    /// Sleeps until they have ended; gives up when the disk has done nothing for `disk_timeout`. Python signals are handled.
    fn wait_patiently(&self, py: Python<'_>) -> PyResult<()> {
        let Self { completion, waiter, store, limit } = self;
        // Without a store all copies have ended.
        let Some(store) = store.upgrade() else { return Ok(()) };
        py.detach(|| patience::wait(waiter, completion, &store, *limit)).map_err(|stop| stop.raise(py))
    }

    /// How many have arrived, counted from the first; None until they have ended.
    #[getter]
    fn copied(&self) -> Option<u32> {
        self.completion.copied()
    }
}

impl Inner {
    /// Copies that threads of the disk make, as Python waits for them.
    fn disk_copies(&self, completion: Completion) -> DiskCopies {
        let store = self.store().map_or_else(Weak::new, Arc::downgrade);
        DiskCopies { completion, waiter: self.mover.waiter(), store, limit: self.disk_timeout() }
    }

    /// Tickets of plans under way, to wait for.
    fn tickets(&self, py: Python<'_>, moves: Vec<(TicketId, Completion)>) -> PyResult<Vec<Py<Ticket>>> {
        let ticket = |(id, completion)| match &self.engine {
            Engine::Device(device) => {
                // A ticket that is no longer listed has ended.
                let ticket = device.moving.iter().find(|moving| moving.get().id == id);
                ticket.map(|ticket| Ok(ticket.clone_ref(py)))
            }
            Engine::Cpu(_) => Some(Py::new(py, Ticket::new(id, completion, Vec::new(), Vec::new()))),
        };
        moves.into_iter().filter_map(ticket).collect()
    }
}

#[pymethods]
impl Cache {
    /// What moving pages would copy.
    #[pyo3(signature = (
        sequence, to, tokens, groups, *, keep=false, newest_first=false, pages_max=None, only_from=None, unshared=false,
        sealed=false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn plan(
        &self,
        py: Python<'_>,
        sequence: u64,
        to: &str,
        tokens: Option<(u64, u64)>,
        groups: Vec<u8>,
        keep: bool,
        newest_first: bool,
        pages_max: Option<Vec<usize>>,
        only_from: Option<&str>,
        unshared: bool,
        sealed: bool,
    ) -> PyResult<Plan> {
        let to = tier_named(py, "to", to)?;
        let from = only_from.map(|name| tier_named(py, "only_from", name)).transpose()?;
        let (id, inner) = (SequenceId::of_number(sequence), self.lock(py)?);
        let tokens = match tokens {
            Some((start, stop)) => start..stop,
            None => 0..inner.core.token_count(id).map_err(|error| core(py, &error))?,
        };
        let pages_max = pages_max.unwrap_or_else(|| vec![usize::MAX; groups.len()]);
        let selection = Selection {
            tokens,
            groups: groups.into_iter().map(GroupId).zip(pages_max).collect(),
            keep,
            newest_first,
            from,
            unshared,
            sealed,
        };
        inner.core.plan(id, to, &selection).map(Plan).map_err(|error| core(py, &error))
    }

    /// Starts a plan in the background. `moving` lists what a device has to copy, whatever becomes of the ticket.
    fn execute(&self, py: Python<'_>, plan: &Plan) -> PyResult<Py<Ticket>> {
        let mut inner = self.lock(py)?;
        inner.zero(py)?;
        let (id, completion, copies) = inner.core.execute(&plan.0).map_err(|error| core(py, &error))?;
        let is_empty = copies.is_empty();
        let mut transfers = Vec::new();
        match &inner.engine {
            Engine::Cpu(_) if !is_empty => {
                let transfers = copies.iter().map(|copy| inner.transfer(copy)).collect();
                // SAFETY: sources are Ready and pinned by the ticket, targets are Filling: nobody else touches either.
                unsafe { inner.mover.send(transfers, completion.clone()) };
            }
            Engine::Cpu(_) => {}
            Engine::Device(_) => transfers = inner.addresses(&copies),
        }
        let ticket = Py::new(py, Ticket::new(id, completion, copies, transfers))?;
        if let Engine::Device(device) = &mut inner.engine
            && !is_empty
        {
            device.moving.push(ticket.clone_ref(py));
        }
        inner.trim(py)?;
        Ok(ticket)
    }

    /// The tickets whose copies the engine of a device has to make, oldest first; each is listed until `end_copies`.
    fn moving(&self, py: Python<'_>) -> PyResult<Vec<Py<Ticket>>> {
        self.with(py, |inner| match &inner.engine {
            Engine::Device(device) => Ok(device.moving.iter().map(|ticket| ticket.clone_ref(py)).collect()),
            Engine::Cpu(_) => Ok(Vec::new()),
        })
    }

    /// Starts some of a ticket's copies, by number: those between the disk and host memory. That is the host tier or, if the
    /// other side is on a device, the stage at the given offset. A repeated call starts nothing more.
    fn start_on_disk(
        &self,
        py: Python<'_>,
        ticket: &Ticket,
        numbers: Vec<usize>,
        offsets: Vec<u64>,
    ) -> PyResult<DiskCopies> {
        self.with(py, |inner| {
            let mut started = ticket.on_disk.lock().unwrap_or_else(PoisonError::into_inner);
            let first = numbers.first().copied().unwrap_or_default();
            let completion = started.entry(first).or_insert_with(|| {
                let copies = numbers.into_iter().zip(offsets);
                let transfers = copies.map(|(number, at)| inner.staged(&ticket.copies[number], at)).collect();
                let completion = Completion::new();
                // SAFETY: sources are Ready and pinned by the ticket, targets are Filling; the caller keeps others out of its
                // stage.
                unsafe { inner.mover.send(transfers, completion.clone()) };
                completion
            });
            Ok(inner.disk_copies(completion.clone()))
        })
    }

    /// Notes that the first `copied` of a ticket's copies have arrived and that no other will, for the reason in `why`. Blocks
    /// on disk that others were written to give their space back first: the ticket ends with what is returned, and is listed
    /// until a call finds that it has ended. A repeated call starts nothing more.
    fn end_copies(
        &self,
        py: Python<'_>,
        ticket: &Ticket,
        copied: u32,
        why: Option<Why<'_>>,
    ) -> PyResult<DiskCopies> {
        self.with(py, |inner| {
            let failure = match why {
                Some(Why::OnDisk(copies)) => copies.completion.failure().cloned(),
                Some(Why::Told(reason)) => Some(Failure::Io(reason)),
                None => None,
            };
            if !ticket.ends.swap(true, Ordering::Relaxed) {
                let on_disk = |copy: &BlockCopy| (copy.to.0 == Tier::Disk).then_some((copy.group, copy.to.1));
                let written: Vec<_> = ticket.copies.iter().map(on_disk).collect();
                let (copied, completion) = (copied as usize, ticket.completion.clone());
                if written[copied..].iter().any(Option::is_some) {
                    inner.mover.end(copied, written, failure, completion);
                } else if let Some(failure) = failure {
                    completion.fail(copied as u32, failure);
                } else {
                    completion.finish(copied as u32);
                }
            }
            if let Engine::Device(device) = &mut inner.engine
                && ticket.completion.copied().is_some()
            {
                device.moving.retain(|moving| moving.get().id != ticket.id);
            }
            Ok(inner.disk_copies(ticket.completion.clone()))
        })
    }

    /// The plans under way that move pages of a sequence.
    fn under_way(&self, py: Python<'_>, sequence: u64) -> PyResult<Vec<Py<Ticket>>> {
        let mut inner = self.lock(py)?;
        let moves = inner.core.moves_of(SequenceId::of_number(sequence)).map_err(|error| core(py, &error))?;
        inner.tickets(py, moves)
    }

    /// The plans under way that move pages from one tier to another. keep: also those that leave a copy.
    #[pyo3(signature = (source, target, *, keep))]
    fn moves_between(
        &self,
        py: Python<'_>,
        source: &str,
        target: &str,
        keep: bool,
    ) -> PyResult<Vec<Py<Ticket>>> {
        let (source, target) = (tier_named(py, "source", source)?, tier_named(py, "target", target)?);
        let mut inner = self.lock(py)?;
        let moves = inner.core.moves_between(source, target, keep);
        inner.tickets(py, moves)
    }

    /// Whether a ticket's copies have arrived; raises if they failed.
    fn ticket_done(&self, py: Python<'_>, ticket: &Ticket) -> PyResult<bool> {
        let mut inner = self.lock(py)?;
        if ticket.completion.copied().is_none() {
            return Ok(false);
        }
        // A failure is reported once, so nothing that may raise comes before this.
        if let Some(error) = inner.core.ticket_failure(ticket.id) {
            let _ = ticket.failure.set(error);
        }
        if let Some(error) = ticket.failure.get() {
            return Err(core(py, error));
        }
        inner.trim(py)?;
        Ok(true)
    }

    /// Sleeps until a ticket's copies have arrived or `seconds` have passed; returns which. Python signals are handled.
    fn wait(&self, py: Python<'_>, ticket: &Ticket, seconds: f64) -> PyResult<bool> {
        let waiter = self.with(py, |inner| Ok(inner.mover.waiter()))?;
        let limit = Duration::try_from_secs_f64(seconds)
            .map_err(|_| invalid(py, "timeout", seconds, "from 0 to 1.8e19 seconds"))?;
        py.detach(|| patience::until(limit, |slice| waiter.wait(&ticket.completion, slice)))
    }

    /// Sleeps until a ticket's copies have arrived; gives up when the disk has done nothing for `disk_timeout`. Python
    /// signals are handled.
    fn wait_patiently(&self, py: Python<'_>, ticket: &Ticket) -> PyResult<()> {
        let inner = self.lock(py)?;
        let Some(store) = inner.store().cloned() else {
            return Err(unavailable(py, "disk: this cache has none"));
        };
        let (waiter, limit) = (inner.mover.waiter(), inner.disk_timeout());
        drop(inner);
        py.detach(|| patience::wait(&waiter, &ticket.completion, &store, limit))
            .map_err(|stop| stop.raise(py))
    }
}
