//! The tables of a step as a device needs them: runs of words for fixed places in device memory.
//!
//! Only what changed is sent. A kernel (cuda/pagoda/unpack.cuh) writes the runs to their places, so that a step needs one copy
//! to the device, however many tables there are.

use crate::common::Found;
use crate::layers::{PlacedLayer, page_size};
use crate::passes::Streams;
use crate::step::StepState;
use crate::tables::{Stamp, slots};
use pagoda_core::Cache;
use pagoda_core::common::LEVELS_MAX;
use pagoda_core::ids::{GroupId, Tier};
use pagoda_core::table::{Sight, SpanView};
use pagoda_core::work::{Cut, Held, QueryBlock, WorkList, runs};
use pyo3::prelude::*;
use std::ops::Range;

/// The addresses of a layer group's tables, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct GroupPlaces {
    /// uint32 `[batch, columns]`.
    table: u64,
    columns: usize,
    spans: u64,
    /// int64 `[tokens]`.
    slots: u64,
    /// Two int32: the number of new tokens, and how many of them are the first in an empty cache, all or none.
    tokens: u64,
}

/// The addresses of a work list, as a dict.
#[derive(Clone, Copy, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct WorkPlaces {
    pub(crate) group: u8,
    /// The least and the most new tokens of a sequence in the list.
    pub(crate) new_tokens: (u32, u32),
    /// Queries in a block.
    queries: u32,
    pub(crate) window: Option<u32>,
    pub(crate) by_runs: bool,
    own: ListAddresses,
    /// The list over common pages; None if every sequence reads all of its pages by itself.
    common: Option<ListAddresses>,
    /// Queries in a block of the list over common pages.
    common_queries: u32,
    /// int32: the row in the batch of each query that holds common pages.
    members: u64,
}

impl WorkPlaces {
    /// Whether a sequence with this many new tokens is in the list.
    pub(crate) fn takes(&self, new_tokens: u32) -> bool {
        (self.new_tokens.0..=self.new_tokens.1).contains(&new_tokens)
    }
}

/// The addresses of one list, as a dict.
#[derive(Clone, Copy, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct ListAddresses {
    blocks: u64,
    /// int32 `[blocks + 1]`.
    prefix: u64,
    /// Two int32: the number of blocks, and their work.
    totals: u64,
    /// int32: for the parts that blocks begin with, their places among the queries that hold common pages.
    rows: u64,
}

/// The address of the angles by which a layer's queries are rotated back, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct AnglePlaces {
    layer: usize,
    /// float32 `[rows, pairs, 2]`.
    angles: u64,
}

/// How much room the open step needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Room {
    pub(crate) sequences: usize,
    pub(crate) tokens: usize,
    /// Pages of the longest sequence, in any group.
    pub(crate) columns: usize,
    /// Spans of all sequences, in any group.
    pub(crate) spans: usize,
    /// Rows of angles of any layer: one for each span and, if the span trails, one more for each query.
    pub(crate) angles: usize,
}

/// Common pages; valid as long as the tables of a batch only grow.
#[derive(Default)]
pub(crate) struct Shared {
    found: Found,
    /// The row in the batch of each query that holds common pages.
    members: Vec<u32>,
    /// The row of parts for the first of these queries: behind those of queries that are decoded in the same layers.
    pub(crate) first_row: u32,
    /// For each time that a sequence holds common pages: its place in the batch, the row of parts for its first query, and the
    /// token after the pages.
    holds: Vec<(u32, i32, u32)>,
}

/// The row of a block table that is on the device, and how many of its pages are on the host tier.
#[derive(Clone, Copy)]
struct Row {
    stamp: Stamp,
    on_host: usize,
}

/// A work list, and the one over its sequences' common pages.
#[derive(Clone, Default)]
pub(crate) struct Lists {
    pub(crate) own: WorkList,
    pub(crate) common: WorkList,
}

