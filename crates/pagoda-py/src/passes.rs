//! What a device has to be told of pages that are streamed to it from other tiers: which come together in a pass, tables that
//! say where they are then, and the work of each pass.

use crate::device::{Lists, Upload, write_list};
use crate::layers::PlacedLayer;
use crate::step::StepState;
use numpy::PyArray1;
use pagoda_core::Cache;
use pagoda_core::ids::{BlockId, BlockRef, GroupId, SequenceId, Tier};
use pagoda_core::work::{Passes, RUN_ROWS, Scanned, TILE, WorkList};
use pagoda_store::LayerOfPages;
use pyo3::prelude::*;

/// Where the words of one list are, in bytes from the start of all.
#[derive(IntoPyObject)]
pub(crate) struct ListPlaces {
    blocks: usize,
    prefix: usize,
    count: usize,
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
    /// Where the block table is, in bytes from the start of all: uint32 `[batch, columns]`. What is streamed is on the third tier,
    /// at its place among the blocks of its pass.
    table: usize,
    columns: usize,
    /// Of each pass its blocks of the host tier, uint32, in ascending order, and how many of disk come behind these.
    passes: Vec<(Bound<'py, PyArray1<u32>>, usize)>,
    works: Vec<PassedWork>,
}

/// What of the open step is streamed.
#[derive(Default)]
pub(crate) struct Streams {
    /// For one place on the device.
    pub(crate) words: Vec<u32>,
    /// What the blocks of all passes hold is the same as long as this is.
    held: Vec<Held>,
    stamp: u64,
}

/// A group, the sequences of a batch with the versions of their tables, and the blocks of the passes.
type Held = (u8, Vec<(SequenceId, u32)>, Vec<Vec<BlockRef>>);

impl Upload {
    /// Plans passes for each group in `rooms`, of so many pages at most, and writes them down; returns how many words more there
    /// are now, a number that stays the same as long as blocks hold the same, and the groups.
    pub(crate) fn stream<'py>(
        &mut self,
        py: Python<'py>,
        core: &Cache,
        step: &StepState,
        layers: &[PlacedLayer],
        rooms: &[(u8, usize)],
    ) -> (usize, u64, Vec<StreamedGroup<'py>>) {
        let mut held = Vec::new();
        let groups = rooms
            .iter()
            .map(|&(group, room)| {
                let passes = self.passes(core, step, layers, GroupId(group), room);
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

    /// What of the passes is on disk: layer by layer, of each pass that has some.
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
        id: GroupId,
        room: usize,
    ) -> Passes {
        let works = || self.works.iter().filter(|work| GroupId(work.group) == id);
        let placed = layers.iter().find(|placed| placed.group == id);
        let page_size = placed.map_or(1, |placed| placed.layer.page_size as usize);
        let stretch = if works().any(|work| work.by_runs) { RUN_ROWS } else { TILE.max(page_size) };
        let scanned = core.step_batch().enumerate().map(|(index, (_, new_tokens))| {
            let all = step.spans(core, index, id);
            let length: u32 = all.iter().map(|span| span.count).sum();
            let first = |window: Option<u32>| {
                window.map_or(0, |window| (length - new_tokens + 1).saturating_sub(window))
            };
            let low = works().filter(|work| work.takes(new_tokens)).map(|work| first(work.window)).min();
            // No queries, no work.
            let spans = if low.is_some() { all } else { &[] };
            Scanned { spans, row: core.step_row(index, id).0, low: low.unwrap_or(0) }
        });
        Passes::plan(&scanned.collect::<Vec<_>>(), page_size, stretch, room)
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
            // No kernel reads the disk tier: its number is that of what has been brought.
            let brought = BlockRef::new(Tier::Disk, BlockId::new(place));
            words[start + sequence as usize * columns + entry as usize] = brought.bits();
        }
        let members = self.members() as u32;
        let tokens = step.new_tokens() as u32;
        let spans = |sequence: usize| step.spans(core, sequence, id);
        let mut lists = vec![WorkList::default(); passes.blocks.len()];
        let mut works = Vec::new();
        for (index, work) in self.works.iter().enumerate().filter(|(_, work)| GroupId(work.group) == id) {
            // Rows of parts: of those who hold common pages, then what is carried for each query, and for each of those.
            let mut write = |list: &WorkList, carried: u32, queries: u32| {
                lists.iter_mut().for_each(WorkList::clear);
                list.split(passes, work.by_runs, spans, carried, queries, &mut lists);
                lists.iter().map(|list| write_part(&mut self.streams.words, list)).collect::<Vec<_>>()
            };
            let Lists { own, common } = &self.lists[index];
            let (own, common) = (write(own, members, tokens), write(common, members + 2 * tokens, members));
            works.push(PassedWork { work: index, own, common });
        }
        let passes = passes.blocks.iter().map(|blocks| {
            let on_host = of_tier(blocks, Tier::Host);
            let on_disk = blocks.len() - on_host.len();
            (PyArray1::from_iter(py, on_host.into_iter().map(BlockId::index)), on_disk)
        });
        StreamedGroup { table: 4 * start, columns, passes: passes.collect(), works }
    }
}

/// Those of one tier.
fn of_tier(blocks: &[BlockRef], tier: Tier) -> Vec<BlockId> {
    blocks.iter().filter(|block| block.tier() == tier).map(|block| block.block()).collect()
}

/// Writes a list down, if there is work in it; returns where.
fn write_part(words: &mut Vec<u32>, list: &WorkList) -> Option<ListPlaces> {
    if list.blocks.is_empty() {
        return None;
    }
    let [blocks, prefix, count, rows] = write_list(words, list).map(|range| 4 * range.start);
    Some(ListPlaces { blocks, prefix, count, rows })
}
