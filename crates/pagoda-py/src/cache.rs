//! `pagoda._core.Cache`: the bookkeeping, the memory and the CPU kernels behind one lock.

use crate::device::{self, AnglePlaces, Device, DeviceArguments, GroupPlaces, Room, Upload, WorkPlaces};
use crate::disk::{self, Disk, DiskArguments};
use crate::errors::{self, core, invalid, invalid_because, released, unavailable};
use crate::fork;
use crate::handle::{Abandoned, Handle};
use crate::kernels::{Cpu, require_rows, require_sinks};
use crate::layers::{LayerArguments, Placed, PlacedLayer, place};
use crate::moves::{Late, Link, zero_by};
use crate::passes::{HostPages, StreamArguments, StreamedGroup};
use crate::patience::{self, Apart, Stop};
use crate::reads::Traffic;
use crate::sessions::Sessions;
use crate::step::StepState;
use crate::tables::{self, Tables};
use crate::ticket::{DiskCopies, Plan, Ticket};
use numpy::{PyArray1, PyArray2, PyReadonlyArray1, PyReadwriteArray1, PyUntypedArray};
use pagoda_core::Error;
use pagoda_core::cache::TierMemory;
use pagoda_core::fence::{Completion, Failure};
use pagoda_core::ids::{Epoch, GroupId, SequenceId, Tier};
use pagoda_core::plan::Selection;
use pagoda_cpu::Arenas;
use pagoda_store::disk::Store;
use pagoda_store::{Mover, Slab};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyDict;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The tiers that are memory, in the order of their slabs.
pub(crate) const MEMORY_TIERS: [Tier; 2] = [Tier::Device, Tier::Host];

/// Bookkeeping, memory and CPU kernels of one cache. Its methods may be called from any thread; they take turns.
#[pyclass(frozen, module = "pagoda._core")]
pub(crate) struct Cache {
    inner: Mutex<Option<ManuallyDrop<Inner>>>,
    abandoned: Abandoned,
    /// The process that made it: threads and memory do not survive a fork.
    process: u64,
}

pub(crate) struct Inner {
    pub(crate) core: pagoda_core::Cache,
    pub(crate) layers: Vec<PlacedLayer>,
    pub(crate) block_bytes: Vec<u64>,
    pub(crate) arenas: Arenas,
    pub(crate) mover: Mover,
    pub(crate) disk: Option<Box<Disk>>,
    pub(crate) engine: Engine,
    pub(crate) step: StepState,
    pub(crate) tables: Tables,
    pub(crate) sessions: Sessions,
    pub(crate) late: Vec<Late>,
    /// The last step that was closed, the last one whose kernels have ended, and the last one that has retired.
    pub(crate) closed: Epoch,
    pub(crate) ended: Epoch,
    pub(crate) retired: Epoch,
}

/// Who runs kernels.
pub(crate) enum Engine {
    /// This module.
    Cpu(Cpu),
    /// Whoever drives a device: it is told what to copy and what changed, and tells when a copy or a step has ended.
    Device(Device),
}

impl Cache {
    pub(crate) fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Option<ManuallyDrop<Inner>>>> {
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
        Ok(guard)
    }

    /// Refuses calls of signal handlers that run while this thread waits for the disk: they would wait for themselves.
    fn require_elsewhere(&self, py: Python<'_>) -> PyResult<()> {
        if WAITING.get() == std::ptr::from_ref(self).addr() {
            return Err(invalid_because(py, "cache: in use by the call that this signal has interrupted"));
        }
        Ok(())
    }

    /// Releases sequences whose handles are gone, unless a step is open that may have them.
    fn release_abandoned(&self, inner: &mut Inner) {
        if inner.core.step_is_open() {
            return;
        }
        let abandoned = self.abandoned.take();
        for &sequence in &abandoned {
            // Ctrl-C may have come right after it was released.
            let _ = inner.core.release(sequence_id(sequence));
        }
        if !abandoned.is_empty() {
            inner.trim();
        }
    }

    /// Runs a call of the core.
    pub(crate) fn with<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Inner) -> pagoda_core::Result<T>,
    ) -> PyResult<T> {
        let mut guard = self.lock(py)?;
        call(guard.as_mut().expect("locked open")).map_err(|error| core(py, &error))
    }

    /// Tells a device about the open step.
    fn with_upload<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Upload, &pagoda_core::Cache, &StepState, &[PlacedLayer]) -> T,
    ) -> PyResult<T> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        let Inner { core, step, layers, engine, .. } = &mut **inner;
        let Engine::Device(Device { upload, .. }) = engine else { return Err(no_device(py)) };
        Ok(call(upload, core, step, layers))
    }
}

