//! Products in registers of 256 bits: those of AVX2, or of AVX-VNNI, which add at once.
//!
//! Numbers of two bytes are multiplied as they are, with codes widened to 16 bits (`vpmaddwd`, `vpdpwssd`): AVX2's product of
//! bytes adds two of them in 16 bits, where products of arbitrary bytes overflow. Products of one-byte numbers with small
//! codes do not, even four times two of them (`vpmaddubsw`; and `vpdpbusd`).

use std::arch::x86_64::*;

use super::{COLUMNS, Cache, Dot, LANES, column};
use crate::simd::avx2::e4m3;

/// AVX2, FMA and F16C, and AVX-VNNI if so.
pub(crate) struct Dot256<const VNNI: bool>;

/// Applies an intrinsic to both halves.
macro_rules! both {
    ($intrinsic:ident $(::<$constant:literal>)?, $($v:expr),+) => {
        [$intrinsic $(::<$constant>)?($($v[0]),+), $intrinsic $(::<$constant>)?($($v[1]),+)]
    };
}

/// One part of a register from each of two places in memory.
#[inline(always)]
unsafe fn halves(low: *const u8, high: *const u8) -> __m256i {
    // SAFETY: as the caller promises.
    unsafe { _mm256_loadu2_m128i(high.cast(), low.cast()) }
}

/// In every 128 bits, word `i` of the four vectors in vector `i`.
#[inline(always)]
unsafe fn transpose([a, b, c, d]: [__m256i; 4]) -> [__m256i; 4] {
    // SAFETY: the caller has AVX2.
    unsafe {
        let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
        let (ef, gh) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab, cd),
            _mm256_unpackhi_epi64(ab, cd),
            _mm256_unpacklo_epi64(ef, gh),
            _mm256_unpackhi_epi64(ef, gh),
        ]
    }
}

/// Of 16 rows of 16 bytes, word `i` of row `t` in word `t` of vector `i`.
#[inline(always)]
unsafe fn columns(rows: *const u8, stride: usize) -> [[__m256i; 2]; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        let row = |t: usize| rows.wrapping_add(t * stride);
        let a =
            [halves(row(0), row(4)), halves(row(1), row(5)), halves(row(2), row(6)), halves(row(3), row(7))];
        let b = [
            halves(row(8), row(12)),
            halves(row(9), row(13)),
            halves(row(10), row(14)),
            halves(row(11), row(15)),
        ];
        let (a, b) = (transpose(a), transpose(b));
        [[a[0], b[0]], [a[1], b[1]], [a[2], b[2]], [a[3], b[3]]]
    }
}

/// Of 4 rows of 16 bytes, byte `i` of row `r` in byte `r` of word `i`, where words are 0 to 3, 8 to 11, 4 to 7 and 12 to 15.
#[inline(always)]
unsafe fn words(rows: *const u8, stride: usize) -> [__m256i; 2] {
    // SAFETY: as the caller promises.
    unsafe {
        let row = |r: usize| rows.wrapping_add(r * stride);
        let (ac, bd) = (halves(row(0), row(2)), halves(row(1), row(3)));
        // Bytes 0 to 7 of rows 0 and 1 next to those of rows 2 and 3; then bytes 8 to 15.
        let (low, high) = (_mm256_unpacklo_epi8(ac, bd), _mm256_unpackhi_epi8(ac, bd));
        let ab = _mm256_permute2x128_si256::<0x20>(low, high);
        let cd = _mm256_permute2x128_si256::<0x31>(low, high);
        [_mm256_unpacklo_epi16(ab, cd), _mm256_unpackhi_epi16(ab, cd)]
    }
}

/// The lower (half 0) or the upper nibbles of bytes.
#[inline(always)]
unsafe fn nibbles(v: [__m256i; 2], half: usize) -> [__m256i; 2] {
    // SAFETY: the caller has AVX2.
    unsafe {
        let v = if half == 0 { v } else { both!(_mm256_srli_epi16::<4>, v) };
        let mask = [_mm256_set1_epi8(15); 2];
        both!(_mm256_and_si256, v, mask)
    }
}

