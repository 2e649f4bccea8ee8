//! Attention over pages on disk, run by run: while one run is attended to, the next ones are read.

use crate::errors::cpu;
use crate::layers::PlacedLayer;
use crate::reads::{self, Reader, Reads};
use crate::step::StepState;
use pagoda_core::ids::{BlockId, BlockRef, Tier};
use pagoda_core::work;
use pagoda_cpu::{Attention, Backend, Carried, PagedKv, SequenceTable};
use pagoda_store::LayerOfPages;
use pyo3::prelude::*;
use std::ops::Range;

/// The runs of the open step's sequences that have pages on disk.
#[derive(Default)]
pub(crate) struct Stream {
    /// One for each entry of `Reads::what`: whose pages those are.
    passes: Vec<Pass>,
    /// The passes of each layer.
    ranges: Vec<Range<usize>>,
    carried: Carried,
    row: Vec<BlockRef>,
}

/// A fixed run of one sequence, for one layer, with pages on disk.
#[derive(Clone)]
struct Pass {
    sequence: usize,
    run: usize,
    /// The places of these pages in the sequence's row.
    pages: Vec<usize>,
}

/// Why attention ended early.
pub(crate) enum Stop {
    Backend(pagoda_cpu::Error),
    Disk(reads::Stop),
}

impl Stop {
    pub(crate) fn raise(self, py: Python<'_>, core: &pagoda_core::Cache) -> PyErr {
        match self {
            Self::Backend(error) => cpu(py, &error),
            Self::Disk(stop) => stop.raise(py, core),
        }
    }
}

impl From<pagoda_cpu::Error> for Stop {
    fn from(error: pagoda_cpu::Error) -> Self {
        Self::Backend(error)
    }
}

impl Stream {
    /// Whether the open step has to read anything for a layer.
    pub(crate) fn has(&self, layer: usize) -> bool {
        !self.ranges[layer].is_empty()
    }

    /// Lists what the step that was just opened has to read, in the order in which layers usually attend.
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

    /// Lists what a layer has to read for one sequence.
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

    /// Attention of a layer of the open step, some of whose pages are on disk.
    ///
    /// # Safety
    /// As for [`Backend::attend`], but for pages on disk, whose blocks nobody writes to until their reads have ended.
    pub(crate) unsafe fn attend(
        &mut self,
        backend: &Backend,
        reader: &mut Reader<'_>,
        at: usize,
        attention: Attention<'_>,
    ) -> Result<(), Stop> {
        let mut passes = self.ranges[at].clone();
        let (mut in_memory, count) = (0, attention.kv.sequences.len());
        for index in 0..count {
            let own = self.passes[passes.clone()].iter().take_while(|pass| pass.sequence == index).count();
            if own == 0 {
                continue;
            }
            // Reads begin before anything is computed.
            // SAFETY: as the caller promises.
            unsafe { reader.read_ahead(passes.start) };
            // SAFETY: none of these sequences has pages on disk that this layer sees.
            unsafe { backend.attend(&attention.part(in_memory..index))? };
            let (own, one) = (passes.start..passes.start + own, attention.part(index..index + 1));
            passes.start = own.end;
            // SAFETY: as the caller promises.
            unsafe { self.sequence(backend, reader, own, one)? };
            in_memory = index + 1;
        }
        // SAFETY: as above.
        unsafe { backend.attend(&attention.part(in_memory..count))? };
        Ok(())
    }

    /// Attention of one sequence, with the pages that its passes read.
    unsafe fn sequence(
        &mut self,
        backend: &Backend,
        reader: &mut Reader<'_>,
        passes: Range<usize>,
        attention: Attention<'_>,
    ) -> Result<(), Stop> {
        let PagedKv { arenas, layer, sequences } = attention.kv;
        let table = sequences[0];
        self.row.clear();
        self.row.extend_from_slice(table.row);
        let mut done = 0;
        for pass in passes {
            let run = self.passes[pass].run;
            // SAFETY: runs that no pass is of have no pages on disk.
            unsafe { backend.attend_runs(&attention, done..run, &mut self.carried)? };
            // SAFETY: as the caller promises.
            let filled = unsafe { reader.take(pass) }.map_err(Stop::Disk)?;
            let filled = filled.expect("slots are given back run by run");
            // Entries of other runs are not read.
            for (place, &page) in self.passes[pass].pages.iter().enumerate() {
                self.row[page] = BlockRef::new(Tier::Disk, BlockId::new(place as u32));
            }
            let begin = layer.layout.k.rows.offset as usize;
            let arenas = arenas.with_disk(filled.address.wrapping_sub(begin), filled.stride as usize);
            let patched = [SequenceTable { row: &self.row, ..table }];
            let kv = PagedKv { arenas: &arenas, layer, sequences: &patched };
            let attention = Attention { kv, ..attention };
            // SAFETY: the pages of this run that are on disk are in the slot, verified.
            let result = unsafe { backend.attend_runs(&attention, run..run + 1, &mut self.carried) };
            reader.reads.release(filled);
            result?;
            // SAFETY: as the caller promises.
            unsafe { reader.read_ahead(pass + 1) };
            done = run + 1;
        }
        let rest = done..work::run_count(table.spans);
        // SAFETY: as above.
        unsafe { backend.attend_runs(&attention, rest, &mut self.carried)? };
        Ok(())
    }
}