/// The places on a device, what they hold, and the words for the open step.
#[derive(Default)]
pub(crate) struct Upload {
    groups: Vec<GroupPlaces>,
    pub(crate) works: Vec<WorkPlaces>,
    angles: Vec<AnglePlaces>,
    /// By group and place in the batch.
    held: Vec<Vec<Option<Row>>>,
    /// Likewise, for the open step: the index of the sequence's first span among all spans.
    pub(crate) first_spans: Vec<Vec<u32>>,
    /// By work list.
    pub(crate) shared: Vec<Shared>,
    pub(crate) lists: Vec<Lists>,
    /// Target (two words), source and length of every run, in words.
    runs: Vec<u32>,
    words: Vec<u32>,
    pub(crate) streams: Streams,
}

impl Upload {
    /// Sets new places, to which nothing has been written.
    pub(crate) fn place(
        &mut self,
        groups: Vec<GroupPlaces>,
        works: Vec<WorkPlaces>,
        angles: Vec<AnglePlaces>,
    ) {
        let held = vec![Vec::new(); groups.len()];
        let first_spans = vec![Vec::new(); groups.len()];
        let shared = works.iter().map(|_| Shared::default()).collect();
        let lists = vec![Lists::default(); works.len()];
        // Pages that were streamed ahead are in the ring, which stays where it is.
        let streams = std::mem::take(&mut self.streams);
        *self = Self { groups, works, angles, held, first_spans, shared, lists, streams, ..Self::default() };
    }

    /// Lists what the open step changes. Returns how many words [`Self::take`] gives, and the rows of parts for queries that
    /// hold common pages.
    pub(crate) fn fill(&mut self, core: &Cache, step: &StepState, layers: &[PlacedLayer]) -> (usize, usize) {
        self.runs.clear();
        self.words.clear();
        self.streams.words.clear();
        for group in 0..self.groups.len() {
            self.table(core, group);
            self.spans(core, step, group);
            self.slots(core, step, layers, group);
        }
        // Prefilled queries last: their parts follow those of decoded ones.
        for decoded in [true, false] {
            for work in 0..self.works.len() {
                if self.works[work].takes(1) == decoded {
                    self.find_common(core, step, layers, work);
                    self.common_work(core, step, work);
                    self.work(core, step, work);
                }
            }
        }
        for at in 0..self.angles.len() {
            self.angles(core, step, layers, at);
        }
        (1 + self.runs.len() + self.words.len(), self.members())
    }

    /// Whether the work of every list is small enough for kernels to count.
    pub(crate) fn is_countable(&self) -> bool {
        self.lists.iter().all(|Lists { own, common }| own.is_countable() && common.is_countable())
    }

    /// The rows of parts for queries that hold common pages, in any layer.
    pub(crate) fn members(&self) -> usize {
        let rows = |shared: &Shared| shared.first_row as usize + shared.members.len();
        self.shared.iter().map(rows).max().unwrap_or(0)
    }

    /// Writes the number of runs, the runs, and the words that they copy from. `streams`: the address for the tables of
    /// streamed pages.
    pub(crate) fn take(&mut self, streams: u64, target: &mut [u32]) {
        let first = self.words.len();
        self.words.append(&mut self.streams.words);
        self.run(streams, first..self.words.len());
        let (head, words) = target.split_at_mut(1 + self.runs.len());
        head[0] = (self.runs.len() / 4) as u32;
        head[1..].copy_from_slice(&self.runs);
        words[..self.words.len()].copy_from_slice(&self.words);
    }

    /// How many groups there are.
    pub(crate) fn group_count(&self) -> usize {
        self.groups.len()
    }

    /// Host pages of the sequence at place `index` of the batch.
    pub(crate) fn on_host(&self, group: usize, index: usize) -> u64 {
        self.held[group][index].map_or(0, |row| row.on_host as u64)
    }

    /// The first token that a query of the sequence at place `index` sees in any layer of a group, besides those that every
    /// query sees; None if it has no queries.
    pub(crate) fn first_seen(
        &self,
        core: &Cache,
        step: &StepState,
        id: GroupId,
        index: usize,
    ) -> Option<u32> {
        let new_tokens = step.bounds()[index + 1] - step.bounds()[index];
        let length = step.length(core, index, id);
        let first =
            |window: Option<u32>| window.map_or(0, |window| (length - new_tokens + 1).saturating_sub(window));
        let works = self.works_of(id).filter(|(_, work)| work.takes(new_tokens));
        works.map(|(_, work)| first(work.window)).min()
    }

