//! The Python module `pagoda._core`: a thin layer over the Rust crates. It checks arrays and decides nothing.

mod arrays;
mod cache;
mod codec;
mod common;
mod device;
mod disk;
mod errors;
mod fork;
mod handle;
mod kernels;
mod layers;
mod lock;
mod moves;
mod partials;
mod passes;
mod patience;
mod reads;
mod sessions;
mod step;
mod stream;
mod tables;
mod ticket;
mod upload;

use numpy::{PyArray1, PyArrayMethods};
use pagoda_core::layout::RowFormat;
use pagoda_core::{limits, work};
use pagoda_cpu::Isa;
use pagoda_store::disk::io;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// How many cores this process may use, by its affinity and the quota of its cgroup: the default number of a cache's workers.
#[pyfunction]
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// How this module was built, and what it found on this machine.
#[pyfunction]
fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    let isas = Isa::ALL.into_iter().filter(|isa| isa.is_supported());
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("debug", cfg!(debug_assertions))?;
    info.set_item("isa", Isa::detect().to_string())?;
    info.set_item("isas", isas.map(|isa| isa.to_string()).collect::<Vec<_>>())?;
    Ok(info)
}

/// The compiled part of Pagoda.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // The first array makes Python look up NumPy's functions. Ctrl-C during that is a panic, which no cache survives. NumPy is
    // imported before, as this takes longer and may fail.
    module.py().import("numpy")?;
    drop(PyArray1::<f32>::zeros(module.py(), 0, false).readwrite());
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("ARENA_BYTES_MAX", limits::ARENA_BYTES_MAX)?;
    module.add("BLOCKS_PER_GROUP_MAX", limits::BLOCKS_PER_GROUP_MAX)?;
    module.add("COMMON_LEVELS_MAX", pagoda_core::common::LEVELS_MAX)?;
    module.add("COMMON_NEW_TOKENS_MAX", pagoda_core::common::NEW_TOKENS_MAX)?;
    module.add("DISK_ALIGN", io::ALIGN)?;
    module.add("EXTENTS_MAX", limits::EXTENTS_MAX)?;
    module.add("F16_MAX", pagoda_cpu::F16_MAX)?;
    module.add("GROUPS_MAX", limits::GROUPS_MAX)?;
    module.add("HEAD_DIM_MAX", pagoda_cpu::HEAD_DIM_MAX)?;
    module.add("KEY_BYTES_MAX", sessions::KEY_BYTES_MAX)?;
    module.add("PAGE_SIZE_MAX", pagoda_cpu::PAGE_SIZE_MAX)?;
    module.add("PAGE_SIZE_MIN", pagoda_cpu::PAGE_SIZE_MIN)?;
    module.add("RUN_ROWS", work::RUN_ROWS)?;
    module.add("SEQUENCES_MAX", limits::SEQUENCES_MAX)?;
    module.add("TILE", work::TILE)?;
    module.add("TOKENS_MAX", limits::TOKENS_PER_SEQUENCE_MAX)?;
    let facts = |format: RowFormat| {
        let (scale_bytes, block) = format.scale();
        (format.to_string(), format.bits(), format.unit(), scale_bytes, block)
    };
    module.add("ROW_FORMATS", RowFormat::ALL.map(facts))?;
    module.add_function(wrap_pyfunction!(build_info, module)?)?;
    module.add_function(wrap_pyfunction!(cores, module)?)?;
    module.add_function(wrap_pyfunction!(codec::encode_rows, module)?)?;
    module.add_function(wrap_pyfunction!(codec::decode_rows, module)?)?;
    module.add_function(wrap_pyfunction!(disk::disk_access, module)?)?;
    module.add_function(wrap_pyfunction!(disk::disk_room, module)?)?;
    module.add_function(wrap_pyfunction!(disk::ring_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(disk::time_disk_reads, module)?)?;
    module.add_function(wrap_pyfunction!(layers::block_layout, module)?)?;
    module.add_function(wrap_pyfunction!(fork::after_fork_in_child, module)?)?;
    module.add_class::<cache::Cache>()?;
    module.add_class::<handle::Handle>()?;
    module.add_class::<partials::Partials>()?;
    module.add_class::<ticket::Plan>()?;
    module.add_class::<ticket::Ticket>()?;
    module.add_class::<ticket::DiskCopies>()?;
    Ok(())
}
