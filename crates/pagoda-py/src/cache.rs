//! `pagoda._core.Cache`: the bookkeeping, the memory and the CPU kernels behind one lock.

use crate::arrays::{floats, rows, rows_mut};
use crate::device::{self, AnglePlaces, GroupPlaces, Room, Upload, WorkPlaces};
use crate::disk::{self, DiskArguments};
use crate::errors::{self, core, cpu, invalid, invalid_because, released, unavailable};
use crate::fork;
use crate::layers::{LayerArguments, Placed, PlacedLayer, place};
use crate::passes::{HostPages, StreamArguments, StreamedGroup};
use crate::sessions::Sessions;
use crate::stream::{Call, Stream, Traffic};
use crate::tables::{self, Tables};
use crate::ticket::{Plan, Ticket};
use numpy::{
    PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadwriteArray1, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pagoda_core::Error;
use pagoda_core::cache::TierMemory;
use pagoda_core::fence::Completion;
use pagoda_core::ids::{BlockId, Epoch, GroupId, SequenceId, Tier};
use pagoda_core::plan::{BlockCopy, Selection};
use pagoda_core::table::SpanView;
use pagoda_core::work::RUN_ROWS;
use pagoda_cpu::{Arenas, Backend, Element, Isa, Layer, SequenceTable};
use pagoda_store::disk::Store;
use pagoda_store::{Mover, Place, Ring, Slab, Transfer};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyDict;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The tiers that are memory, in the order of their slabs.
const MEMORY_TIERS: [Tier; 2] = [Tier::Device, Tier::Host];

/// Bookkeeping, memory and CPU kernels of one cache. Its methods may be called from any thread; they take turns.
#[pyclass(frozen, module = "pagoda._core")]
pub(crate) struct Cache {
    inner: Mutex<Option<ManuallyDrop<Inner>>>,
    /// The process that made it: threads and memory do not survive a fork.
    process: u64,
}

pub(crate) struct Inner {
    pub(crate) core: pagoda_core::Cache,
    pub(crate) layers: Vec<PlacedLayer>,
    block_bytes: Vec<u64>,
    pub(crate) arenas: Arenas,
    engine: Engine,
    pub(crate) step: StepState,
    pub(crate) tables: Tables,
    pub(crate) sessions: Sessions,
    /// The last step that has ended, and the last one that has retired, where kernels are this module's.
    ended: Epoch,
    retired: Epoch,
}

/// Who holds the memory, moves it and runs kernels.
enum Engine {
    /// This module.
    Cpu { slabs: Vec<Arc<Slab>>, disk: Option<Box<Disk>>, mover: Mover, backend: Backend, checked: bool },
    /// Whoever drives a device: it is told what to copy and what changed, and tells when a copy or a step has ended.
    Device { upload: Upload, epoch: Option<Epoch> },
}

/// The disk tier, and what a step reads of it.
struct Disk {
    store: Arc<Store>,
    stream: Stream,
}

/// What the open step adds to the core's own.
#[derive(Default)]
pub(crate) struct StepState {
    spans: Vec<SpanView>,
    /// Per layer group, then per sequence: its part of `spans`.
    ranges: Vec<Range<usize>>,
    /// Where each sequence's new tokens begin, and where the last one's end.
    bounds: Vec<u32>,
    /// Bytes of the rows that were attended to.
    attended: u64,
    /// Per layer: whether its rows of the new tokens are written, or the caller does so through the tables, or it has none.
    written: Vec<bool>,
    /// Memory for the tables of one call.
    sequences: Vec<SequenceTable<'static>>,
}

impl StepState {
    /// The spans of the sequence at place `index` of the batch, new tokens included.
    pub(crate) fn spans(&self, core: &pagoda_core::Cache, index: usize, group: GroupId) -> &[SpanView] {
        &self.spans[self.ranges[group.index() * core.step_batch().len() + index].clone()]
    }

    /// The table of the sequence at place `index` of the batch.
    pub(crate) fn table<'a>(
        &'a self,
        core: &'a pagoda_core::Cache,
        index: usize,
        group: GroupId,
    ) -> SequenceTable<'a> {
        let new_tokens = self.bounds[index + 1] - self.bounds[index];
        SequenceTable {
            row: core.step_row(index, group).0,
            spans: self.spans(core, index, group),
            new_tokens,
        }
    }

    /// Of the whole batch.
    pub(crate) fn new_tokens(&self) -> usize {
        self.bounds.last().map_or(0, |&end| end as usize)
    }

    /// Where each sequence's new tokens begin, and where the last one's end.
    pub(crate) fn bounds(&self) -> &[u32] {
        &self.bounds
    }

    /// Lays out the spans of the step that `core` has just opened.
    fn enter(&mut self, core: &pagoda_core::Cache, groups: usize, layers: &[PlacedLayer]) {
        self.spans.clear();
        self.ranges.clear();
        for group in 0..groups as u8 {
            for index in 0..core.step_batch().len() {
                let start = self.spans.len();
                self.spans.extend(core.step_spans(index, GroupId(group)));
                self.ranges.push(start..self.spans.len());
            }
        }
        self.bounds.clear();
        self.bounds.push(0);
        self.bounds.extend(core.step_batch().scan(0, |end, (_, new_tokens)| {
            *end += new_tokens;
            Some(*end)
        }));
        self.attended = 0;
        let nothing = self.new_tokens() == 0;
        self.written.clear();
        self.written.extend(layers.iter().map(|placed| nothing || placed.owner.is_some()));
    }
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

    /// Refuses calls of signal handlers that run while this thread waits inside of `attend`: they would wait for themselves.
    fn require_elsewhere(&self, py: Python<'_>) -> PyResult<()> {
        if ATTENDING.get() == std::ptr::from_ref(self).addr() {
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
        let mut guard = self.lock(py)?;
        call(guard.as_mut().expect("locked open")).map_err(|error| core(py, &error))
    }
}