    /// Pages on disk that attention of the open step reads for a layer of a group.
    pub(crate) fn pages_on_disk(
        &self,
        core: &Cache,
        step: &StepState,
        layers: &[PlacedLayer],
        id: GroupId,
    ) -> usize {
        let of_sequence = |index: usize| {
            let Some(first) = self.first_seen(core, step, id, index) else { return 0 };
            let (row, spans) = (core.step_row(index, id).0, step.spans(core, index, id));
            let length = step.length(core, index, id);
            let pages = runs(spans, first as usize..length as usize, page_size(layers) as usize);
            pages.flat_map(|(_, pages)| &row[pages]).filter(|entry| entry.tier() == Tier::Disk).count()
        };
        let batch = 0..core.step_batch().len();
        batch.filter(|&index| core.step_reaches_disk(index, id)).map(of_sequence).sum()
    }

    /// The number of blocks that this many queries of a sequence fill, the most of any work list; None if no list takes them.
    pub(crate) fn query_blocks(&self, id: GroupId, new_tokens: u32) -> Option<u64> {
        let works = self.works_of(id).filter(|(_, work)| work.takes(new_tokens));
        works.map(|(_, work)| u64::from(new_tokens.div_ceil(work.queries))).max()
    }

    /// The work lists of a group, and their indices among all.
    pub(crate) fn works_of(&self, id: GroupId) -> impl Iterator<Item = (usize, &WorkPlaces)> {
        self.works.iter().enumerate().filter(move |(_, work)| GroupId(work.group) == id)
    }

    /// Whether a sequence shares pages with others, in a work list.
    pub(crate) fn holds_common(&self, work: usize, index: usize) -> bool {
        self.shared[work].holds.binary_search_by_key(&index, |hold| hold.0 as usize).is_ok()
    }

    /// Adds a run of words for a place on the device.
    fn run(&mut self, target: u64, words: Range<usize>) {
        if !words.is_empty() {
            self.runs.extend([target as u32, (target >> 32) as u32, words.start as u32, words.len() as u32]);
        }
    }

    fn table(&mut self, core: &Cache, group: usize) {
        let (table, columns) = (self.groups[group].table, self.groups[group].columns);
        if self.held[group].len() < core.step_batch().len() {
            self.held[group].resize(core.step_batch().len(), None);
        }
        for (index, (sequence, _)) in core.step_batch().enumerate() {
            let (row, version) = core.step_row(index, GroupId(group as u8));
            let (stamp, held) = (Stamp { sequence, version, pages: row.len() }, self.held[group][index]);
            let clean = stamp.kept(held.map(|held| held.stamp));
            let before = held.filter(|_| clean > 0).map_or(0, |held| held.on_host);
            let on_host = before + row[clean..].iter().filter(|entry| entry.tier() == Tier::Host).count();
            let start = self.words.len();
            self.words.extend(row[clean..].iter().map(|entry| entry.bits()));
            self.run(table + 4 * (index * columns + clean) as u64, start..self.words.len());
            self.held[group][index] = Some(Row { stamp, on_host });
        }
    }

    fn spans(&mut self, core: &Cache, step: &StepState, group: usize) {
        let mut count = 0;
        self.first_spans[group].clear();
        for index in 0..core.step_batch().len() {
            self.first_spans[group].push(count);
            count += step.spans(core, index, GroupId(group as u8)).len() as u32;
        }
        let first = self.words.len();
        let mut turned = i64::from(count);
        for (index, (_, new_tokens)) in core.step_batch().enumerate() {
            let mut before = 0;
            for span in step.spans(core, index, GroupId(group as u8)) {
                let SpanView { first_page, skip, count, position, mut offset, sight } = *span;
                // `Sight` of cuda/pagoda/tables.cuh.
                let sight = match sight {
                    Sight::Window => 0,
                    Sight::Always => 1,
                    Sight::Trailing { .. } => {
                        // Where its angles would be for row 0 of the batch.
                        offset = (turned - i64::from(step.bounds()[index])) as u64;
                        turned += i64::from(new_tokens);
                        2
                    }
                };
                self.words.extend([first_page, skip, count, before]);
                for wide in [offset, position] {
                    self.words.extend([wide as u32, (wide >> 32) as u32]);
                }
                self.words.extend([sight, 0]);
                before += count;
            }
        }
        self.run(self.groups[group].spans, first..self.words.len());
    }

