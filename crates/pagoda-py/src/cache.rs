//! `pagoda._core.Cache`: bookkeeping, memory and CPU kernels behind one lock, and the life of the cache and of its sequences.
//! Its other calls are in the files of their topics.

use crate::device::{Device, DeviceArguments};
use crate::disk::{self, Disk, DiskArguments, Opened};
use crate::errors::{self, core, invalid};
use crate::fork;
use crate::handle::{Abandoned, Handle};
use crate::kernels::Cpu;
use crate::layers::{LayerArguments, Placed, PlacedLayer, place};
use crate::moves::Late;
use crate::patience::{Apart, Stop};
use crate::sessions::Sessions;
use crate::step::StepState;
use crate::tables::Tables;
use numpy::PyReadonlyArray1;
use pagoda_core::cache::TierMemory;
use pagoda_core::ids::{Epoch, GroupId, SequenceId, Tier};
use pagoda_cpu::Arenas;
use pagoda_store::disk::{Geometry, Store};
use pagoda_store::{Mover, Slab};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyDict;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The tiers that are memory, in the order of their slabs.
pub(crate) const MEMORY_TIERS: [Tier; 2] = [Tier::Device, Tier::Host];

/// Bookkeeping, memory and CPU kernels of one cache. Its methods may be called from any thread; they take turns.
#[pyclass(frozen, module = "pagoda._core")]
pub(crate) struct Cache {
    /// None once the cache is closed.
    pub(crate) inner: Mutex<Option<ManuallyDrop<Inner>>>,
    /// The lock of calls that take several turns (`in_turn`).
    pub(crate) turns: Mutex<()>,
    pub(crate) abandoned: Abandoned,
    /// The process that made the cache: threads and memory do not survive a fork.
    pub(crate) process: u64,
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
    /// The engine of a device: it is told what to copy and what changed, and reports when a copy or a step has ended.
    Device(Device),
}

impl Cache {
    /// Releases sequences whose handles are gone, unless a step is open, which may use them.
    pub(crate) fn release_abandoned(&self, py: Python<'_>, inner: &mut Inner) -> PyResult<()> {
        if inner.core.step_is_open() {
            return Ok(());
        }
        let abandoned = self.abandoned.take();
        for &sequence in &abandoned {
            // Ctrl-C may have come right after it was released.
            let _ = inner.core.release(SequenceId::of_number(sequence));
        }
        if abandoned.is_empty() { Ok(()) } else { inner.trim(py) }
    }

    /// Runs a call of the core that may free blocks.
    fn freeing<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut pagoda_core::Cache) -> pagoda_core::Result<T>,
    ) -> PyResult<T> {
        let mut inner = self.lock(py)?;
        let done = call(&mut inner.core).map_err(|error| core(py, &error))?;
        inner.trim(py)?;
        Ok(done)
    }
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

    /// Gives everything back once nothing is under way. With a busy disk tier a thread does so, and goes on alone when the
    /// drive does nothing for too long: until then it keeps memory that is being read into, and the lock of the directory.
    fn end(self, heeds_signals: bool) -> Result<(), Stop> {
        let limit = self.disk_timeout();
        let is_idle = self.mover.waiter().is_idle()
            && self.sessions.answered()
            && self.disk.as_ref().is_none_or(|disk| disk.is_idle() && disk.store.is_settled());
        let Some(store) = self.store().filter(|_| !is_idle).cloned() else { return Ok(()) };
        // If no thread can be started `self` is dropped here.
        Apart::begin(move || drop(self)).map_or(Ok(()), |end| end.finish(&store, limit, heeds_signals))
    }
}

