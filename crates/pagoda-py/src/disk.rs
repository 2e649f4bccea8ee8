//! Opening the disk tier with the arguments that the facade has checked.

use crate::errors;
use crate::patience::{Apart, Stop};
use crate::reads::Reads;
use crate::sessions::Sessions;
use pagoda_core::cache::TierMemory;
use pagoda_core::ids::GroupId;
use pagoda_core::work::RUN_ROWS;
use pagoda_store::disk::io::{Access, Folder, Pulse, scratch_in, space_in};
use pagoda_store::disk::{Budget, Error, Geometry, Recovered, Store, ceiling};
use pagoda_store::{Ring, Slab};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Arguments of the disk tier, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct DiskArguments {
    pub(crate) path: PathBuf,
    pub(crate) memory: u64,
    fingerprint: [u8; 16],
    /// Whether files have names and may be opened again.
    resume: bool,
    writes_per_day: Option<u64>,
    /// How long attention waits for one read, and other calls for a disk that does nothing.
    pub(crate) timeout: Duration,
}

/// The disk tier, and what steps read from it.
pub(crate) struct Disk {
    pub(crate) store: Arc<Store>,
    pub(crate) reads: Reads,
    /// A thread that zeroes blocks and returns which ones; no call waits for it any more.
    late: Option<Apart<Zeroed>>,
}

/// Runs of blocks, by layer group.
type Zeroed = HashSet<(GroupId, Range<u32>)>;

impl Disk {
    /// lent: memory to read into, and bytes of a slot of it; without it there is a new ring with slots of one run of pages.
    pub(crate) fn new(
        py: Python<'_>,
        store: Arc<Store>,
        lent: Option<(Slab, u64)>,
        page_size: u32,
        timeout: Duration,
    ) -> PyResult<Self> {
        let ring = match lent {
            Some((slab, slot_bytes)) => Ring::over(&store, slab, slot_bytes),
            None => Ring::new(&store, RUN_ROWS / page_size as usize)
                .map_err(|error| errors::unavailable(py, format_args!("memory to read into: {error}")))?,
        };
        let reads = Reads::new(ring, store.directory(), timeout);
        Ok(Self { store, reads, late: None })
    }

    /// Zeroes blocks that no page uses any more; returns those that are zeroed. If the drive does nothing for too long a
    /// thread goes on alone, and nothing more is zeroed until it has ended.
    pub(crate) fn zero(&mut self, py: Python<'_>, blocks: Vec<(GroupId, Range<u32>)>) -> PyResult<Zeroed> {
        if !self.is_idle() {
            return Ok(Zeroed::new());
        }
        let store = self.store.clone();
        let zero = move |(group, blocks): &(GroupId, Range<u32>)| store.zero(*group, blocks.clone()).is_ok();
        // If no thread can be started, or the drive refuses, the blocks wait for the next call.
        let Ok(mut zeroing) = Apart::begin(|| blocks.into_iter().filter(zero).collect()) else {
            return Ok(Zeroed::new());
        };
        let waited = py.detach(|| zeroing.wait(&self.store, self.reads.timeout()));
        if waited.is_ok() {
            return Ok(zeroing.join());
        }
        self.late = Some(zeroing);
        match waited {
            Err(Stop::Signal(error)) => Err(error),
            _ => Ok(Zeroed::new()),
        }
    }

    /// Whether no thread is zeroing whose call has given up.
    pub(crate) fn is_idle(&self) -> bool {
        self.late.as_ref().is_none_or(Apart::has_ended)
    }

    /// How I/O is done, and how much there was.
    pub(crate) fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (report, traffic) = (access_report(py, self.store.access())?, self.store.traffic());
        report.set_item("bytes_written", traffic.bytes_written)?;
        report.set_item("bytes_read", traffic.bytes_read)?;
        report.set_item("corrupt", traffic.corrupt)?;
        report.set_item("ring_bytes", self.reads.bytes())?;
        Ok(report)
    }
}

/// The result of opening the files.
pub(crate) struct Opened {
    pub(crate) core: pagoda_core::Cache,
    pub(crate) store: Arc<Store>,
    pub(crate) sessions: Sessions,
}

