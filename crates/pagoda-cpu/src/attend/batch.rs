//! Which tiles of which heads are read in one go, and where they lie.

use std::ops::Range;

use pagoda_core::layout::Plane;
use pagoda_core::work::{Piece, TILE};

use crate::chunk::{Lines, PIECES};
use crate::layer::PagedKv;
use crate::plan::Group;

/// Tiles, of any heads, that are scored before the values of the first are added: one long stream of K and one of V are read
/// faster than short ones in turn.
pub(super) const CELLS: usize = 8;

/// A batch and those after it that are prefetched meanwhile: with two cells each, these are as many as streams.
pub(super) const BATCHES: usize = 3;

/// Cells of a batch: fewer where there are more queries, so that scores stay in the cache.
pub(super) fn cells(queries: usize) -> usize {
    (CELLS / queries).max(1)
}

/// The blocks that a tile lies in, and the row in them at which it begins.
#[derive(Clone, Copy)]
struct TilePages {
    blocks: [*const u8; PIECES],
    first: usize,
}

impl TilePages {
    const NONE: Self = Self { blocks: [std::ptr::null(); PIECES], first: 0 };

    /// The pages of a tile. Pages outside the piece are not looked up.
    fn of(kv: &PagedKv<'_>, group: &Group, piece: &Piece<'_>, tile: usize) -> Self {
        let page_size = kv.layer.page_size as usize;
        let row = &kv.sequences[group.sequence].row[piece.span.first_page as usize..];
        let first = tile * TILE;
        let mut pages = Self { first: first % page_size, ..Self::NONE };
        for i in 0..TILE / TILE.min(page_size) {
            let start = first + i * page_size;
            if start < piece.rows.end && start + page_size > piece.rows.start {
                let block = kv.arenas.block(row[start / page_size], kv.layer.block_bytes as usize);
                pages.blocks[i] = block.cast_const();
            }
        }
        pages
    }

    /// Where the rows of a head begin, and their scales.
    fn begin(&self, plane: &Plane, head: usize) -> [usize; 2] {
        [&plane.rows, &plane.scales].map(|strip| {
            strip.offset as usize + head * strip.head_stride as usize + self.first * strip.row_stride as usize
        })
    }
}

/// A tile of a head.
#[derive(Clone, Copy)]
pub(super) struct Cell {
    pub(super) head: usize,
    pub(super) tile: usize,
    /// Where its rows of K and V begin in its blocks, and their scales.
    pub(super) keys: [usize; 2],
    pub(super) values: [usize; 2],
}

/// Tiles of one page and some heads: all of their K is read in one go, then all of their V.
pub(super) struct Batch {
    pub(super) tiles: Range<usize>,
    heads: Range<usize>,
    /// The pages of each tile.
    pages: [TilePages; CELLS],
    /// In memory order: tiles within heads.
    cells: [Cell; CELLS],
}

impl Batch {
    pub(super) const NONE: Self = Self {
        tiles: 0..0,
        heads: 0..0,
        pages: [TilePages::NONE; CELLS],
        cells: [Cell { head: 0, tile: 0, keys: [0; 2], values: [0; 2] }; CELLS],
    };

    /// Sets the batch that comes after `before`: an empty one, if that was the last.
    pub(super) fn follow(
        &mut self,
        before: &Self,
        kv: &PagedKv<'_>,
        group: &Group,
        piece: &Piece<'_>,
        end: usize,
    ) {
        let heads = &group.heads;
        if before.heads.end < heads.end {
            self.fill(kv, group, piece, before.tiles.start..end, before.heads.end);
        } else if before.tiles.end < end {
            self.fill(kv, group, piece, before.tiles.end..end, heads.start);
        } else {
            (self.tiles, self.heads) = (end..end, heads.end..heads.end);
        }
    }

    /// Sets as many of the tiles, all of one page, and of the heads from `head` on as a batch takes.
    pub(super) fn fill(
        &mut self,
        kv: &PagedKv<'_>,
        group: &Group,
        piece: &Piece<'_>,
        tiles: Range<usize>,
        head: usize,
    ) {
        let page_tiles = (kv.layer.page_size as usize / TILE).max(1);
        let count = cells(group.queries);
        let end = tiles.end.min((tiles.start / page_tiles + 1) * page_tiles).min(tiles.start + count);
        self.tiles = tiles.start..end;
        self.heads = head..group.heads.end.min(head + (count / self.tiles.len()).max(1));
        for (pages, tile) in self.pages.iter_mut().zip(self.tiles.clone()) {
            *pages = TilePages::of(kv, group, piece, tile);
        }
        let layout = &kv.layer.layout;
        let mut cells = self.cells.iter_mut();
        for head in self.heads.clone() {
            for (pages, tile) in self.pages.iter().zip(self.tiles.clone()) {
                if let Some(cell) = cells.next() {
                    let (keys, values) = (pages.begin(&layout.k, head), pages.begin(&layout.v, head));
                    *cell = Cell { head, tile, keys, values };
                }
            }
        }
    }

    pub(super) fn cells(&self) -> &[Cell] {
        &self.cells[..self.heads.len() * self.tiles.len()]
    }

    /// The rows of a cell, given where they begin.
    pub(super) fn lines(&self, cell: &Cell, [rows, scales]: [usize; 2]) -> Lines<'_> {
        Lines { blocks: &self.pages[cell.tile - self.tiles.start].blocks, rows, scales }
    }
}
