//! What attention goes over, as arithmetic: tiles of stored rows, pieces of spans, blocks of queries.
//!
//! Every backend cuts its work along these lines, so that a tile, and in deterministic mode a run, is the same rows of a
//! page whoever computes it.

use std::ops::Range;

use crate::table::{Sight, SpanView};

/// Stored rows that are worked on together.
pub const TILE: usize = 64;
/// Tiles of a fixed run: 4096 stored rows.
pub const RUN_TILES: usize = RUN_ROWS / TILE;
/// Stored rows of a fixed run.
pub const RUN_ROWS: usize = 4096;

/// The tiles of one span that a range of the token axis touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// The span.
    pub span: &'a SpanView,
    /// The axis index of stored row 0 of the span's first page; below 0 where the span skips rows.
    pub origin: isize,
    /// Stored rows of the span that are in the range.
    pub rows: Range<usize>,
    /// Tiles of [`TILE`] stored rows.
    pub tiles: Range<usize>,
    /// Runs of the spans before.
    runs_before: usize,
}

impl Piece<'_> {
    /// Fixed runs of [`RUN_TILES`] tiles that the piece touches.
    pub fn runs(&self) -> Range<usize> {
        self.tiles.start / RUN_TILES..self.tiles.end.div_ceil(RUN_TILES)
    }

    /// The place of a run of the span among those of the sequence, as [`runs`] counts them.
    pub fn place(&self, run: usize) -> usize {
        self.runs_before + run - span_runs(self.span).start
    }
}

/// Fixed runs that a span has rows in.
fn span_runs(span: &SpanView) -> Range<usize> {
    let (low, high) = (span.skip as usize, (span.skip + span.count) as usize);
    if low == high { 0..0 } else { low / RUN_ROWS..high.div_ceil(RUN_ROWS) }
}

/// The pieces of a sequence that hold a part of `range` of its token axis, and of what every query sees up to the range's end.
pub fn pieces<'a>(spans: &'a [SpanView], range: Range<usize>) -> impl Iterator<Item = Piece<'a>> {
    let (mut start, mut runs) = (0, 0);
    spans.iter().filter_map(move |span| {
        let (first, skip, runs_before) = (start, span.skip as usize, runs);
        start += span.count as usize;
        runs += span_runs(span).len();
        let low = if span.sight == Sight::Window { first.max(range.start) } else { first };
        let high = start.min(range.end);
        (low < high).then(|| {
            let rows = low - first + skip..high - first + skip;
            let tiles = rows.start / TILE..rows.end.div_ceil(TILE);
            Piece { span, origin: first as isize - skip as isize, rows, tiles, runs_before }
        })
    })
}

/// The fixed runs with a part of what [`pieces`] gives for `range`: the place of each among those of the sequence, and the
/// places in the sequence's row of the pages that hold that part.
pub fn runs(
    spans: &[SpanView],
    range: Range<usize>,
    page_size: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    pieces(spans, range).flat_map(move |piece| {
        let first = piece.span.first_page as usize;
        piece.runs().map(move |run| {
            let rows = piece.rows.start.max(run * RUN_ROWS)..piece.rows.end.min((run + 1) * RUN_ROWS);
            (piece.place(run), first + rows.start / page_size..first + rows.end.div_ceil(page_size))
        })
    })
}

/// How many fixed runs a sequence has, over all spans, whoever sees them.
pub fn run_count(spans: &[SpanView]) -> usize {
    spans.iter().map(|span| span_runs(span).len()).sum()
}

/// Consecutive queries of one sequence, or queries of several that hold pages in common, in the layout that device kernels
/// read (cuda/pagoda/unit.cuh).
#[repr(C)]
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
    /// What of the axis is gone over: from here on,
    pub low: i32,
    /// up to here.
    pub high: i32,
    /// Where [`WorkList::common_rows`] names the common parts of the first query,
    pub first_common: i32,
    /// and how many there are.
    pub commons: i32,
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
    /// Common parts to add, block after block: the place of the first query in the list of those who hold the pages.
    pub common_rows: Vec<i32>,
}