thread_local! {
    /// The address of the cache in whose `attend` this thread is.
    static ATTENDING: Cell<usize> = const { Cell::new(0) };
}

/// While it lives, the thread is in `attend`.
struct Attending;

impl Attending {
    fn of(cache: &Cache) -> Self {
        ATTENDING.set(std::ptr::from_ref(cache).addr());
        Self
    }
}

impl Drop for Attending {
    fn drop(&mut self) {
        ATTENDING.set(0);
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
    fn place(&self, group: GroupId, (tier, block): (Tier, BlockId)) -> Place {
        if tier == Tier::Disk {
            return Place::Disk { group, block };
        }
        Place::Slab { slab: tier.index(), offset: u64::from(block.index()) * self.block_bytes[group.index()] }
    }

    pub(crate) fn transfer(&self, copy: &BlockCopy) -> Transfer {
        let (from, to) = (self.place(copy.group, copy.from), self.place(copy.group, copy.to));
        Transfer { from, to, bytes: copy.bytes }
    }

    /// The disk tier.
    pub(crate) fn store(&self) -> Option<&Arc<Store>> {
        match &self.engine {
            Engine::Cpu { disk, .. } => disk.as_ref().map(|disk| &disk.store),
            Engine::Device { .. } => None,
        }
    }

    /// How the I/O of the disk tier is done and what it came to.
    fn disk_report<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Engine::Cpu { disk: Some(disk), .. } = &self.engine else { return Ok(None) };
        let report = disk::report(py, &disk.store)?;
        report.set_item("ring_bytes", disk.stream.bytes())?;
        Ok(Some(report))
    }

    /// Makes copies, some of which may be of the disk, and waits for them.
    pub(crate) fn copy_now(&self, py: Python<'_>, copies: &[BlockCopy]) -> PyResult<()> {
        self.require_cpu(py)?;
        let Engine::Cpu { mover, .. } = &self.engine else { unreachable!("checked") };
        let transfers: Vec<_> = copies.iter().map(|copy| self.transfer(copy)).collect();
        let (completion, waiter) = (Completion::new(), mover.waiter());
        // SAFETY: the core has given the targets to whoever asked for these copies, who holds the lock until they are made;
        // sources are Ready or open pages of no step.
        unsafe { mover.send(transfers, completion.clone()) };
        py.detach(|| while !waiter.wait(&completion, Duration::from_secs(60)) {});
        if completion.copied() == Some(copies.len() as u32) {
            return Ok(());
        }
        Err(errors::failure(py, completion.failure()))
    }

    /// Makes the copies of shared open pages that come before the open step's first append.
    fn copy_shared(&self, py: Python<'_>) -> PyResult<()> {
        let Engine::Cpu { mover, .. } = &self.engine else { return Ok(()) };
        let copies = self.core.step_copies();
        // A part of a page that was full went to disk with it.
        if copies.iter().any(|copy| copy.from.0 == Tier::Disk) {
            return self.copy_now(py, copies);
        }
        for copy in copies {
            // SAFETY: the source is Ready, so nobody writes it, and the target is this step's alone.
            unsafe { mover.copy_now(&self.transfer(copy)) };
        }
        Ok(())
    }