/// Adds 16 where one of the bits of `mask` is set, which are all above 8.
#[inline(always)]
unsafe fn add_16(codes: __m256i, bits: __m256i, mask: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_or_si256(codes, _mm256_min_epu8(_mm256_and_si256(bits, mask), _mm256_set1_epi8(16))) }
}

/// Two bytes from every `stride`th.
#[inline(always)]
pub(super) unsafe fn shorts(first: *const u8, stride: usize) -> __m256i {
    // SAFETY: as the caller promises.
    unsafe {
        let short = |t: usize| first.wrapping_add(t * stride).cast::<i16>().read_unaligned();
        _mm256_setr_epi16(
            short(0),
            short(1),
            short(2),
            short(3),
            short(4),
            short(5),
            short(6),
            short(7),
            short(8),
            short(9),
            short(10),
            short(11),
            short(12),
            short(13),
            short(14),
            short(15),
        )
    }
}

/// Of 16 rows of `stride` bytes, number `index` of each, where numbers are two bytes.
#[inline(always)]
unsafe fn short_column(rows: *const u8, stride: usize, index: usize) -> __m256i {
    // SAFETY: as the caller promises.
    unsafe {
        let load = |i: usize| _mm256_loadu_si256(rows.wrapping_add(32 * i).cast());
        let shift = _mm_cvtsi32_si128(16 * index as i32);
        let short = _mm256_set1_epi32(0xffff);
        match stride {
            4 => {
                let eight = |i: usize| _mm256_and_si256(_mm256_srl_epi32(load(i), shift), short);
                _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(eight(0), eight(1)))
            }
            8 => {
                let four = |i: usize| _mm256_castsi256_ps(_mm256_srl_epi64(load(i), shift));
                let eight = |i: usize| {
                    let words = _mm256_shuffle_ps::<0b10_00_10_00>(four(i), four(i + 1));
                    _mm256_and_si256(_mm256_castps_si256(words), short)
                };
                let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
                _mm256_permutevar8x32_epi32(_mm256_packus_epi32(eight(0), eight(2)), order)
            }
            _ => shorts(rows.wrapping_add(2 * index), stride),
        }
    }
}

