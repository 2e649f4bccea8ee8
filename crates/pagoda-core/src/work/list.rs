//! Blocks of queries and the work of each: the list that the thread blocks of a device divide among themselves.

use super::{Passes, pieces_from};
use crate::table::SpanView;
use std::ops::Range;

/// Consecutive queries of one sequence, or queries of several sequences that share pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryBlock {
    /// The sequence's place in the batch.
    pub sequence: i32,
    /// The row of the first query in the batch or, for common pages, in the list of their holders' queries.
    pub token: i32,
    /// How many there are.
    pub queries: i32,
    /// The axis index of the first query; for common pages, of the last token in them.
    pub position: i32,
    /// Axis index of the first token to process among those that every query sees, whatever the window.
    pub from: i32,
    /// Axis index of the first token to process among the others.
    pub low: i32,
    /// The axis index after the last token to process.
    pub high: i32,
    /// Index in [`WorkList::part_rows`] of the parts (partial results) with which the first query's results begin.
    pub first_part: i32,
    /// How many of these parts there are.
    pub parts: i32,
    /// The part to which the first query's results are written; below 0, they are final results.
    pub target: i32,
}

impl QueryBlock {
    /// How many tiles or runs it processes.
    fn work(&self, by_runs: bool, spans: &[SpanView]) -> usize {
        pieces_from(spans, self.from as usize, self.low as usize..self.high as usize)
            .map(|piece| if by_runs { piece.runs().len() } else { piece.tiles.len() })
            .sum()
    }
}

/// The tokens of a sequence that are processed together with other sequences.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held<'a> {
    /// All tokens below this index.
    pub end: u32,
    /// The rows of its first new token in the lists of queries of those who hold common pages, in token order.
    pub rows: &'a [i32],
}

/// How a batch is cut into query blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// Most queries of a block.
    pub queries: u32,
    /// Most tokens that a query sees, itself included.
    pub window: Option<u32>,
    /// Whether work is counted in fixed runs instead of tiles.
    pub by_runs: bool,
}

/// The query blocks of a batch, and the running total of their work, for one K/V head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkList {
    /// The blocks.
    pub blocks: Vec<QueryBlock>,
    /// The work before each block and, as the last entry, of all blocks.
    pub prefix: Vec<i32>,
    /// The parts with which results begin, block after block: the row of the first query's. For common pages, its row in the
    /// list of their holders' queries.
    pub part_rows: Vec<i32>,
}

impl WorkList {
    /// Removes everything but keeps the memory.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.prefix.clear();
        self.prefix.push(0);
        self.part_rows.clear();
    }

    /// Adds the blocks of the sequence at place `sequence` of the batch. Its last `new_tokens` tokens are the queries and
    /// begin at row `token`. What it holds in common with others is left out.
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

    /// Adds the blocks that process `tokens` of the sequence at place `sequence` for some `queries`, a range of the list of
    /// queries of those who hold these pages, whose parts begin at row `first_row`.
    pub fn push_common(
        &mut self,
        cut: Cut,
        sequence: u32,
        spans: &[SpanView],
        tokens: Range<u32>,
        queries: Range<u32>,
        first_row: u32,
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
                target: (first_row + first) as i32,
            };
            self.add(block, block.work(cut.by_runs, spans));
        }
    }

    /// Adds each block to the lists of the passes that do some of its work. From pass to pass its parts are carried in two
    /// rows per query, used in turn, which begin at row `carried`; `queries` is the number over all blocks. One more row per
    /// query follows, for the CPU's part of the attention: if there is one, results in the last pass begin with it.
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

    /// Whether the total work is small enough for kernels to count.
    pub fn is_countable(&self) -> bool {
        self.prefix.last() != Some(&i32::MAX)
    }
}
