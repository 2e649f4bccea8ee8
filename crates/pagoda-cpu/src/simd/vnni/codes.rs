//! Stored codes as bytes for dot products.

use std::arch::x86_64::*;

use pagoda_core::layout::RowFormat;

use super::{LANES, QUAD, VECTORS};
use crate::integers::STEP;
use crate::kernel::RowSize;

/// An array of vectors, without closures: those that are not inlined pass vectors through memory.
macro_rules! vectors {
    (|$i:ident| $value:expr; $count:expr) => {{
        let mut all = [_mm512_setzero_si512(); $count];
        for $i in 0..$count {
            all[$i] = $value;
        }
        all
    }};
}

/// How a format lies in memory. Rows are given by the first of them and the bytes from one to the next.
pub(super) trait Codes {
    /// The code of 0.
    const ZERO: i32;
    const FORMAT: RowFormat;
    /// Bytes of the integers that codes are multiplied with.
    const BYTES: usize;
    /// Bytes of a step of a row.
    const STEP_BYTES: usize = Self::FORMAT.row_bytes(STEP as u32) as usize;
    /// Whether all steps of a row have the same scale.
    const ROW_SCALE: bool =
        Self::FORMAT.scale_bytes(STEP as u32) == Self::FORMAT.scale_bytes(2 * STEP as u32);
    /// The size of a row of so many steps.
    #[inline(always)]
    fn size(steps: usize) -> RowSize {
        let dim = steps * STEP;
        RowSize {
            dim,
            bytes: Self::FORMAT.row_bytes(dim as u32) as usize,
            scale_bytes: Self::FORMAT.scale_bytes(dim as u32) as usize,
        }
    }
    /// Of 16 rows the elements of a step: word `t` of vector `i` is the elements `4 * i..4 * i + 4` of row `t`.
    unsafe fn columns(rows: *const u8, size: RowSize, step: usize) -> [__m512i; STEP / 4];
    /// Of 4 rows the elements of a step: byte `r` of word `i` of vector `j` is element `16 * j + i` of row `r`.
    unsafe fn words(rows: *const u8, size: RowSize, step: usize) -> [__m512i; VECTORS];
    /// The scales of a step of 16 rows, of which the first has its scales at `scales`.
    unsafe fn scales(scales: *const u8, size: RowSize, step: usize) -> __m512;
}

pub(super) struct Int8;
pub(super) struct Q8_0;
pub(super) struct Q5_0;
pub(super) struct Q4_0;
pub(super) struct Mxfp4;

impl Codes for Int8 {
    const ZERO: i32 = 128;
    const FORMAT: RowFormat = RowFormat::Int8;
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn columns(rows: *const u8, size: RowSize, step: usize) -> [__m512i; STEP / 4] {
        // SAFETY: as the caller promises.
        unsafe { byte_columns(rows.wrapping_add(step * STEP), size.bytes) }
    }
    #[inline(always)]
    unsafe fn words(rows: *const u8, size: RowSize, step: usize) -> [__m512i; VECTORS] {
        // SAFETY: as the caller promises.
        unsafe { byte_words(rows.wrapping_add(step * STEP), size.bytes) }
    }
    #[inline(always)]
    unsafe fn scales(scales: *const u8, _: RowSize, _: usize) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe { _mm512_loadu_ps(scales.cast()) }
    }
}

impl Codes for Q8_0 {
    const ZERO: i32 = 128;
    const FORMAT: RowFormat = RowFormat::Q8_0;
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn columns(rows: *const u8, size: RowSize, step: usize) -> [__m512i; STEP / 4] {
        // SAFETY: as the caller promises.
        unsafe { Int8::columns(rows, size, step) }
    }
    #[inline(always)]
    unsafe fn words(rows: *const u8, size: RowSize, step: usize) -> [__m512i; VECTORS] {
        // SAFETY: as the caller promises.
        unsafe { Int8::words(rows, size, step) }
    }
    #[inline(always)]
    unsafe fn scales(scales: *const u8, size: RowSize, step: usize) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe { f16_scales(scales, size, step) }
    }
}

