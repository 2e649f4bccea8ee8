//! What a device has to be told of a step: its tables, as runs of words for fixed places in device memory.
//!
//! Only what changed is written: rows of block tables keep what they hold. A kernel (cuda/pagoda/unpack.cuh) takes the runs to
//! their places, so that a step needs one copy to the device, however many tables there are.

use crate::cache::StepState;
use crate::layers::PlacedLayer;
use pagoda_core::Cache;
use pagoda_core::ids::{BlockRef, GroupId, SequenceId, Tier};
use pagoda_core::table::SpanView;
use pagoda_core::work::{Cut, WorkList};
use pyo3::prelude::*;

/// The addresses of a layer group's tables, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct GroupPlaces {
    /// uint32 `[batch, columns]`.
    table: u64,
    columns: usize,
    /// int32 `[batch + 1]`.
    span_starts: u64,
    spans: u64,
    /// int64 `[tokens]`.
    slots: u64,
}

/// The addresses of a work list, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct WorkPlaces {
    group: u8,
    /// Sequences with so many new tokens, at least and at most.
    new_tokens: (u32, u32),
    /// Queries of a block.
    queries: u32,
    window: Option<u32>,
    by_runs: bool,
    blocks: u64,
    /// int32 `[blocks + 1]`.
    prefix: u64,
    /// One int32.
    count: u64,
}

/// The address of the angles by which queries of a layer are rotated back, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct AnglePlaces {
    layer: usize,
    /// float32 `[spans, pairs, 2]`.
    angles: u64,
}

/// How much room the open step needs.
#[derive(Clone, Copy, Debug, Default, IntoPyObject)]
pub(crate) struct Room {
    sequences: usize,
    tokens: usize,
    /// Pages of the longest sequence, in any group.
    columns: usize,
    /// Spans of all sequences, in any group.
    spans: usize,
}

/// The places on a device, what they hold, and the words for the open step.
#[derive(Default)]
pub(crate) struct Upload {
    groups: Vec<GroupPlaces>,
    works: Vec<WorkPlaces>,
    angles: Vec<AnglePlaces>,
    /// Per group and place in the batch: the sequence whose row is there, the version of its table, and how many pages of it.
    held: Vec<Vec<Option<(SequenceId, u32, usize)>>>,
    list: WorkList,
    /// Target (two words), source and length of every run, in words.
    runs: Vec<u32>,
    words: Vec<u32>,
}

impl Upload {
    /// New places, which hold nothing.
    pub(crate) fn place(groups: Vec<GroupPlaces>, works: Vec<WorkPlaces>, angles: Vec<AnglePlaces>) -> Self {
        let held = groups.iter().map(|_| Vec::new()).collect();
        Self { groups, works, angles, held, ..Self::default() }
    }

    /// Writes down what the open step changes; returns the words that [`Self::take`] gives.
    pub(crate) fn fill(&mut self, core: &Cache, step: &StepState, layers: &[PlacedLayer]) -> usize {
        self.runs.clear();
        self.words.clear();
        for group in 0..self.groups.len() {
            self.table(core, group);
            self.spans(core, step, group);
            self.slots(core, step, layers, group);
        }
        for work in 0..self.works.len() {
            self.work(core, step, work);
        }
        for at in 0..self.angles.len() {
            self.angles(core, step, layers, at);
        }
        1 + self.runs.len() + self.words.len()
    }

    /// The number of runs, the runs, and the words that they take their sources from.
    pub(crate) fn take(&self, target: &mut [u32]) {
        let (head, words) = target.split_at_mut(1 + self.runs.len());
        head[0] = (self.runs.len() / 4) as u32;
        head[1..].copy_from_slice(&self.runs);
        words[..self.words.len()].copy_from_slice(&self.words);
    }

    /// Adds a run of the words from `start` on.
    fn run(&mut self, target: u64, start: usize) {
        let length = self.words.len() - start;
        if length > 0 {
            self.runs.extend([target as u32, (target >> 32) as u32, start as u32, length as u32]);
        }
    }

    fn table(&mut self, core: &Cache, group: usize) {
        let (table, columns) = (self.groups[group].table, self.groups[group].columns);
        let batch: Vec<_> = core.step_batch().collect();
        if self.held[group].len() < batch.len() {
            self.held[group].resize(batch.len(), None);
        }
        for (index, &(sequence, _)) in batch.iter().enumerate() {
            let (row, version) = core.step_row(index, GroupId(group as u8));
            let clean = match self.held[group][index] {
                Some((held, stamp, pages)) if held == sequence && stamp == version && pages <= row.len() => {
                    pages
                }
                _ => 0,
            };
            let start = self.words.len();
            self.words.extend(row[clean..].iter().map(|entry| entry.bits()));
            self.run(table + 4 * (index * columns + clean) as u64, start);
            self.held[group][index] = Some((sequence, version, row.len()));
        }
    }