thread_local! {
    /// The address of the cache in a call of which this thread is that may wait for the disk.
    static WAITING: Cell<usize> = const { Cell::new(0) };
}

/// While it lives, the thread is in a call that may wait for the disk.
struct Waiting;

impl Waiting {
    fn of(cache: &Cache) -> Self {
        WAITING.set(std::ptr::from_ref(cache).addr());
        Self
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.set(0);
    }
}

/// A sequence handle as Python holds it.
pub(crate) fn sequence_id(handle: u64) -> SequenceId {
    SequenceId { index: handle as u32, generation: (handle >> 32) as u32 }
}

pub(crate) fn handle(id: SequenceId) -> u64 {
    u64::from(id.generation) << 32 | u64::from(id.index)
}

pub(crate) fn tier_named(py: Python<'_>, argument: &str, name: &str) -> PyResult<Tier> {
    let tier = Tier::ALL.into_iter().find(|tier| tier.to_string() == name);
    tier.ok_or_else(|| invalid(py, argument, format_args!("{name:?}"), "\"device\", \"host\" or \"disk\""))
}

impl Inner {
    /// The disk tier.
    pub(crate) fn store(&self) -> Option<&Arc<Store>> {
        self.disk.as_ref().map(|disk| &disk.store)
    }

    /// Gives everything back when nothing is under way any more. Where something is of the disk a thread does, and goes on alone
    /// when the drive does nothing for too long: what is read into must stay until then, and others must not open the directory.
    fn end(self, heeds_signals: bool) -> Result<(), Stop> {
        let (limit, is_idle) =
            (self.disk_timeout(), self.mover.waiter().is_idle() && self.sessions.answered());
        let Some(store) = self.store().filter(|_| !is_idle).cloned() else { return Ok(()) };
        // Where no thread can be had `self` is dropped here.
        Apart::begin(move || drop(self)).map_or(Ok(()), |end| end.finish(&store, limit, heeds_signals))
    }

    /// What is told to a device.
    fn upload(&mut self, py: Python<'_>) -> PyResult<&mut Upload> {
        match &mut self.engine {
            Engine::Device(device) => Ok(&mut device.upload),
            Engine::Cpu(_) => Err(no_device(py)),
        }
    }
}

fn no_device(py: Python<'_>) -> PyErr {
    unavailable(py, "device: this cache is on the CPU")
}