/// Opens the files, and passes what they keep to the core that `core` makes for their arena. If the drive takes too long to
/// answer, the directory stays locked until it has.
pub(crate) fn open(
    py: Python<'_>,
    disk: DiskArguments,
    geometry: Geometry,
    core: impl FnOnce(TierMemory) -> Result<pagoda_core::Cache, pagoda_core::Error> + Send + 'static,
    zero_on_free: bool,
) -> PyResult<Opened> {
    let opened = ask(py, &disk.path.clone(), disk.timeout, move |pulse| {
        let folder = Folder::open_watched(&disk.path, pulse)?;
        let budget = disk.writes_per_day.map(|bytes| Budget::new(bytes, SystemTime::now()));
        let (store, recovered) = if disk.resume {
            Store::open(&folder, geometry, disk.fingerprint, budget)?
        } else {
            (Store::scratch(&folder, geometry, disk.fingerprint, budget)?, Recovered::default())
        };
        let mut core = match core(store.geometry().arena()) {
            Ok(core) => core,
            Err(error) => return Ok(Err(error)),
        };
        let sessions = Sessions::open(&mut core, &store, recovered)?;
        if zero_on_free {
            store.zero_on_free()?;
        }
        Ok(Ok(Opened { core, store: Arc::new(store), sessions }))
    })?;
    opened.map_err(|error| errors::core(py, &error))
}

/// Asks the drive of a directory in a thread, which goes on alone when an answer takes longer than `limit`.
fn ask<T: Send + 'static>(
    py: Python<'_>,
    directory: &Path,
    limit: Duration,
    work: impl FnOnce(Arc<Pulse>) -> Result<T, Error> + Send + 'static,
) -> PyResult<T> {
    let pulse = Arc::new(Pulse::default());
    let watched = pulse.clone();
    let asking = Apart::begin(|| work(watched));
    let asking = asking.map_err(|source| Error::Io { operation: "starting a thread", source });
    let asking = asking.map_err(|error| errors::disk(py, directory, &error))?;
    let then = "the directory is let go of when it has answered";
    let outcome = py.detach(|| asking.outcome(directory, &pulse, limit));
    outcome.map_err(|stop| stop.and(then).raise(py))?.map_err(|error| errors::disk(py, directory, &error))
}

/// Bytes of a ring for reads ahead with slots of `slot_bytes`.
#[pyfunction]
pub(crate) fn ring_bytes(slot_bytes: u64) -> u64 {
    Ring::bytes_of(slot_bytes)
}

/// Bytes of pages that fit a file of at most `disk_memory` bytes. runs: bytes of each layer in a block, by layer group.
#[pyfunction]
pub(crate) fn disk_room(py: Python<'_>, runs: Vec<Vec<u64>>, disk_memory: u64) -> PyResult<u64> {
    let geometry = Geometry::new(&runs, disk_memory);
    geometry.map(|geometry| geometry.arena().bytes).map_err(|error| errors::disk(py, Path::new(""), &error))
}

/// How page I/O can be done in a directory, tested with a write and a read there, and how much space its file system has.
#[pyfunction]
pub(crate) fn disk_access(
    py: Python<'_>,
    path: PathBuf,
    disk_timeout: Duration,
) -> PyResult<Bound<'_, PyDict>> {
    let (access, (free, total)) = ask(py, &path.clone(), disk_timeout, move |pulse| {
        let (_, access) = scratch_in(&path, &pulse)?;
        Ok((access, space_in(&path, &pulse)?))
    })?;
    let report = access_report(py, &access)?;
    report.set_item("free_bytes", free)?;
    report.set_item("total_bytes", total)?;
    Ok(report)
}

fn access_report<'py>(py: Python<'py>, access: &Access) -> PyResult<Bound<'py, PyDict>> {
    let report = PyDict::new(py);
    report.set_item("direct", access.direct)?;
    report.set_item("io_uring", access.uring)?;
    report.set_item("refused", access.refused.clone())?;
    Ok(report)
}

/// Reads a file of `size` bytes in a directory repeatedly for `limit`; returns the bytes read and the seconds taken.
#[pyfunction]
pub(crate) fn time_disk_reads(
    py: Python<'_>,
    path: PathBuf,
    size: u64,
    limit: Duration,
    disk_timeout: Duration,
) -> PyResult<(u64, f64)> {
    let (bytes, time) = ask(py, &path.clone(), disk_timeout, move |pulse| {
        let (file, _) = scratch_in(&path, &pulse)?;
        ceiling::time_reads(&*file, size, limit, &pulse)
    })?;
    Ok((bytes, time.as_secs_f64()))
}
