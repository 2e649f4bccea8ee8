//! A cache whose memory and kernels are on a device: the calls of its engine (python/pagoda/device), step by step. The engine
//! is told what to copy and what to zero, and reports when copies and kernels have ended.

use crate::cache::{Cache, Engine, Inner, MEMORY_TIERS};
use crate::errors::{invalid, unavailable};
use crate::kernels::{require_rows, require_sinks};
use crate::layers::PlacedLayer;
use crate::moves::{bytes_of, zero_by};
use crate::passes::{HostPages, StreamArguments, StreamedGroup};
use crate::reads::Reader;
use crate::step::StepState;
use crate::ticket::Ticket;
use crate::upload::{AnglePlaces, GroupPlaces, Room, Upload, WorkPlaces, room};
use numpy::{PyArray1, PyReadonlyArray1, PyReadwriteArray1};
use pagoda_core::ids::{Epoch, GroupId, Tier};
use pagoda_store::{Filled, Slab};
use pyo3::prelude::*;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// The memory of a cache on a device, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct DeviceArguments {
    /// Addresses of the device tier and of the host tier.
    pub(crate) bases: [u64; 2],
    /// Memory that pages pass through between the device and disk: its address, its bytes, and the bytes of its first part,
    /// which is reserved for calls that wait.
    pub(crate) stage: (u64, u64, u64),
    /// The ring that pages on disk pass through on their way to attention: its address, its bytes, and the bytes of a slot.
    pub(crate) ring: (u64, u64, u64),
    /// Objects that own the host memory which threads of this module write to.
    pub(crate) owners: Vec<Py<PyAny>>,
}

/// What this module keeps for the engine that runs a device's kernels.
pub(crate) struct Device {
    /// What the engine is told.
    pub(crate) upload: Upload,
    /// Plans whose copies the engine makes, until it has reported how they ended.
    pub(crate) moving: Vec<Py<Ticket>>,
    /// Slots of the ring that the engine copies from.
    pub(crate) lent: Vec<Filled>,
    /// Whether blocks on disk have been zeroed since the engine last cleared the memory that their pages had passed through.
    zeroed_on_disk: bool,
    pub(crate) stage: u64,
    /// Bytes of the stage's first part.
    pub(crate) stage_part: u64,
    /// Keeps memory alive until nothing writes to it any more.
    _owners: Vec<Py<PyAny>>,
}

impl Device {
    /// Also returns the slabs between which blocks are moved: the device tier, which is out of reach here, the host tier of
    /// `host_bytes`, and [`STAGE`].
    pub(crate) fn new(arguments: DeviceArguments, host_bytes: u64) -> (Self, Vec<Arc<Slab>>) {
        let DeviceArguments { bases, stage, owners, .. } = arguments;
        // SAFETY: the owners keep the memory, and `Inner` drops its mover before them.
        let lent = |address: u64, bytes: u64| unsafe { Slab::lent(address as usize, bytes as usize) };
        let slabs = [lent(0, 0), lent(bases[1], host_bytes), lent(stage.0, stage.1)];
        let device = Self {
            upload: Upload::default(),
            moving: Vec::new(),
            lent: Vec::new(),
            zeroed_on_disk: false,
            stage: stage.0,
            stage_part: stage.2,
            _owners: owners,
        };
        (device, slabs.map(Arc::new).to_vec())
    }
}

/// The slab after those of the tiers.
pub(crate) const STAGE: usize = MEMORY_TIERS.len();

pub(crate) fn no_device(py: Python<'_>) -> PyErr {
    unavailable(py, "device: this cache is on the CPU")
}

impl Cache {
    /// Tells a device about the open step.
    fn with_upload<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Upload, &pagoda_core::Cache, &StepState, &[PlacedLayer]) -> T,
    ) -> PyResult<T> {
        let mut inner = self.lock(py)?;
        inner.require_open(py)?;
        let Inner { core, step, layers, engine, .. } = &mut *inner;
        let Engine::Device(Device { upload, .. }) = engine else { return Err(no_device(py)) };
        Ok(call(upload, core, step, layers))
    }
}

