//! The disk tier, as the facade asks for it.

use crate::errors;
use crate::reads::Reads;
use pagoda_core::work::RUN_ROWS;
use pagoda_store::disk::io::{Access, Directory, File, Folder, IO_BYTES_MAX, Kind, Op};
use pagoda_store::disk::{Budget, Error, Geometry, Recovered, Store};
use pagoda_store::{Ring, Slab};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that a thread of `time_disk_reads` asks for at once.
const PART_BYTES: u64 = 16 << 20;

/// Where pages go, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct DiskArguments {
    path: PathBuf,
    memory: u64,
    fingerprint: [u8; 16],
    /// Whether files have names, and are opened again.
    resume: bool,
    writes_per_day: Option<u64>,
    /// How long attention waits for one read.
    pub(crate) timeout: Duration,
}

/// The disk tier, and what steps read of it.
pub(crate) struct Disk {
    pub(crate) store: Arc<Store>,
    pub(crate) reads: Reads,
}

impl Disk {
    /// lent: memory to read into, and bytes of a slot of it; else there is as much as one run of pages needs.
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
        Ok(Self { store, reads: Reads::new(ring, timeout) })
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

/// Opens the files.
pub(crate) fn open(py: Python<'_>, disk: &DiskArguments, runs: &[Vec<u64>]) -> PyResult<(Store, Recovered)> {
    let open = || -> Result<_, Error> {
        let geometry = Geometry::new(runs, disk.memory)?;
        let folder = Folder::open(&disk.path)?;
        let budget = disk.writes_per_day.map(|bytes| Budget::new(bytes, Instant::now()));
        if disk.resume {
            Store::open(&folder, geometry, disk.fingerprint, budget)
        } else {
            let store = Store::scratch(&folder, geometry, disk.fingerprint, budget)?;
            Ok((store, Recovered::default()))
        }
    };
    py.detach(open).map_err(|error| errors::disk(py, &error))
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

/// Writes a file of `size` bytes, rounded up to parts of 16 MiB, and reads it in order, over and over, for `limit`: as pages are
/// read, but nothing is done with what comes. Returns the bytes that were read and the seconds that it took.
#[pyfunction]
pub(crate) fn time_disk_reads(
    py: Python<'_>,
    path: PathBuf,
    size: u64,
    limit: Duration,
) -> PyResult<(u64, f64)> {
    let time = || -> Result<_, Error> {
        let folder = Folder::open(&path)?;
        let parts = size.div_ceil(PART_BYTES).max(1);
        let timed = folder.scratch().and_then(|file| {
            // In huge pages, like the memory that a store reads into: with small ones some drives are several times slower.
            let slab = Slab::new(file.lanes() * PART_BYTES as usize)?;
            // SAFETY: the slab is this call's alone and lives to its end.
            let memory = unsafe { std::slice::from_raw_parts_mut(slab.base(), slab.bytes()) };
            // Nothing that a drive could store as less.
            for (n, byte) in memory.iter_mut().enumerate() {
                *byte = ((n as u32).wrapping_mul(0x9E37_79B1) >> 24) as u8;
            }
            let (written, asked) = (AtomicU64::new(0), AtomicU64::new(0));
            let next = || Some(written.fetch_add(1, Ordering::Relaxed)).filter(|&part| part < parts);
            in_parts(&*file, Kind::Write, memory, next)?;
            file.sync()?;
            let start = Instant::now();
            let next = || {
                let part = asked.fetch_add(1, Ordering::Relaxed);
                (part == 0 || start.elapsed() < limit).then_some(part % parts)
            };
            let read = in_parts(&*file, Kind::Read, memory, next)?;
            Ok((read * PART_BYTES, start.elapsed().as_secs_f64()))
        });
        timed.map_err(|source| Error::Io { operation: "timing the disk", source })
    };
    py.detach(time).map_err(|error| errors::disk(py, &error))
}

/// Has lanes of a file read or write parts of it, each with a part of `memory`, until `next` gives none; returns how many.
fn in_parts(
    file: &dyn File,
    kind: Kind,
    memory: &mut [u8],
    next: impl Fn() -> Option<u64> + Sync,
) -> io::Result<u64> {
    let lane = |bytes: &mut [u8]| -> io::Result<u64> {
        let (mut lane, mut done) = (file.lane()?, 0);
        while let Some(part) = next() {
            let pieces = bytes.chunks_mut(IO_BYTES_MAX).enumerate();
            let at = |piece: usize| part * PART_BYTES + (piece * IO_BYTES_MAX) as u64;
            let mut ops: Vec<_> = pieces.map(|(n, piece)| Op::new(kind, at(n), piece)).collect();
            lane.run(&mut ops);
            ops.into_iter().try_for_each(Op::outcome)?;
            done += 1;
        }
        Ok(done)
    };
    let lane = &lane;
    thread::scope(|scope| {
        let parts = memory.chunks_mut(PART_BYTES as usize);
        let lanes: Vec<_> = parts.map(|bytes| scope.spawn(move || lane(bytes))).collect();
        lanes.into_iter().map(|lane| lane.join().expect("a lane does not panic")).sum()
    })
}
