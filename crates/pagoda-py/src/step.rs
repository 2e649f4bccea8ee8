//! The open step: what it adds to the core's own, and what its calls have to hold.

use crate::cache::Inner;
use crate::errors::{invalid, invalid_because};
use crate::layers::PlacedLayer;
use pagoda_core::ids::GroupId;
use pagoda_core::table::SpanView;
use pagoda_cpu::SequenceTable;
use pyo3::prelude::*;
use std::ops::Range;

/// What the open step adds to the core's own.
#[derive(Default)]
pub(crate) struct StepState {
    spans: Vec<SpanView>,
    /// Per layer group, then per sequence: its part of `spans`.
    ranges: Vec<Range<usize>>,
    /// Where each sequence's new tokens begin, and where the last one's end.
    bounds: Vec<u32>,
    /// Bytes of the rows that were attended to.
    pub(crate) attended: u64,
    /// Per layer: whether its rows of the new tokens are written, or the caller does so through the tables, or it has none.
    pub(crate) written: Vec<bool>,
    /// Memory for the tables of one call.
    pub(crate) sequences: Vec<SequenceTable<'static>>,
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
    pub(crate) fn enter(&mut self, core: &pagoda_core::Cache, groups: usize, layers: &[PlacedLayer]) {
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

impl Inner {
    pub(crate) fn layer(&self, py: Python<'_>, layer: usize) -> PyResult<&PlacedLayer> {
        let limit = format_args!("from 0 to {}", self.layers.len() - 1).to_string();
        self.layers.get(layer).ok_or_else(|| invalid(py, "layer", layer, limit))
    }

    /// A layer that stores K and V.
    pub(crate) fn owning_layer(&self, py: Python<'_>, layer: usize) -> PyResult<&PlacedLayer> {
        let placed = self.layer(py, layer)?;
        let Some(owner) = placed.owner else { return Ok(placed) };
        let limit =
            format_args!("a layer that stores K and V; this one reads those of layer {owner}").to_string();
        Err(invalid(py, "layer", layer, limit))
    }

    pub(crate) fn require_unwritten(&self, py: Python<'_>, layer: usize) -> PyResult<()> {
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