    /// Zeroes freed blocks, where that is asked for: until then they are not handed out.
    pub(crate) fn zero(&mut self) {
        let Engine::Cpu { slabs, disk, .. } = &self.engine else { return };
        let block_bytes = &self.block_bytes;
        self.core.zero(|tier, group, blocks| {
            if tier == Tier::Disk {
                return disk.as_ref().is_some_and(|disk| disk.store.zero(group, blocks).is_ok());
            }
            let at = |block| u64::from(block) * block_bytes[group.index()];
            // SAFETY: the core says that nobody can touch these blocks any more.
            unsafe { slabs[tier.index()].zero(at(blocks.start)..at(blocks.end)) };
            true
        });
    }

    /// Zeroes what is to be, and gives memory without blocks back to the system.
    pub(crate) fn trim(&mut self) {
        self.zero();
        let Engine::Cpu { slabs, disk, .. } = &self.engine else { return };
        // A refusal leaves the memory, or the space, where it is, which is no error.
        for tier in MEMORY_TIERS {
            for range in self.core.reclaim(tier) {
                // SAFETY: the core says that no block lies here, so nobody reads or writes it.
                let _ = unsafe { slabs[tier.index()].give_back(range) };
            }
        }
        if let Some(disk) = disk {
            self.core.reclaim(Tier::Disk).for_each(|range| drop(disk.store.discard(range)));
        }
    }

    fn end_step(&mut self, ended: Epoch) -> pagoda_core::Result<()> {
        self.ended = ended;
        match &mut self.engine {
            Engine::Cpu { .. } => self.settle()?,
            Engine::Device { epoch, .. } => *epoch = Some(ended),
        }
        self.trim();
        Ok(())
    }

    /// Retires steps that have ended. The kernels of this backend have when their calls return, but reads ahead of need go on.
    fn settle(&mut self) -> pagoda_core::Result<()> {
        let Engine::Cpu { disk, .. } = &self.engine else { return Ok(()) };
        if self.retired == self.ended {
            return Ok(());
        }
        let since = disk.as_ref().and_then(|disk| disk.stream.since());
        self.retired = since.map_or(self.ended, |since| since.min(self.ended));
        self.core.retire(self.retired)
    }

    /// Waits for reads that blocks may drain for; says whether there were any.
    fn finish_reads(&mut self, py: Python<'_>) -> PyResult<bool> {
        let Engine::Cpu { disk: Some(disk), mover, .. } = &mut self.engine else { return Ok(false) };
        let waited = py.detach(|| disk.stream.finish(mover)).map_err(|stop| stop.raise(py))?;
        self.settle().map_err(|error| core(py, &error))?;
        self.zero();
        Ok(waited)
    }

    /// Addresses and bytes of copies: `[from, to, bytes]` of each.
    fn addresses(&self, copies: &[BlockCopy]) -> Vec<u64> {
        copies
            .iter()
            .flat_map(|copy| {
                let at = |(tier, block): (Tier, BlockId)| {
                    self.arenas.base[tier.index()] as u64
                        + u64::from(block.index()) * self.block_bytes[copy.group.index()]
                };
                [at(copy.from), at(copy.to), copy.bytes]
            })
            .collect()
    }

    /// Refuses calls of CPU kernels where a device has them.
    fn require_cpu(&self, py: Python<'_>) -> PyResult<()> {
        match self.engine {
            Engine::Cpu { .. } => Ok(()),
            Engine::Device { .. } => Err(unavailable(py, "CPU kernels: this cache is on a device")),
        }
    }

    fn require_device(&self, py: Python<'_>) -> PyResult<()> {
        match self.engine {
            Engine::Device { .. } => Ok(()),
            Engine::Cpu { .. } => Err(unavailable(py, "device: this cache is on the CPU")),
        }
    }

    pub(crate) fn layer(&self, py: Python<'_>, layer: usize) -> PyResult<&PlacedLayer> {
        let limit = format_args!("from 0 to {}", self.layers.len() - 1).to_string();
        self.layers.get(layer).ok_or_else(|| invalid(py, "layer", layer, limit))
    }

