//! Inputs for tests of kernels: random numbers, and pages of memory to read rows from.

use std::ops::Range;

use crate::chunk::{Chunk, Lines, PIECES, RowSize, STREAMS};

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
    /// From -1 to 1.
    pub(crate) fn float(&mut self) -> f32 {
        self.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0
    }
    /// Roughly normal, and of so few bits that sums of a row are exact in f32: rotation there and in f64 gives the same codes
    /// after rounding.
    pub(crate) fn normal(&mut self) -> f32 {
        let sum: f64 = (0..4).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64 - 0.5).sum();
        (sum * 1.7 * 1024.0).round() as f32 / 1024.0
    }
    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Calls `with` the tile in some pages of `page` rows and then their scales, after `before` bytes of others. The addresses of
/// pages without a visible row are null. `in_order`: see [`Chunk`].
pub(crate) fn read(
    pages: &[Vec<u8>],
    before: usize,
    page: usize,
    size: RowSize,
    seen: Range<usize>,
    in_order: bool,
    with: impl FnOnce(&Chunk<'_>),
) {
    let mut blocks = [std::ptr::null(); PIECES];
    for (i, (block, bytes)) in blocks.iter_mut().zip(pages).enumerate() {
        if i * page < seen.end && seen.start < (i + 1) * page {
            *block = bytes.as_ptr();
        }
    }
    let here = Lines { blocks: &blocks, rows: before, scales: before + page * size.bytes };
    let next = Lines::NOWHERE;
    with(&Chunk { here, ahead: &[next; STREAMS], in_order, piece_shift: page.ilog2() });
}
