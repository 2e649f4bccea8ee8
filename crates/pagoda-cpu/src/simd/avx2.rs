//! Eight lanes of AVX2, FMA and F16C.

use std::arch::x86_64::*;

use super::Simd;
use crate::kernel::ALIGN;

/// AVX2, FMA and F16C.
pub(crate) struct Avx2;

/// `2^n` for integers `n` in -126..=127.
#[inline(always)]
unsafe fn power(n: __m256i) -> __m256 {
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127)))) }
}

/// Eight E4M3 numbers, times 2^-8: the bit of a code above those of binary16's exponent is not one of it, and adding to NaN's
/// carries into that.
#[inline(always)]
pub(super) unsafe fn e4m3(codes: __m128i) -> __m256 {
    // SAFETY: the caller has AVX2 and F16C.
    unsafe {
        let code = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(codes));
        let half = _mm_and_si128(code, _mm_set1_epi16(!0x4000));
        let carried = _mm_add_epi16(half, _mm_set1_epi16(0x80));
        let nan = _mm_and_si128(carried, _mm_set1_epi16(0x4000));
        _mm256_cvtph_ps(_mm_or_si128(half, nan))
    }
}

// SAFETY (of every block): callers of `Simd` have AVX2, and pointers good for as many elements as the name says.
impl Simd for Avx2 {
    const LANES: usize = 8;
    const REGISTERS: usize = 16;
    const ROWS: usize = 4;
    type V = __m256;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        // SAFETY: see the impl.
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(v: __m256) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v) }
    }
    #[inline(always)]
    unsafe fn scale(v: __m256, n: __m256) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_mul_ps(v, power(_mm256_cvtps_epi32(n))) }
    }
    #[inline(always)]
    unsafe fn swap<const H: usize>(v: __m256) -> __m256 {
        // SAFETY: see the impl.
        unsafe {
            match H {
                1 => _mm256_permute_ps::<0b10_11_00_01>(v),
                2 => _mm256_permute_ps::<0b01_00_11_10>(v),
                4 => _mm256_permute2f128_ps::<1>(v, v),
                _ => unreachable!("no such lanes"),
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose(v: &mut [__m256; ALIGN]) {
        // SAFETY: see the impl.
        unsafe {
            // In every 128 bits, four numbers of one column.
            for rows in v[..8].as_chunks_mut::<4>().0 {
                let [a, b, c, d] = *rows;
                let wide = |v| _mm256_castps_pd(v);
                let (ab, cd) = (wide(_mm256_unpacklo_ps(a, b)), wide(_mm256_unpacklo_ps(c, d)));
                let (ef, gh) = (wide(_mm256_unpackhi_ps(a, b)), wide(_mm256_unpackhi_ps(c, d)));
                *rows = [
                    _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)),
                    _mm256_castpd_ps(_mm256_unpacklo_pd(ef, gh)),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(ef, gh)),
                ];
            }
            for i in 0..4 {
                let (a, b) = (v[i], v[i + 4]);
                v[i] = _mm256_permute2f128_ps::<0x20>(a, b);
                v[i + 4] = _mm256_permute2f128_ps::<0x31>(a, b);
            }
        }
    }
    #[inline(always)]
    unsafe fn max_quad(v: [__m256; 4], out: *mut f32) {
        // SAFETY: see the impl.
        unsafe {
            let mut halves = [_mm_setzero_ps(); 4];
            for i in 0..4 {
                halves[i] = _mm_max_ps(_mm256_castps256_ps128(v[i]), _mm256_extractf128_ps::<1>(v[i]));
            }
            let [a, b, c, d] = halves;
            let ab = _mm_max_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
            let cd = _mm_max_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
            _mm_storeu_ps(out, _mm_max_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
        }
    }
    #[inline(always)]
    unsafe fn sum_quads<const R: usize>(v: [[__m256; 4]; R], out: *mut f32, stride: usize) {
        for (r, row) in v.iter().enumerate() {
            // SAFETY: see the impl.
            unsafe {
                let parts = _mm256_hadd_ps(_mm256_hadd_ps(row[0], row[1]), _mm256_hadd_ps(row[2], row[3]));
                let sums = _mm_add_ps(_mm256_castps256_ps128(parts), _mm256_extractf128_ps::<1>(parts));
                _mm_storeu_ps(out.add(r * stride), sums);
            }
        }
    }
    #[inline(always)]
    unsafe fn all_below(v: __m256, bound: f32) -> bool {
        // SAFETY: see the impl.
        unsafe {
            let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), v);
            _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(magnitude, _mm256_set1_ps(bound))) == 0xff
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m256 {
        // SAFETY: see the impl.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u8, v: __m256) {
        // SAFETY: see the impl.
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u8, v: __m256) {
        // SAFETY: see the impl.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let upper = _mm256_srli_epi32::<16>(bits);
            let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
            let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let wide = _mm256_blendv_epi8(rounded, quiet, nan);
            let words = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256::<1>(wide));
            _mm_storeu_si128(p.cast(), words);
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m256 {
        // SAFETY: see the impl.
        unsafe { e4m3(_mm_loadl_epi64(p.cast())) }
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> __m256 {
        // SAFETY: see the impl.
        unsafe { _mm256_cvtph_ps(_mm_set1_epi16(p.cast::<i16>().read_unaligned())) }
    }
    #[inline(always)]
    unsafe fn lookup(p: *const u8, high: bool, table: &[f32; 16]) -> __m256 {
        // SAFETY: see the impl. Only the lower 3 bits of an index count; the fourth chooses the half of the table.
        unsafe {
            let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let codes = if high { _mm256_srli_epi32::<4>(codes) } else { codes };
            let low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr()), codes);
            let upper = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr().add(8)), codes);
            _mm256_blendv_ps(low, upper, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes)))
        }
    }
    #[inline(always)]
    unsafe fn masked(bits: u32, v: __m256) -> __m256 {
        // SAFETY: see the impl.
        unsafe {
            let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits as i32), lane), lane);
            _mm256_and_ps(_mm256_castsi256_ps(set), v)
        }
    }
    #[inline(always)]
    unsafe fn half_f32(_: *const u8) -> __m256 {
        unreachable!("rows are whole vectors")
    }
    #[inline(always)]
    unsafe fn half_f16(_: *const u8) -> __m256 {
        unreachable!("rows are whole vectors")
    }
    #[inline(always)]
    unsafe fn half_bf16(_: *const u8) -> __m256 {
        unreachable!("rows are whole vectors")
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}