    /// A layer that stores K and V.
    fn owning_layer(&self, py: Python<'_>, layer: usize) -> PyResult<&PlacedLayer> {
        let placed = self.layer(py, layer)?;
        let Some(owner) = placed.owner else { return Ok(placed) };
        let limit =
            format_args!("a layer that stores K and V; this one reads those of layer {owner}").to_string();
        Err(invalid(py, "layer", layer, limit))
    }

    fn require_unwritten(&self, py: Python<'_>, layer: usize) -> PyResult<()> {
        if self.step.written[layer] && self.step.new_tokens() > 0 {
            return Err(invalid(py, "layer", layer, "a layer that this step has not appended to"));
        }
        Ok(())
    }

    /// Refuses unless the rows that a layer reads are written.
    pub(crate) fn require_written(&self, py: Python<'_>, layer: usize) -> PyResult<()> {
        let layer = self.layers[layer].owner.unwrap_or(layer);
        if !self.step.written[layer] {
            return Err(invalid(py, "layer", layer, "a layer that this step has appended to"));
        }
        Ok(())
    }

    pub(crate) fn require_step(&self, py: Python<'_>) -> PyResult<()> {
        if self.core.step_is_open() {
            return Ok(());
        }
        Err(invalid_because(py, "step = closed: an open step; reserve first"))
    }
}

pub(crate) fn isa_named(py: Python<'_>, name: &str) -> PyResult<Isa> {
    let found = Isa::ALL.into_iter().find(|isa| isa.to_string() == name);
    found.ok_or_else(|| invalid(py, "isa", format_args!("{name:?}"), format_args!("one of {:?}", Isa::ALL)))
}

/// The tables of one layer group of the open step, in memory that is reused.
fn sequence_tables<'a>(
    core: &'a pagoda_core::Cache,
    step: &'a StepState,
    group: GroupId,
    memory: Vec<SequenceTable<'static>>,
) -> Vec<SequenceTable<'a>> {
    let mut tables = recycle(memory);
    tables.extend((0..core.step_batch().len()).map(|index| step.table(core, index, group)));
    tables
}

/// The same allocation, empty, for tables of another lifetime.
fn recycle<'a>(mut tables: Vec<SequenceTable<'_>>) -> Vec<SequenceTable<'a>> {
    tables.clear();
    tables.into_iter().map(|_| unreachable!("cleared")).collect()
}

