//! Attention over pages on disk, run by run: while one run is attended to, the next ones are read. What several sequences
//! begin with is read once for all of them.

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

/// What the open step reads from disk, and for which sequences.
#[derive(Default)]
pub(crate) struct Stream {
    /// By layer.
    reads: Vec<LayerReads>,
    passes: Vec<Pass>,
    /// By place in the batch.
    progress: Vec<Progress>,
}

/// What a layer reads.
#[derive(Clone)]
struct LayerReads {
    /// Where it begins in `Reads::what`.
    what: usize,
    /// A pass for each entry there; layers that read the same pages have the same passes.
    passes: Range<usize>,
}

/// A part of the ring's content: the pages on disk of a run of some sequences.
type Pass = Vec<RunOnDisk>;

/// A run of one sequence.
struct RunOnDisk {
    sequence: usize,
    run: usize,
    /// The places of its pages on disk in the sequence's row.
    pages: Vec<usize>,
}

/// How far a sequence has come in a layer.
#[derive(Default)]
struct Progress {
    /// Its passes that are still to come.
    left: usize,
    /// Runs that have been attended to.
    done: usize,
    /// Its row, in which pages of the current run are where they were read to.
    row: Vec<BlockRef>,
    carried: Carried,
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
        !self.reads[layer].passes.is_empty()
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
        self.reads.clear();
        for (at, placed) in layers.iter().enumerate() {
            let PlacedLayer { group, member, ref layer, .. } = *placed;
            let what = reads.what.len();
            let alike = |other: &PlacedLayer| other.group == group && other.layer.window == layer.window;
            let passes = if let Some(before) = layers[..at].iter().position(alike) {
                let LayerReads { what: first, passes } = self.reads[before].clone();
                reads.what.extend_from_within(first..first + passes.len());
                reads.what[what..].iter_mut().for_each(|what| what.layer = member);
                passes
            } else {
                let first = self.passes.len();
                self.list(core, step, placed, &mut reads.what);
                first..self.passes.len()
            };
            self.reads.push(LayerReads { what, passes });
        }
    }

    /// Lists what a layer has to read: sequence by sequence, but not again what an earlier one begins with as well.
    fn list(
        &mut self,
        core: &pagoda_core::Cache,
        step: &StepState,
        placed: &PlacedLayer,
        what: &mut Vec<LayerOfPages>,
    ) {
        let PlacedLayer { group, member: layer, layer: ref shape, .. } = *placed;
        let (first, first_what) = (self.passes.len(), what.len());
        // The passes that sequences begin with, then for each pass those that come next. All are counted from 0.
        let mut following = vec![Vec::<usize>::new()];
        for sequence in (0..core.step_batch().len()).filter(|&at| core.step_reaches_disk(at, group)) {
            let table = step.table(core, sequence, group);
            let (row, seen) = (table.row, shape.seen(&table));
            let mut place = 0;
            for (run, pages) in work::runs(table.spans, seen, shape.page_size as usize) {
                let pages: Vec<_> = pages.filter(|&page| row[page].tier() == Tier::Disk).collect();
                if pages.is_empty() {
                    continue;
                }
                let blocks = pages.iter().map(|&page| row[page].block()).collect::<Vec<_>>();
                let known = following[place].iter().find(|&&pass| what[first_what + pass].blocks == blocks);
                let pass = known.copied().unwrap_or_else(|| {
                    let pass = what.len() - first_what;
                    following[place].push(pass);
                    following.push(Vec::new());
                    what.push(LayerOfPages { group, layer, blocks });
                    self.passes.push(Pass::default());
                    pass
                });
                self.passes[first + pass].push(RunOnDisk { sequence, run, pages });
                place = pass + 1;
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
        let LayerReads { what, passes } = self.reads[at].clone();
        let (passes, all) = (&self.passes[passes], &mut self.progress);
        let sequences = attention.kv.sequences;
        // Reads begin before anything is computed.
        // SAFETY: as the caller promises.
        unsafe { reader.read_ahead(what) };
        all.resize_with(sequences.len().max(all.len()), Progress::default);
        all.iter_mut().for_each(|progress| (progress.left, progress.done) = (0, 0));
        for run in passes.iter().flatten() {
            all[run.sequence].left += 1;
        }
        let mut in_memory = 0;
        for (index, (progress, table)) in all.iter_mut().zip(sequences).enumerate() {
            if progress.left > 0 {
                // SAFETY: none of the sequences between has pages on disk that this layer sees.
                unsafe { backend.attend(&attention.part(in_memory..index))? };
                in_memory = index + 1;
                progress.row.clear();
                progress.row.extend_from_slice(table.row);
            }
        }
        // SAFETY: as above.
        unsafe { backend.attend(&attention.part(in_memory..sequences.len()))? };
        let one = |sequence: usize| attention.part(sequence..sequence + 1);
        for (index, pass) in passes.iter().enumerate() {
            for run in pass {
                // SAFETY: runs that no pass is of have no pages on disk.
                unsafe { all[run.sequence].attend(backend, one(run.sequence), run.run)? };
            }
            // SAFETY: as the caller promises.
            let filled = unsafe { reader.take(what + index) }.map_err(Stop::Disk)?;
            let filled = filled.expect("slots are given back run by run");
            let PagedKv { arenas, layer, .. } = attention.kv;
            let begin = layer.layout.k.rows.offset as usize;
            let arenas = arenas.with_disk(filled.address.wrapping_sub(begin), filled.stride as usize);
            let result = pass.iter().try_for_each(|run| {
                let progress = &mut all[run.sequence];
                // Entries of other runs are not read.
                for (place, &page) in run.pages.iter().enumerate() {
                    progress.row[page] = BlockRef::new(Tier::Disk, BlockId::new(place as u32));
                }
                progress.left -= 1;
                let attention = one(run.sequence);
                let attention = Attention { kv: PagedKv { arenas: &arenas, ..attention.kv }, ..attention };
                // SAFETY: the pages of this run that are on disk are in the slot, verified.
                unsafe { progress.attend(backend, attention, run.run + 1) }
            });
            reader.reads.release(filled);
            result?;
            // SAFETY: as the caller promises.
            unsafe { reader.read_ahead(what + index + 1) };
            for run in pass {
                let (progress, rest) =
                    (&mut all[run.sequence], work::run_count(sequences[run.sequence].spans));
                if progress.left == 0 {
                    // SAFETY: as above.
                    unsafe { progress.attend(backend, one(run.sequence), rest)? };
                }
            }
        }
        Ok(())
    }
}

impl Progress {
    /// Attends to the runs of a sequence before `end`.
    ///
    /// # Safety
    /// As for [`Backend::attend_runs`].
    unsafe fn attend(
        &mut self,
        backend: &Backend,
        attention: Attention<'_>,
        end: usize,
    ) -> Result<(), pagoda_cpu::Error> {
        let table = [SequenceTable { row: &self.row, ..attention.kv.sequences[0] }];
        let kv = PagedKv { sequences: &table, ..attention.kv };
        // SAFETY: as the caller promises.
        unsafe { backend.attend_runs(&Attention { kv, ..attention }, self.done..end, &mut self.carried)? };
        self.done = end;
        Ok(())
    }
}
