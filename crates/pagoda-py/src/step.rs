//! The open step: its calls, their preconditions, and the state that it adds to the core's own.

use crate::arrays::by_token;
use crate::cache::{Cache, Engine, Inner};
use crate::errors::{core, invalid, invalid_because};
use crate::layers::PlacedLayer;
use crate::moves::Link;
use crate::reads::Traffic;
use crate::tables;
use numpy::{PyArray1, PyReadonlyArray1};
use pagoda_core::Error;
use pagoda_core::ids::{GroupId, SequenceId};
use pagoda_core::limits::TOKENS_PER_STEP_MAX;
use pagoda_core::table::SpanView;
use pagoda_cpu::SequenceTable;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ops::Range;

/// What the open step adds to the core's own.
#[derive(Default)]
pub(crate) struct StepState {
    /// Identifies the step; its holder chose the number.
    number: u64,
    spans: Vec<SpanView>,
    /// Its part of `spans`, by layer group, then by sequence.
    ranges: Vec<Range<usize>>,
    /// Where each sequence's new tokens begin, and where the last one's end.
    bounds: Vec<u32>,
    /// Whether its rows determine the centre of K, in layers where rows do: they are the first in an empty cache.
    pub(crate) centers: bool,
    /// Bytes of the rows that were attended to.
    pub(crate) attended: u64,
    /// By layer: whether its new rows are written, or the caller writes them through the tables, or the layer stores none.
    pub(crate) written: Vec<bool>,
    /// Memory for the tables of one call.
    pub(crate) sequences: Vec<SequenceTable<'static>>,
}

impl StepState {
    /// The spans of the sequence at place `index` of the batch, new tokens included.
    pub(crate) fn spans(&self, core: &pagoda_core::Cache, index: usize, group: GroupId) -> &[SpanView] {
        &self.spans[self.ranges[group.index() * core.step_batch().len() + index].clone()]
    }