impl Inner {
    /// What the engine is told.
    fn upload(&mut self, py: Python<'_>) -> PyResult<&mut Upload> {
        match &mut self.engine {
            Engine::Device(device) => Ok(&mut device.upload),
            Engine::Cpu(_) => Err(no_device(py)),
        }
    }
}

#[pymethods]
impl Cache {
    /// Sets where the tables of steps lie on the device from now on; nothing has been written there yet.
    fn place_tables(
        &self,
        py: Python<'_>,
        groups: Vec<GroupPlaces>,
        works: Vec<WorkPlaces>,
        angles: Vec<AnglePlaces>,
    ) -> PyResult<()> {
        self.lock(py)?.upload(py)?.place(groups, works, angles);
        Ok(())
    }

    /// How much room the tables of the open step need: sequences, tokens, columns, spans, angles.
    fn table_room(&self, py: Python<'_>) -> PyResult<[usize; 5]> {
        let inner = self.lock(py)?;
        inner.require_open(py)?;
        let Room { sequences, tokens, columns, spans, angles } =
            room(&inner.core, &inner.step, inner.block_bytes.len());
        Ok([sequences, tokens, columns, spans, angles])
    }

    /// Lists what the open step changes on the device; returns the number of words, and how many queries hold pages in common
    /// with others.
    fn stage(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        let (staged, countable, new_tokens) = self.with_upload(py, |upload, core, step, layers| {
            let staged = upload.fill(core, step, layers);
            (staged, upload.is_countable(), step.new_tokens())
        })?;
        if countable {
            return Ok(staged);
        }
        let limit = "fewer over contexts as long as these: kernels count tiles of all queries in 31 bits";
        Err(invalid(py, "new_tokens", new_tokens, limit))
    }

    /// The host pages that attention over a layer reads in the step that was staged, for each group that has some.
    fn host_pages(&self, py: Python<'_>) -> PyResult<BTreeMap<usize, HostPages>> {
        self.with_upload(py, |upload, core, _, _| upload.host_pages(core))
    }

    /// Pages of each group that attention of the staged step reads from disk, for a layer.
    fn on_disk(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.with_upload(py, |upload, core, step, layers| {
            let groups = (0..upload.group_count() as u8).map(GroupId);
            groups.map(|group| upload.pages_on_disk(core, step, layers, group)).collect()
        })
    }

