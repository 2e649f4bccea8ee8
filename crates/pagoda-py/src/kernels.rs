//! The CPU's kernels over the open step, and the checks of what they are given.

use crate::arrays::{address_of, array, empty, floats, rows, rows_mut, zeros};
use crate::cache::{Cache, Engine, Inner};
use crate::common::Found;
use crate::errors::{cpu, invalid, unavailable};
use crate::layers::PlacedLayer;
use crate::reads::Reader;
use crate::step::StepState;
use crate::stream::{Stop, Stream};
use numpy::{PyArray2, PyArrayMethods, PyUntypedArray};
use pagoda_core::ids::GroupId;
use pagoda_cpu::{Attention, Backend, Isa, Layer, PagedKv, SequenceTable, Shared};
use pagoda_store::Slab;
use pyo3::prelude::*;
use std::sync::Arc;

/// Results of attention, and their log-sum-exp if it is asked for.
type Attended<'py> = (Bound<'py, PyUntypedArray>, Option<Bound<'py, PyArray2<f32>>>);

/// The memory of a cache on the CPU, and its backend.
pub(crate) struct Cpu {
    pub(crate) slabs: Vec<Arc<Slab>>,
    pub(crate) backend: Backend,
    checked: bool,
    pub(crate) stream: Stream,
    /// What sequences of the open step have in common, by layer group.
    commons: Vec<(Found, Shared)>,
}

impl Cpu {
    pub(crate) fn new(
        py: Python<'_>,
        memory: [u64; 2],
        threads: usize,
        deterministic: bool,
        isa: Option<&str>,
        checked: bool,
    ) -> PyResult<Self> {
        let isa = isa.map(|name| isa_named(py, name)).transpose()?;
        let slab = |name: &str, bytes: u64| {
            let slab = Slab::new(bytes as usize);
            slab.map(Arc::new).map_err(|error| unavailable(py, format_args!("{name} = {bytes}: {error}")))
        };
        let slabs = vec![slab("device_memory", memory[0])?, slab("host_memory", memory[1])?];
        let backend = Backend::new(threads, deterministic, isa).map_err(|error| cpu(py, &error))?;
        Ok(Self { slabs, backend, checked, stream: Stream::default(), commons: Vec::new() })
    }

    /// Finds common pages of the step that was opened, for groups in which attention may read them once for all sequences.
    pub(crate) fn find_common(
        &mut self,
        core: &pagoda_core::Cache,
        step: &StepState,
        groups: usize,
        layers: &[PlacedLayer],
    ) {
        self.commons.resize_with(groups, Default::default);
        for (group, (found, shared)) in self.commons.iter_mut().enumerate() {
            let Some(placed) = layers.iter().find(|placed| placed.group.index() == group) else { continue };
            if placed.layer.window.is_none() && !self.backend.deterministic() {
                found.update(core, step, placed.group, placed.layer.page_size, |_| true);
                shared.fill(&found.commons, step.bounds());
            }
        }
    }
}