impl Codes for Q5_0 {
    const ZERO: i32 = 16;
    const FORMAT: RowFormat = RowFormat::Q5_0;
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn columns(rows: *const u8, size: RowSize, step: usize) -> [__m512i; STEP / 4] {
        // SAFETY: as the caller promises.
        unsafe {
            let columns = Q4_0::columns(rows, size, step);
            // Of 16 rows.
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let places = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(size.bytes as i32));
            let bits = fifth_bits(rows, size, step);
            let bits = _mm512_i32gather_epi32::<1>(places, bits.cast());
            // Of two rows in 64 bits, the elements 0 to 3 of each.
            let order = _mm512_set1_epi64(0x2322_2120_0302_0100);
            vectors![|i| {
                let order = _mm512_add_epi8(order, _mm512_set1_epi8(4 * i as i8));
                add_16(columns[i], _mm512_bitshuffle_epi64_mask(bits, order))
            }; STEP / 4]
        }
    }
    #[inline(always)]
    unsafe fn words(rows: *const u8, size: RowSize, step: usize) -> [__m512i; VECTORS] {
        const ORDER: [u8; 64] = interleaved(LANES);
        // SAFETY: as the caller promises.
        unsafe {
            let words = Q4_0::words(rows, size, step);
            let row = |r: usize| fifth_bits(rows, size, step).wrapping_add(r * size.bytes).cast::<i32>();
            let [a, b, c, d] = std::array::from_fn(|r| row(r).read_unaligned());
            // The lower 16 bits of four rows, then the upper ones.
            let order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
            let bits = _mm_shuffle_epi8(_mm_setr_epi32(a, b, c, d), order);
            let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
            let half = |bits| _mm512_bitshuffle_epi64_mask(_mm512_broadcastq_epi64(bits), order);
            let halves = [half(bits), half(_mm_unpackhi_epi64(bits, bits))];
            [add_16(words[0], halves[0]), add_16(words[1], halves[1])]
        }
    }
    #[inline(always)]
    unsafe fn scales(scales: *const u8, size: RowSize, step: usize) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe { f16_scales(scales, size, step) }
    }
}

impl Codes for Q4_0 {
    const ZERO: i32 = 8;
    const FORMAT: RowFormat = RowFormat::Q4_0;
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn columns(rows: *const u8, size: RowSize, step: usize) -> [__m512i; STEP / 4] {
        // SAFETY: as the caller promises.
        unsafe {
            let rows = rows.wrapping_add(step * STEP / 2);
            let both =
                transpose(vectors![|i| quarters(rows.wrapping_add(i * size.bytes), 4 * size.bytes); 4]);
            vectors![|i| nibbles(both[i % 4])[i / 4]; STEP / 4]
        }
    }
    #[inline(always)]
    unsafe fn words(rows: *const u8, size: RowSize, step: usize) -> [__m512i; VECTORS] {
        // SAFETY: as the caller promises.
        unsafe { nibble_words(rows.wrapping_add(step * STEP / 2), size.bytes) }
    }
    #[inline(always)]
    unsafe fn scales(scales: *const u8, size: RowSize, step: usize) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe { f16_scales(scales, size, step) }
    }
}

