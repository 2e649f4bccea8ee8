//! Where the rows of a tile lie in their pages, and what is prefetched while they are read.

use pagoda_core::work::TILE;

use crate::simd::Simd;
use crate::stored::Row;

/// The most pages that a tile touches: the smallest page holds 8 tokens.
pub(crate) const PIECES: usize = TILE / 8;
/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;
/// Places from which lines are prefetched in turn.
pub(crate) const STREAMS: usize = 4;
/// Rows that are prefetched in each of them while a tile is read.
const STREAM_ROWS: usize = TILE / STREAMS;

/// Where the K or V rows of one head in one tile lie.
#[derive(Clone, Copy)]
pub(crate) struct Lines<'a> {
    /// The blocks, page by page. Those without a token of the sequence are never read.
    pub(crate) blocks: &'a [*const u8; PIECES],
    /// Where the rows begin in each.
    pub(crate) rows: usize,
    /// Where their scales begin, for formats with scales.
    pub(crate) scales: usize,
}

impl Lines<'_> {
    pub(crate) const NOWHERE: Self = Self { blocks: &[std::ptr::null(); PIECES], rows: 0, scales: 0 };
}

/// The K or V rows of one head in one tile.
pub(crate) struct Chunk<'a> {
    pub(crate) here: Lines<'a>,
    /// What will be read after that, in order, to be prefetched.
    pub(crate) ahead: &'a [Lines<'a>; STREAMS],
    /// Whether lines of floats, fp8_e4m3 and bytes are prefetched in order, from one place: for pages of whole tiles.
    pub(crate) in_order: bool,
    /// Rows of a piece, as a power of two.
    pub(crate) piece_shift: u32,
}

impl Chunk<'_> {
    /// The place of row `t` in its piece.
    #[inline(always)]
    fn place(&self, t: usize) -> usize {
        t & ((1 << self.piece_shift) - 1)
    }
    /// Row `t` of the tile.
    #[inline(always)]
    pub(crate) fn row(&self, t: usize, size: RowSize) -> Row {
        self.find(&self.here, t, size)
    }
    /// Row `t` of the tile, or of the next one if `t` is past the end of this one.
    #[inline(always)]
    pub(crate) fn row_or_next(&self, t: usize, size: RowSize) -> Row {
        if t < TILE { self.row(t, size) } else { self.find(&self.ahead[0], t - TILE, size) }
    }
    /// What to prefetch while this is read from row `t` on: a part of each of the next tiles, from the last part of the
    /// nearest to the first of the farthest, so that all parts of a tile have been prefetched when its turn comes. All parts
    /// have the same number of rows, which are consecutive as far as pages go.
    #[inline(always)]
    fn streams(&self, t: usize, size: RowSize) -> Streams {
        let before = ((t / STREAMS) >> self.piece_shift) << self.piece_shift;
        let rows = std::array::from_fn(|i| {
            let row = self.find(&self.ahead[i], (STREAMS - 1 - i) * STREAM_ROWS + before, size);
            Row { data: row.data.wrapping_sub(before * size.bytes), ..row }
        });
        Streams { rows, stride: LINE }
    }
    /// The lines of the tile after the next from row `t` on, in order, and where the scales of its quarters begin.
    #[inline(always)]
    fn tile_ahead(&self, t: usize, size: RowSize) -> Streams {
        let first = self.find(&self.ahead[1], t, size);
        let rows = std::array::from_fn(|i| Row {
            data: first.data.wrapping_add(i * LINE),
            scales: first.scales.wrapping_add(i * STREAM_ROWS * size.scale_bytes),
            ..first
        });
        Streams { rows, stride: STREAMS * LINE }
    }
    /// What to prefetch while all of this is read: in order from one place, or from four in turn.
    #[inline(always)]
    pub(crate) fn to_ask_for(&self, in_order: bool, size: RowSize) -> Streams {
        if in_order { self.tile_ahead(0, size) } else { self.streams(0, size) }
    }
    /// The same line by line, while this is read from row `t` on.
    #[inline(always)]
    pub(crate) fn lines_ahead(&self, t: usize, size: RowSize) -> StreamLines {
        if self.in_order {
            let Streams { rows, stride } = self.tile_ahead(t, size);
            return StreamLines { next: rows.map(|row| row.data), stride, owed: 0 };
        }
        let (streams, asked) = (self.streams(t, size), t * size.bytes);
        let next = std::array::from_fn(|i| streams.line(asked / LINE + i));
        StreamLines { next, stride: LINE, owed: asked % LINE }
    }
    #[inline(always)]
    fn find(&self, lines: &Lines<'_>, t: usize, size: RowSize) -> Row {
        let (block, place) = (lines.blocks[t >> self.piece_shift], self.place(t));
        Row {
            data: block.wrapping_add(lines.rows + place * size.bytes),
            scales: block.wrapping_add(lines.scales + place * size.scale_bytes),
            dim: size.dim,
        }
    }
}

/// Rows in several places, to be prefetched in turn. A CPU by itself fetches ahead of accesses in order, but never across
/// 4 KiB and some 20 lines at most: it fetches from several such places at once (docs/benchmarks/2026-11-25-cpu-intel.md).
pub(crate) struct Streams {
    pub(crate) rows: [Row; STREAMS],
    /// Bytes from a line of a place to the next.
    stride: usize,
}

impl Streams {
    /// Line `n` of all.
    #[inline(always)]
    pub(crate) fn line(&self, n: usize) -> *const u8 {
        self.rows[n % STREAMS].data.wrapping_add(n / STREAMS * self.stride)
    }
}

/// Lines ahead, in the order in which they are prefetched. Cheaper than finding each line of [`Streams`] by its number, if
/// that is not known at compile time.
pub(crate) struct StreamLines {
    /// The next one, and those after it.
    next: [*const u8; STREAMS],
    /// Bytes from each to the one that comes four later.
    stride: usize,
    /// Bytes since the last one.
    owed: usize,
}

impl StreamLines {
    /// Prefetches the lines of the next `bytes` bytes.
    #[inline(always)]
    pub(crate) unsafe fn ask<S: Simd>(&mut self, bytes: usize) {
        // The same number every time if possible: a loop with an unknown count takes longer.
        let mut lines = bytes / LINE;
        if !bytes.is_multiple_of(LINE) {
            self.owed += bytes;
            lines = self.owed / LINE;
            self.owed %= LINE;
        }
        for _ in 0..lines {
            let [next, second, third, fourth] = self.next;
            self.next = [second, third, fourth, next.wrapping_add(self.stride)];
            // SAFETY: a prefetch never faults.
            unsafe { S::prefetch(next) };
        }
    }
}

/// Elements and bytes of a stored row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowSize {
    pub(crate) dim: usize,
    pub(crate) bytes: usize,
    pub(crate) scale_bytes: usize,
}

impl RowSize {
    /// The row that is `n` rows later in the same piece.
    #[inline(always)]
    pub(crate) fn after(&self, row: Row, n: usize) -> Row {
        Row {
            data: row.data.wrapping_add(n * self.bytes),
            scales: row.scales.wrapping_add(n * self.scale_bytes),
            dim: row.dim,
        }
    }
}
