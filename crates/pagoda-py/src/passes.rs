//! What a device needs to know about pages that are streamed to it from other tiers: which pages each pass brings, tables of
//! where they then lie, and the work of each pass.

use crate::layers::{PlacedLayer, page_size};
use crate::step::StepState;
use crate::upload::{Lists, Upload, write_list};
use numpy::PyArray1;
use pagoda_core::Cache;
use pagoda_core::ids::{BlockId, BlockRef, GroupId, SequenceId, Tier};
use pagoda_core::work::{Passes, RUN_ROWS, Scanned, Shares, TILE, WorkList};
use pagoda_store::LayerOfPages;
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// How a group is to be streamed, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct StreamArguments {
    group: u8,
    /// The most pages that a pass brings.
    room: usize,
    /// The share that the CPU attends to, of the first pages of divisible sequences, up to one that is not on the host tier.
    on_cpu: f64,
    /// The share that kernels read in place, of all other pages on the host tier.
    in_place: f64,
}

/// Host pages that attention over a layer of a group reads.
#[derive(IntoPyObject)]
pub(crate) struct HostPages {
    /// Pages of all sequences.
    pages: u64,
    /// Pages counted as often as kernels read them in place: once for each block of queries.
    reads: u64,
    /// Of sequences that may be divided between kernels and the CPU: the first pages, up to one that is not on the host tier.
    divisible: u64,
    /// The most new tokens of any of these sequences.
    new_tokens: u32,
}

/// Where the words of one list are, in bytes from the start of all words.
#[derive(IntoPyObject)]
pub(crate) struct ListPlaces {
    blocks: usize,
    prefix: usize,
    totals: usize,
    rows: usize,
}

/// The work of the passes over a group, for one work list.
#[derive(IntoPyObject)]
pub(crate) struct PassedWork {
    /// Its place among the work lists.
    work: usize,
    own: Vec<Option<ListPlaces>>,
    /// Over common pages.
    common: Vec<Option<ListPlaces>>,
}

/// How the pages of a group are streamed.
#[derive(IntoPyObject)]
pub(crate) struct StreamedGroup<'py> {
    /// Where the block table is, in bytes from the start of all words: uint32 `[batch, columns]`. Streamed pages have the
    /// third tier there, and their place among the blocks of their pass.
    table: usize,
    columns: usize,
    /// For each pass its host blocks, uint32, in ascending order, and how many blocks from disk come after them.
    passes: Vec<(Bound<'py, PyArray1<u32>>, usize)>,
    works: Vec<PassedWork>,
    /// For each sequence the token up to which the CPU computes everything, uint32; and the row of `parts` for the first
    /// query of the batch whose last pass begins with the CPU's result.
    begins: Bound<'py, PyArray1<u32>>,
    row: u32,
    /// Pages counted as often as kernels read them in place.
    in_place: u64,
}

/// What is streamed in the open step.
#[derive(Default)]
pub(crate) struct Streams {
    /// The words for one place on the device.
    pub(crate) words: Vec<u32>,
    /// The blocks of all passes hold the same as long as this is the same.
    held: Vec<Held>,
    stamp: u64,
}

/// A group, the sequences of a batch with the versions of their tables, and the blocks of the passes.
type Held = (u8, Vec<(SequenceId, u32)>, Vec<Vec<BlockRef>>);

impl Upload {
    /// Counts the host pages that attention over a layer of each group reads, for groups that have any.
    pub(crate) fn host_pages(&self, core: &Cache) -> BTreeMap<usize, HostPages> {
        let of_group = |group: usize| {
            let mut sum = HostPages { pages: 0, reads: 0, divisible: 0, new_tokens: 0 };
            for (index, (_, new_tokens)) in core.step_batch().enumerate() {
                let id = GroupId(group as u8);
                let pages = self.on_host(group, index);
                let Some(blocks) = self.query_blocks(id, new_tokens) else { continue };
                sum.pages += pages;
                sum.reads += pages * blocks;
                if pages > 0 && self.divisible(id, index, new_tokens) {
                    let row = core.step_row(index, id).0.iter();
                    sum.divisible += row.take_while(|entry| entry.tier() == Tier::Host).count() as u64;
                    sum.new_tokens = sum.new_tokens.max(new_tokens);
                }
            }
            sum
        };
        let all = (0..self.group_count()).map(|group| (group, of_group(group)));
        all.filter(|(_, sum)| sum.pages > 0).collect()
    }

    /// Whether the CPU may compute a part: if the sequence has few queries and shares no pages with others.
    fn divisible(&self, id: GroupId, index: usize, new_tokens: u32) -> bool {
        self.works_of(id)
            .all(|(at, work)| !self.holds_common(at, index) && work.takes(new_tokens) == work.takes(1))
    }