impl Codes for Mxfp4 {
    const ZERO: i32 = 12;
    const FORMAT: RowFormat = RowFormat::Mxfp4;
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn columns(rows: *const u8, size: RowSize, step: usize) -> [__m512i; STEP / 4] {
        // SAFETY: as the caller promises.
        unsafe {
            let columns = Q4_0::columns(rows, size, step);
            vectors![|i| twice_e2m1(columns[i]); STEP / 4]
        }
    }
    #[inline(always)]
    unsafe fn words(rows: *const u8, size: RowSize, step: usize) -> [__m512i; VECTORS] {
        // SAFETY: as the caller promises.
        unsafe {
            let words = Q4_0::words(rows, size, step);
            vectors![|i| twice_e2m1(words[i]); VECTORS]
        }
    }
    #[inline(always)]
    unsafe fn scales(scales: *const u8, size: RowSize, step: usize) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe {
            let codes = if size.scale_bytes == 4 {
                let shift = _mm512_set1_epi32(8 * step as i32);
                let codes = _mm512_srlv_epi32(_mm512_loadu_si512(scales.cast()), shift);
                _mm512_and_si512(codes, _mm512_set1_epi32(255))
            } else {
                let scale = |t: usize| *scales.wrapping_add(t * size.scale_bytes + step);
                let codes: [u8; LANES] = std::array::from_fn(scale);
                _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.as_ptr().cast()))
            };
            // 2^(code - 127), subnormal for 0 and NaN for 255; half of that.
            let value = _mm512_max_epi32(_mm512_slli_epi32::<23>(codes), _mm512_set1_epi32(1 << 22));
            let nan = _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(255));
            let value = _mm512_mask_mov_epi32(value, nan, _mm512_set1_epi32(0x7fc0_0000));
            _mm512_mul_ps(_mm512_castsi512_ps(value), _mm512_set1_ps(0.5))
        }
    }
}

/// Where the fifth bits of a step begin.
#[inline(always)]
fn fifth_bits(row: *const u8, size: RowSize, step: usize) -> *const u8 {
    row.wrapping_add(size.dim / 2 + step * (STEP / 8))
}

/// Adds 16 to some bytes.
#[inline(always)]
unsafe fn add_16(codes: __m512i, which: __mmask64) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe { _mm512_mask_add_epi8(codes, which, codes, _mm512_set1_epi8(16)) }
}

/// Twice what E2M1 codes stand for, and 12.
#[inline(always)]
unsafe fn twice_e2m1(codes: __m512i) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes)
    }
}

/// Byte `r` of word `i` is number `i` of row `r`, where rows are `stride` numbers long.
const fn interleaved(stride: usize) -> [u8; 64] {
    let mut index = [0; 64];
    let mut i = 0;
    while i < 64 {
        index[i] = (i % QUAD * stride + i / QUAD) as u8;
        i += 1;
    }
    index
}

/// Two parts of a register from two places in memory.
#[inline(always)]
unsafe fn halves(low: *const u8, high: *const u8) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe {
        let low = _mm512_castsi256_si512(_mm256_loadu_si256(low.cast()));
        _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(high.cast()))
    }
}

/// Four parts of a register from every `step`th byte.
#[inline(always)]
unsafe fn quarters(first: *const u8, step: usize) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe {
        let part = |i: usize| _mm_loadu_si128(first.wrapping_add(i * step).cast());
        let a = _mm512_castsi128_si512(part(0));
        let a = _mm512_inserti32x4::<1>(a, part(1));
        let a = _mm512_inserti32x4::<2>(a, part(2));
        _mm512_inserti32x4::<3>(a, part(3))
    }
}

/// In every 128 bits, word `i` of the four vectors in vector `i`.
#[inline(always)]
unsafe fn transpose(v: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let (ab, cd) = (_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpacklo_epi32(v[2], v[3]));
        let (ef, gh) = (_mm512_unpackhi_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[2], v[3]));
        [
            _mm512_unpacklo_epi64(ab, cd),
            _mm512_unpackhi_epi64(ab, cd),
            _mm512_unpacklo_epi64(ef, gh),
            _mm512_unpackhi_epi64(ef, gh),
        ]
    }
}

