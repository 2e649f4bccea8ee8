//! Sixteen lanes of AVX-512.

use std::arch::x86_64::*;

use super::Simd;
use super::avx2::Avx2;
use crate::kernel::ALIGN;

/// AVX-512 F, BW, DQ and VL.
pub(crate) struct Avx512;

/// The lane sums of four vectors, as four partial sums (one per 128-bit part) of four numbers each.
#[inline(always)]
unsafe fn quad(v: [__m512; 4]) -> __m512 {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
        let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
        )
    }
}

/// Adds neighbouring 128-bit parts of `a` and of `b`.
#[inline(always)]
unsafe fn add_parts(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller has AVX-512.
    unsafe {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b),
            _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b),
        )
    }
}

/// Sixteen E4M3 numbers, times 2^-8: the bit of a code above those of binary16's exponent is not one of it, and adding to NaN's
/// carries into that.
#[inline(always)]
pub(super) unsafe fn e4m3(codes: __m128i) -> __m512 {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let code = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(codes));
        let half = _mm256_and_si256(code, _mm256_set1_epi16(!0x4000));
        let carried = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
        let nan = _mm256_and_si256(carried, _mm256_set1_epi16(0x4000));
        _mm512_cvtph_ps(_mm256_or_si256(half, nan))
    }
}

// SAFETY (of every block): callers of `Simd` have AVX-512, and pointers good for as many elements as the name says.
impl Simd for Avx512 {
    const LANES: usize = 16;
    const REGISTERS: usize = 32;
    const ROWS: usize = 6;
    type V = __m512;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
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
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(v: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(v) }
    }
    #[inline(always)]
    unsafe fn scale(v: __m512, n: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_scalef_ps(v, n) }
    }
    #[inline(always)]
    unsafe fn swap<const H: usize>(v: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            match H {
                1 => _mm512_permute_ps::<0b10_11_00_01>(v),
                2 => _mm512_permute_ps::<0b01_00_11_10>(v),
                4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v),
                8 => _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v),
                _ => unreachable!("no such lanes"),
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose(v: &mut [__m512; ALIGN]) {
        // SAFETY: see the impl.
        unsafe {
            // In every 128 bits, four numbers of one column.
            for rows in v.as_chunks_mut::<4>().0 {
                let [a, b, c, d] = *rows;
                let wide = |v| _mm512_castps_pd(v);
                let (ab, cd) = (wide(_mm512_unpacklo_ps(a, b)), wide(_mm512_unpacklo_ps(c, d)));
                let (ef, gh) = (wide(_mm512_unpackhi_ps(a, b)), wide(_mm512_unpackhi_ps(c, d)));
                *rows = [
                    _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
                    _mm512_castpd_ps(_mm512_unpacklo_pd(ef, gh)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(ef, gh)),
                ];
            }
            // These four numbers of all rows.
            for i in 0..4 {
                let [a, b, c, d] = [v[i], v[i + 4], v[i + 8], v[i + 12]];
                let even_ab = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                let even_cd = _mm512_shuffle_f32x4::<0b10_00_10_00>(c, d);
                let odd_ab = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
                let odd_cd = _mm512_shuffle_f32x4::<0b11_01_11_01>(c, d);
                v[i] = _mm512_shuffle_f32x4::<0b10_00_10_00>(even_ab, even_cd);
                v[i + 4] = _mm512_shuffle_f32x4::<0b10_00_10_00>(odd_ab, odd_cd);
                v[i + 8] = _mm512_shuffle_f32x4::<0b11_01_11_01>(even_ab, even_cd);
                v[i + 12] = _mm512_shuffle_f32x4::<0b11_01_11_01>(odd_ab, odd_cd);
            }
        }
    }
    #[inline(always)]
    unsafe fn max_quad(v: [__m512; 4], out: *mut f32) {
        // SAFETY: see the impl.
        unsafe {
            let mut halves = [_mm256_setzero_ps(); 4];
            for i in 0..4 {
                halves[i] = _mm256_max_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps::<1>(v[i]));
            }
            Avx2::max_quad(halves, out);
        }
    }
    #[inline(always)]
    unsafe fn sum_quads<const R: usize>(v: [[__m512; 4]; R], out: *mut f32, stride: usize) {
        // SAFETY: see the impl.
        unsafe {
            let mut r = 0;
            while R - r >= 3 {
                let low = add_parts(quad(v[r]), quad(v[r + 1]));
                let high = add_parts(quad(v[r + 2]), quad(v[(r + 3).min(R - 1)]));
                let sums = add_parts(low, high);
                let out = out.add(r * stride);
                _mm_storeu_ps(out, _mm512_castps512_ps128(sums));
                _mm_storeu_ps(out.add(stride), _mm512_extractf32x4_ps::<1>(sums));
                _mm_storeu_ps(out.add(2 * stride), _mm512_extractf32x4_ps::<2>(sums));
                if R - r > 3 {
                    _mm_storeu_ps(out.add(3 * stride), _mm512_extractf32x4_ps::<3>(sums));
                }
                r += 4.min(R - r);
            }
            while r < R {
                let parts = quad(v[r]);
                let parts = add_parts(parts, parts);
                let sums = _mm512_castps512_ps128(add_parts(parts, parts));
                _mm_storeu_ps(out.add(r * stride), sums);
                r += 1;
            }
        }
    }
    #[inline(always)]
    unsafe fn all_below(v: __m512, bound: f32) -> bool {
        // SAFETY: see the impl.
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(v), _mm512_set1_ps(bound)) == !0 }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u8, v: __m512) {
        // SAFETY: see the impl.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u8, v: __m512) {
        // SAFETY: see the impl.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let upper = _mm512_srli_epi32::<16>(bits);
            let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
            let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let words = _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(p.cast(), words);
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe { e4m3(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(p.cast::<i16>().read_unaligned())) }
    }
    #[inline(always)]
    unsafe fn lookup(p: *const u8, high: bool, table: &[f32; 16]) -> __m512 {
        // SAFETY: see the impl. Only the lower 4 bits of an index count.
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let codes = if high { _mm512_srli_epi32::<4>(codes) } else { codes };
            _mm512_permutexvar_ps(codes, _mm512_loadu_ps(table.as_ptr()))
        }
    }
    #[inline(always)]
    unsafe fn masked(bits: u32, v: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_maskz_mov_ps(bits as __mmask16, v) }
    }
    #[inline(always)]
    unsafe fn half_f32(p: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_zextps256_ps512(_mm256_loadu_ps(p.cast())) }
    }
    #[inline(always)]
    unsafe fn half_f16(p: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_zextps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn half_bf16(p: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let bits = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())));
            _mm512_zextps256_ps512(_mm256_castsi256_ps(bits))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}
