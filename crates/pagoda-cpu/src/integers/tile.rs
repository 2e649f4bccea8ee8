//! The codes and scales of a tile, as they are stored, or unpacked once for many query rows.

use std::marker::PhantomData;
use std::ops::Range;

use pagoda_core::work::TILE;

use super::{Codes, QUAD, STEP};
use crate::chunk::{Chunk, RowSize};
use crate::simd::dot::{COLUMNS, Dot, LANES};
use crate::stored::Row;

/// Blocks of rows whose scores lie in a vector.
pub(super) const BLOCKS: usize = TILE / LANES;

/// The codes and scales of a tile, in blocks of 16 rows.
pub(super) trait Tile<S: Dot> {
    /// Whether what lies ahead is prefetched in order (see [`Chunk::in_order`]).
    fn in_order(&self) -> bool;
    /// Gives block `block` of `blocks` blocks of query rows its share of prefetches.
    fn share(&mut self, block: usize, blocks: usize);
    /// Whether the block of query rows that begins with `row` prefetches at turn `turn` of eight.
    fn asks(&self, row: usize, turn: usize) -> bool;
    /// Where a block is.
    type Block: Copy;
    /// Nothing is read of a block that nobody sees, which may have no page.
    fn block(&self, index: usize) -> Self::Block;
    /// Columns of K, in registers or in memory.
    type Columns: Copy;
    /// See [`Codes::columns`].
    unsafe fn columns(&self, block: Self::Block, step: usize) -> Self::Columns;
    /// One of these columns. With few registers it is loaded when it is multiplied.
    unsafe fn column(columns: &Self::Columns, index: usize) -> S::Words;
    /// See [`Codes::words`], of rows `4 * quad..4 * quad + 4` of the block.
    unsafe fn words(&self, block: Self::Block, quad: usize, step: usize, half: usize) -> S::Words;
    /// See [`Codes::scales`].
    unsafe fn scales(&self, block: Self::Block, index: usize) -> S::Floats;
}

/// A tile as it is stored.
pub(super) struct Stored<'a, C> {
    chunk: &'a Chunk<'a>,
    size: RowSize,
    codes: PhantomData<C>,
}

impl<'a, C> Stored<'a, C> {
    #[inline(always)]
    pub(super) fn new(chunk: &'a Chunk<'a>, size: RowSize) -> Self {
        Self { chunk, size, codes: PhantomData }
    }
}

// SAFETY (of every block): as callers promise.
impl<S: Dot, C: Codes> Tile<S> for Stored<'_, C> {
    #[inline(always)]
    fn in_order(&self) -> bool {
        // Codes of fewer bits gained little by this, and lost with a single query row.
        C::BYTES == 2 && self.chunk.in_order
    }
    /// The first block prefetches everything.
    #[inline(always)]
    fn share(&mut self, _: usize, _: usize) {}
    #[inline(always)]
    fn asks(&self, row: usize, _: usize) -> bool {
        row == 0
    }
    /// Its first row.
    type Block = Row;
    #[inline(always)]
    fn block(&self, index: usize) -> Row {
        self.chunk.row(index * LANES, self.size)
    }
    type Columns = [S::Words; COLUMNS];
    #[inline(always)]
    unsafe fn columns(&self, block: Row, step: usize) -> [S::Words; COLUMNS] {
        // SAFETY: see the impl.
        unsafe { C::columns::<S>(block.data, self.size, step) }
    }
    #[inline(always)]
    unsafe fn column(columns: &[S::Words; COLUMNS], index: usize) -> S::Words {
        columns[index]
    }
    #[inline(always)]
    unsafe fn words(&self, block: Row, quad: usize, step: usize, half: usize) -> S::Words {
        let first = block.data.wrapping_add(quad * QUAD * self.size.bytes);
        // SAFETY: see the impl.
        unsafe { C::words::<S>(first, self.size, step, half) }
    }
    #[inline(always)]
    unsafe fn scales(&self, block: Row, index: usize) -> S::Floats {
        // SAFETY: see the impl.
        unsafe { C::scales::<S>(block.scales, self.size, index) }
    }
}

/// A tile unpacked once for many query rows: columns of K or words of V, and scales as floats.
pub(super) struct Unpacked<S: Dot> {
    /// `[block][step][COLUMNS]`, or `[step][quad][2]`.
    codes: *mut S::Words,
    /// `[index][TILE]`.
    scales: *mut S::Floats,
    steps: usize,
    /// The turns, of eight, at which to prefetch, as bits.
    turns: u8,
}

/// Floats of scratch memory for a tile of rows of up to `dim` elements.
pub(crate) fn scratch(dim: usize) -> usize {
    TILE * dim / QUAD + TILE * dim / STEP * 2
}

