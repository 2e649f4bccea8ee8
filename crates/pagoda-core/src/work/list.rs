//! Blocks of queries and the work of each: the list that the thread blocks of a device divide among themselves.

use super::{Passes, pieces_from};
use crate::table::SpanView;
use std::ops::Range;

/// Consecutive queries of one sequence, or queries of several that hold pages in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryBlock {
    /// The sequence's place in the batch.
    pub sequence: i32,
    /// The row of the first query in the batch, or in the list of those who hold common pages.
    pub token: i32,
    /// How many there are.
    pub queries: i32,
    /// The axis index of the first query; for common pages of the last token that they hold.
    pub position: i32,
    /// Where on the axis the block begins to go over tokens that every query sees, whatever the window.
    pub from: i32,
    /// Where on the axis it begins to go over the others.
    pub low: i32,
    /// The axis index behind the last token that it goes over.
    pub high: i32,
    /// Where in [`WorkList::part_rows`] the parts are named that the first query's results begin with.
    pub first_part: i32,
    /// How many of these parts there are.
    pub parts: i32,
    /// The part that the first query's results are to be; below 0 they are results.
    pub target: i32,
}

impl QueryBlock {
    /// Tiles or runs that are gone over.
    fn work(&self, by_runs: bool, spans: &[SpanView]) -> usize {
        pieces_from(spans, self.from as usize, self.low as usize..self.high as usize)
            .map(|piece| if by_runs { piece.runs().len() } else { piece.tiles.len() })
            .sum()
    }
}

/// What of a sequence is gone over together with others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held<'a> {
    /// The tokens below this.
    pub end: u32,
    /// The places of its first new token in the lists of those who hold common pages, in token order.
    pub rows: &'a [i32],
}

/// How a batch is cut into query blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// Queries of a block at most.
    pub queries: u32,
    /// Tokens that a query sees at most, itself included.
    pub window: Option<u32>,
    /// Whether work is counted in fixed runs, and not in tiles.
    pub by_runs: bool,
}

/// The query blocks of a batch, and before each the work of those before it, for one K/V head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkList {
    /// The blocks.
    pub blocks: Vec<QueryBlock>,
    /// One entry more than blocks.
    pub prefix: Vec<i32>,
    /// Parts that results begin with, block after block: where the first query's are. Of common pages, its place in the list
    /// of those who hold them.
    pub part_rows: Vec<i32>,
}

impl WorkList {
    /// Starts over, keeping the memory.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.prefix.clear();
        self.prefix.push(0);
        self.part_rows.clear();
    }

    /// Adds the blocks of the sequence at place `sequence` of the batch, whose `new_tokens` last tokens are the queries and
    /// begin at row `token`; not what it holds in common with others.
    pub fn push(
        &mut self,
        cut: Cut,
        sequence: u32,
        token: u32,
        spans: &[SpanView],
        new_tokens: u32,
        held: Held<'_>,
    ) {
        let length: u32 = spans.iter().map(|span| span.count).sum();
        for first in (0..new_tokens).step_by(cut.queries as usize) {
            let queries = cut.queries.min(new_tokens - first);
            let position = length - new_tokens + first;
            let low = cut.window.map_or(0, |window| (position + 1).saturating_sub(window)).max(held.end);
            let block = QueryBlock {
                sequence: sequence as i32,
                token: (token + first) as i32,
                queries: queries as i32,
                position: position as i32,
                from: 0,
                low: low as i32,
                high: (position + queries) as i32,
                first_part: self.part_rows.len() as i32,
                parts: held.rows.len() as i32,
                target: -1,
            };
            self.part_rows.extend(held.rows.iter().map(|row| row + first as i32));
            self.add(block, block.work(cut.by_runs, spans));
        }
    }

    /// Adds the blocks that go over `tokens` of the sequence at place `sequence`, for the `queries` queries from `first` on
    /// of those who hold these pages.
    pub fn push_common(
        &mut self,
        cut: Cut,
        sequence: u32,
        spans: &[SpanView],
        tokens: Range<u32>,
        queries: Range<u32>,
    ) {
        for first in queries.clone().step_by(cut.queries as usize) {
            let block = QueryBlock {
                sequence: sequence as i32,
                token: first as i32,
                queries: cut.queries.min(queries.end - first) as i32,
                position: tokens.end as i32 - 1,
                from: 0,
                low: tokens.start as i32,
                high: tokens.end as i32,
                first_part: 0,
                parts: 0,
                target: first as i32,
            };
            self.add(block, block.work(cut.by_runs, spans));
        }
    }

    /// Adds each block of a list to the lists of the passes that go over some of its work. From pass to pass its parts are
    /// carried in two rows a query, by turns, which begin at row `carried`; `queries`: of all blocks together. Behind these rows is
    /// one more for each query, for what the CPU attends to: where there is some, results begin with it in the last pass.
    pub fn split<'a>(
        &self,
        passes: &Passes,
        by_runs: bool,
        spans: impl Fn(usize) -> &'a [SpanView],
        carried: u32,
        queries: u32,
        lists: &mut [WorkList],
    ) {
        for whole in &self.blocks {
            let sequence = whole.sequence as usize;
            let mut begin = &self.part_rows[whole.first_part as usize..][..whole.parts as usize];
            let rows = [0, 1].map(|turn| [(carried + turn * queries) as i32 + whole.token]);
            let mut turn = 0;
            for (pass, list) in lists.iter_mut().enumerate() {
                let tokens = passes.tokens(pass, sequence);
                let mut block = QueryBlock {
                    from: tokens.start as i32,
                    low: whole.low.max(tokens.start as i32),
                    high: whole.high.min(tokens.end.min(i32::MAX as u32) as i32),
                    first_part: list.part_rows.len() as i32,
                    parts: begin.len() as i32,
                    ..*whole
                };
                let work = block.work(by_runs, spans(sequence));
                if work == 0 {
                    continue;
                }
                let ends = block.high == whole.high;
                list.part_rows.extend_from_slice(begin);
                if !ends {
                    block.target = rows[turn][0];
                } else if passes.begin(sequence) > 0 {
                    list.part_rows.push((carried + 2 * queries) as i32 + whole.token);
                    block.parts += 1;
                }
                list.add(block, work);
                if ends {
                    break;
                }
                begin = &rows[turn];
                turn = 1 - turn;
            }
        }
    }

    fn add(&mut self, block: QueryBlock, work: usize) {
        self.blocks.push(block);
        let before = self.prefix.last().copied().unwrap_or(0);
        self.prefix.push(before.saturating_add(i32::try_from(work).unwrap_or(i32::MAX)));
    }

    /// Whether the work is little enough for kernels to count.
    pub fn is_countable(&self) -> bool {
        self.prefix.last() != Some(&i32::MAX)
    }
}