#[pymethods]
impl Cache {
    #[new]
    #[pyo3(signature = (
        layers, *, page_size, memory, threads, deterministic, checked, isa, zero_on_free=false, bases=None, disk=None
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
        bases: Option<[u64; 2]>,
        disk: Option<DiskArguments>,
    ) -> PyResult<Self> {
        let Placed { groups, runs, layers } = place(py, &layers, page_size)?;
        let disk_timeout = disk.as_ref().map_or(Duration::ZERO, |disk| disk.timeout);
        let opened = disk.map(|disk| disk::open(py, &disk, &runs)).transpose()?;
        let (disk, recovered) = opened.map(|(store, recovered)| (Arc::new(store), recovered)).unzip();
        let absent = TierMemory { bytes: 0, extent_bytes: u64::MAX };
        let on_disk = disk.as_ref().map_or(absent, |store| store.geometry().arena());
        let [device, host] = memory.map(|(bytes, extent_bytes)| TierMemory { bytes, extent_bytes });
        let mut core =
            pagoda_core::Cache::new(&groups, [device, host, on_disk]).map_err(|error| core(py, &error))?;
        if zero_on_free {
            core.zero_on_free();
        }
        let sessions = match (&disk, recovered) {
            (Some(store), Some(recovered)) => {
                Sessions::open(&mut core, store, recovered).map_err(|error| errors::disk(py, &error))?
            }
            _ => Sessions::default(),
        };
        if let (Some(store), true) = (&disk, zero_on_free) {
            store.zero_rest().map_err(|error| errors::disk(py, &error))?;
        }
        let mut base = [std::ptr::null_mut(); Tier::COUNT];
        let engine = if let Some(bases) = bases {
            MEMORY_TIERS.iter().for_each(|tier| base[tier.index()] = bases[tier.index()] as *mut u8);
            Engine::Device { upload: Upload::default(), epoch: None }
        } else {
            let isa = isa.map(|name| isa_named(py, name)).transpose()?;
            let slab = |bytes: u64| {
                let slab = Slab::new(bytes as usize);
                slab.map(Arc::new)
                    .map_err(|error| unavailable(py, format_args!("{bytes} bytes of memory: {error}")))
            };
            let slabs = vec![slab(memory[0].0)?, slab(memory[1].0)?];
            MEMORY_TIERS.iter().for_each(|tier| base[tier.index()] = slabs[tier.index()].base());
            let mover = Mover::new(slabs.clone(), disk.as_ref()).map_err(|error| errors::disk(py, &error))?;
            let backend = Backend::new(threads, deterministic, isa).map_err(|error| cpu(py, &error))?;
            let with_stream = |store: Arc<Store>| -> PyResult<Box<Disk>> {
                let ring = Ring::new(&store, RUN_ROWS / page_size as usize)
                    .map_err(|error| unavailable(py, format_args!("memory to read into: {error}")))?;
                Ok(Box::new(Disk { store, stream: Stream::new(ring, disk_timeout) }))
            };
            let disk = disk.map(with_stream).transpose()?;
            Engine::Cpu { slabs, disk, mover, backend, checked }
        };
        let inner = Inner {
            core,
            block_bytes: groups.iter().map(|group| group.block_bytes).collect(),
            layers,
            arenas: Arenas::new(base[Tier::Device.index()], base[Tier::Host.index()]),
            engine,
            step: StepState::default(),
            tables: Tables::default(),
            sessions,
            ended: Epoch::default(),
            retired: Epoch::default(),
        };
        Ok(Self { inner: Mutex::new(Some(ManuallyDrop::new(inner))), process: fork::process() })
    }

    /// A new, empty sequence.
    fn create(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |inner| inner.core.create()).map(handle)
    }

    /// A sequence over the same pages.
    fn fork(&self, py: Python<'_>, sequence: u64) -> PyResult<u64> {
        self.with(py, |inner| inner.core.fork(sequence_id(sequence))).map(handle)
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

    /// Opens a step; shared open pages are copied before it returns.
    fn reserve(
        &self,
        py: Python<'_>,
        sequences: PyReadonlyArray1<'_, u64>,
        new_tokens: PyReadonlyArray1<'_, i64>,
    ) -> PyResult<()> {
        let (sequences, new_tokens) = (sequences.as_slice()?, new_tokens.as_slice()?);
        if sequences.len() != new_tokens.len() {
            let limit = format!("one entry for each of {} sequences", sequences.len());
            return Err(invalid(py, "new_tokens", format_args!("{} entries", new_tokens.len()), limit));
        }
        let counts = new_tokens.iter().map(|&count| u32::try_from(count).map_err(|_| count));
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
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
        if let Err(error) = inner.copy_shared(py) {
            let epoch = inner.core.rollback().map_err(|error| core(py, &error))?;
            inner.end_step(epoch).map_err(|error| core(py, &error))?;
            return Err(error);
        }
        let Inner { core, layers, step, block_bytes, engine, .. } = &mut **inner;
        step.enter(core, block_bytes.len(), layers);
        if let Engine::Cpu { disk: Some(disk), .. } = engine {
            disk.stream.enter(core, step, layers);
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
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        let placed = inner.owning_layer(py, layer)?;
        let bits = bits(py, dtype)?;
        let geometry = placed.layer.geometry;
        let shape = |dim: u32| [inner.step.new_tokens(), geometry.num_kv_heads as usize, dim as usize];
        require_rows(py, &placed.layer, k.is_some(), v.is_some())?;
        // Of a layer whose keys are derived, values take the place of K.
        let (name, stored) = k.map(|k| ("k", k)).or(v.map(|v| ("v", v))).expect("one of them is given");
        let keys = rows(name, stored, shape(geometry.head_dim), bits)?;
        let values = v.filter(|_| geometry.v_format.is_some());
        let values = values.map(|v| rows("v", v, shape(geometry.v_head_dim), bits)).transpose()?;
        inner.require_unwritten(py, layer)?;
        inner.require_cpu(py)?;
        let Inner { core, layers, arenas, engine: Engine::Cpu { backend, checked, .. }, step, .. } =
            &mut **inner
        else {
            unreachable!("checked")
        };
        if std::mem::take(&mut layers[layer].center_first) && step.new_tokens() >= CENTER_TOKENS_MIN {
            let (heads, dim) = (geometry.num_kv_heads as usize, geometry.head_dim as usize);
            // SAFETY: the array was checked.
            let mean = unsafe { backend.mean(keys, step.new_tokens(), heads, dim) };
            let center = mean.unwrap_or_default();
            for (at, placed) in layers.iter_mut().enumerate() {
                if at == layer || placed.owner == Some(layer) {
                    placed.layer.transform.center.clone_from(&center);
                }
            }
        }
        let memory = std::mem::take(&mut step.sequences);
        let tables = sequence_tables(core, step, layers[layer].group, memory);
        let result = py.detach(|| {
            // SAFETY: the core has given the new rows to this step alone, and the arrays were checked; Python keeps them
            // alive for the call.
            unsafe { backend.append(arenas, &layers[layer].layer, &tables, keys, values, *checked) }
        });
        step.sequences = recycle(tables);
        result.map_err(|error| cpu(py, &error))?;
        step.written[layer] = true;
        Ok(())
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
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        let placed = inner.layer(py, layer)?;
        let bits = bits(py, dtype)?;
        let heads = placed.layer.num_q_heads as usize;
        let shape = |dim: u32| [inner.step.new_tokens(), heads, dim as usize];
        let queries = rows("q", q, shape(placed.layer.geometry.head_dim), bits)?;
        let outputs = rows_mut("out", out, shape(placed.layer.geometry.v_head_dim), bits, q)?;
        require_sinks(py, placed, sink_logits.is_some())?;
        let sinks = sink_logits.map(|array| floats("sink_logits", array, heads)).transpose()?;
        inner.require_written(py, layer)?;
        inner.require_cpu(py)?;
        let lse = lse.map(|lse| lse_address(lse, [inner.step.new_tokens(), heads])).transpose()?;
        let Inner { core, layers, arenas, engine, step, ended, .. } = &mut **inner;
        let Engine::Cpu { backend, mover, disk, .. } = engine else { unreachable!("checked") };
        let memory = std::mem::take(&mut step.sequences);
        let tables = sequence_tables(core, step, layers[layer].group, memory);
        let stream = disk.as_mut().map(|disk| &mut disk.stream).filter(|stream| stream.has(layer));
        let _attending = Attending::of(self);
        let result = py.detach(|| {
            let call = Call {
                backend,
                arenas,
                layer: &layers[layer].layer,
                tables: &tables,
                queries,
                sinks: sinks.as_deref(),
                out: outputs,
                lse: lse.map(|address| address.get()),
            };
            // SAFETY: pages do not move or change while the step is open, and the arrays were checked; Python keeps them
            // alive for the call. Steps retire after the reads that they have begun.
            unsafe {
                match stream {
                    Some(stream) => stream.attend(mover, layer, call, *ended),
                    None => call.attend(),
                }
            }
        });
        let attended: u64 = tables.iter().map(|table| layers[layer].layer.seen_bytes(table)).sum();
        step.sequences = recycle(tables);
        step.attended += attended;
        result.map_err(|stop| stop.raise(py))
    }

    /// Of the step that was entered last: bytes of the rows that were attended to, bytes read from disk for that, and seconds
    /// in which attention only waited for these.
    fn attended(&self, py: Python<'_>) -> PyResult<(u64, u64, f64)> {
        self.with(py, |inner| {
            let traffic = match &inner.engine {
                Engine::Cpu { disk: Some(disk), .. } => disk.stream.traffic(),
                _ => Traffic::default(),
            };
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
        Ok(PyArray1::from_iter(py, inner.step.bounds.iter().map(|&bound| bound as i32)))
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

    /// Starts a plan in the background.
    fn execute(&self, py: Python<'_>, plan: &Plan) -> PyResult<Ticket> {
        self.with(py, |inner| {
            inner.zero();
            let (id, completion, copies) = inner.core.execute(&plan.0)?;
            let mut transfers = Vec::new();
            match &inner.engine {
                Engine::Cpu { mover, .. } if !copies.is_empty() => {
                    let transfers = copies.iter().map(|copy| inner.transfer(copy)).collect();
                    // SAFETY: sources are Ready and pinned by the ticket, targets are Filling: nobody else touches either.
                    unsafe { mover.send(transfers, completion.clone()) };
                }
                Engine::Cpu { .. } => {}
                Engine::Device { .. } => transfers = inner.addresses(&copies),
            }
            inner.trim();
            Ok(Ticket { id, completion, transfers })
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
        let guard = self.lock(py)?;
        let inner = guard.as_ref().expect("locked open");
        inner.require_cpu(py)?;
        let Engine::Cpu { mover, .. } = &inner.engine else { unreachable!("checked") };
        let mover = mover.waiter();
        drop(guard);
        let limit = Duration::try_from_secs_f64(seconds)
            .map_err(|_| invalid(py, "timeout", seconds, "from 0 to 1.8e19 seconds"))?;
        let start = std::time::Instant::now();
        loop {
            let left = limit.saturating_sub(start.elapsed());
            let slice = left.min(Duration::from_millis(50));
            if py.detach(|| mover.wait(&ticket.completion, slice)) {
                return Ok(true);
            }
            py.check_signals()?;
            if left.is_zero() {
                return Ok(false);
            }
        }
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
        self.with(py, |inner| Ok(inner.core.by_recency().into_iter().map(handle).collect()))
    }

    /// Block counts by tier and group, and counters.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.zero();
        let stats = PyDict::new(py);
        let blocks = PyDict::new(py);
        let store = inner.store().cloned();
        let tiers = if store.is_some() { &Tier::ALL[..] } else { &MEMORY_TIERS[..] };
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
        stats.set_item("disk", inner.disk_report(py)?)?;
        Ok(stats)
    }

    /// Refuses unless sequences can be kept.
    fn check_key(&self, py: Python<'_>, key: &str) -> PyResult<()> {
        self.lock(py)?.as_ref().expect("locked open").named_store(py, key).map(drop)
    }

    /// Keeps a sequence on disk under a key.
    fn save(&self, py: Python<'_>, sequence: u64, key: &str, meta: &[u8]) -> PyResult<()> {
        self.lock(py)?.as_mut().expect("locked open").save(py, sequence, key, meta)
    }

    /// A sequence with what is kept under a key; None if nothing is.
    fn load(&self, py: Python<'_>, key: &str) -> PyResult<Option<u64>> {
        self.lock(py)?.as_mut().expect("locked open").load(py, key)
    }

    /// Lets go of what is kept under a key; says whether there was something.
    fn forget(&self, py: Python<'_>, key: &str) -> PyResult<bool> {
        self.lock(py)?.as_mut().expect("locked open").forget(py, key)
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

    /// Ends the cache: waits for copies under way, then gives everything back. Closing twice is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.process != fork::process() {
            return Ok(());
        }
        self.require_elsewhere(py)?;
        let inner = self.inner.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner).take();
        if let Some(inner) = inner {
            py.detach(|| drop(ManuallyDrop::into_inner(inner)));
        }
        Ok(())
    }

    /// The instruction set of the CPU kernels; None where a device has the kernels.
    #[getter]
    fn isa(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, |inner| {
            Ok(match &inner.engine {
                Engine::Cpu { backend, .. } => Some(backend.isa().to_string()),
                Engine::Device { .. } => None,
            })
        })
    }

    /// CPU workers, the caller's thread included; 0 where a device has the kernels.
    #[getter]
    fn threads(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |inner| {
            Ok(match &inner.engine {
                Engine::Cpu { backend, .. } => backend.threads(),
                Engine::Device { .. } => 0,
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
        let inner = guard.as_mut().expect("locked open");
        inner.require_device(py)?;
        let Engine::Device { upload, .. } = &mut inner.engine else { unreachable!("checked") };
        upload.place(groups, works, angles);
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
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        inner.require_device(py)?;
        let Inner { core, step, layers, engine: Engine::Device { upload, .. }, .. } = &mut **inner else {
            unreachable!("checked")
        };
        Ok(upload.fill(core, step, layers))
    }

    /// What of the host tier attention over a layer of each group goes over, in the step that was staged.
    fn host_pages(&self, py: Python<'_>) -> PyResult<Vec<HostPages>> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_step(py)?;
        inner.require_device(py)?;
        let Engine::Device { upload, .. } = &inner.engine else { unreachable!("checked") };
        Ok(upload.host_pages(&inner.core))
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
        inner.require_device(py)?;
        let Inner { core, step, layers, engine: Engine::Device { upload, .. }, .. } = &mut **inner else {
            unreachable!("checked")
        };
        Ok(upload.stream(py, core, step, layers, &groups))
    }

    /// Copies what `stage` and `stream` wrote to `words`. streams: where the tables of what is streamed go.
    fn staged(&self, py: Python<'_>, mut words: PyReadwriteArray1<'_, u32>, streams: u64) -> PyResult<()> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_device(py)?;
        let Engine::Device { upload, .. } = &mut inner.engine else { unreachable!("checked") };
        upload.take(streams, words.as_slice_mut()?);
        Ok(())
    }

    /// `[from, to, bytes]` of the copies that come before the open step's first append.
    fn step_transfers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let transfers = self.with(py, |inner| Ok(inner.addresses(inner.core.step_copies())))?;
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
            let Engine::Device { epoch, .. } = &mut inner.engine else { return Ok(None) };
            Ok(epoch.take().map(|epoch| epoch.0))
        })
    }

    /// `[address, bytes]` of freed blocks that the device has to zero before it does anything else with them.
    fn zero<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let mut guard = self.lock(py)?;
        let inner = guard.as_mut().expect("locked open");
        inner.require_device(py)?;
        let Inner { core, arenas, block_bytes, .. } = &mut **inner;
        let mut ranges = Vec::new();
        core.zero(|tier, group, blocks| {
            let (base, size) = (arenas.base[tier.index()] as u64, block_bytes[group.index()]);
            ranges.extend([base + u64::from(blocks.start) * size, blocks.len() as u64 * size]);
            true
        });
        Ok(PyArray1::from_vec(py, ranges))
    }

    /// The kernels of a step, and of all before it, have ended.
    fn retire(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        self.with(py, |inner| inner.core.retire(Epoch(epoch)))
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // In a forked child the threads do not exist and the memory is the parent's: leave both alone.
        if self.process == fork::process()
            && let Some(inner) = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take()
        {
            drop(ManuallyDrop::into_inner(inner));
        }
    }
}

