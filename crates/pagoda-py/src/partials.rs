//! The CPU's part in a step whose kernels are on a device: attention over host pages, as partial results from which the
//! device continues.

use crate::arrays::{address_of, floats, rows};
use crate::cache::Cache;
use crate::errors::{cpu, invalid};
use crate::fork;
use crate::kernels::{integers_are_bf16, isa_named};
use numpy::{PyArray3, PyArrayMethods, PyReadonlyArray1, PyUntypedArray};
use pagoda_core::ids::Tier;
use pagoda_core::work;
use pagoda_cpu::{Backend, Layer, PagedKv, SequenceTable};
use pyo3::prelude::*;
use std::mem::ManuallyDrop;

/// Threads and kernels of the CPU for a cache on a device.
#[pyclass(frozen, module = "pagoda._core")]
pub(crate) struct Partials {
    backend: ManuallyDrop<Backend>,
    /// The process that made it.
    process: u64,
}

impl Drop for Partials {
    fn drop(&mut self) {
        // In a forked child the threads do not exist.
        if self.process == fork::process() {
            // SAFETY: it is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.backend) };
        }
    }
}

#[pymethods]
impl Partials {
    #[new]
    fn new(py: Python<'_>, threads: usize, isa: Option<&str>) -> PyResult<Self> {
        let isa = isa.map(|name| isa_named(py, name)).transpose()?;
        let backend = Backend::new(threads, false, isa).map_err(|error| cpu(py, &error))?;
        Ok(Self { backend: ManuallyDrop::new(backend), process: fork::process() })
    }

    /// Sets the centre of a layer's K rows after the device has taken it from the first of them: float32
    /// `[num_kv_heads * head_dim]`.
    fn center(
        &self,
        py: Python<'_>,
        cache: &Cache,
        layer: usize,
        center: &Bound<'_, PyUntypedArray>,
    ) -> PyResult<()> {
        let mut inner = cache.lock(py)?;
        let geometry = inner.layer(py, layer)?.layer.geometry;
        let length = geometry.num_kv_heads * geometry.head_dim;
        inner.layers[layer].layer.transform.center = floats("center", center, length as usize)?;
        Ok(())
    }

    /// Attention of a layer of the open step over the tokens before `begins` of each sequence, which are all on the host
    /// tier. Sequences without such tokens are left out.
    ///
    /// q: queries of the remaining sequences, `[tokens, num_q_heads, head_dim]`. parts: float32
    /// `[tokens, num_q_heads, v_head_dim + 2]`, see [`Backend::attend_before`]. Returns the bytes of the rows that were read.
    #[pyo3(signature = (cache, layer, begins, q, parts, dtype=None))]
    fn attend(
        &self,
        cache: &Cache,
        layer: usize,
        begins: PyReadonlyArray1<'_, u32>,
        q: &Bound<'_, PyUntypedArray>,
        parts: &Bound<'_, PyArray3<f32>>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let py = q.py();
        let inner = cache.lock(py)?;
        inner.require_open(py)?;
        let placed = inner.layer(py, layer)?;
        inner.require_written(py, layer)?;
        let begins = begins.as_slice()?;
        if begins.len() != inner.core.step_batch().len() {
            let limit = format!("one for each of {} sequences", inner.core.step_batch().len());
            return Err(invalid(py, "begins", format_args!("{} entries", begins.len()), limit));
        }
        let divided = begins.iter().enumerate().filter(|(_, begin)| **begin > 0);
        let (tables, ends): (Vec<_>, Vec<_>) = divided
            .map(|(index, &begin)| (inner.step.table(&inner.core, index, placed.group), begin as usize))
            .unzip();
        let layer = &placed.layer;
        if !tables.iter().zip(&ends).all(|(table, &end)| is_on_host(layer, table, end)) {
            let limit = "the end of tokens of the host tier alone";
            return Err(invalid(py, "begins", format_args!("{begins:?}"), limit));
        }
        let tokens = tables.iter().map(|table| table.new_tokens as usize).sum();
        let (heads, geometry) = (layer.num_q_heads as usize, layer.geometry);
        let are_bf16 = integers_are_bf16(py, dtype)?;
        let queries = rows("q", q, [tokens, heads, geometry.head_dim as usize], are_bf16)?;
        let mut parts = parts.try_readwrite()?;
        let target = address_of("parts", &mut parts, [tokens, heads, geometry.v_head_dim as usize + 2])?;
        let (kv, backend) = (PagedKv { arenas: &inner.arenas, layer, sequences: &tables }, &self.backend);
        // SAFETY: pages do not move or change while the step is open, those before the ends are in memory of the host, and the
        // arrays were checked; Python keeps them alive for the call.
        py.detach(|| unsafe { backend.attend_before(&kv, queries, &ends, target.get()) })
            .map_err(|error| cpu(py, &error))?;
        Ok(tables.iter().zip(&ends).map(|(table, &end)| layer.seen_bytes_before(table, end)).sum())
    }
}

/// Whether all pages with visible tokens before `end` are on the host tier.
fn is_on_host(layer: &Layer, table: &SequenceTable<'_>, end: usize) -> bool {
    let seen = layer.seen(table).start..end;
    let mut runs = work::runs(table.spans, seen, layer.page_size as usize);
    runs.all(|(_, pages)| table.row[pages].iter().all(|entry| entry.tier() == Tier::Host))
}