    /// The slot of every new token, int64.
    fn slots(&mut self, core: &Cache, step: &StepState, layers: &[PlacedLayer], group: usize) {
        let first = self.words.len();
        for slot in slots(core, GroupId(group as u8), page_size(layers)) {
            self.words.extend([slot as u32, (slot >> 32) as u32]);
        }
        self.run(self.groups[group].slots, first..self.words.len());
        let first = self.words.len();
        let tokens = step.new_tokens() as u32;
        self.words.extend([tokens, if step.centers { tokens } else { 0 }]);
        self.run(self.groups[group].tokens, first..self.words.len());
    }

    /// Finds which sequences of a work list hold pages in common. Keeps the last result if tables have only grown since.
    fn find_common(&mut self, core: &Cache, step: &StepState, layers: &[PlacedLayer], at: usize) {
        let work = self.works[at];
        if work.common.is_some() {
            let page_size = page_size(layers);
            let takes = |new_tokens| work.takes(new_tokens);
            self.shared[at].found.update(core, step, GroupId(work.group), page_size, takes);
        }
    }

    /// The work list over common pages, and its queries.
    fn common_work(&mut self, core: &Cache, step: &StepState, at: usize) {
        let WorkPlaces { group, new_tokens, common: Some(places), common_queries: queries, members, .. } =
            self.works[at]
        else {
            return;
        };
        let of_fewer = self.works.iter().zip(&self.shared);
        let of_fewer = of_fewer.filter(|(work, _)| work.group == group && work.new_tokens.1 < new_tokens.0);
        let first_row = of_fewer.map(|(_, shared)| shared.members.len()).max().unwrap_or(0) as u32;
        let (shared, list) = (&mut self.shared[at], &mut self.lists[at].common);
        shared.first_row = first_row;
        shared.members.clear();
        shared.holds.clear();
        list.clear();
        let (bounds, id) = (step.bounds(), GroupId(group));
        for node in &shared.found.commons.nodes {
            let first = shared.members.len() as u32;
            for &place in &shared.found.commons.members[node.members.clone()] {
                shared.holds.push((place, first_row as i32 + shared.members.len() as i32, node.tokens.end));
                shared.members.extend(bounds[place as usize]..bounds[place as usize + 1]);
            }
            let place = shared.found.commons.members[node.members.start];
            let cut = Cut { queries, window: None, by_runs: false };
            let spans = step.spans(core, place as usize, id);
            let queries = first..shared.members.len() as u32;
            list.push_common(cut, place, spans, node.tokens.clone(), queries, first_row);
        }
        // The nodes of a sequence come in token order, and so do its places in `members`.
        shared.holds.sort_unstable();
        let first = self.words.len();
        self.words.extend(&shared.members);
        self.run(members, first..self.words.len());
        let words =
            write_list(&mut self.words, &self.lists[at].common, &self.first_spans[usize::from(group)]);
        self.run_list(places, words);
    }

    fn run_list(&mut self, places: ListAddresses, words: [Range<usize>; 4]) {
        let targets = [places.blocks, places.prefix, places.totals, places.rows];
        targets.into_iter().zip(words).for_each(|(target, words)| self.run(target, words));
    }

