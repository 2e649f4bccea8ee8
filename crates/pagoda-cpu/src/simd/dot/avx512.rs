//! Byte products of AVX-512 VNNI. Codes are unsigned bytes; their factors are signed.

use std::arch::x86_64::*;

use super::avx2::shorts;
use super::{COLUMNS, Cache, Dot, LANES};
use crate::integers::{QUAD, STEP};
use crate::simd::avx512::e4m3;

/// AVX-512 F, BW, DQ, VL, VNNI, VBMI, BITALG and GFNI.
pub(crate) struct Vnni512;

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

/// The lower (half 0) or the upper nibbles of bytes.
#[inline(always)]
unsafe fn nibbles(v: __m512i, half: usize) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe {
        if half == 0 {
            return _mm512_and_si512(v, _mm512_set1_epi8(15));
        }
        // A product of bits: row `i` of the matrix says which bits make bit `i` of the result.
        _mm512_gf2p8affine_epi64_epi8::<0>(v, _mm512_set1_epi64(0x1020_4080_0000_0000))
    }
}

/// Adds 16 to some bytes.
#[inline(always)]
unsafe fn add_16(codes: __m512i, which: __mmask64) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe { _mm512_mask_add_epi8(codes, which, codes, _mm512_set1_epi8(16)) }
}