/// Rows that are enough to say what K is centred by; after fewer it is not.
const CENTER_TOKENS_MIN: usize = 16;

/// The meaning of 16-bit integers, if the caller says so.
pub(crate) fn bits(py: Python<'_>, dtype: Option<&str>) -> PyResult<Option<Element>> {
    match dtype {
        None => Ok(None),
        Some("f32") => Ok(Some(Element::F32)),
        Some("f16") => Ok(Some(Element::F16)),
        Some("bf16") => Ok(Some(Element::Bf16)),
        Some(name) => Err(invalid(py, "dtype", format_args!("{name:?}"), "f32, f16 or bf16")),
    }
}

/// Whether K and V are given where a layer stores them, and only there.
fn require_rows(py: Python<'_>, layer: &Layer, k: bool, v: bool) -> PyResult<()> {
    let geometry = &layer.geometry;
    let missing = |name, dim| {
        let heads = geometry.num_kv_heads;
        Err(invalid(py, name, "None", format_args!("an array [sum(new), {heads}, {dim}]")))
    };
    match (k, v, geometry.v_format) {
        (true, ..) if layer.derived.is_some() => {
            Err(invalid(py, "k", "an array", "None, for a layer with k_eq_v: it stores V alone"))
        }
        (false, ..) if layer.derived.is_none() => missing("k", geometry.head_dim),
        (false, false, _) | (_, false, Some(_)) => missing("v", geometry.v_head_dim),
        (true, true, None) => Err(invalid(py, "v", "an array", "None, for a layer with v_alias")),
        _ => Ok(()),
    }
}