#[pymethods]
impl Cache {
    /// Writes K and V of the new tokens of one layer; no V where it is part of K, no K where it is derived from V.
    #[pyo3(signature = (number, layer, k=None, v=None, dtype=None))]
    fn append(
        &self,
        py: Python<'_>,
        number: u64,
        layer: usize,
        k: Option<&Bound<'_, PyAny>>,
        v: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let inner = &mut *self.lock(py)?;
        inner.require_step(py, number)?;
        let placed = inner.owning_layer(py, layer)?;
        let are_bf16 = integers_are_bf16(py, dtype)?;
        let k = k.map(|k| array("k", k)).transpose()?;
        let v = v.map(|v| array("v", v)).transpose()?;
        let geometry = placed.layer.geometry;
        let shape = |dim: u32| [inner.step.new_tokens(), geometry.num_kv_heads as usize, dim as usize];
        require_rows(py, &placed.layer, k.is_some(), v.is_some())?;
        // In a layer whose keys are derived, values take the place of K.
        let (name, stored) = k.map(|k| ("k", k)).or(v.map(|v| ("v", v))).expect("one of them is given");
        let keys = rows(name, stored, shape(geometry.head_dim), are_bf16)?;
        let values = v.filter(|_| geometry.v_format.is_some());
        let values = values.map(|v| rows("v", v, shape(geometry.v_head_dim), are_bf16)).transpose()?;
        inner.require_unwritten(py, layer)?;
        let Inner { core, layers, arenas, engine, step, .. } = inner;
        let Engine::Cpu(Cpu { backend, checked, .. }) = engine else { return Err(no_kernels(py)) };
        let first = step.centers && layers[layer].center_first;
        let before = first.then(|| layers[layer].layer.transform.center.clone());
        if let Some(before) = &before {
            let (heads, dim) = (geometry.num_kv_heads as usize, geometry.head_dim as usize);
            // SAFETY: the array was checked.
            let center = unsafe { backend.center_of(keys, step.new_tokens(), heads, dim, before) };
            center_by(layers, layer, &center.unwrap_or_default());
        }
        let memory = std::mem::take(&mut step.sequences);
        let tables = sequence_tables(core, step, layers[layer].group, memory);
        let result = py.detach(|| {
            let kv = PagedKv { arenas, layer: &layers[layer].layer, sequences: &tables };
            // SAFETY: the core has given the new rows to this step alone, and the arrays were checked; Python keeps them
            // alive for the call.
            unsafe { backend.append(&kv, keys, values, *checked) }
        });
        step.sequences = recycle(tables);
        if let (Some(before), Err(_)) = (before, &result) {
            center_by(layers, layer, &before);
        }
        result.map_err(|error| cpu(py, &error))?;
        step.written[layer] = true;
        Ok(())
    }

    /// Attention of the new tokens of one layer, into `out` or a new array; and the log-sum-exp, if it is asked for.
    #[pyo3(signature = (number, layer, q, out=None, return_lse=false, dtype=None, sink_logits=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn attend<'py>(
        &self,
        number: u64,
        layer: usize,
        q: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        return_lse: bool,
        dtype: Option<&Bound<'py, PyAny>>,
        sink_logits: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Attended<'py>> {
        let py = q.py();
        let inner = &mut *self.lock(py)?;
        inner.require_step(py, number)?;
        let placed = inner.layer(py, layer)?;
        let are_bf16 = integers_are_bf16(py, dtype)?;
        let heads = placed.layer.num_q_heads as usize;
        let shape = |dim: u32| [inner.step.new_tokens(), heads, dim as usize];
        let q = array("q", q)?;
        let queries = rows("q", q, shape(placed.layer.geometry.head_dim), are_bf16)?;
        let result = shape(placed.layer.geometry.v_head_dim);
        let out = out.map_or_else(|| empty(result, q), |out| array("out", out).cloned())?;
        let outputs = rows_mut("out", &out, result, are_bf16, q)?;
        require_sinks(py, placed, sink_logits.is_some())?;
        let sinks = sink_logits
            .map(|given| floats("sink_logits", array("sink_logits", given)?, heads))
            .transpose()?;
        inner.require_written(py, layer)?;
        let lse = return_lse.then(|| zeros(py, [inner.step.new_tokens(), heads])).transpose()?;
        let mut borrowed = lse.as_ref().map(Bound::readwrite);
        let sums = borrowed.as_mut().map(|lse| address_of("lse", lse, [inner.step.new_tokens(), heads]));
        let sums = sums.transpose()?;
        let Inner { core, layers, arenas, mover, disk, engine, step, closed, .. } = inner;
        let Engine::Cpu(Cpu { backend, stream, commons, .. }) = engine else { return Err(no_kernels(py)) };
        let memory = std::mem::take(&mut step.sequences);
        let tables = sequence_tables(core, step, layers[layer].group, memory);
        let disk = disk.as_mut().filter(|_| stream.has(layer));
        // If pages are on disk, each sequence is attended to by itself.
        let apart = disk.is_some() || layers[layer].layer.window.is_some();
        let shared = if apart { None } else { Some(&commons[layers[layer].group.index()].1) };
        let result = py.detach(|| {
            let attention = Attention {
                kv: PagedKv { arenas, layer: &layers[layer].layer, sequences: &tables },
                queries,
                sinks: sinks.as_deref(),
                out: outputs,
                lse: sums.map(|address| address.get()),
                shared,
            };
            // SAFETY: pages do not move or change while the step is open, and the arrays were checked; Python keeps them
            // alive for the call. Steps retire after the reads that they have begun.
            unsafe {
                match disk {
                    Some(disk) => {
                        let mut reader = Reader { reads: &mut disk.reads, mover, ended: *closed };
                        stream.attend(backend, &mut reader, layer, attention)
                    }
                    None => backend.attend(&attention).map_err(Stop::from),
                }
            }
        });
        let attended: u64 = tables.iter().map(|table| layers[layer].layer.seen_bytes(table)).sum();
        step.sequences = recycle(tables);
        let spared = shared.map_or(0, Shared::spared_rows) as u64 * layers[layer].layer.token_bytes();
        step.attended += attended - spared;
        result.map_err(|stop| stop.raise(py, core))?;
        drop(borrowed);
        Ok((out, lse))
    }
}

