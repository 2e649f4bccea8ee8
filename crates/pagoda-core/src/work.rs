//! Cutting attention into work, as arithmetic: tiles and runs of stored rows, pieces of spans, blocks of queries, passes.
//!
//! Every backend cuts its work in this way. A tile (in deterministic mode also a run) is therefore always the same rows of a
//! page, whoever computes it.

mod list;
mod passes;
#[cfg(test)]
mod tests;

pub use list::{Cut, Held, QueryBlock, WorkList};
pub use passes::{Passes, Scanned, Shares};

use crate::table::{Sight, SpanView};
use std::ops::Range;

/// Stored rows that are processed together.
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
    /// How many runs the spans before have.
    runs_before: usize,
}

impl Piece<'_> {
    /// Fixed runs of [`RUN_TILES`] tiles that the piece touches.
    pub fn runs(&self) -> Range<usize> {
        self.tiles.start / RUN_TILES..self.tiles.end.div_ceil(RUN_TILES)
    }

    /// For the rows of the piece that are in `rows`: the entries of their pages in the sequence's row, and the row after the
    /// last.
    fn pages(&self, rows: Range<usize>, page_size: usize) -> (Range<usize>, usize) {
        let first = self.span.first_page as usize;
        let (low, high) = (self.rows.start.max(rows.start), self.rows.end.min(rows.end));
        (first + low / page_size..first + high.div_ceil(page_size), high)
    }

    /// The index of a run of the span among all runs of the sequence, as [`runs`] counts them.
    pub fn place(&self, run: usize) -> usize {
        self.runs_before + run - span_runs(self.span).start
    }
}

/// Fixed runs that a span has rows in.
fn span_runs(span: &SpanView) -> Range<usize> {
    let (low, high) = (span.skip as usize, (span.skip + span.count) as usize);
    if low == high { 0..0 } else { low / RUN_ROWS..high.div_ceil(RUN_ROWS) }
}

/// The pieces of a sequence with tokens in `range` of its axis, or with tokens up to the end of `range` that every query
/// sees.
pub fn pieces<'a>(spans: &'a [SpanView], range: Range<usize>) -> impl Iterator<Item = Piece<'a>> {
    pieces_from(spans, 0, range)
}

/// The same, but leaves out the tokens before `from` that every query sees.
fn pieces_from<'a>(
    spans: &'a [SpanView],
    from: usize,
    range: Range<usize>,
) -> impl Iterator<Item = Piece<'a>> {
    let (mut start, mut runs) = (0, 0);
    spans.iter().filter_map(move |span| {
        let (first, skip, runs_before) = (start, span.skip as usize, runs);
        start += span.count as usize;
        runs += span_runs(span).len();
        let low = first.max(if span.sight == Sight::Window { range.start } else { from });
        let high = start.min(range.end);
        (low < high).then(|| {
            let rows = low - first + skip..high - first + skip;
            let tiles = rows.start / TILE..rows.end.div_ceil(TILE);
            Piece { span, origin: first as isize - skip as isize, rows, tiles, runs_before }
        })
    })
}

/// The fixed runs that the [`pieces`] for `range` touch: the index of each among the runs of the sequence, and the entries in
/// the sequence's row of the pages that hold the touched part.
pub fn runs(
    spans: &[SpanView],
    range: Range<usize>,
    page_size: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    pieces(spans, range).flat_map(move |piece| {
        let rows = |run: usize| run * RUN_ROWS..(run + 1) * RUN_ROWS;
        piece.runs().map(move |run| (piece.place(run), piece.pages(rows(run), page_size).0))
    })
}

/// How many fixed runs a sequence has over all spans, whichever queries see them.
pub fn run_count(spans: &[SpanView]) -> usize {
    spans.iter().map(|span| span_runs(span).len()).sum()
}