/// Whether sinks are given where a layer has them, and only there.
fn require_sinks(py: Python<'_>, placed: &PlacedLayer, given: bool) -> PyResult<()> {
    match (given, placed.sinks) {
        (false, true) => {
            let limit = format_args!("a float32 array [{}]", placed.layer.num_q_heads).to_string();
            Err(invalid(py, "sink_logits", "None", limit))
        }
        (true, false) => Err(invalid(py, "sink_logits", "an array", "None, for a layer without sinks")),
        _ => Ok(()),
    }
}

/// The memory of a contiguous float32 array of the given shape.
fn lse_address(lse: &Bound<'_, PyArray2<f32>>, shape: [usize; 2]) -> PyResult<Address> {
    let mut array = lse.try_readwrite()?;
    if lse.shape() != shape {
        return Err(invalid(
            lse.py(),
            "lse",
            format_args!("shape {:?}", lse.shape()),
            format_args!("{shape:?}"),
        ));
    }
    Ok(Address(array.as_slice_mut()?.as_mut_ptr()))
}

/// An address that another thread may write to.
#[derive(Clone, Copy)]
struct Address(*mut f32);

// SAFETY: only the backend's workers use it, for disjoint elements, while the array is borrowed.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    fn get(self) -> *mut f32 {
        self.0
    }
}