    /// Plans passes for each group and lists them. Returns the number of words on top, a number that stays the same as long
    /// as blocks hold the same, and the groups.
    pub(crate) fn stream<'py>(
        &mut self,
        py: Python<'py>,
        core: &Cache,
        step: &StepState,
        layers: &[PlacedLayer],
        groups: &[StreamArguments],
    ) -> (usize, u64, Vec<StreamedGroup<'py>>) {
        let mut held = Vec::new();
        let groups = groups
            .iter()
            .map(|streamed| {
                let group = streamed.group;
                let passes = self.passes(core, step, layers, streamed);
                let streamed = self.write_group(py, core, step, GroupId(group), &passes);
                let sequences = core.step_batch().enumerate();
                let versions = sequences
                    .map(|(index, (sequence, _))| (sequence, core.step_row(index, GroupId(group)).1));
                held.push((group, versions.collect(), passes.blocks));
                streamed
            })
            .collect();
        if held != self.streams.held {
            self.streams.held = held;
            self.streams.stamp += 1;
        }
        // The words and their run.
        (4 + self.streams.words.len(), self.streams.stamp, groups)
    }

    /// The parts of passes that are on disk: layer by layer, for each pass that has some.
    pub(crate) fn to_read(&self, layers: &[PlacedLayer]) -> Vec<LayerOfPages> {
        let of_layer = |placed: &PlacedLayer| {
            let (group, layer) = (placed.group, placed.member);
            let held = self.streams.held.iter().filter(move |held| GroupId(held.0) == group);
            let on_disk = held.flat_map(|(.., passes)| passes).map(|blocks| of_tier(blocks, Tier::Disk));
            on_disk.filter(|blocks| !blocks.is_empty()).map(move |blocks| LayerOfPages {
                group,
                layer,
                blocks,
            })
        };
        layers.iter().flat_map(of_layer).collect()
    }

    fn passes(
        &self,
        core: &Cache,
        step: &StepState,
        layers: &[PlacedLayer],
        &StreamArguments { group, room, on_cpu, in_place }: &StreamArguments,
    ) -> Passes {
        let id = GroupId(group);
        let works = || self.works_of(id).map(|(_, work)| work);
        let page_size = page_size(layers) as usize;
        let stretch = if works().any(|work| work.by_runs) { RUN_ROWS } else { TILE.max(page_size) };
        let scanned = core.step_batch().enumerate().map(|(index, (_, new_tokens))| {
            let all = step.spans(core, index, id);
            let length = step.length(core, index, id);
            let low = self.first_seen(core, step, id, index);
            // No queries, no work.
            let spans = if low.is_some() { all } else { &[] };
            let divisible = self.divisible(id, index, new_tokens);
            let (low, queries) = (low.unwrap_or(0), length - new_tokens);
            Scanned { spans, row: core.step_row(index, id).0, low, queries, divisible }
        });
        let shares = Shares { on_cpu, in_place };
        Passes::plan(&scanned.collect::<Vec<_>>(), page_size, stretch, room, shares)
    }

    fn write_group<'py>(
        &mut self,
        py: Python<'py>,
        core: &Cache,
        step: &StepState,
        id: GroupId,
        passes: &Passes,
    ) -> StreamedGroup<'py> {
        let words = &mut self.streams.words;
        let start = words.len();
        let rows = || (0..core.step_batch().len()).map(|index| core.step_row(index, id).0);
        let columns = rows().map(<[_]>::len).max().unwrap_or(0);
        for row in rows() {
            words.extend(row.iter().map(|entry| entry.bits()));
            words.resize(words.len() + columns - row.len(), 0);
        }
        for &(sequence, entry, place) in &passes.entries {
            // No kernel reads the disk tier, so its number marks blocks that a pass brings.
            let brought = BlockRef::new(Tier::Disk, BlockId::new(place));
            words[start + sequence as usize * columns + entry as usize] = brought.bits();
        }
        let members = self.members() as u32;
        let tokens = step.new_tokens() as u32;
        let spans = |sequence: usize| step.spans(core, sequence, id);
        let first_spans = &self.first_spans[usize::from(id.0)];
        let mut lists = vec![WorkList::default(); passes.blocks.len()];
        let mut works = Vec::new();
        for (index, work) in self.works.iter().enumerate().filter(|(_, work)| GroupId(work.group) == id) {
            // The rows of parts: those of members of common pages; for each query what is carried and what the CPU has
            // computed; and what is carried for each member.
            let mut write = |list: &WorkList, carried: u32, queries: u32| {
                lists.iter_mut().for_each(WorkList::clear);
                list.split(passes, work.by_runs, spans, carried, queries, &mut lists);
                let words = &mut self.streams.words;
                lists.iter().map(|list| write_part(words, list, first_spans)).collect::<Vec<_>>()
            };
            let Lists { own, common } = &self.lists[index];
            let for_members = members + 3 * tokens + self.shared[index].first_row;
            let (own, common) = (write(own, members, tokens), write(common, for_members, members));
            works.push(PassedWork { work: index, own, common });
        }
        let brought = passes.blocks.iter().map(|blocks| {
            let on_host = of_tier(blocks, Tier::Host);
            let on_disk = blocks.len() - on_host.len();
            (PyArray1::from_iter(py, on_host.into_iter().map(BlockId::index)), on_disk)
        });
        let batch = || core.step_batch().enumerate();
        let in_place = batch().map(|(index, (_, new_tokens))| {
            u64::from(passes.in_place[index]) * self.query_blocks(id, new_tokens).unwrap_or(0)
        });
        StreamedGroup {
            table: 4 * start,
            columns,
            passes: brought.collect(),
            works,
            begins: PyArray1::from_iter(py, batch().map(|(index, _)| passes.begin(index))),
            row: members + 2 * tokens,
            in_place: in_place.sum(),
        }
    }
}

/// The blocks of one tier.
fn of_tier(blocks: &[BlockRef], tier: Tier) -> Vec<BlockId> {
    blocks.iter().filter(|block| block.tier() == tier).map(|block| block.block()).collect()
}

/// Writes a list, if it has work; returns where.
fn write_part(words: &mut Vec<u32>, list: &WorkList, first_spans: &[u32]) -> Option<ListPlaces> {
    if list.blocks.is_empty() {
        return None;
    }
    let [blocks, prefix, totals, rows] = write_list(words, list, first_spans).map(|range| 4 * range.start);
    Some(ListPlaces { blocks, prefix, totals, rows })
}