#[pymethods]
impl Cache {
    #[new]
    #[pyo3(signature = (
        layers, *, page_size, memory, threads, deterministic, checked, isa, zero_on_free=false, device=None, disk=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
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
        let geometry = disk.as_ref().map(|disk| {
            Geometry::new(&runs, disk.memory).map_err(|error| errors::disk(py, &disk.path, &error))
        });
        let geometry = geometry.transpose()?;
        let block_bytes = groups.iter().map(|group| group.block_bytes).collect();
        let [fast, host] = memory.map(|(bytes, extent_bytes)| TierMemory { bytes, extent_bytes });
        let make_core = move |on_disk| {
            let mut core = pagoda_core::Cache::new(&groups, [fast, host, on_disk])?;
            if zero_on_free {
                core.zero_on_free();
            }
            Ok(core)
        };
        let (core, store, sessions) = if let (Some(disk), Some(geometry)) = (disk, geometry) {
            let Opened { core, store, sessions } = disk::open(py, disk, geometry, make_core, zero_on_free)?;
            (core, Some(store), sessions)
        } else {
            let absent = TierMemory { bytes: 0, extent_bytes: u64::MAX };
            (make_core(absent).map_err(|error| core(py, &error))?, None, Sessions::default())
        };
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
        let mover = Mover::new(slabs, store.as_ref()).map_err(|error| match &store {
            Some(store) => errors::disk(py, store.directory(), &error),
            None => errors::unavailable(py, error),
        })?;
        let disk =
            store.map(|store| Disk::new(py, store, ring, page_size, timeout).map(Box::new)).transpose()?;
        let inner = Inner {
            core,
            block_bytes,
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
        let (turns, abandoned) = (Mutex::default(), Abandoned::default());
        Ok(Self { inner, turns, abandoned, process: fork::process() })
    }

    /// A new, empty sequence.
    fn create(&self, py: Python<'_>) -> PyResult<Handle> {
        let id = self.with(py, |inner| inner.core.create())?;
        Ok(Handle::new(id, &self.abandoned))
    }

    /// A sequence over the same pages.
    fn fork(&self, py: Python<'_>, sequence: u64) -> PyResult<Handle> {
        let id = self.with(py, |inner| inner.core.fork(SequenceId::of_number(sequence)))?;
        Ok(Handle::new(id, &self.abandoned))
    }

    /// Ends a sequence.
    fn release(&self, py: Python<'_>, sequence: u64) -> PyResult<()> {
        self.freeing(py, |core| core.release(SequenceId::of_number(sequence)))
    }

    /// Removes tokens from the end.
    fn truncate(&self, py: Python<'_>, sequence: u64, length: u64) -> PyResult<()> {
        self.freeing(py, |core| core.truncate(SequenceId::of_number(sequence), length))
    }

    /// Removes tokens from the middle.
    fn drop(&self, py: Python<'_>, sequence: u64, start: u64, stop: u64) -> PyResult<()> {
        self.freeing(py, |core| core.drop_tokens(SequenceId::of_number(sequence), start..stop))
    }

    /// Tokens in a sequence.
    fn length(&self, py: Python<'_>, sequence: u64) -> PyResult<u64> {
        self.with(py, |inner| inner.core.token_count(SequenceId::of_number(sequence)))
    }

    /// The least length to truncate to, besides 0.
    fn rewind_limit(&self, py: Python<'_>, sequence: u64) -> PyResult<u64> {
        self.with(py, |inner| inner.core.rewind_limit(SequenceId::of_number(sequence)))
    }

