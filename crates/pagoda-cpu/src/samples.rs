//! Inputs for tests of kernels: random numbers, and pages of memory to read rows from.

use std::ops::Range;

use crate::kernel::{Chunk, Lines, PIECES, RowSize, STREAMS};

/// A linear congruential generator.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
    /// From -1 to 1.
    pub(crate) fn float(&mut self) -> f32 {
        self.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Calls `with` the tile in some pages of `page` rows and then their scales, after `before` bytes of others. Pages without a row
/// that is seen are nowhere.
pub(crate) fn read(
    pages: &[Vec<u8>],
    before: usize,
    page: usize,
    size: RowSize,
    seen: Range<usize>,
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
    with(&Chunk { here, ahead: [next; STREAMS], piece_shift: page.ilog2() });
}
