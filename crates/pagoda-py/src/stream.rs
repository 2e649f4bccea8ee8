//! Attention over pages on disk, run by run: while one run is gone over, the next ones are read.

use crate::errors::cpu;
use crate::layers::PlacedLayer;
use crate::patience;
use crate::reads::Reads;
use crate::step::StepState;
use pagoda_core::ids::{BlockId, BlockRef, Epoch, Tier};
use pagoda_core::work;
use pagoda_cpu::{Arenas, Backend, Carried, Layer, Rows, RowsMut, SequenceTable};
use pagoda_store::{LayerOfPages, Mover};
use pyo3::prelude::*;
use std::ops::Range;

/// Which runs of an open step's sequences have pages on disk.
#[derive(Default)]
pub(crate) struct Stream {
    /// Of what there is to read: whose it is.
    passes: Vec<Pass>,
    /// By layer, its passes.
    ranges: Vec<Range<usize>>,
    carried: Carried,
    row: Vec<BlockRef>,
}

/// A fixed run of one sequence, for one layer, with pages on disk.
#[derive(Clone)]
struct Pass {
    sequence: usize,
    run: usize,
    /// Places of these pages in the sequence's row.
    pages: Vec<usize>,
}

/// The arguments of one call of `attend`, sequence by sequence.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) backend: &'a Backend,
    pub(crate) arenas: &'a Arenas,
    pub(crate) layer: &'a Layer,
    pub(crate) tables: &'a [SequenceTable<'a>],
    pub(crate) queries: Rows,
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) out: RowsMut,
    pub(crate) lse: Option<*mut f32>,
}

/// Why attention ended early.
pub(crate) enum Stop {
    Backend(pagoda_cpu::Error),
    Disk(patience::Stop),
}

impl Stop {
    pub(crate) fn raise(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Backend(error) => cpu(py, &error),
            Self::Disk(stop) => stop.raise(py),
        }
    }
}

impl From<pagoda_cpu::Error> for Stop {
    fn from(error: pagoda_cpu::Error) -> Self {
        Self::Backend(error)
    }
}

impl<'a> Call<'a> {
    /// The call for some of the sequences, of which the first has its first query at `token`.
    fn part(self, tables: &'a [SequenceTable<'a>], token: usize) -> Self {
        let heads = self.layer.num_q_heads as usize;
        let lse = self.lse.map(|lse| lse.wrapping_add(token * heads));
        Self { tables, queries: self.queries.skip(token), out: self.out.skip(token), lse, ..self }
    }

    /// # Safety
    /// As for [`Backend::attend`].
    pub(crate) unsafe fn attend(self) -> Result<(), Stop> {
        let Self { backend, arenas, layer, tables, queries, sinks, out, lse } = self;
        // SAFETY: as the caller promises.
        unsafe { backend.attend(arenas, layer, tables, queries, sinks, out, lse)? };
        Ok(())
    }

    /// # Safety
    /// As for [`Backend::attend_runs`].
    unsafe fn attend_runs(self, runs: Range<usize>, carried: &mut Carried) -> Result<(), Stop> {
        let Self { backend, arenas, layer, tables, queries, sinks, out, lse } = self;
        if runs.is_empty() {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        unsafe { backend.attend_runs(runs, carried, arenas, layer, tables[0], queries, sinks, out, lse)? };
        Ok(())
    }
}

impl Stream {
    /// Whether the open step has to read anything for a layer.
    pub(crate) fn has(&self, layer: usize) -> bool {
        !self.ranges[layer].is_empty()
    }

    /// Lists what the step that was just opened has to read, in the order in which layers are usually attended to.
    pub(crate) fn enter(
        &mut self,
        core: &pagoda_core::Cache,
        step: &StepState,
        layers: &[PlacedLayer],
        reads: &mut Reads,
    ) {
        reads.what.clear();
        self.passes.clear();
        self.ranges.clear();
        for (at, placed) in layers.iter().enumerate() {
            let PlacedLayer { group, member, ref layer, .. } = *placed;
            let start = self.passes.len();
            let alike = |other: &PlacedLayer| other.group == group && other.layer.window == layer.window;
            if let Some(before) = layers[..at].iter().position(alike) {
                let same = self.ranges[before].clone();
                self.passes.extend_from_within(same.clone());
                reads.what.extend_from_within(same);
                reads.what[start..].iter_mut().for_each(|what| what.layer = member);
            } else {
                for sequence in 0..core.step_batch().len() {
                    self.list(core, step, placed, sequence, &mut reads.what);
                }
            }
            self.ranges.push(start..self.passes.len());
        }
    }