/// [`Codes::columns`] of signed bytes.
#[inline(always)]
unsafe fn byte_columns(rows: *const u8, stride: usize) -> [__m512i; STEP / 4] {
    // SAFETY: as the caller promises.
    unsafe {
        let row = |t: usize| rows.wrapping_add(t * stride);
        let a = transpose(vectors![|i| halves(row(i), row(i + 4)); 4]);
        let b = transpose(vectors![|i| halves(row(i + 8), row(i + 12)); 4]);
        let sign = _mm512_set1_epi8(-128);
        vectors![|i| {
            let column = if i < 4 {
                _mm512_shuffle_i32x4::<0b10_00_10_00>(a[i % 4], b[i % 4])
            } else {
                _mm512_shuffle_i32x4::<0b11_01_11_01>(a[i % 4], b[i % 4])
            };
            _mm512_xor_si512(column, sign)
        }; STEP / 4]
    }
}

/// [`Codes::words`] of signed bytes.
#[inline(always)]
unsafe fn byte_words(rows: *const u8, stride: usize) -> [__m512i; VECTORS] {
    const FIRST: [u8; 64] = interleaved(STEP);
    // SAFETY: as the caller promises.
    unsafe {
        let row = |t: usize| rows.wrapping_add(t * stride);
        let sign = _mm512_set1_epi8(-128);
        let a = _mm512_xor_si512(halves(row(0), row(1)), sign);
        let b = _mm512_xor_si512(halves(row(2), row(3)), sign);
        let first = _mm512_loadu_si512(FIRST.as_ptr().cast());
        let second = _mm512_add_epi8(first, _mm512_set1_epi8(LANES as i8));
        [_mm512_permutex2var_epi8(a, first, b), _mm512_permutex2var_epi8(a, second, b)]
    }
}

/// The lower and the upper nibbles of bytes.
#[inline(always)]
unsafe fn nibbles(v: __m512i) -> [__m512i; 2] {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        [_mm512_and_si512(v, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(v), mask)]
    }
}

/// [`Codes::words`] of nibbles.
#[inline(always)]
unsafe fn nibble_words(rows: *const u8, stride: usize) -> [__m512i; VECTORS] {
    const ORDER: [u8; 64] = interleaved(LANES);
    // SAFETY: as the caller promises.
    unsafe {
        let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
        nibbles(_mm512_permutexvar_epi8(order, quarters(rows, stride)))
    }
}

/// [`Codes::scales`] of binary16, one a step.
#[inline(always)]
unsafe fn f16_scales(scales: *const u8, size: RowSize, step: usize) -> __m512 {
    const COUNT: [i16; 32] = {
        let mut count = [0; 32];
        let mut i = 0;
        while i < 32 {
            count[i] = i as i16;
            i += 1;
        }
        count
    };
    // SAFETY: as the caller promises: 16 rows of scales.
    unsafe {
        let load = |i: usize| _mm512_loadu_si512(scales.wrapping_add(64 * i).cast());
        let count = _mm512_loadu_si512(COUNT.as_ptr().cast());
        let step_of = |index| _mm512_add_epi16(index, _mm512_set1_epi16(step as i16));
        let codes = match size.scale_bytes {
            8 => {
                let index = step_of(_mm512_slli_epi16::<2>(count));
                _mm512_castsi512_si256(_mm512_permutex2var_epi16(load(0), index, load(1)))
            }
            16 => {
                let index = step_of(_mm512_slli_epi16::<3>(count));
                let low = _mm512_permutex2var_epi16(load(0), index, load(1));
                let high = _mm512_permutex2var_epi16(load(2), index, load(3));
                _mm256_inserti128_si256::<1>(_mm512_castsi512_si256(low), _mm512_castsi512_si128(high))
            }
            _ => collect(scales, size, step),
        };
        _mm512_cvtph_ps(codes)
    }
}

/// The 16 bits of a step of 16 rows of scales, one after the other.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx2")]
unsafe fn collect(scales: *const u8, size: RowSize, step: usize) -> __m256i {
    let scale = |t: usize| scales.wrapping_add(t * size.scale_bytes).cast::<u16>().wrapping_add(step);
    // SAFETY: as the caller promises.
    unsafe {
        let all: [u16; LANES] = std::array::from_fn(|t| scale(t).read_unaligned());
        _mm256_loadu_si256(all.as_ptr().cast())
    }
}