/// Reduces vectors to a number each: of `v[i][j]` at `4 * i + j`.
macro_rules! reduce {
    ($v:expr, $with:ident, $with_halves:ident) => {{
        let mut all = [0; LANES];
        for (all, v) in all.chunks_exact_mut(4).zip($v) {
            let [a, b, c, d] = [
                $with(v[0][0], v[0][1]),
                $with(v[1][0], v[1][1]),
                $with(v[2][0], v[2][1]),
                $with(v[3][0], v[3][1]),
            ];
            let ab = $with(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let cd = $with(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
            let parts = $with(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
            let one = $with_halves(_mm256_castsi256_si128(parts), _mm256_extracti128_si256::<1>(parts));
            _mm_storeu_si128(all.as_mut_ptr().cast(), one);
        }
        all
    }};
}

// SAFETY (of every block): callers of `Dot` have AVX2, and AVX-VNNI if so, and pointers good for as much as the name says.
impl<const VNNI: bool> Dot for Dot256<VNNI> {
    type Words = [__m256i; 2];
    type Floats = [__m256; 2];
    const ROWS: usize = 4;
    const MANY_REGISTERS: bool = false;
    const ZERO: i32 = 0;
    const SHORTS: bool = true;

    #[inline(always)]
    unsafe fn integers(x: i32) -> [__m256i; 2] {
        // SAFETY: see the impl.
        unsafe { [_mm256_set1_epi32(x); 2] }
    }
    #[inline(always)]
    unsafe fn floats(x: f32) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: [__m256; 2]) {
        // SAFETY: see the impl.
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_mul_ps, a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_fmadd_ps, a, b, c) }
    }
    #[inline(always)]
    unsafe fn masked(bits: u16, v: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let bits = [_mm256_set1_epi32(i32::from(bits)), _mm256_set1_epi32(i32::from(bits >> 8))];
            let (lane, set) = ([lane; 2], both!(_mm256_and_si256, bits, [lane; 2]));
            let set = both!(_mm256_cmpeq_epi32, set, lane);
            let set = both!(_mm256_castsi256_ps, set);
            both!(_mm256_and_ps, set, v)
        }
    }
    #[inline(always)]
    unsafe fn magnitudes(v: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            let sign = [_mm256_set1_ps(-0.0); 2];
            both!(_mm256_andnot_ps, sign, v)
        }
    }
    #[inline(always)]
    unsafe fn to_floats(v: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_cvtepi32_ps, v) }
    }
    #[inline(always)]
    unsafe fn to_integers(v: [__m256; 2]) -> [__m256i; 2] {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_cvtps_epi32, v) }
    }
    #[inline(always)]
    unsafe fn larger(a: [__m256i; 2], b: [__m256; 2]) -> [__m256i; 2] {
        // SAFETY: see the impl.
        unsafe {
            let b = both!(_mm256_castps_si256, b);
            both!(_mm256_max_epu32, a, b)
        }
    }
    #[inline(always)]
    unsafe fn sums(v: [[[__m256i; 2]; 4]; 4]) -> [i32; LANES] {
        // SAFETY: see the impl.
        unsafe { reduce!(v, _mm256_add_epi32, _mm_add_epi32) }
    }
    #[inline(always)]
    unsafe fn largest(v: [[[__m256i; 2]; 4]; 4]) -> [i32; LANES] {
        // SAFETY: see the impl.
        unsafe { reduce!(v, _mm256_max_epu32, _mm_max_epu32) }
    }
    #[inline(always)]
    unsafe fn pack(numbers: [[__m256i; 2]; 4], bytes: usize, words: &mut [[i32; LANES]; 2]) -> [__m256i; 2] {
        // SAFETY: see the impl.
        unsafe {
            let ab = both!(_mm256_add_epi32, numbers[0], numbers[1]);
            let cd = both!(_mm256_add_epi32, numbers[2], numbers[3]);
            let sum = both!(_mm256_add_epi32, ab, cd);
            // Of 16 numbers, 0 to 3 and 8 to 11 in one part and the others in the other.
            let [a, b, c, d] = [
                _mm256_packs_epi32(numbers[0][0], numbers[0][1]),
                _mm256_packs_epi32(numbers[1][0], numbers[1][1]),
                _mm256_packs_epi32(numbers[2][0], numbers[2][1]),
                _mm256_packs_epi32(numbers[3][0], numbers[3][1]),
            ];
            if bytes == 1 {
                let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
                for (i, quads) in [_mm256_packs_epi16(a, b), _mm256_packs_epi16(c, d)].into_iter().enumerate()
                {
                    let quads = _mm256_permutevar8x32_epi32(quads, order);
                    _mm256_storeu_si256(words[0].as_mut_ptr().add(8 * i).cast(), quads);
                }
                return sum;
            }
            let order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
            for (i, quads) in [a, b, c, d].into_iter().enumerate() {
                let quads = _mm256_shufflelo_epi16::<0b11_01_10_00>(quads);
                let quads = _mm256_shufflehi_epi16::<0b11_01_10_00>(quads);
                let quads = _mm256_permutevar8x32_epi32(quads, order);
                let first = words[0].as_mut_ptr().add(4 * i).cast();
                let second = words[1].as_mut_ptr().add(4 * i).cast();
                _mm_storeu_si128(first, _mm256_castsi256_si128(quads));
                _mm_storeu_si128(second, _mm256_extracti128_si256::<1>(quads));
            }
            sum
        }
    }

    /// Sums of 32 bits, and of 16.
    #[inline(always)]
    unsafe fn begin(start: i32, _: usize) -> [[__m256i; 2]; 2] {
        // SAFETY: see the impl.
        unsafe { [[_mm256_set1_epi32(start); 2], [_mm256_setzero_si256(); 2]] }
    }
    #[inline(always)]
    unsafe fn add_products(
        [sum, short]: [[__m256i; 2]; 2],
        codes: [__m256i; 2],
        words: [i32; 2],
        bytes: usize,
    ) -> [[__m256i; 2]; 2] {
        // SAFETY: see the impl.
        unsafe {
            let first = [_mm256_set1_epi32(words[0]); 2];
            if bytes == 1 && VNNI {
                return [both!(_mm256_dpbusd_avx_epi32, sum, codes, first), short];
            }
            if bytes == 1 {
                let products = both!(_mm256_maddubs_epi16, codes, first);
                return [sum, both!(_mm256_add_epi16, short, products)];
            }
            let second = [_mm256_set1_epi32(words[1]); 2];
            let even = both!(_mm256_slli_epi16::<8>, codes);
            let (even, odd) = (both!(_mm256_srai_epi16::<8>, even), both!(_mm256_srai_epi16::<8>, codes));
            if VNNI {
                let sum = both!(_mm256_dpwssd_avx_epi32, sum, even, first);
                return [both!(_mm256_dpwssd_avx_epi32, sum, odd, second), short];
            }
            let products = [both!(_mm256_madd_epi16, even, first), both!(_mm256_madd_epi16, odd, second)];
            let sum = both!(_mm256_add_epi32, sum, products[0]);
            [both!(_mm256_add_epi32, sum, products[1]), short]
        }
    }
    #[inline(always)]
    unsafe fn settle([sum, short]: [[__m256i; 2]; 2], bytes: usize) -> [[__m256i; 2]; 2] {
        if bytes == 2 || VNNI {
            return [sum, short];
        }
        // SAFETY: see the impl.
        unsafe {
            let ones = [_mm256_set1_epi16(1); 2];
            let settled = both!(_mm256_madd_epi16, short, ones);
            [both!(_mm256_add_epi32, sum, settled), [_mm256_setzero_si256(); 2]]
        }
    }
    #[inline(always)]
    unsafe fn total([sum, _]: [[__m256i; 2]; 2], _: usize) -> [__m256i; 2] {
        sum
    }

    #[inline(always)]
    unsafe fn byte_columns(rows: *const u8, stride: usize) -> [[__m256i; 2]; COLUMNS] {
        // SAFETY: see the impl.
        unsafe {
            let (a, b) = (columns(rows, stride), columns(rows.wrapping_add(16), stride));
            [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
        }
    }
    #[inline(always)]
    unsafe fn nibble_columns(rows: *const u8, stride: usize) -> [[__m256i; 2]; COLUMNS] {
        // SAFETY: see the impl.
        unsafe {
            let v = columns(rows, stride);
            let mut all = [[_mm256_setzero_si256(); 2]; COLUMNS];
            for i in 0..COLUMNS {
                all[i] = nibbles(v[i % 4], i / 4);
            }
            all
        }
    }
    #[inline(always)]
    unsafe fn byte_words(rows: *const u8, stride: usize, half: usize) -> [__m256i; 2] {
        // SAFETY: see the impl.
        unsafe { words(rows.wrapping_add(16 * half), stride) }
    }
    #[inline(always)]
    unsafe fn nibble_words(rows: *const u8, stride: usize, half: usize) -> [__m256i; 2] {
        // SAFETY: see the impl.
        unsafe { nibbles(words(rows, stride), half) }
    }
    #[inline(always)]
    unsafe fn fifth_columns(
        mut columns: [[__m256i; 2]; COLUMNS],
        bits: *const u8,
        stride: usize,
    ) -> [[__m256i; 2]; COLUMNS] {
        // SAFETY: see the impl.
        unsafe {
            let row = |t: usize| bits.wrapping_add(t * stride).cast::<i32>().read_unaligned();
            let mask = _mm256_set1_epi32(i32::from_le_bytes([16, 32, 64, 128]));
            // Byte 0 of a word in all of it.
            let first = _mm256_setr_epi64x(
                0x0404_0404_0000_0000,
                0x0c0c_0c0c_0808_0808,
                0x0404_0404_0000_0000,
                0x0c0c_0c0c_0808_0808,
            );
            for (i, t) in [0, 8].into_iter().enumerate() {
                let upper = _mm256_setr_epi32(
                    row(t),
                    row(t + 1),
                    row(t + 2),
                    row(t + 3),
                    row(t + 4),
                    row(t + 5),
                    row(t + 6),
                    row(t + 7),
                );
                let lower = _mm256_slli_epi32::<4>(upper);
                for (j, column) in columns.iter_mut().enumerate() {
                    let byte = _mm256_add_epi8(first, _mm256_set1_epi8(j as i8 / 2));
                    let bits = if j % 2 == 0 { lower } else { upper };
                    column[i] = add_16(column[i], _mm256_shuffle_epi8(bits, byte), mask);
                }
            }
            columns
        }
    }
    #[inline(always)]
    unsafe fn fifth_words(words: [__m256i; 2], bits: *const u8, stride: usize, half: usize) -> [__m256i; 2] {
        // SAFETY: see the impl.
        unsafe {
            let row = |r: usize| bits.wrapping_add(r * stride + 2 * half).cast::<u16>().read_unaligned();
            // Byte 0 of four rows in every word of one part, byte 1 in those of the other.
            let pair = |a: u16, b: u16| i32::from(a) | i32::from(b) << 16;
            let pairs = _mm256_setr_epi32(pair(row(0), row(1)), pair(row(2), row(3)), 0, 0, 0, 0, 0, 0);
            let order = _mm256_setr_epi32(
                0x0604_0200,
                0x0604_0200,
                0x0604_0200,
                0x0604_0200,
                0x0705_0301,
                0x0705_0301,
                0x0705_0301,
                0x0705_0301,
            );
            let upper = _mm256_shuffle_epi8(_mm256_permute4x64_epi64::<0>(pairs), order);
            let lower = _mm256_slli_epi16::<4>(upper);
            let mask = _mm256_setr_epi64x(
                0x2020_2020_1010_1010,
                -0x7f7f_7f7f_bfbf_bfc0,
                0x2020_2020_1010_1010,
                -0x7f7f_7f7f_bfbf_bfc0,
            );
            [add_16(words[0], lower, mask), add_16(words[1], upper, mask)]
        }
    }
    #[inline(always)]
    unsafe fn in_order([a, b]: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: see the impl.
        unsafe { [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)] }
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], v: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: see the impl.
        unsafe {
            let table = [_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())); 2];
            both!(_mm256_shuffle_epi8, table, v)
        }
    }
    #[inline(always)]
    unsafe fn f16_scales(scales: *const u8, stride: usize, index: usize) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            let all = short_column(scales, stride, index);
            [
                _mm256_cvtph_ps(_mm256_castsi256_si128(all)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(all)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn half_e8m0_scales(scales: *const u8, stride: usize, step: usize) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            let row = |t: usize| i32::from(*scales.wrapping_add(t * stride + step));
            let eight = |t: usize| {
                let codes = _mm256_setr_epi32(
                    row(t),
                    row(t + 1),
                    row(t + 2),
                    row(t + 3),
                    row(t + 4),
                    row(t + 5),
                    row(t + 6),
                    row(t + 7),
                );
                // 2^(code - 127), subnormal for 0 and NaN for 255; half of that.
                let value = _mm256_max_epi32(_mm256_slli_epi32::<23>(codes), _mm256_set1_epi32(1 << 22));
                let nan = _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(255));
                let value = _mm256_or_si256(value, _mm256_and_si256(nan, _mm256_set1_epi32(0x7fc0_0000)));
                _mm256_mul_ps(_mm256_castsi256_ps(value), _mm256_set1_ps(0.5))
            };
            [eight(0), eight(8)]
        }
    }

    #[inline(always)]
    unsafe fn half_e4m3_scales(scales: *const u8, stride: usize, index: usize) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            let codes = _mm_loadu_si128(column(scales, stride, index).as_ptr().cast());
            let eight = |codes| _mm256_mul_ps(e4m3(codes), _mm256_set1_ps(128.0));
            [eight(codes), eight(_mm_unpackhi_epi64(codes, codes))]
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