impl<S: Dot> Unpacked<S> {
    /// In [`scratch`] floats, aligned to vectors.
    #[inline(always)]
    pub(super) fn new(scratch: &mut [f32], dim: usize) -> Self {
        let codes = scratch.as_mut_ptr();
        let scales = codes.wrapping_add(TILE * dim / QUAD);
        Self { codes: codes.cast(), scales: scales.cast(), steps: dim / STEP, turns: 0 }
    }

    /// Where columns of K are.
    #[inline(always)]
    fn columns_at(&self, block: usize, step: usize) -> *mut [S::Words; COLUMNS] {
        self.codes.wrapping_add((block * self.steps + step) * COLUMNS).cast()
    }

    /// Where both halves of words of V are.
    #[inline(always)]
    fn words_at(&self, block: usize, quad: usize, step: usize) -> *mut [S::Words; 2] {
        self.codes.wrapping_add((step * (TILE / QUAD) + block * (LANES / QUAD) + quad) * 2).cast()
    }

    #[inline(always)]
    fn scales_at(&self, block: usize, index: usize) -> *mut S::Floats {
        self.scales.wrapping_add(index * BLOCKS + block)
    }

    /// Writes some blocks of K.
    #[inline(always)]
    pub(super) unsafe fn fill_columns<C: Codes>(&self, stored: &Stored<'_, C>, blocks: Range<usize>) {
        for index in blocks {
            let block = Tile::<S>::block(stored, index);
            // SAFETY: as the caller promises.
            unsafe {
                for step in 0..self.steps {
                    self.columns_at(index, step).write(Tile::<S>::columns(stored, block, step));
                }
                self.fill_scales(stored, block, index);
            }
        }
    }

    /// Writes some blocks of V.
    #[inline(always)]
    pub(super) unsafe fn fill_words<C: Codes>(&self, stored: &Stored<'_, C>, blocks: Range<usize>) {
        for index in blocks {
            let block = Tile::<S>::block(stored, index);
            // SAFETY: as the caller promises.
            unsafe {
                for quad in 0..LANES / QUAD {
                    for step in 0..self.steps {
                        let mut halves = [Tile::<S>::words(stored, block, quad, step, 0); 2];
                        halves[1] = Tile::<S>::words(stored, block, quad, step, 1);
                        self.words_at(index, quad, step).write(halves);
                    }
                }
                self.fill_scales(stored, block, index);
            }
        }
    }

    #[inline(always)]
    unsafe fn fill_scales<C: Codes>(&self, stored: &Stored<'_, C>, block: Row, index: usize) {
        for scale in 0..self.steps * C::SCALES {
            // SAFETY: as the caller promises.
            unsafe { self.scales_at(index, scale).write(Tile::<S>::scales(stored, block, scale)) };
        }
    }
}

// SAFETY (of every block): callers ask for what has been written.
impl<S: Dot> Tile<S> for Unpacked<S> {
    /// Several blocks of query rows prefetch in turn.
    #[inline(always)]
    fn in_order(&self) -> bool {
        false
    }
    /// Spread over turns: prefetches in bursts are dropped.
    #[inline(always)]
    fn share(&mut self, block: usize, blocks: usize) {
        let (turns, shares) = match blocks {
            1 => (0b1111_1111, 1),
            2..4 => (0b0101_0101, 2),
            4..8 => (0b0001_0001, 4),
            _ => (0b0000_0001, 8),
        };
        self.turns = if block < shares { turns << block } else { 0 };
    }
    #[inline(always)]
    fn asks(&self, _: usize, turn: usize) -> bool {
        self.turns >> turn & 1 != 0
    }
    /// Its number.
    type Block = usize;
    #[inline(always)]
    fn block(&self, index: usize) -> usize {
        index
    }
    type Columns = *const [S::Words; COLUMNS];
    #[inline(always)]
    unsafe fn columns(&self, block: usize, step: usize) -> *const [S::Words; COLUMNS] {
        self.columns_at(block, step)
    }
    #[inline(always)]
    unsafe fn column(columns: &*const [S::Words; COLUMNS], index: usize) -> S::Words {
        // SAFETY: see the impl.
        unsafe { (**columns)[index] }
    }
    #[inline(always)]
    unsafe fn words(&self, block: usize, quad: usize, step: usize, half: usize) -> S::Words {
        // SAFETY: see the impl.
        unsafe { (*self.words_at(block, quad, step))[half] }
    }
    #[inline(always)]
    unsafe fn scales(&self, block: usize, index: usize) -> S::Floats {
        // SAFETY: see the impl.
        unsafe { self.scales_at(block, index).read() }
    }
}