    /// Plans how groups are streamed in the step that was staged. Returns the number of words on top of those of `stage`, a
    /// number that stays the same as long as blocks hold the same, and the groups.
    fn stream<'py>(
        &self,
        py: Python<'py>,
        groups: Vec<StreamArguments>,
    ) -> PyResult<(usize, u64, Vec<StreamedGroup<'py>>)> {
        let mut inner = self.lock(py)?;
        inner.require_open(py)?;
        let Inner { core, step, layers, disk, engine, .. } = &mut *inner;
        let Engine::Device(Device { upload, .. }) = engine else { return Err(no_device(py)) };
        let streamed = upload.stream(py, core, step, layers, &groups);
        if let Some(disk) = disk {
            disk.reads.what = upload.to_read(layers);
        }
        Ok(streamed)
    }

    /// Copies what `stage` and `stream` listed to `words`. streams: the address for the tables of streamed pages.
    fn staged(&self, py: Python<'_>, mut words: PyReadwriteArray1<'_, u32>, streams: u64) -> PyResult<()> {
        let words = words.as_slice_mut()?;
        self.with_upload(py, |upload, _, _, _| upload.take(streams, words))
    }

    /// `[from, to, bytes]` of the copies before the open step's first append, except those from disk, which are made already.
    fn step_transfers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let transfers = self.with(py, |inner| {
            let copies = inner.core.step_copies().iter().copied();
            Ok(inner.addresses(&copies.filter(|copy| copy.from.0 != Tier::Disk).collect::<Vec<_>>()))
        })?;
        Ok(PyArray1::from_vec(py, transfers))
    }

    /// Refuses unless the step may append to the layer now.
    fn check_append(
        &self,
        py: Python<'_>,
        number: u64,
        layer: usize,
        has_keys: bool,
        has_values: bool,
    ) -> PyResult<()> {
        let inner = self.lock(py)?;
        inner.require_step(py, number)?;
        require_rows(py, &inner.owning_layer(py, layer)?.layer, has_keys, has_values)?;
        inner.require_unwritten(py, layer)
    }

    /// Whether the open step's rows determine the centre of K, in layers where rows do.
    fn step_centers(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |inner| Ok(inner.step.centers))
    }

    /// Notes that the layer's new rows are on their way.
    fn appended(&self, py: Python<'_>, layer: usize) -> PyResult<()> {
        self.lock(py)?.step.written[layer] = true;
        Ok(())
    }

    /// Refuses unless the step may attend over the layer now.
    fn check_attend(&self, py: Python<'_>, number: u64, layer: usize, has_sinks: bool) -> PyResult<()> {
        let inner = self.lock(py)?;
        inner.require_step(py, number)?;
        require_sinks(py, inner.layer(py, layer)?, has_sinks)?;
        inner.require_written(py, layer)
    }

    /// Takes the layer of pages on disk at place `at` of what the step reads: a slot, the address of the first page, and the
    /// bytes from one page to the next. None if its read has not ended yet; with `wait`, None if all slots are taken.
    fn take_read(&self, py: Python<'_>, at: usize, wait: bool) -> PyResult<Option<(usize, usize, u64)>> {
        let mut inner = self.lock(py)?;
        inner.require_open(py)?;
        let Inner { core, mover, disk, engine, closed, .. } = &mut *inner;
        let (Engine::Device(device), Some(disk)) = (engine, disk) else { return Err(no_device(py)) };
        let mut reader = Reader { reads: &mut disk.reads, mover, ended: *closed };
        // SAFETY: pages do not move or change while the step is open. Steps retire after the reads that they have begun.
        let taken = unsafe {
            if wait {
                py.detach(|| reader.take(at)).map_err(|stop| stop.raise(py, core))?
            } else {
                reader.take_if_read(at)
            }
        };
        Ok(taken.map(|filled| {
            let found = (filled.slot(), filled.address.addr(), filled.stride);
            device.lent.push(filled);
            found
        }))
    }

    /// Gives back a slot whose pages have been copied, or all slots.
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

    /// The epoch of the step that was closed last, 0 before the first; the engine calls `retire` with it once its kernels have
    /// ended.
    fn ended_epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |inner| Ok(inner.closed.0))
    }

    /// The kernels of a step, and of all before it, have ended.
    fn retire(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        self.with(py, |inner| inner.retire(Epoch(epoch)))
    }

    /// `[address, bytes]` of freed blocks that the engine must zero, and whether blocks on disk have been zeroed, which this
    /// call does itself. Blocks are listed again until `zeroed`.
    fn zero<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyArray1<u64>>, bool)> {
        let mut inner = self.lock(py)?;
        let Inner { core, arenas, block_bytes, disk, engine, .. } = &mut *inner;
        let Engine::Device(device) = engine else { return Err(no_device(py)) };
        let mut ranges = Vec::new();
        device.zeroed_on_disk |= zero_by(py, core, disk, block_bytes, |tier, range| {
            ranges.extend([arenas.base[tier.index()] as u64 + range.start, range.end - range.start]);
            false
        })?;
        Ok((PyArray1::from_vec(py, ranges), device.zeroed_on_disk))
    }

    /// What `zero` listed is zeroed before anything else uses it, and so is the memory that pages on disk passed through.
    fn zeroed(&self, py: Python<'_>, ranges: PyReadonlyArray1<'_, u64>) -> PyResult<()> {
        let told: HashSet<_> = ranges.as_slice()?.chunks_exact(2).collect();
        let mut inner = self.lock(py)?;
        let Inner { core, arenas, block_bytes, engine, .. } = &mut *inner;
        let Engine::Device(device) = engine else { return Err(no_device(py)) };
        device.zeroed_on_disk = false;
        // Ranges to which newly freed neighbours were added are zeroed once more.
        core.zero(|tier, group, blocks| {
            let Range { start, end } = bytes_of(block_bytes, group, &blocks);
            tier != Tier::Disk && told.contains(&[arenas.base[tier.index()] as u64 + start, end - start][..])
        });
        Ok(())
    }
}