/// Reduces vectors to a number each: of `v[i][j]` at `4 * i + j`.
#[inline(always)]
unsafe fn reduce(v: [[__m512i; 4]; 4], with: impl Fn(__m512i, __m512i) -> __m512i) -> [i32; LANES] {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let mut parts = [_mm512_setzero_si512(); 4];
        for (part, [a, b, c, d]) in parts.iter_mut().zip(v) {
            let ab = with(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let cd = with(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            *part = with(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        }
        let neighbours = |a, b| {
            let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
            with(even, _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b))
        };
        let [a, b, c, d] = parts;
        let mut all = [0; LANES];
        _mm512_storeu_si512(all.as_mut_ptr().cast(), neighbours(neighbours(a, b), neighbours(c, d)));
        all
    }
}

/// Of 16 rows of `stride` bytes, number `index` of each, where numbers are two bytes.
#[inline(always)]
unsafe fn short_column(rows: *const u8, stride: usize, index: usize) -> __m256i {
    // SAFETY: as the caller promises.
    unsafe {
        let load = |i: usize| _mm512_loadu_si512(rows.wrapping_add(64 * i).cast());
        let count = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let places =
            |shifted| _mm512_castsi256_si512(_mm256_add_epi16(shifted, _mm256_set1_epi16(index as i16)));
        match stride {
            4 => _mm512_cvtepi32_epi16(_mm512_srl_epi32(load(0), _mm_cvtsi32_si128(16 * index as i32))),
            8 => {
                let places = places(_mm256_slli_epi16::<2>(count));
                _mm512_castsi512_si256(_mm512_permutex2var_epi16(load(0), places, load(1)))
            }
            16 => {
                // Of an index only the bits that tell 128 bytes apart count.
                let places = places(_mm256_slli_epi16::<3>(count));
                let low = _mm512_permutex2var_epi16(load(0), places, load(1));
                let high = _mm512_permutex2var_epi16(load(2), places, load(3));
                _mm256_blend_epi32::<0xf0>(_mm512_castsi512_si256(low), _mm512_castsi512_si256(high))
            }
            _ => shorts(rows.wrapping_add(2 * index), stride),
        }
    }
}

/// Of 16 rows of `stride` bytes, byte `index` of each.
#[inline(always)]
unsafe fn byte_column(rows: *const u8, stride: usize, index: usize) -> __m128i {
    // SAFETY: as the caller promises.
    unsafe {
        let load = |i: usize| _mm512_loadu_si512(rows.wrapping_add(64 * i).cast());
        let shift = _mm_cvtsi32_si128(8 * index as i32);
        let count = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let places = |shifted| _mm512_castsi128_si512(_mm_add_epi8(shifted, _mm_set1_epi8(index as i8)));
        match stride {
            2 => _mm256_cvtepi16_epi8(_mm256_srl_epi16(_mm256_loadu_si256(rows.cast()), shift)),
            4 => _mm512_cvtepi32_epi8(_mm512_srl_epi32(load(0), shift)),
            8 => {
                let places = places(_mm_slli_epi16::<3>(count));
                _mm512_castsi512_si128(_mm512_permutex2var_epi8(load(0), places, load(1)))
            }
            16 => {
                // Of an index only the bits that tell 128 bytes apart count.
                let places = places(_mm_slli_epi16::<4>(_mm_and_si128(count, _mm_set1_epi8(7))));
                let low = _mm512_permutex2var_epi8(load(0), places, load(1));
                let high = _mm512_permutex2var_epi8(load(2), places, load(3));
                _mm_unpacklo_epi64(_mm512_castsi512_si128(low), _mm512_castsi512_si128(high))
            }
            1 => _mm_loadu_si128(rows.cast()),
            _ => {
                let first = index.min(stride - 2);
                let shift = _mm_cvtsi32_si128(8 * (index - first) as i32);
                _mm256_cvtepi16_epi8(_mm256_srl_epi16(shorts(rows.wrapping_add(first), stride), shift))
            }
        }
    }
}

// SAFETY (of every block): callers of `Dot` have AVX-512, and pointers good for as much as the name says.
impl Dot for Vnni512 {
    type Words = __m512i;
    type Floats = __m512;
    const ROWS: usize = 4;
    const MANY_REGISTERS: bool = true;
    const ZERO: i32 = 128;
    const SHORTS: bool = false;

    #[inline(always)]
    unsafe fn integers(x: i32) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn floats(x: f32) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        // SAFETY: see the impl.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn masked(bits: u16, v: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_maskz_mov_ps(bits, v) }
    }
    #[inline(always)]
    unsafe fn magnitudes(v: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_abs_ps(v) }
    }
    #[inline(always)]
    unsafe fn to_floats(v: __m512i) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn to_integers(v: __m512) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtps_epi32(v) }
    }
    #[inline(always)]
    unsafe fn larger(a: __m512i, b: __m512) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_max_epu32(a, _mm512_castps_si512(b)) }
    }
    #[inline(always)]
    unsafe fn sums(v: [[__m512i; 4]; 4]) -> [i32; LANES] {
        // SAFETY: see the impl.
        unsafe { reduce(v, |a, b| _mm512_add_epi32(a, b)) }
    }
    #[inline(always)]
    unsafe fn largest(v: [[__m512i; 4]; 4]) -> [i32; LANES] {
        // SAFETY: see the impl.
        unsafe { reduce(v, |a, b| _mm512_max_epu32(a, b)) }
    }
    #[inline(always)]
    unsafe fn pack(numbers: [__m512i; 4], bytes: usize, words: &mut [[i32; LANES]; 2]) -> __m512i {
        /// Where the lower byte of a number lies after two vectors have been packed to one, twice.
        const LOW: [u8; 64] = {
            let mut index = [0; 64];
            let mut i = 0;
            while i < 64 {
                let (half, vector, quarter, word) = (i / 32, i / 16 % 2, i / 4 % 4, i % 4);
                index[i] = (half * 64 + 2 * (quarter * 8 + vector * 4 + word)) as u8;
                i += 1;
            }
            index
        };
        let [a, b, c, d] = numbers;
        // SAFETY: see the impl.
        unsafe {
            let (a, b) = (_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
            let (zeros, ones) = (_mm512_setzero_si512(), _mm512_set1_epi16(1));
            let (high, sum) = if bytes == 1 {
                // Of four vectors packed to one the words lie four apart.
                let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                let all = _mm512_packs_epi16(a, b);
                (_mm512_permutexvar_epi32(order, all), _mm512_dpbusd_epi32(zeros, _mm512_set1_epi8(1), all))
            } else {
                let sum = _mm512_dpwssd_epi32(_mm512_madd_epi16(a, ones), b, ones);
                let order = _mm512_loadu_si512(LOW.as_ptr().cast());
                let low = _mm512_permutex2var_epi8(a, order, b);
                _mm512_storeu_si512(words[1].as_mut_ptr().cast(), low);
                let half = _mm512_set1_epi16(128);
                let (a, b) = (_mm512_add_epi16(a, half), _mm512_add_epi16(b, half));
                let high = _mm512_add_epi8(order, _mm512_set1_epi8(1));
                (_mm512_permutex2var_epi8(a, high, b), sum)
            };
            _mm512_storeu_si512(words[0].as_mut_ptr().cast(), high);
            sum
        }
    }

    /// Products with high bytes, or the only ones, and with low bytes.
    #[inline(always)]
    unsafe fn begin(start: i32, bytes: usize) -> [__m512i; 2] {
        // SAFETY: see the impl.
        unsafe {
            let (start, zeros) = (_mm512_set1_epi32(start), _mm512_setzero_si512());
            if bytes == 1 { [start, zeros] } else { [zeros, start] }
        }
    }
    #[inline(always)]
    unsafe fn add_products(
        [high, low]: [__m512i; 2],
        codes: __m512i,
        words: [i32; 2],
        bytes: usize,
    ) -> [__m512i; 2] {
        // SAFETY: see the impl.
        unsafe {
            let high = _mm512_dpbusd_epi32(high, codes, _mm512_set1_epi32(words[0]));
            if bytes == 1 {
                return [high, low];
            }
            [high, _mm512_dpbusd_epi32(low, codes, _mm512_set1_epi32(words[1]))]
        }
    }
    #[inline(always)]
    unsafe fn settle(sums: [__m512i; 2], _: usize) -> [__m512i; 2] {
        sums
    }
    #[inline(always)]
    unsafe fn total([high, low]: [__m512i; 2], bytes: usize) -> __m512i {
        // SAFETY: see the impl.
        if bytes == 1 { high } else { unsafe { _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low) } }
    }

    #[inline(always)]
    unsafe fn byte_columns(rows: *const u8, stride: usize) -> [__m512i; COLUMNS] {
        // SAFETY: see the impl.
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
            }; COLUMNS]
        }
    }
    #[inline(always)]
    unsafe fn nibble_columns(rows: *const u8, stride: usize) -> [__m512i; COLUMNS] {
        // SAFETY: see the impl.
        unsafe {
            let both = transpose(vectors![|i| quarters(rows.wrapping_add(i * stride), 4 * stride); 4]);
            vectors![|i| nibbles(both[i % 4], i / 4); COLUMNS]
        }
    }
    #[inline(always)]
    unsafe fn byte_words(rows: *const u8, stride: usize, half: usize) -> __m512i {
        const FIRST: [u8; 64] = interleaved(STEP);
        // SAFETY: see the impl.
        unsafe {
            let row = |t: usize| rows.wrapping_add(t * stride);
            let sign = _mm512_set1_epi8(-128);
            let a = _mm512_xor_si512(halves(row(0), row(1)), sign);
            let b = _mm512_xor_si512(halves(row(2), row(3)), sign);
            let first = _mm512_loadu_si512(FIRST.as_ptr().cast());
            _mm512_permutex2var_epi8(a, _mm512_add_epi8(first, _mm512_set1_epi8((half * LANES) as i8)), b)
        }
    }
    #[inline(always)]
    unsafe fn nibble_words(rows: *const u8, stride: usize, half: usize) -> __m512i {
        const ORDER: [u8; 64] = interleaved(LANES);
        // SAFETY: see the impl.
        unsafe {
            let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
            nibbles(_mm512_permutexvar_epi8(order, quarters(rows, stride)), half)
        }
    }
    #[inline(always)]
    unsafe fn fifth_columns(
        columns: [__m512i; COLUMNS],
        bits: *const u8,
        stride: usize,
    ) -> [__m512i; COLUMNS] {
        // SAFETY: see the impl.
        unsafe {
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let places = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(stride as i32));
            let bits = _mm512_i32gather_epi32::<1>(places, bits.cast());
            // Of two rows in 64 bits, the elements 0 to 3 of each.
            let order = _mm512_set1_epi64(0x2322_2120_0302_0100);
            vectors![|i| {
                let order = _mm512_add_epi8(order, _mm512_set1_epi8(4 * i as i8));
                add_16(columns[i], _mm512_bitshuffle_epi64_mask(bits, order))
            }; COLUMNS]
        }
    }
    #[inline(always)]
    unsafe fn fifth_words(words: __m512i, bits: *const u8, stride: usize, half: usize) -> __m512i {
        const ORDER: [u8; 64] = interleaved(LANES);
        // SAFETY: see the impl.
        unsafe {
            let row = |r: usize| bits.wrapping_add(r * stride).cast::<i32>();
            let [a, b, c, d] = std::array::from_fn(|r| row(r).read_unaligned());
            // The lower 16 bits of four rows, then the upper ones.
            let order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
            let bits = _mm_shuffle_epi8(_mm_setr_epi32(a, b, c, d), order);
            let bits = if half == 0 { bits } else { _mm_unpackhi_epi64(bits, bits) };
            let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
            add_16(words, _mm512_bitshuffle_epi64_mask(_mm512_broadcastq_epi64(bits), order))
        }
    }
    #[inline(always)]
    unsafe fn in_order(v: __m512i) -> __m512i {
        v
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], v: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), v)
        }
    }
    #[inline(always)]
    unsafe fn f16_scales(scales: *const u8, stride: usize, index: usize) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtph_ps(short_column(scales, stride, index)) }
    }
    #[inline(always)]
    unsafe fn half_e8m0_scales(scales: *const u8, stride: usize, index: usize) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let codes = _mm512_cvtepu8_epi32(byte_column(scales, stride, index));
            // 2^(code - 127), subnormal for 0 and NaN for 255; half of that.
            let value = _mm512_max_epi32(_mm512_slli_epi32::<23>(codes), _mm512_set1_epi32(1 << 22));
            let nan = _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(255));
            let value = _mm512_mask_mov_epi32(value, nan, _mm512_set1_epi32(0x7fc0_0000));
            _mm512_mul_ps(_mm512_castsi512_ps(value), _mm512_set1_ps(0.5))
        }
    }

    #[inline(always)]
    unsafe fn half_e4m3_scales(scales: *const u8, stride: usize, index: usize) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let codes = byte_column(scales, stride, index);
            _mm512_mul_ps(e4m3(codes), _mm512_set1_ps(128.0))
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8, to: Cache) {
        // SAFETY: a prefetch never faults.
        unsafe {
            match to {
                Cache::L1 => _mm_prefetch::<_MM_HINT_T0>(p.cast()),
                Cache::L2 => _mm_prefetch::<_MM_HINT_T1>(p.cast()),
            }
        }
    }
}