impl WorkList {
    /// Starts over, keeping the memory.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.prefix.clear();
        self.prefix.push(0);
        self.common_rows.clear();
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
                low: low as i32,
                high: (position + queries) as i32,
                first_common: self.common_rows.len() as i32,
                commons: held.rows.len() as i32,
            };
            self.common_rows.extend(held.rows.iter().map(|row| row + first as i32));
            self.add(block, cut.by_runs, spans);
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
                low: tokens.start as i32,
                high: tokens.end as i32,
                first_common: 0,
                commons: 0,
            };
            self.add(block, cut.by_runs, spans);
        }
    }

    fn add(&mut self, block: QueryBlock, by_runs: bool, spans: &[SpanView]) {
        let work: usize = pieces(spans, block.low as usize..block.high as usize)
            .map(|piece| if by_runs { piece.runs().len() } else { piece.tiles.len() })
            .sum();
        self.blocks.push(block);
        let before = self.prefix.last().copied().unwrap_or(0);
        self.prefix.push(before + work as i32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Spans one after the other, each from its own page on.
    fn spans() -> impl Strategy<Value = Vec<SpanView>> {
        let parts = proptest::collection::vec((0u32..200, 1u32..9000), 1..5);
        (parts, 0usize..3).prop_map(|(parts, sinks)| {
            let mut first_page = 0;
            let span = |(index, (skip, count)): (usize, (u32, u32))| {
                let sight = if index < sinks { Sight::Always } else { Sight::Window };
                let position = skip.into();
                let view = SpanView { first_page, skip, count, position, offset: 0, sight };
                first_page += (skip + count).div_ceil(16);
                view
            };
            parts.into_iter().enumerate().map(span).collect()
        })
    }

    proptest! {
        /// Token by token: which tiles and runs of which span the queries of a block see.
        #[test]
        fn blocks_cover_what_their_queries_see(
            spans in spans(),
            new in 1u32..300,
            queries in 1u32..70,
            window in proptest::option::of(1u32..10_000),
            by_runs: bool,
            held in 0u32..100,
        ) {
            let length: u32 = spans.iter().map(|span| span.count).sum();
            let new = new.min(length);
            let mut work = WorkList::default();
            work.clear();
            let end = length - new;
            let held = Held { end: end / 100 * held, rows: &[70, 90][..usize::from(held > 0)] };
            work.push(Cut { queries, window, by_runs }, 3, 1000, &spans, new, held);
            prop_assert_eq!(work.prefix.len(), work.blocks.len() + 1);
            let mut next = length - new;
            for (block, part) in work.blocks.iter().zip(work.prefix.windows(2)) {
                prop_assert_eq!(block.position as u32, next);
                prop_assert_eq!(block.token as u32, 1000 + next - (length - new));
                prop_assert!(block.queries as u32 <= queries && block.sequence == 3);
                let rows = &work.common_rows[block.first_common as usize..][..block.commons as usize];
                let expected: Vec<i32> = held.rows.iter().map(|row| row + block.token - 1000).collect();
                prop_assert_eq!(rows, expected);
                next += block.queries as u32;
                let mut seen = BTreeSet::new();
                let mut start = 0;
                for (index, span) in spans.iter().enumerate() {
                    for row in 0..span.count {
                        let token = start + row;
                        let visible = (block.position as u32..next).any(|query| {
                            let sink = span.sight == Sight::Always;
                            token <= query
                                && (sink || token >= held.end && window.is_none_or(|window| token + window > query))
                        });
                        if visible {
                            let tile = (span.skip + row) as usize / TILE;
                            seen.insert((index, if by_runs { tile / RUN_TILES } else { tile }));
                            prop_assert!(token >= block.low as u32 || span.sight == Sight::Always);
                        }
                    }
                    start += span.count;
                }
                prop_assert_eq!((part[1] - part[0]) as usize, seen.len());
            }
            prop_assert_eq!(next, length);
        }
    }
}
