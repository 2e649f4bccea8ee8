//! The codes of formats, as instruction sets multiply them: integers, one of which stands for 0.

use pagoda_core::layout::RowFormat;

use super::STEP;
use crate::chunk::RowSize;
use crate::simd::dot::{COLUMNS, Dot};

/// The memory layout of a format. Rows are given by the address of the first and the bytes from one to the next.
pub(crate) trait Codes {
    const FORMAT: RowFormat;
    /// Bytes of the integers that codes are multiplied with. With one, codes are at most 31.
    const BYTES: usize;
    /// Bytes of a step of a row.
    const STEP_BYTES: usize = Self::FORMAT.row_bytes(STEP as u32) as usize;
    /// Scales of a step: one, or one for each half.
    const SCALES: usize = 1;
    /// Whether all steps of a row have the same scale.
    const ROW_SCALE: bool =
        Self::FORMAT.scale_bytes(STEP as u32) == Self::FORMAT.scale_bytes(2 * STEP as u32);
    /// The size of a row of `steps` steps.
    #[inline(always)]
    fn size(steps: usize) -> RowSize {
        let dim = steps * STEP;
        RowSize {
            dim,
            bytes: Self::FORMAT.row_bytes(dim as u32) as usize,
            scale_bytes: Self::FORMAT.scale_bytes(dim as u32) as usize,
        }
    }
    /// The code of 0.
    fn zero<S: Dot>() -> i32;
    /// The elements of a step of 16 rows: word `t` of vector `i` is the elements `4 * i..4 * i + 4` of row `t`.
    unsafe fn columns<S: Dot>(rows: *const u8, size: RowSize, step: usize) -> [S::Words; COLUMNS];
    /// Half of the elements of a step of 4 rows: byte `r` of word `i` is element `16 * half + i` of row `r`, with words in
    /// the order of [`Dot::in_order`].
    unsafe fn words<S: Dot>(rows: *const u8, size: RowSize, step: usize, half: usize) -> S::Words;
    /// Scale `index` of 16 rows, the first of which has its scales at `scales`: as in ggml, unless a format has others.
    #[inline(always)]
    unsafe fn scales<S: Dot>(scales: *const u8, size: RowSize, index: usize) -> S::Floats {
        // SAFETY: as the caller promises.
        unsafe { S::f16_scales(scales, size.scale_bytes, index) }
    }
}

pub(crate) struct Int8;
pub(crate) struct Q8_0;
pub(crate) struct Q5_0;
pub(crate) struct Q4_0;
pub(crate) struct Mxfp4;
pub(crate) struct Nvfp4;

impl Codes for Int8 {
    const FORMAT: RowFormat = RowFormat::Int8;
    const BYTES: usize = 2;
    #[inline(always)]
    fn zero<S: Dot>() -> i32 {
        S::ZERO
    }
    #[inline(always)]
    unsafe fn columns<S: Dot>(rows: *const u8, size: RowSize, step: usize) -> [S::Words; COLUMNS] {
        // SAFETY: as the caller promises.
        unsafe { S::byte_columns(rows.wrapping_add(step * STEP), size.bytes) }
    }
    #[inline(always)]
    unsafe fn words<S: Dot>(rows: *const u8, size: RowSize, step: usize, half: usize) -> S::Words {
        // SAFETY: as the caller promises.
        unsafe { S::byte_words(rows.wrapping_add(step * STEP), size.bytes, half) }
    }
    #[inline(always)]
    unsafe fn scales<S: Dot>(scales: *const u8, _: RowSize, _: usize) -> S::Floats {
        // SAFETY: as the caller promises: 16 floats.
        unsafe { S::load(scales.cast()) }
    }
}

impl Codes for Q8_0 {
    const FORMAT: RowFormat = RowFormat::Q8_0;
    const BYTES: usize = 2;
    #[inline(always)]
    fn zero<S: Dot>() -> i32 {
        S::ZERO
    }
    #[inline(always)]
    unsafe fn columns<S: Dot>(rows: *const u8, size: RowSize, step: usize) -> [S::Words; COLUMNS] {
        // SAFETY: as the caller promises.
        unsafe { Int8::columns::<S>(rows, size, step) }
    }
    #[inline(always)]
    unsafe fn words<S: Dot>(rows: *const u8, size: RowSize, step: usize, half: usize) -> S::Words {
        // SAFETY: as the caller promises.
        unsafe { Int8::words::<S>(rows, size, step, half) }
    }
}