    fn spans(&mut self, core: &Cache, step: &StepState, group: usize) {
        let (starts, spans) = (self.groups[group].span_starts, self.groups[group].spans);
        let first = self.words.len();
        let mut count = 0;
        self.words.push(0);
        for index in 0..core.step_batch().len() {
            count += step.spans(core, index, GroupId(group as u8)).len() as u32;
            self.words.push(count);
        }
        self.run(starts, first);
        let first = self.words.len();
        for index in 0..core.step_batch().len() {
            let mut before = 0;
            for span in step.spans(core, index, GroupId(group as u8)) {
                let SpanView { first_page, skip, count, offset } = *span;
                self.words.extend([first_page, skip, count, before, offset as u32, (offset >> 32) as u32]);
                before += count;
            }
        }
        self.run(spans, first);
    }

    /// `block * page_size + row` of every new token, int64.
    fn slots(&mut self, core: &Cache, step: &StepState, layers: &[PlacedLayer], group: usize) {
        let id = GroupId(group as u8);
        let Some(placed) = layers.iter().find(|placed| placed.group == id) else { return };
        let page_size = placed.layer.page_size;
        let first = self.words.len();
        for (index, (_, new_tokens)) in core.step_batch().enumerate() {
            let Some(span) = step.spans(core, index, id).last() else { continue };
            let row = core.step_row(index, id).0;
            let end = span.skip + span.count;
            for stored in end - new_tokens..end {
                let block: BlockRef = row[(span.first_page + stored / page_size) as usize];
                debug_assert_eq!(block.tier(), Tier::Device);
                let slot =
                    u64::from(block.block().index()) * u64::from(page_size) + u64::from(stored % page_size);
                self.words.extend([slot as u32, (slot >> 32) as u32]);
            }
        }
        self.run(self.groups[group].slots, first);
    }

    fn work(&mut self, core: &Cache, step: &StepState, at: usize) {
        let WorkPlaces { group, new_tokens: (least, most), queries, window, by_runs, blocks, prefix, count } =
            self.works[at];
        let cut = Cut { queries, window, by_runs };
        self.list.clear();
        let mut token = 0;
        for (index, (_, new_tokens)) in core.step_batch().enumerate() {
            if (least..=most).contains(&new_tokens) {
                let spans = step.spans(core, index, GroupId(group));
                self.list.push(cut, index as u32, token, spans, new_tokens);
            }
            token += new_tokens;
        }
        let first = self.words.len();
        for block in &self.list.blocks {
            let fields = [block.sequence, block.token, block.queries, block.position, block.low];
            self.words.extend(fields.map(|field| field as u32));
        }
        self.run(blocks, first);
        let first = self.words.len();
        self.words.extend(self.list.prefix.iter().map(|&work| work as u32));
        self.run(prefix, first);
        let first = self.words.len();
        self.words.push(self.list.blocks.len() as u32);
        self.run(count, first);
    }

    /// Cosines and sines of the offsets of all spans, if any has one.
    fn angles(&mut self, core: &Cache, step: &StepState, layers: &[PlacedLayer], at: usize) {
        let AnglePlaces { layer, angles } = self.angles[at];
        let placed = &layers[layer];
        let Some(rope) = &placed.layer.rope else { return };
        let batch = core.step_batch().len();
        let spans = || (0..batch).flat_map(|index| step.spans(core, index, placed.group));
        if spans().all(|span| span.offset == 0) {
            return;
        }
        let first = self.words.len();
        for span in spans() {
            self.words.extend(rope.inv_freq.iter().flat_map(|&frequency| {
                let (sin, cos) = (span.offset as f64 * f64::from(frequency)).sin_cos();
                [(cos as f32).to_bits(), (sin as f32).to_bits()]
            }));
        }
        self.run(angles, first);
    }
}

/// The room that the open step needs.
pub(crate) fn room(core: &Cache, step: &StepState, groups: usize) -> Room {
    let mut room = Room { sequences: core.step_batch().len(), tokens: step.new_tokens(), ..Room::default() };
    for group in (0..groups as u8).map(GroupId) {
        let mut spans = 0;
        for index in 0..room.sequences {
            room.columns = room.columns.max(core.step_row(index, group).0.len());
            spans += step.spans(core, index, group).len();
        }
        room.spans = room.spans.max(spans);
    }
    room
}