    fn work(&mut self, core: &Cache, step: &StepState, at: usize) {
        let work = self.works[at];
        let WorkPlaces { group, queries, window, by_runs, own, .. } = work;
        let cut = Cut { queries, window, by_runs };
        let (shared, list, id) = (&self.shared[at], &mut self.lists[at].own, GroupId(group));
        list.clear();
        let mut holds = shared.holds.iter().peekable();
        let mut rows = Vec::with_capacity(LEVELS_MAX);
        let bounds = step.bounds();
        for (index, (_, new_tokens)) in core.step_batch().enumerate() {
            let mut end = 0;
            rows.clear();
            while let Some(&(_, start, behind)) = holds.next_if(|hold| hold.0 == index as u32) {
                rows.push(start);
                end = behind;
            }
            if work.takes(new_tokens) {
                let held = Held { end, rows: &rows };
                list.push(cut, index as u32, bounds[index], step.spans(core, index, id), new_tokens, held);
            }
        }
        let words = write_list(&mut self.words, &self.lists[at].own, &self.first_spans[usize::from(group)]);
        self.run_list(own, words);
    }

    /// Cosines and sines of the offsets of all spans, then of each trailing span by query. None if no span moved or trails.
    fn angles(&mut self, core: &Cache, step: &StepState, layers: &[PlacedLayer], at: usize) {
        let AnglePlaces { layer, angles } = self.angles[at];
        let placed = &layers[layer];
        let Some(rope) = &placed.layer.rope else { return };
        let batch = core.step_batch().len();
        let spans = || (0..batch).flat_map(|index| step.spans(core, index, placed.group));
        if spans().all(|span| span.offset == 0 && !trails(span)) {
            return;
        }
        let first = self.words.len();
        let words = &mut self.words;
        let mut add = |offset: u64| {
            words.extend(rope.inv_freq.iter().flat_map(|&frequency| {
                let (sin, cos) = (offset as f64 * f64::from(frequency)).sin_cos();
                [(cos as f32).to_bits(), (sin as f32).to_bits()]
            }));
        };
        spans().for_each(|span| add(span.offset));
        for (index, (_, new_tokens)) in core.step_batch().enumerate() {
            let spans = step.spans(core, index, placed.group);
            let length = step.length(core, index, placed.group);
            for span in spans.iter().filter(|span| trails(span)) {
                (length - new_tokens..length).for_each(|query| add(span.offset_for(query as usize)));
            }
        }
        self.run(angles, first..self.words.len());
    }
}

/// Whether each query sees a span at its own distance.
fn trails(span: &SpanView) -> bool {
    matches!(span.sight, Sight::Trailing { .. })
}

/// Writes blocks, prefix, totals and parts of a work list as cuda/pagoda/unit.cuh expects them; returns where. `first_spans`:
/// for each sequence of the batch.
pub(crate) fn write_list(words: &mut Vec<u32>, list: &WorkList, first_spans: &[u32]) -> [Range<usize>; 4] {
    let first = words.len();
    for block in &list.blocks {
        let QueryBlock { sequence, token, queries, position, from, low, high, first_part, parts, target } =
            *block;
        let fields = [token, queries, position, from, low, high, first_part, parts, target];
        words.extend([sequence as u32, first_spans[sequence as usize]]);
        words.extend(fields.map(|field| field as u32));
    }
    let second = words.len();
    words.extend(list.prefix.iter().map(|&work| work as u32));
    let third = words.len();
    words.extend([list.blocks.len() as u32, words[third - 1]]);
    let fourth = words.len();
    words.extend(list.part_rows.iter().map(|&row| row as u32));
    [first..second, second..third, third..fourth, fourth..words.len()]
}

/// The room that the open step needs. A step without sequences has tables, too.
pub(crate) fn room(core: &Cache, step: &StepState, groups: usize) -> Room {
    let sequences = core.step_batch().len().max(1);
    let mut room = Room { sequences, tokens: step.new_tokens(), ..Room::default() };
    for group in (0..groups as u8).map(GroupId) {
        let (mut spans, mut angles) = (0, 0);
        for (index, (_, new_tokens)) in core.step_batch().enumerate() {
            room.columns = room.columns.max(core.step_row(index, group).0.len());
            spans += step.spans(core, index, group).len();
            let trailing = step.spans(core, index, group).iter().filter(|span| trails(span)).count();
            angles += trailing * new_tokens as usize;
        }
        room.spans = room.spans.max(spans);
        room.angles = room.angles.max(spans + angles);
    }
    room
}