    /// Lists what a layer has to read of one sequence.
    fn list(
        &mut self,
        core: &pagoda_core::Cache,
        step: &StepState,
        placed: &PlacedLayer,
        sequence: usize,
        what: &mut Vec<LayerOfPages>,
    ) {
        let PlacedLayer { group, member, ref layer, .. } = *placed;
        if !core.step_reaches_disk(sequence, group) {
            return;
        }
        let table = step.table(core, sequence, group);
        let (row, spans, seen) = (table.row, table.spans, layer.seen(&table));
        for (run, pages) in work::runs(spans, seen, layer.page_size as usize) {
            let pages: Vec<_> = pages.filter(|&page| row[page].tier() == Tier::Disk).collect();
            if !pages.is_empty() {
                let blocks = pages.iter().map(|&page| row[page].block()).collect();
                what.push(LayerOfPages { group, layer: member, blocks });
                self.passes.push(Pass { sequence, run, pages });
            }
        }
    }

    /// Attention of a layer of the open step, some of whose pages are on disk. `ended` is the last step that has.
    ///
    /// # Safety
    /// As for [`Backend::attend`], but for pages on disk, whose blocks nobody writes to until their reads have ended.
    pub(crate) unsafe fn attend(
        &mut self,
        mover: &Mover,
        reads: &mut Reads,
        at: usize,
        call: Call<'_>,
        ended: Epoch,
    ) -> Result<(), Stop> {
        let (mut passes, mut token) = (self.ranges[at].clone(), 0);
        let mut in_memory = 0;
        for (index, table) in call.tables.iter().enumerate() {
            let own = self.passes[passes.clone()].iter().take_while(|pass| pass.sequence == index).count();
            let first = token;
            token += table.new_tokens as usize;
            if own == 0 {
                continue;
            }
            let before = &call.tables[in_memory..index];
            let queries: usize = before.iter().map(|table| table.new_tokens as usize).sum();
            // Begun before anything is computed.
            // SAFETY: as the caller promises.
            unsafe { reads.read_ahead(mover, passes.start, ended) };
            if queries > 0 {
                // SAFETY: none of these sequences has pages on disk that this layer sees.
                unsafe { call.part(before, first - queries).attend()? };
            }
            let one = call.part(std::slice::from_ref(table), first);
            // SAFETY: as the caller promises.
            unsafe { self.sequence(mover, reads, passes.start..passes.start + own, one, ended)? };
            passes.start += own;
            in_memory = index + 1;
        }
        let rest = &call.tables[in_memory..];
        let queries: usize = rest.iter().map(|table| table.new_tokens as usize).sum();
        if queries > 0 {
            // SAFETY: as above.
            unsafe { call.part(rest, token - queries).attend()? };
        }
        Ok(())
    }

    /// Attention of one sequence, with what its passes read.
    unsafe fn sequence(
        &mut self,
        mover: &Mover,
        reads: &mut Reads,
        passes: Range<usize>,
        call: Call<'_>,
        ended: Epoch,
    ) -> Result<(), Stop> {
        let table = call.tables[0];
        self.row.clear();
        self.row.extend_from_slice(table.row);
        let mut done = 0;
        for pass in passes {
            let run = self.passes[pass].run;
            // SAFETY: runs that no pass is of have no pages on disk.
            unsafe { call.attend_runs(done..run, &mut self.carried)? };
            // SAFETY: as the caller promises.
            let filled = unsafe { reads.take(mover, pass, ended) }.map_err(Stop::Disk)?;
            let filled = filled.expect("slots are given back run by run");
            // Those of other runs are not looked at.
            for (place, &page) in self.passes[pass].pages.iter().enumerate() {
                self.row[page] = BlockRef::new(Tier::Disk, BlockId::new(place as u32));
            }
            let begin = call.layer.layout.k.rows.offset as usize;
            let arenas = call.arenas.with_disk(filled.address.wrapping_sub(begin), filled.stride as usize);
            let patched = [SequenceTable { row: &self.row, ..table }];
            let call = Call { tables: &patched, arenas: &arenas, ..call };
            // SAFETY: the pages of this run that are on disk are in the slot, verified.
            let result = unsafe { call.attend_runs(run..run + 1, &mut self.carried) };
            reads.release(filled);
            result?;
            // SAFETY: as the caller promises.
            unsafe { reads.read_ahead(mover, pass + 1, ended) };
            done = run + 1;
        }
        // SAFETY: as above.
        unsafe { call.attend_runs(done..work::run_count(table.spans), &mut self.carried) }
    }
}