    /// Up to `most` sequences with pages to move, the one that rested longest first, except those of a batch.
    #[pyo3(signature = (source, target, group, most, batch, *, unshared=false))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn resting(
        &self,
        py: Python<'_>,
        source: &str,
        target: &str,
        group: u8,
        most: usize,
        batch: PyReadonlyArray1<'_, u64>,
        unshared: bool,
    ) -> PyResult<Vec<u64>> {
        let way = (tier_named(py, "source", source)?, tier_named(py, "target", target)?);
        let mut others: Vec<_> = batch.as_slice()?.iter().map(|&id| SequenceId::of_number(id)).collect();
        self.with(py, |inner| {
            others.extend(inner.late.iter().filter_map(|late| late.held.sequence));
            let found = inner.core.resting(way, GroupId(group), unshared, most, &others);
            Ok(found.into_iter().map(SequenceId::number).collect())
        })
    }

    /// The sequences of a batch with pages to move, each paired with every layer group of such pages.
    fn movable(
        &self,
        py: Python<'_>,
        source: &str,
        target: &str,
        batch: PyReadonlyArray1<'_, u64>,
    ) -> PyResult<Vec<(u64, u8)>> {
        let way = (tier_named(py, "source", source)?, tier_named(py, "target", target)?);
        let ids: Vec<_> = batch.as_slice()?.iter().map(|&id| SequenceId::of_number(id)).collect();
        self.with(py, |inner| {
            let found = inner.core.with_movable(way, &ids);
            Ok(found.into_iter().map(|(id, group)| (id.number(), group.0)).collect())
        })
    }

    /// Blocks of each group that a tier could hand out now.
    fn free_blocks(&self, py: Python<'_>, tier: &str) -> PyResult<Vec<u64>> {
        let tier = tier_named(py, "tier", tier)?;
        let mut inner = self.lock(py)?;
        inner.zero(py)?;
        Ok(inner.core.free_blocks(tier).collect())
    }

    /// Frees blocks of a tier that can be spared, except for pages that sequence `but_of` holds; returns how many.
    #[pyo3(signature = (tier, group, pages_max, *, but_of=None))]
    fn drop_copies(
        &self,
        py: Python<'_>,
        tier: &str,
        group: u8,
        pages_max: usize,
        but_of: Option<u64>,
    ) -> PyResult<usize> {
        let (tier, group) = (tier_named(py, "tier", tier)?, GroupId(group));
        let but_of = but_of.map(SequenceId::of_number);
        self.freeing(py, |core| core.drop_copies(tier, group, pages_max, but_of))
    }

    /// Waits for reads ahead if blocks of any tier may be draining because of them.
    fn finish_draining(&self, py: Python<'_>) -> PyResult<()> {
        let mut inner = self.lock(py)?;
        if inner.core.is_draining() { inner.finish_reads(py) } else { Ok(()) }
    }

    /// Blocks of all tiers that have drained so far.
    fn drained_blocks(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.lock(py)?.core.drained_blocks())
    }

    /// Sequences that have ended so far.
    fn ended_sequences(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.lock(py)?.core.ended_sequences())
    }

    /// Block counts by tier and group, and counters.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let mut inner = self.lock(py)?;
        inner.zero(py)?;
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
        stats.set_item("sequences", inner.core.sequence_count())?;
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

    /// Checks the whole bookkeeping.
    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |inner| inner.core.audit())
    }

    /// Closes the cache: waits for copies under way, then gives everything back. Closing twice is no error. If the drive does
    /// nothing for `disk_timeout` the cache is closed all the same, and everything is given back once the drive has answered.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.process != fork::process() {
            return Ok(());
        }
        self.require_elsewhere(py)?;
        let inner = self.inner.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner).take();
        let Some(inner) = inner else { return Ok(()) };
        let then = "the cache is closed, and its memory and files are given back when the drive has answered";
        let ended = py.detach(|| ManuallyDrop::into_inner(inner).end(true));
        ended.map_err(|stop| stop.and(then).raise(py))
    }

    /// The instruction set of the CPU kernels; None if the kernels are on a device.
    #[getter]
    fn isa(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, |inner| {
            Ok(match &inner.engine {
                Engine::Cpu(cpu) => Some(cpu.backend.isa().to_string()),
                Engine::Device(_) => None,
            })
        })
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // In a forked child the threads do not exist and the memory is the parent's: leave both alone.
        if self.process == fork::process()
            && let Some(inner) = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take()
        {
            // Other threads run meanwhile. There is no caller to report an error to.
            let _ = Python::attach(|py| py.detach(|| ManuallyDrop::into_inner(inner).end(false)));
        }
    }
}