    /// Tokens of these spans.
    pub(crate) fn length(&self, core: &pagoda_core::Cache, index: usize, group: GroupId) -> u32 {
        self.spans(core, index, group).iter().map(|span| span.count).sum()
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

    /// New tokens of the whole batch.
    pub(crate) fn new_tokens(&self) -> usize {
        self.bounds.last().map_or(0, |&end| end as usize)
    }

    /// Where each sequence's new tokens begin, and where the last one's end.
    pub(crate) fn bounds(&self) -> &[u32] {
        &self.bounds
    }

    /// Lays out the spans of the step that `core` has just opened.
    pub(crate) fn enter(&mut self, core: &pagoda_core::Cache, groups: usize, layers: &[PlacedLayer]) {
        self.spans.clear();
        self.ranges.clear();
        for group in 0..groups as u8 {
            for index in 0..core.step_batch().len() {
                let start = self.spans.len();
                // Not `extend`, which would ask a chain of iterators for one span after the other.
                core.step_spans(index, GroupId(group)).for_each(|span| self.spans.push(span));
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

#[pymethods]
impl Cache {
    /// Opens a step under a number that no other has; shared open pages are copied before it returns. link: a function
    /// that copies between a device and host memory.
    #[pyo3(signature = (number, sequences, new_tokens, link=None))]
    fn reserve(
        &self,
        py: Python<'_>,
        number: u64,
        sequences: PyReadonlyArray1<'_, u64>,
        new_tokens: PyReadonlyArray1<'_, i64>,
        link: Link<'_, '_>,
    ) -> PyResult<()> {
        let (sequences, new_tokens) = (sequences.as_slice()?, new_tokens.as_slice()?);
        if sequences.len() != new_tokens.len() {
            let limit = format!("one entry for each of {} sequences in batch", sequences.len());
            return Err(invalid(py, "new_tokens", format_args!("{} entries", new_tokens.len()), limit));
        }
        let counts = new_tokens.iter().map(|&count| u32::try_from(count).map_err(|_| count));
        let mut inner = self.lock(py)?;
        self.release_abandoned(py, &mut inner)?;
        if let Some(error) = inner.core.take_failure() {
            return Err(core(py, &error));
        }
        let mut batch = Vec::with_capacity(sequences.len());
        for (&sequence, count) in sequences.iter().zip(counts) {
            let limit = format_args!("from 0 to {TOKENS_PER_STEP_MAX}");
            let count = count.map_err(|count| invalid(py, "new_tokens", count, limit))?;
            batch.push((SequenceId::of_number(sequence), count));
        }
        inner.zero(py)?;
        let was_empty = inner.core.is_empty();
        let mut reserved = inner.core.reserve(&batch);
        if matches!(reserved, Err(Error::OutOfBlocks { draining: 1.., .. })) {
            // Reads may have ended since the lock was taken.
            inner.finish_reads(py)?;
            reserved = inner.core.reserve(&batch);
        }
        reserved.map_err(|error| core(py, &error))?;
        inner.step.number = number;
        if let Err(unmade) = inner.copy_shared(py, link) {
            let epoch = inner.core.rollback().map_err(|error| core(py, &error))?;
            inner.end_step(py, epoch)?;
            return Err(unmade.raise(py, &inner.core));
        }
        let Inner { core, layers, step, block_bytes, engine, disk, .. } = &mut *inner;
        step.enter(core, block_bytes.len(), layers);
        step.centers = was_empty && step.new_tokens() > 0;
        if let Engine::Cpu(cpu) = engine {
            cpu.find_common(core, step, block_bytes.len(), layers);
        }
        if let Some(disk) = disk {
            disk.reads.traffic = Traffic::default();
            if let Engine::Cpu(cpu) = engine {
                cpu.stream.enter(core, step, layers, &mut disk.reads);
            }
        }
        Ok(())
    }

    /// Whether a step is open.
    fn step_is_open(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |inner| Ok(inner.core.step_is_open()))
    }

    /// Pages of the open step's sequences that are on disk.
    fn pages_on_disk(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |inner| Ok(inner.core.step_pages_on_disk()))
    }

    /// For the step that was entered last: bytes of the rows that attention read, bytes read from disk for that, and seconds
    /// in which attention only waited for the disk.
    fn attended(&self, py: Python<'_>) -> PyResult<(u64, u64, f64)> {
        self.with(py, |inner| {
            let traffic = inner.disk.as_ref().map(|disk| disk.reads.traffic).unwrap_or_default();
            Ok((inner.step.attended, traffic.bytes, traffic.waited.as_secs_f64()))
        })
    }

    /// Closes the step; the first `accepted` new tokens of each sequence stay.
    #[pyo3(signature = (number, accepted=None))]
    fn commit(
        &self,
        py: Python<'_>,
        number: u64,
        accepted: Option<PyReadonlyArray1<'_, i64>>,
    ) -> PyResult<()> {
        let accepted = match &accepted {
            None => None,
            Some(counts) => {
                let counts = counts.as_slice()?.iter().map(|&count| {
                    let limit = format_args!("from 0 to {TOKENS_PER_STEP_MAX}");
                    u32::try_from(count).map_err(|_| invalid(py, "accepted", count, limit))
                });
                Some(counts.collect::<PyResult<Vec<u32>>>()?)
            }
        };
        let mut inner = self.lock(py)?;
        inner.require_step(py, number)?;
        if let Some(layer) = inner.step.written.iter().position(|&written| !written) {
            return Err(invalid(
                py,
                "layer",
                layer,
                "appended to before commit, or written through step.table(layer)",
            ));
        }
        let epoch = inner.core.commit(accepted.as_deref()).map_err(|error| core(py, &error))?;
        inner.end_step(py, epoch)
    }

    /// Closes the step as if it had never been opened.
    fn rollback(&self, py: Python<'_>, number: u64) -> PyResult<()> {
        let mut inner = self.lock(py)?;
        inner.require_step(py, number)?;
        let epoch = inner.core.rollback().map_err(|error| core(py, &error))?;
        inner.end_step(py, epoch)
    }

    /// int64 `[sum(new)]`: the position of every new token.
    fn positions<'py>(&self, py: Python<'py>, number: u64) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let inner = self.lock(py)?;
        inner.require_step(py, number)?;
        let of_sequence = |(sequence, new_tokens)| {
            let start = inner.core.next_position(sequence).map_err(|error| core(py, &error))? as i64;
            Ok(start..start + i64::from(new_tokens))
        };
        let positions = inner.core.step_batch().map(of_sequence).collect::<PyResult<Vec<_>>>()?;
        by_token(py, inner.step.new_tokens(), positions.into_iter().flatten())
    }

    /// int32 `[B + 1]`: where each sequence's new tokens begin.
    fn cu_seqlens<'py>(&self, py: Python<'py>, number: u64) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let inner = self.lock(py)?;
        inner.require_step(py, number)?;
        Ok(PyArray1::from_iter(py, inner.step.bounds().iter().map(|&bound| bound as i32)))
    }

    /// The tables of one layer as arrays; from then on the caller is responsible for writing the layer's rows.
    fn table<'py>(&self, py: Python<'py>, number: u64, layer: usize) -> PyResult<Bound<'py, PyDict>> {
        let mut inner = self.lock(py)?;
        inner.require_step(py, number)?;
        inner.layer(py, layer)?;
        let table = tables::export(py, &mut inner, layer)?;
        inner.step.written[layer] = true;
        Ok(table)
    }

    /// `(kv_indptr, kv_indices, kv_last_page_len)` of one layer, int32, if its tables can be expressed so.
    fn csr_table<'py>(&self, py: Python<'py>, number: u64, layer: usize) -> PyResult<tables::Csr<'py>> {
        let inner = self.lock(py)?;
        inner.require_step(py, number)?;
        inner.layer(py, layer)?;
        tables::csr(py, &inner, layer)
    }
}

impl Inner {
    pub(crate) fn layer(&self, py: Python<'_>, layer: usize) -> PyResult<&PlacedLayer> {
        let outside = || invalid(py, "layer", layer, format_args!("from 0 to {}", self.layers.len() - 1));
        self.layers.get(layer).ok_or_else(outside)
    }

    /// A layer that stores K and V.
    pub(crate) fn owning_layer(&self, py: Python<'_>, layer: usize) -> PyResult<&PlacedLayer> {
        let placed = self.layer(py, layer)?;
        let Some(owner) = placed.owner else { return Ok(placed) };
        let limit = format!("a layer that stores K and V; this one reads those of layer {owner}");
        Err(invalid(py, "layer", layer, limit))
    }

    pub(crate) fn require_unwritten(&self, py: Python<'_>, layer: usize) -> PyResult<()> {
        if self.step.written[layer] && self.step.new_tokens() > 0 {
            return Err(invalid(
                py,
                "layer",
                layer,
                "a layer that this step has neither appended to nor taken the table of",
            ));
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

    /// Refuses a call of a step that is not the open one: while the call waited for its turn, the step may have ended and
    /// another one begun.
    pub(crate) fn require_step(&self, py: Python<'_>, number: u64) -> PyResult<()> {
        self.require_open(py)?;
        if self.step.number == number { Ok(()) } else { Err(closed(py)) }
    }

    /// Refuses unless a step is open.
    pub(crate) fn require_open(&self, py: Python<'_>) -> PyResult<()> {
        if self.core.step_is_open() { Ok(()) } else { Err(closed(py)) }
    }
}

fn closed(py: Python<'_>) -> PyErr {
    invalid_because(py, "step = closed: an open step; enter it with `with`")
}
