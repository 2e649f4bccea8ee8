//! Stored rows as attention reads them: a vector of f32 at a time, whatever the row format.

use crate::codec::{BLOCK, E2M1, NV_BLOCK, e4m3, e8m0};
use crate::convert::{self, Format};
use crate::simd::Simd;

/// A stored row.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub(crate) data: *const u8,
    /// Its scales, if the format has any.
    pub(crate) scales: *const u8,
    /// Its elements.
    pub(crate) dim: usize,
}

/// A row format, as a type.
pub(crate) trait Stored {
    /// Bits of an element, about.
    const BITS: usize;
    /// From this many query rows of a head on a tile is decoded for them: the more work a row takes to convert, the fewer.
    const MANY: usize = 8;
    /// Whether loaded numbers have yet to be multiplied by [`row_scale`](Self::row_scale): once for a score or a weight, not
    /// for every element.
    const ROW_SCALE: bool = false;
    unsafe fn row_scale(_: Row) -> f32 {
        unreachable!("rows of this format have no scale of their own")
    }
    /// Loads a vector: elements `first..first + LANES`.
    unsafe fn load<S: Simd>(row: Row, first: usize) -> S::V;
    /// Loads 8 elements where a vector has 16 lanes.
    unsafe fn half<S: Simd>(_: Row, _: usize) -> S::V {
        unreachable!("rows of this format are whole vectors")
    }
}

impl<F: Format> Stored for F {
    const BITS: usize = 8 * F::BYTES;
    const MANY: usize = 24;
    #[inline(always)]
    unsafe fn load<S: Simd>(row: Row, first: usize) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { <F as convert::Format>::load::<S>(row.data.add(first * F::BYTES)) }
    }
    #[inline(always)]
    unsafe fn half<S: Simd>(row: Row, first: usize) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { <F as convert::Format>::half::<S>(row.data.add(first * F::BYTES)) }
    }
}

/// See [`RowFormat`](pagoda_core::layout::RowFormat), as all of these.
pub(crate) struct Fp8E4m3;
pub(crate) struct Int8;
pub(crate) struct Q8_0;
pub(crate) struct Q5_0;
pub(crate) struct Q4_0;
pub(crate) struct Mxfp4;
pub(crate) struct Nvfp4;

/// What the codes of q4_0 stand for, before scaling.
const FROM_8: [f32; 16] =
    [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
/// What the lower 4 bits of q5_0 stand for, before scaling.
const FROM_16: [f32; 16] =
    [-16.0, -15.0, -14.0, -13.0, -12.0, -11.0, -10.0, -9.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0];

/// The f16 scale of the block of element `first`.
#[inline(always)]
unsafe fn block_scale<S: Simd>(row: Row, first: usize) -> S::V {
    // SAFETY: the caller has a scale of 2 bytes for each block.
    unsafe { S::splat_f16(row.scales.add(first / BLOCK * 2)) }
}

/// The nibbles of elements `first..first + LANES`, as entries of a table.
#[inline(always)]
unsafe fn nibbles<S: Simd>(row: Row, first: usize, table: &[f32; 16]) -> S::V {
    // SAFETY: the caller has a byte for two elements; LANES divide 16.
    unsafe {
        let bytes = row.data.add(first / BLOCK * NV_BLOCK + first % NV_BLOCK);
        S::lookup(bytes, first / NV_BLOCK % 2 == 1, table)
    }
}

impl Stored for Fp8E4m3 {
    const BITS: usize = 8;
    const ROW_SCALE: bool = true;
    #[inline(always)]
    unsafe fn row_scale(row: Row) -> f32 {
        // SAFETY: as the caller promises. Scales are so far below the largest float.
        256.0 * unsafe { Int8::row_scale(row) }
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(row: Row, first: usize) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { S::load_e4m3(row.data.add(first)) }
    }
}

impl Stored for Int8 {
    const BITS: usize = 8;
    const MANY: usize = 16;
    const ROW_SCALE: bool = true;
    #[inline(always)]
    unsafe fn row_scale(row: Row) -> f32 {
        // SAFETY: as the caller promises.
        f32::from_le_bytes(unsafe { row.scales.cast::<[u8; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(row: Row, first: usize) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { S::load_i8(row.data.add(first)) }
    }
}

impl Stored for Q8_0 {
    const BITS: usize = 8;
    #[inline(always)]
    unsafe fn load<S: Simd>(row: Row, first: usize) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { S::mul(S::load_i8(row.data.add(first)), block_scale::<S>(row, first)) }
    }
}

impl Stored for Q5_0 {
    const BITS: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(row: Row, first: usize) -> S::V {
        // SAFETY: as the caller promises.
        unsafe {
            let high = row.data.add(row.dim / 2 + first / BLOCK * 4).cast::<[u8; 4]>().read_unaligned();
            let bits = u32::from_le_bytes(high) >> (first % BLOCK);
            let low = nibbles::<S>(row, first, &FROM_16);
            S::mul(S::add(low, S::masked(bits, S::splat(16.0))), block_scale::<S>(row, first))
        }
    }
}

impl Stored for Q4_0 {
    const BITS: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(row: Row, first: usize) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { S::mul(nibbles::<S>(row, first, &FROM_8), block_scale::<S>(row, first)) }
    }
}

impl Stored for Mxfp4 {
    const BITS: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(row: Row, first: usize) -> S::V {
        // SAFETY: as the caller promises.
        unsafe {
            let scale = e8m0(*row.scales.add(first / BLOCK));
            S::mul(nibbles::<S>(row, first, &E2M1), S::splat(scale))
        }
    }
}

impl Stored for Nvfp4 {
    const BITS: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(row: Row, first: usize) -> S::V {
        // SAFETY: as the caller promises.
        unsafe {
            let scale = e4m3(*row.scales.add(first / NV_BLOCK));
            S::mul(nibbles::<S>(row, first, &E2M1), S::splat(scale))
        }
    }
}