impl Codes for Q5_0 {
    const FORMAT: RowFormat = RowFormat::Q5_0;
    const BYTES: usize = 1;
    #[inline(always)]
    fn zero<S: Dot>() -> i32 {
        16
    }
    #[inline(always)]
    unsafe fn columns<S: Dot>(rows: *const u8, size: RowSize, step: usize) -> [S::Words; COLUMNS] {
        // SAFETY: as the caller promises.
        unsafe {
            let columns = Q4_0::columns::<S>(rows, size, step);
            S::fifth_columns(columns, fifth_bits(rows, size, step), size.bytes)
        }
    }
    #[inline(always)]
    unsafe fn words<S: Dot>(rows: *const u8, size: RowSize, step: usize, half: usize) -> S::Words {
        // SAFETY: as the caller promises.
        unsafe {
            let words = Q4_0::words::<S>(rows, size, step, half);
            S::fifth_words(words, fifth_bits(rows, size, step), size.bytes, half)
        }
    }
}

/// Where the fifth bits of a step begin, one for each element.
#[inline(always)]
fn fifth_bits(row: *const u8, size: RowSize, step: usize) -> *const u8 {
    row.wrapping_add(size.dim / 2 + step * (STEP / 8))
}

impl Codes for Q4_0 {
    const FORMAT: RowFormat = RowFormat::Q4_0;
    const BYTES: usize = 1;
    #[inline(always)]
    fn zero<S: Dot>() -> i32 {
        8
    }
    #[inline(always)]
    unsafe fn columns<S: Dot>(rows: *const u8, size: RowSize, step: usize) -> [S::Words; COLUMNS] {
        // SAFETY: as the caller promises.
        unsafe { S::nibble_columns(rows.wrapping_add(step * STEP / 2), size.bytes) }
    }
    #[inline(always)]
    unsafe fn words<S: Dot>(rows: *const u8, size: RowSize, step: usize, half: usize) -> S::Words {
        // SAFETY: as the caller promises.
        unsafe { S::nibble_words(rows.wrapping_add(step * STEP / 2), size.bytes, half) }
    }
}

/// Twice what E2M1 codes stand for, and 12.
const TWICE_E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

impl Codes for Mxfp4 {
    const FORMAT: RowFormat = RowFormat::Mxfp4;
    const BYTES: usize = 1;
    #[inline(always)]
    fn zero<S: Dot>() -> i32 {
        12
    }
    #[inline(always)]
    unsafe fn columns<S: Dot>(rows: *const u8, size: RowSize, step: usize) -> [S::Words; COLUMNS] {
        // SAFETY: as the caller promises.
        unsafe {
            let mut columns = Q4_0::columns::<S>(rows, size, step);
            for column in &mut columns {
                *column = S::lookup(&TWICE_E2M1, *column);
            }
            columns
        }
    }
    #[inline(always)]
    unsafe fn words<S: Dot>(rows: *const u8, size: RowSize, step: usize, half: usize) -> S::Words {
        // SAFETY: as the caller promises.
        unsafe { S::lookup(&TWICE_E2M1, Q4_0::words::<S>(rows, size, step, half)) }
    }
    #[inline(always)]
    unsafe fn scales<S: Dot>(scales: *const u8, size: RowSize, index: usize) -> S::Floats {
        // SAFETY: as the caller promises.
        unsafe { S::half_e8m0_scales(scales, size.scale_bytes, index) }
    }
}

impl Codes for Nvfp4 {
    const FORMAT: RowFormat = RowFormat::Nvfp4;
    const BYTES: usize = 1;
    const SCALES: usize = 2;
    #[inline(always)]
    fn zero<S: Dot>() -> i32 {
        Mxfp4::zero::<S>()
    }
    #[inline(always)]
    unsafe fn columns<S: Dot>(rows: *const u8, size: RowSize, step: usize) -> [S::Words; COLUMNS] {
        // SAFETY: as the caller promises.
        unsafe { Mxfp4::columns::<S>(rows, size, step) }
    }
    #[inline(always)]
    unsafe fn words<S: Dot>(rows: *const u8, size: RowSize, step: usize, half: usize) -> S::Words {
        // SAFETY: as the caller promises.
        unsafe { Mxfp4::words::<S>(rows, size, step, half) }
    }
    #[inline(always)]
    unsafe fn scales<S: Dot>(scales: *const u8, size: RowSize, index: usize) -> S::Floats {
        // SAFETY: as the caller promises.
        unsafe { S::half_e4m3_scales(scales, size.scale_bytes, index) }
    }
}
