//! The disk tier, as the facade asks for it.

use crate::errors;
use crate::fork;
use crate::patience::{Apart, Stop};
use crate::reads::Reads;
use crate::sessions::Sessions;
use pagoda_core::fence::Failure;
use pagoda_core::work::RUN_ROWS;
use pagoda_store::disk::io::{Access, Directory, Folder, Pulse};
use pagoda_store::disk::{Budget, Error, Geometry, Recovered, Store, ceiling};
use pagoda_store::{Ring, Slab};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where pages go, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct DiskArguments {
    pub(crate) path: PathBuf,
    pub(crate) memory: u64,
    fingerprint: [u8; 16],
    /// Whether files have names, and are opened again.
    resume: bool,
    writes_per_day: Option<u64>,
    /// How long attention waits for one read, and others for a disk that does nothing.
    pub(crate) timeout: Duration,
}

/// The disk tier, and what steps read of it.
pub(crate) struct Disk {
    pub(crate) store: Arc<Store>,
    pub(crate) reads: Reads,
    /// The directory.
    pub(crate) path: PathBuf,
}

impl Disk {
    /// lent: memory to read into, and bytes of a slot of it; else there is as much as one run of pages needs.
    pub(crate) fn new(
        py: Python<'_>,
        store: Arc<Store>,
        lent: Option<(Slab, u64)>,
        page_size: u32,
        timeout: Duration,
        path: PathBuf,
    ) -> PyResult<Self> {
        let ring = match lent {
            Some((slab, slot_bytes)) => Ring::over(&store, slab, slot_bytes),
            None => Ring::new(&store, RUN_ROWS / page_size as usize)
                .map_err(|error| errors::unavailable(py, format_args!("memory to read into: {error}")))?,
        };
        Ok(Self { store, reads: Reads::new(ring, timeout), path })
    }

    /// How I/O is done and what it came to.
    pub(crate) fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (report, traffic) = (access_report(py, self.store.access())?, self.store.traffic());
        report.set_item("bytes_written", traffic.bytes_written)?;
        report.set_item("bytes_read", traffic.bytes_read)?;
        report.set_item("corrupt", traffic.corrupt)?;
        report.set_item("ring_bytes", self.reads.bytes())?;
        Ok(report)
    }
}

/// What is there once the files are open.
pub(crate) struct Opened {
    pub(crate) core: pagoda_core::Cache,
    pub(crate) store: Arc<Store>,
    pub(crate) sessions: Sessions,
}

/// Opens the files, and tells `core` what they keep. A thread does, and goes on alone when the drive does not answer for too long:
/// until it has, others must not open the directory.
pub(crate) fn open(
    py: Python<'_>,
    disk: DiskArguments,
    geometry: Geometry,
    mut core: pagoda_core::Cache,
    zero_on_free: bool,
) -> PyResult<Opened> {
    let (limit, path, pulse) = (disk.timeout, disk.path.clone(), Arc::new(Pulse::default()));
    let watched = pulse.clone();
    let opening = Apart::begin(move || -> Result<_, Error> {
        let folder = Folder::open_watched(&disk.path, watched)?;
        let budget = disk.writes_per_day.map(|bytes| Budget::new(bytes, Instant::now()));
        let (store, recovered) = if disk.resume {
            Store::open(&folder, geometry, disk.fingerprint, budget)?
        } else {
            (Store::scratch(&folder, geometry, disk.fingerprint, budget)?, Recovered::default())
        };
        let sessions = Sessions::open(&mut core, &store, recovered)?;
        if zero_on_free {
            store.zero_on_free()?;
        }
        Ok(Opened { core, store: Arc::new(store), sessions })
    });
    let opening = opening.map_err(|source| Error::Io { operation: "starting a thread", source });
    let opening = opening.map_err(|error| errors::disk_in(py, &path, &error))?;
    let opened = py.detach(|| opening.outcome(&pulse, limit)).map_err(|stop| match stop {
        Stop::Idle(limit) => {
            let seconds = limit.as_secs_f64();
            let reason = format!(
                "disk_timeout = {seconds}: the drive did nothing for longer; the directory is let go of when it has answered"
            );
            errors::failure(py, Some(&Failure::Io(reason)))
        }
        other => other.raise(py),
    })?;
    let opened = opened.map_err(|error| errors::disk_in(py, &path, &error))?;
    fork::opened(&opened.store);
    Ok(opened)
}

/// Bytes of a ring for reads ahead of need with slots of so many.
#[pyfunction]
pub(crate) fn ring_bytes(slot_bytes: u64) -> u64 {
    Ring::bytes_of(slot_bytes)
}

/// How page I/O can be done in a directory, as a write and a read there show.
#[pyfunction]
pub(crate) fn disk_access(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let folder = py.detach(|| Folder::open(&path)).map_err(|error| errors::disk(py, &error))?;
    access_report(py, &folder.access())
}

fn access_report<'py>(py: Python<'py>, access: &Access) -> PyResult<Bound<'py, PyDict>> {
    let report = PyDict::new(py);
    report.set_item("direct", access.direct)?;
    report.set_item("io_uring", access.uring)?;
    report.set_item("refused", access.refused.clone())?;
    Ok(report)
}

/// The bytes that were read from a file of `size` bytes in a directory, over and over for `limit`, and the seconds that it took.
#[pyfunction]
pub(crate) fn time_disk_reads(
    py: Python<'_>,
    path: PathBuf,
    size: u64,
    limit: Duration,
) -> PyResult<(u64, f64)> {
    let time = || ceiling::time_reads(&Folder::open(&path)?, size, limit);
    let (bytes, time) = py.detach(time).map_err(|error| errors::disk(py, &error))?;
    Ok((bytes, time.as_secs_f64()))
}