fn no_kernels(py: Python<'_>) -> PyErr {
    unavailable(py, "CPU kernels: this cache is on a device")
}

pub(crate) fn isa_named(py: Python<'_>, name: &str) -> PyResult<Isa> {
    let found = Isa::ALL.into_iter().find(|isa| isa.to_string() == name);
    found.ok_or_else(|| {
        let names = Isa::ALL.map(|isa| isa.to_string()).join(", ");
        invalid(py, "PAGODA_CPU_ISA", format_args!("{name:?}"), format_args!("one of {names}"))
    })
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

/// Sets the centre of K from now on, for a layer and for those that read its rows.
fn center_by(layers: &mut [PlacedLayer], layer: usize, center: &[f32]) {
    for (at, placed) in layers.iter_mut().enumerate() {
        if at == layer || placed.owner == Some(layer) {
            center.clone_into(&mut placed.layer.transform.center);
        }
    }
}

/// The same allocation, empty, for tables of another lifetime.
fn recycle<'a>(mut tables: Vec<SequenceTable<'_>>) -> Vec<SequenceTable<'a>> {
    tables.clear();
    tables.into_iter().map(|_| unreachable!("cleared")).collect()
}

/// Whether the caller says that 16-bit integers are bits of bfloat16.
pub(crate) fn integers_are_bf16(py: Python<'_>, dtype: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
    match dtype.map(|dtype| (dtype, dtype.extract())) {
        None => Ok(false),
        Some((_, Ok("bf16"))) => Ok(true),
        Some((other, _)) => Err(invalid(py, "dtype", other.repr()?, "None, or \"bf16\" for 16-bit integers")),
    }
}

/// Refuses unless K and V are given exactly where a layer stores them.
pub(crate) fn require_rows(py: Python<'_>, layer: &Layer, k: bool, v: bool) -> PyResult<()> {
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

/// Refuses unless sinks are given exactly where a layer has them.
pub(crate) fn require_sinks(py: Python<'_>, placed: &PlacedLayer, given: bool) -> PyResult<()> {
    match (given, placed.sinks) {
        (false, true) => {
            let limit = format!("a float32 array [{}]", placed.layer.num_q_heads);
            Err(invalid(py, "sink_logits", "None", limit))
        }
        (true, false) => Err(invalid(py, "sink_logits", "an array", "None, for a layer without sinks")),
        _ => Ok(()),
    }
}