#[pymethods]
impl Cache {
    #[new]
    #[pyo3(signature = (
        layers, *, page_size, memory, threads, deterministic, checked, isa, zero_on_free=false, device=None, disk=None
    ))]
    fn new(
        py: Python<'_>,
        layers: Vec<LayerArguments>,
        page_size: u32,
        memory: [(u64, u64); 2],
        threads: usize,
        deterministic: bool,
        checked: bool,
        isa: Option<&str>,
        zero_on_free: bool,
        device: Option<DeviceArguments>,
        disk: Option<DiskArguments>,
    ) -> PyResult<Self> {
        let Placed { groups, runs, layers } = place(py, &layers, page_size)?;
        let timeout = disk.as_ref().map_or(Duration::ZERO, |disk| disk.timeout);
        let opened = disk.map(|disk| disk::open(py, &disk, &runs)).transpose()?;
        let (store, recovered) = opened.map(|(store, recovered)| (Arc::new(store), recovered)).unzip();
        store.iter().for_each(fork::opened);
        let absent = TierMemory { bytes: 0, extent_bytes: u64::MAX };
        let on_disk = store.as_ref().map_or(absent, |store| store.geometry().arena());
        let [fast, host] = memory.map(|(bytes, extent_bytes)| TierMemory { bytes, extent_bytes });
        let mut core =
            pagoda_core::Cache::new(&groups, [fast, host, on_disk]).map_err(|error| core(py, &error))?;
        if zero_on_free {
            core.zero_on_free();
        }
        let sessions = match (&store, recovered) {
            (Some(store), Some(recovered)) => {
                Sessions::open(&mut core, store, recovered).map_err(|error| errors::disk(py, &error))?
            }
            _ => Sessions::default(),
        };
        if let (Some(store), true) = (&store, zero_on_free) {
            store.zero_on_free().map_err(|error| errors::disk(py, &error))?;
        }
        let mut base = [std::ptr::null_mut(); Tier::COUNT];
        let mut ring = None;
        let (engine, slabs) = if let Some(device) = device {
            MEMORY_TIERS.iter().for_each(|tier| base[tier.index()] = device.bases[tier.index()] as *mut u8);
            let (address, bytes, slot) = device.ring;
            // SAFETY: the owners keep the memory, and `Inner` drops its mover before them.
            ring = Some((unsafe { Slab::lent(address as usize, bytes as usize) }, slot));
            let (device, slabs) = Device::new(device, memory[1].0);
            (Engine::Device(device), slabs)
        } else {
            let cpu = Cpu::new(py, memory.map(|(bytes, _)| bytes), threads, deterministic, isa, checked)?;
            MEMORY_TIERS.iter().for_each(|tier| base[tier.index()] = cpu.slabs[tier.index()].base());
            let slabs = cpu.slabs.clone();
            (Engine::Cpu(cpu), slabs)
        };
        let mover = Mover::new(slabs, store.as_ref()).map_err(|error| errors::disk(py, &error))?;
        let disk =
            store.map(|store| Disk::new(py, store, ring, page_size, timeout).map(Box::new)).transpose()?;
        let inner = Inner {
            core,
            block_bytes: groups.iter().map(|group| group.block_bytes).collect(),
            layers,
            arenas: Arenas::new(base[Tier::Device.index()], base[Tier::Host.index()]),
            mover,
            disk,
            engine,
            step: StepState::default(),
            tables: Tables::default(),
            sessions,
            late: Vec::new(),
            closed: Epoch::default(),
            ended: Epoch::default(),
            retired: Epoch::default(),
        };
        let inner = Mutex::new(Some(ManuallyDrop::new(inner)));
        Ok(Self { inner, abandoned: Abandoned::default(), process: fork::process() })
    }

    /// A new, empty sequence.
    fn create(&self, py: Python<'_>) -> PyResult<Handle> {
        let id = self.with(py, |inner| inner.core.create())?;
        Ok(Handle::new(handle(id), &self.abandoned))
    }

    /// A sequence over the same pages.
    fn fork(&self, py: Python<'_>, sequence: u64) -> PyResult<Handle> {
        let id = self.with(py, |inner| inner.core.fork(sequence_id(sequence)))?;
        Ok(Handle::new(handle(id), &self.abandoned))
    }

    /// Ends a sequence.
    fn release(&self, py: Python<'_>, sequence: u64) -> PyResult<()> {
        self.with(py, |inner| {
            inner.core.release(sequence_id(sequence))?;
            inner.trim();
            Ok(())
        })
    }

    /// Takes tokens back from the end.
    fn truncate(&self, py: Python<'_>, sequence: u64, length: u64) -> PyResult<()> {
        self.with(py, |inner| {
            inner.core.truncate(sequence_id(sequence), length)?;
            inner.trim();
            Ok(())
        })
    }

    /// Takes tokens out of the middle.
    fn drop(&self, py: Python<'_>, sequence: u64, start: u64, stop: u64) -> PyResult<()> {
        self.with(py, |inner| {
            inner.core.drop_tokens(sequence_id(sequence), start..stop)?;
            inner.trim();
            Ok(())
        })
    }

    /// Tokens in a sequence.
    fn length(&self, py: Python<'_>, sequence: u64) -> PyResult<u64> {
        self.with(py, |inner| inner.core.token_count(sequence_id(sequence)))
    }

    /// The least length to truncate to, besides 0.
    fn rewind_limit(&self, py: Python<'_>, sequence: u64) -> PyResult<u64> {
        self.with(py, |inner| inner.core.rewind_limit(sequence_id(sequence)))
    }

    /// Opens a step; shared open pages are copied before it returns. link: what copies between a device and memory of the host.
    #[pyo3(signature = (sequences, new_tokens, link=None))]
    fn reserve(
        &self,
        py: Python<'_>,
        sequences: PyReadonlyArray1<'_, u64>,
        new_tokens: PyReadonlyArray1<'_, i64>,
        link: Link<'_, '_>,
    ) -> PyResult<()> {
        let (sequences, new_tokens) = (sequences.as_slice()?, new_tokens.as_slice()?);
        if sequences.len() != new_tokens.len() {
            let limit = format!("one entry for each of {} sequences", sequences.len());
            return Err(invalid(py, "new_tokens", format_args!("{} entries", new_tokens.len()), limit));
        }
        let counts = new_tokens.iter().map(|&count| u32::try_from(count).map_err(|_| count));
        let mut guard = self.lock(py)?;
        let _waiting = Waiting::of(self);
        let inner = guard.as_mut().expect("locked open");
        self.release_abandoned(inner);
        if let Some(error) = inner.core.take_failure() {
            return Err(core(py, &error));
        }
        let mut batch = Vec::with_capacity(sequences.len());
        for (&sequence, count) in sequences.iter().zip(counts) {
            let count = count.map_err(|count| invalid(py, "new_tokens", count, "from 0 to 4294967295"))?;
            batch.push((sequence_id(sequence), count));
        }
        inner.zero();
        let mut reserved = inner.core.reserve(&batch);
        if matches!(reserved, Err(Error::OutOfBlocks { draining: 1.., .. })) && inner.finish_reads(py)? {
            reserved = inner.core.reserve(&batch);
        }
        reserved.map_err(|error| core(py, &error))?;
        if let Err(error) = inner.copy_shared(py, link) {
            let epoch = inner.core.rollback().map_err(|error| core(py, &error))?;
            inner.end_step(epoch).map_err(|error| core(py, &error))?;
            return Err(error);
        }
        let Inner { core, layers, step, block_bytes, engine, disk, .. } = &mut **inner;
        step.enter(core, block_bytes.len(), layers);
        if let Some(disk) = disk {
            disk.reads.traffic = Traffic::default();
            if let Engine::Cpu(cpu) = engine {
                cpu.stream.enter(core, step, layers, &mut disk.reads);
            }
        }
        Ok(())
    }

    /// Pages of the open step's sequences that are on disk.
    fn pages_on_disk(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |inner| Ok(inner.core.step_on_disk().0))
    }

    /// Writes K and V of the new tokens of one layer; no V where it is part of K, no K where it is derived from V.
    #[pyo3(signature = (layer, k=None, v=None, dtype=None))]
    fn append(
        &self,
        py: Python<'_>,
        layer: usize,
        k: Option<&Bound<'_, PyUntypedArray>>,
        v: Option<&Bound<'_, PyUntypedArray>>,
        dtype: Option<&str>,
    ) -> PyResult<()> {
        self.lock(py)?.as_mut().expect("locked open").append(py, layer, k, v, dtype)
    }

    /// Attention of the new tokens of one layer, into `out` and `lse`.
    #[pyo3(signature = (layer, q, out, lse=None, dtype=None, sink_logits=None))]
    fn attend(
        &self,
        py: Python<'_>,
        layer: usize,
        q: &Bound<'_, PyUntypedArray>,
        out: &Bound<'_, PyUntypedArray>,
        lse: Option<&Bound<'_, PyArray2<f32>>>,
        dtype: Option<&str>,
        sink_logits: Option<&Bound<'_, PyUntypedArray>>,
    ) -> PyResult<()> {
        let mut guard = self.lock(py)?;
        let _waiting = Waiting::of(self);
        guard.as_mut().expect("locked open").attend(py, layer, q, out, lse, dtype, sink_logits)
    }

    /// Of the step that was entered last: bytes of the rows that were attended to, bytes read from disk for that, and seconds
    /// in which attention only waited for these.
    fn attended(&self, py: Python<'_>) -> PyResult<(u64, u64, f64)> {
        self.with(py, |inner| {
            let traffic = inner.disk.as_ref().map(|disk| disk.reads.traffic).unwrap_or_default();
            Ok((inner.step.attended, traffic.bytes, traffic.waited.as_secs_f64()))
        })
    }

    /// Closes the step; of each sequence's new tokens the first `accepted` stay.
    #[pyo3(signature = (accepted=None))]
    fn commit(&self, py: Python<'_>, accepted: Option<PyReadonlyArray1<'_, i64>>) -> PyResult<()> {
        let accepted = match &accepted {
            None => None,
            Some(counts) => {
                let counts = counts.as_slice()?.iter().map(|&count| {
                    u32::try_from(count).map_err(|_| invalid(py, "accepted", count, "from 0 to 4294967295"))
                });
                Some(counts.collect::<PyResult<Vec<u32>>>()?)
            }
        };
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        if let Some(layer) = inner.step.written.iter().position(|&written| !written) {
            return Err(invalid(
                py,
                "layer",
                layer,
                "appended to before commit, or written through step.table(layer)",
            ));
        }
        let epoch = inner.core.commit(accepted.as_deref()).map_err(|error| core(py, &error))?;
        inner.end_step(epoch).map_err(|error| core(py, &error))
    }

    /// Closes the step as if it had never been opened.
    fn rollback(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |inner| {
            let epoch = inner.core.rollback()?;
            inner.end_step(epoch)
        })
    }

    /// int64 `[sum(new)]`: the position of every new token.
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        let mut positions = Vec::with_capacity(inner.step.new_tokens());
        for (sequence, new_tokens) in inner.core.step_batch() {
            let start = inner.core.next_position(sequence).map_err(|error| core(py, &error))? as i64;
            positions.extend(start..start + i64::from(new_tokens));
        }
        Ok(PyArray1::from_vec(py, positions))
    }

    /// int32 `[B + 1]`: where each sequence's new tokens begin.
    fn cu_seqlens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        Ok(PyArray1::from_iter(py, inner.step.bounds().iter().map(|&bound| bound as i32)))
    }

    /// The tables of one layer as arrays; from then on writing the layer's rows is the caller's.
    fn table<'py>(&self, py: Python<'py>, layer: usize) -> PyResult<Bound<'py, PyDict>> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        inner.layer(py, layer)?;
        inner.step.written[layer] = true;
        tables::export(py, inner, layer)
    }

    /// `(kv_indptr, kv_indices, kv_last_page_len)` of one layer, int32, where they can be expressed.
    fn csr_table<'py>(&self, py: Python<'py>, layer: usize) -> PyResult<tables::Csr<'py>> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        inner.layer(py, layer)?;
        tables::csr(py, inner, layer)
    }

    /// What moving pages would copy.
    #[pyo3(signature = (
        sequence, to, tokens, groups, *, keep=false, newest_first=false, pages_max=None, only_from=None, unshared=false
    ))]
    fn plan(
        &self,
        py: Python<'_>,
        sequence: u64,
        to: &str,
        tokens: (u64, u64),
        groups: Vec<u8>,
        keep: bool,
        newest_first: bool,
        pages_max: Option<usize>,
        only_from: Option<&str>,
        unshared: bool,
    ) -> PyResult<Plan> {
        let to = tier_named(py, "to", to)?;
        let from = only_from.map(|name| tier_named(py, "only_from", name)).transpose()?;
        let selection = Selection {
            tokens: tokens.0..tokens.1,
            groups: groups.into_iter().map(GroupId).collect(),
            keep,
            newest_first,
            pages_max: pages_max.unwrap_or(usize::MAX),
            from,
            unshared,
        };
        self.with(py, |inner| inner.core.plan(sequence_id(sequence), to, &selection)).map(Plan)
    }

    /// Starts a plan in the background. What a device has to copy is known from then on, whatever becomes of the ticket.
    fn execute(&self, py: Python<'_>, plan: &Plan) -> PyResult<Py<Ticket>> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.zero();
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
        let ticket = Py::new(py, Ticket { id, completion, copies, transfers, on_disk: Mutex::default() })?;
        if let Engine::Device(device) = &mut inner.engine
            && !is_empty
        {
            device.moving.push(ticket.clone_ref(py));
        }
        inner.trim();
        Ok(ticket)
    }

    /// The tickets whose copies a device has to make, oldest first, until `end_copies`.
    fn moving(&self, py: Python<'_>) -> PyResult<Vec<Py<Ticket>>> {
        self.with(py, |inner| match &inner.engine {
            Engine::Device(device) => Ok(device.moving.iter().map(|ticket| ticket.clone_ref(py)).collect()),
            Engine::Cpu(_) => Ok(Vec::new()),
        })
    }

    /// Starts some of a ticket's copies, by number: those between the disk and memory of the host, which is the host tier or, at
    /// the given offset, the stage where the other side is on a device. Asking again starts nothing more.
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
            let (completion, waiter) = (completion.clone(), inner.mover.waiter());
            let store = Arc::downgrade(inner.store().expect("nothing is on disk without one"));
            Ok(DiskCopies { completion, waiter, store, limit: inner.disk_timeout() })
        })
    }

    /// The first `copied` of a ticket's copies have arrived, and no other will, for the reason that `why` has. Twice is no error.
    fn end_copies(
        &self,
        py: Python<'_>,
        ticket: &Ticket,
        copied: u32,
        why: Option<&DiskCopies>,
    ) -> PyResult<()> {
        self.with(py, |inner| {
            if let Engine::Device(device) = &mut inner.engine {
                device.moving.retain(|moving| moving.get().id != ticket.id);
            }
            if ticket.completion.copied().is_some() {
                return Ok(());
            }
            if let Some(store) = inner.store() {
                for copy in ticket.copies[copied as usize..].iter().filter(|copy| copy.to.0 == Tier::Disk) {
                    // What counts as not written takes no space; a refusal leaves it where it is, which is no error.
                    let _ = store.give_back(copy.group, &[copy.to.1]);
                }
            }
            match why.and_then(|why| why.completion.failure()) {
                Some(failure) => ticket.completion.fail(copied, failure.clone()),
                None => ticket.completion.finish(copied),
            }
            Ok(())
        })
    }

    /// Frees blocks of a tier that can be spared; returns how many.
    fn drop_copies(&self, py: Python<'_>, tier: &str, group: u8, pages_max: usize) -> PyResult<usize> {
        let tier = tier_named(py, "tier", tier)?;
        self.with(py, |inner| {
            let dropped = inner.core.drop_copies(tier, GroupId(group), pages_max);
            inner.trim();
            Ok(dropped)
        })
    }

    /// Whether a ticket's copies have arrived; raises if they failed.
    fn ticket_done(&self, py: Python<'_>, ticket: &Ticket) -> PyResult<bool> {
        if ticket.completion.copied().is_none() {
            return Ok(false);
        }
        self.with(py, |inner| {
            let failure = inner.core.ticket_failure(ticket.id);
            inner.trim();
            failure.map_or(Ok(true), Err)
        })
    }

    /// Sleeps until a ticket's copies have arrived, or `seconds` have passed; says which. Python signals are seen.
    fn wait(&self, py: Python<'_>, ticket: &Ticket, seconds: f64) -> PyResult<bool> {
        let waiter = self.with(py, |inner| Ok(inner.mover.waiter()))?;
        let limit = Duration::try_from_secs_f64(seconds)
            .map_err(|_| invalid(py, "timeout", seconds, "from 0 to 1.8e19 seconds"))?;
        py.detach(|| patience::until(limit, |slice| waiter.wait(&ticket.completion, slice)))
    }

    /// Sleeps until a ticket's copies have arrived, as long as the disk does anything, and `disk_timeout` more. Python signals are
    /// seen.
    fn wait_patiently(&self, py: Python<'_>, ticket: &Ticket) -> PyResult<()> {
        let guard = self.lock(py)?;
        let inner = guard.as_ref().expect("locked open");
        let Some(store) = inner.store().cloned() else {
            return Err(unavailable(py, "disk: this cache has none"));
        };
        let (waiter, limit) = (inner.mover.waiter(), inner.disk_timeout());
        drop(guard);
        py.detach(|| patience::wait(&waiter, &ticket.completion, &store, limit))
            .map_err(|stop| stop.raise(py))
    }

    /// Blocks of each group that a tier could hand out now.
    fn free_blocks(&self, py: Python<'_>, tier: &str) -> PyResult<Vec<u64>> {
        let tier = tier_named(py, "tier", tier)?;
        self.with(py, |inner| {
            inner.zero();
            Ok(inner.core.free_blocks(tier).collect())
        })
    }

    /// Sequences that are not in a step, the one that rested longest first.
    fn by_recency(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.with(py, |inner| {
            let late: Vec<_> = inner.late.iter().filter_map(|late| late.held.sequence).collect();
            let all = inner.core.by_recency().into_iter();
            Ok(all.filter(|id| !late.contains(id)).map(handle).collect())
        })
    }

    /// Block counts by tier and group, and counters.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.zero();
        let stats = PyDict::new(py);
        let blocks = PyDict::new(py);
        let tiers = if inner.disk.is_some() { &Tier::ALL[..] } else { &MEMORY_TIERS[..] };
        for &tier in tiers {
            let counts = (0..inner.block_bytes.len() as u8).map(|group| {
                let counts = inner.core.block_counts(tier, GroupId(group));
                (counts.free, counts.used, counts.draining)
            });
            blocks.set_item(tier.to_string(), counts.collect::<Vec<_>>())?;
        }
        stats.set_item("blocks", blocks)?;
        stats.set_item("block_bytes", inner.block_bytes.clone())?;
        stats.set_item("shared_pages", inner.core.shared_pages())?;
        stats.set_item("dead_rows", inner.core.dead_rows())?;
        let moved = PyDict::new(py);
        for (from, to) in tiers.iter().flat_map(|from| tiers.iter().map(move |to| (from, to))) {
            if from != to {
                let bytes = inner.core.moved_bytes()[from.index()][to.index()];
                moved.set_item((from.to_string(), to.to_string()), bytes)?;
            }
        }
        stats.set_item("moved_bytes", moved)?;
        stats.set_item("disk", inner.disk.as_ref().map(|disk| disk.report(py)).transpose()?)?;
        Ok(stats)
    }

    /// Refuses unless sequences can be kept.
    fn check_key(&self, py: Python<'_>, key: &str) -> PyResult<()> {
        self.lock(py)?.as_ref().expect("locked open").named_store(py, key).map(drop)
    }

    /// Keeps a sequence on disk under a key.
    #[pyo3(signature = (sequence, key, meta, link=None))]
    fn save(
        &self,
        py: Python<'_>,
        sequence: u64,
        key: &str,
        meta: &[u8],
        link: Link<'_, '_>,
    ) -> PyResult<()> {
        let mut guard = self.lock(py)?;
        let _waiting = Waiting::of(self);
        guard.as_mut().expect("locked open").save(py, sequence, key, meta, link)
    }

    /// A sequence with what is kept under a key; None if nothing is.
    #[pyo3(signature = (key, link=None))]
    fn load(&self, py: Python<'_>, key: &str, link: Link<'_, '_>) -> PyResult<Option<Handle>> {
        let mut guard = self.lock(py)?;
        let _waiting = Waiting::of(self);
        let inner = guard.as_mut().expect("locked open");
        self.release_abandoned(inner);
        let id = inner.load(py, key, link)?;
        Ok(id.map(|id| Handle::new(id, &self.abandoned)))
    }

    /// Lets go of what is kept under a key; says whether there was something.
    fn forget(&self, py: Python<'_>, key: &str) -> PyResult<bool> {
        let mut guard = self.lock(py)?;
        let _waiting = Waiting::of(self);
        guard.as_mut().expect("locked open").forget(py, key)
    }

    /// What is kept: keys, and what the caller added.
    fn saved(&self, py: Python<'_>) -> PyResult<BTreeMap<String, Vec<u8>>> {
        self.with(py, |inner| {
            let kept = inner.sessions.kept.iter();
            Ok(kept.map(|(key, (_, meta))| (key.clone(), meta.clone())).collect())
        })
    }

    /// Keys that were lost when the cache was opened, and why.
    fn lost(&self, py: Python<'_>) -> PyResult<Vec<(String, String)>> {
        self.with(py, |inner| Ok(inner.sessions.lost.clone()))
    }

    /// Checks the whole bookkeeping.
    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |inner| inner.core.audit())
    }

    /// Ends the cache: waits for copies under way, then gives everything back. Closing twice is no error. When the drive does
    /// nothing for `disk_timeout` the cache is closed all the same, and everything goes back when it has answered.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.process != fork::process() {
            return Ok(());
        }
        self.require_elsewhere(py)?;
        let inner = self.inner.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner).take();
        let Some(inner) = inner else { return Ok(()) };
        py.detach(|| ManuallyDrop::into_inner(inner).end(true)).map_err(|stop| match stop {
            Stop::Idle(limit) => {
                let seconds = limit.as_secs_f64();
                let reason = format!(
                    "disk_timeout = {seconds}: the drive did nothing for longer; the cache is closed, and its memory and \
                     files are given back when the drive has answered"
                );
                errors::failure(py, Some(&Failure::Io(reason)))
            }
            other => other.raise(py),
        })
    }

    /// The instruction set of the CPU kernels; None where a device has the kernels.
    #[getter]
    fn isa(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, |inner| {
            Ok(match &inner.engine {
                Engine::Cpu(cpu) => Some(cpu.backend.isa().to_string()),
                Engine::Device(_) => None,
            })
        })
    }

    /// CPU workers, the caller's thread included; 0 where a device has the kernels.
    #[getter]
    fn threads(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |inner| {
            Ok(match &inner.engine {
                Engine::Cpu(cpu) => cpu.backend.threads(),
                Engine::Device(_) => 0,
            })
        })
    }

    /// Where the tables of steps lie on the device from now on; they hold nothing yet.
    fn place_tables(
        &self,
        py: Python<'_>,
        groups: Vec<GroupPlaces>,
        works: Vec<WorkPlaces>,
        angles: Vec<AnglePlaces>,
    ) -> PyResult<()> {
        let mut guard = self.lock(py)?;
        guard.as_mut().expect("locked open").upload(py)?.place(groups, works, angles);
        Ok(())
    }

    /// The room that the tables of the open step need.
    fn table_room(&self, py: Python<'_>) -> PyResult<Room> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        Ok(device::room(&inner.core, &inner.step, inner.block_bytes.len()))
    }

    /// Writes down what the open step changes on the device; returns how many words that is, and how many queries hold
    /// pages in common with others.
    fn stage(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        self.with_upload(py, |upload, core, step, layers| upload.fill(core, step, layers))
    }

    /// What of the host tier attention over a layer of each group goes over, in the step that was staged.
    fn host_pages(&self, py: Python<'_>) -> PyResult<Vec<HostPages>> {
        self.with_upload(py, |upload, core, _, _| upload.host_pages(core))
    }

    /// Pages of each group that attention of the open step may read from disk.
    fn on_disk(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.with_upload(py, |_, core, step, layers| {
            let groups = layers.iter().map(|placed| placed.group.index() + 1).max().unwrap_or(0);
            let first = |group| layers.iter().find(|placed| placed.group.index() == group);
            let pages = |group| first(group).map_or(0, |placed| device::pages_on_disk(core, step, placed));
            (0..groups).map(pages).collect()
        })
    }

    /// Takes the layer of pages on disk that comes at place `at` of what is to be read for the step: a slot, the address of the first
    /// page and the bytes from one to the next. None if its read has not ended yet; with `wait` if all slots are taken.
    fn take_read(&self, py: Python<'_>, at: usize, wait: bool) -> PyResult<Option<(usize, usize, u64)>> {
        let mut guard = self.lock(py)?;
        let _waiting = Waiting::of(self);
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        let Inner { mover, disk, engine, closed, .. } = &mut **inner;
        let (Engine::Device(device), Some(disk)) = (engine, disk) else { return Err(no_device(py)) };
        let reads = &mut disk.reads;
        // SAFETY: pages do not move or change while the step is open. Steps retire after the reads that they have begun.
        let taken = unsafe {
            if wait {
                py.detach(|| reads.take(mover, at, *closed)).map_err(|stop| stop.raise(py))?
            } else {
                reads.take_if_read(mover, at, *closed)
            }
        };
        Ok(taken.map(|filled| {
            let found = (filled.slot(), filled.address.addr(), filled.stride);
            device.lent.push(filled);
            found
        }))
    }

    /// Gives a slot back, or all, whose pages have been copied.
    fn give_back(&self, py: Python<'_>, slot: Option<usize>) -> PyResult<()> {
        self.with(py, |inner| {
            if let (Engine::Device(device), Some(disk)) = (&mut inner.engine, &mut inner.disk) {
                device
                    .lent
                    .extract_if(.., |filled| slot.is_none_or(|slot| filled.slot() == slot))
                    .for_each(|filled| disk.reads.release(filled));
            }
            Ok(())
        })
    }

    /// Plans how groups are streamed in the step that was staged; returns how many words there are now besides those of `stage`, a
    /// number that stays the same as long as blocks hold the same, and the groups.
    fn stream<'py>(
        &self,
        py: Python<'py>,
        groups: Vec<StreamArguments>,
    ) -> PyResult<(usize, u64, Vec<StreamedGroup<'py>>)> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        let Inner { core, step, layers, disk, engine, .. } = &mut **inner;
        let Engine::Device(Device { upload, .. }) = engine else { return Err(no_device(py)) };
        let streamed = upload.stream(py, core, step, layers, &groups);
        if let Some(disk) = disk {
            disk.reads.what = upload.to_read(layers);
        }
        Ok(streamed)
    }

    /// Copies what `stage` and `stream` wrote to `words`. streams: where the tables of what is streamed go.
    fn staged(&self, py: Python<'_>, mut words: PyReadwriteArray1<'_, u32>, streams: u64) -> PyResult<()> {
        let words = words.as_slice_mut()?;
        self.with_upload(py, |upload, _, _, _| upload.take(streams, words))
    }

    /// `[from, to, bytes]` of the copies that come before the open step's first append, but for those from disk, which are made.
    fn step_transfers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let transfers = self.with(py, |inner| {
            let copies = inner.core.step_copies().iter().copied();
            Ok(inner.addresses(&copies.filter(|copy| copy.from.0 != Tier::Disk).collect::<Vec<_>>()))
        })?;
        Ok(PyArray1::from_vec(py, transfers))
    }

    /// Refuses unless the open step may append to the layer now.
    fn check_append(&self, py: Python<'_>, layer: usize, has_values: bool) -> PyResult<()> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        require_rows(py, &inner.owning_layer(py, layer)?.layer, true, has_values)?;
        inner.require_unwritten(py, layer)
    }

    /// The layer's new rows are on their way.
    fn appended(&self, py: Python<'_>, layer: usize) -> PyResult<()> {
        let mut guard = self.lock(py)?;
        guard.as_mut().expect("locked open").step.written[layer] = true;
        Ok(())
    }

    /// Refuses unless the open step may attend over the layer now.
    fn check_attend(&self, py: Python<'_>, layer: usize, has_sinks: bool) -> PyResult<()> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        require_sinks(py, inner.layer(py, layer)?, has_sinks)?;
        inner.require_written(py, layer)
    }

    /// The epoch of the step that ended last: `retire` it when its kernels have ended.
    fn ended_epoch(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.with(py, |inner| {
            let Engine::Device(device) = &mut inner.engine else { return Ok(None) };
            Ok(device.epoch.take().map(|epoch| epoch.0))
        })
    }

    /// `[address, bytes]` of freed blocks that the device has to zero before it does anything else with them. Those on disk are
    /// zeroed.
    fn zero<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.upload(py)?;
        let Inner { core, arenas, block_bytes, disk, .. } = &mut **inner;
        let mut ranges = Vec::new();
        zero_by(core, disk, block_bytes, |tier, range| {
            ranges.extend([arenas.base[tier.index()] as u64 + range.start, range.end - range.start]);
        });
        Ok(PyArray1::from_vec(py, ranges))
    }

    /// The kernels of a step, and of all before it, have ended.
    fn retire(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        self.with(py, |inner| inner.retire(Epoch(epoch)))
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // In a forked child the threads do not exist and the memory is the parent's: leave both alone.
        if self.process == fork::process()
            && let Some(inner) = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take()
        {
            // There is nobody to tell.
            let _ = ManuallyDrop::into_inner(inner).end(false);
        }
    }
}
