//! Four lanes of arm64 Advanced SIMD.

use std::arch::aarch64::*;

use super::Simd;
use crate::kernel::ALIGN;

/// Advanced SIMD.
pub(crate) struct Neon;

/// `2^n` for integers `n` in -126..=127.
#[inline(always)]
unsafe fn power(n: int32x4_t) -> float32x4_t {
    // SAFETY: the caller has NEON.
    unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)))) }
}

// SAFETY (of every block): callers of `Simd` have NEON, and pointers good for as many elements as the name says.
impl Simd for Neon {
    const LANES: usize = 4;
    const REGISTERS: usize = 32;
    const ROWS: usize = 4;
    type V = float32x4_t;

    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vld1q_f32(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: float32x4_t) {
        // SAFETY: see the impl.
        unsafe { vst1q_f32(p, v) }
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn round(v: float32x4_t) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vrndnq_f32(v) }
    }
    #[inline(always)]
    unsafe fn scale(v: float32x4_t, n: float32x4_t) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vmulq_f32(v, power(vcvtq_s32_f32(n))) }
    }
    #[inline(always)]
    unsafe fn swap<const H: usize>(v: float32x4_t) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe {
            match H {
                1 => vrev64q_f32(v),
                2 => vextq_f32::<2>(v, v),
                _ => unreachable!("no such lanes"),
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose(v: &mut [float32x4_t; ALIGN]) {
        // SAFETY: see the impl.
        unsafe {
            let wide = |v| vreinterpretq_f64_f32(v);
            let (ab, cd) = (wide(vtrn1q_f32(v[0], v[1])), wide(vtrn1q_f32(v[2], v[3])));
            let (ef, gh) = (wide(vtrn2q_f32(v[0], v[1])), wide(vtrn2q_f32(v[2], v[3])));
            v[0] = vreinterpretq_f32_f64(vtrn1q_f64(ab, cd));
            v[1] = vreinterpretq_f32_f64(vtrn1q_f64(ef, gh));
            v[2] = vreinterpretq_f32_f64(vtrn2q_f64(ab, cd));
            v[3] = vreinterpretq_f32_f64(vtrn2q_f64(ef, gh));
        }
    }
    #[inline(always)]
    unsafe fn max_quad(v: [float32x4_t; 4], out: *mut f32) {
        // SAFETY: see the impl.
        unsafe { vst1q_f32(out, vpmaxq_f32(vpmaxq_f32(v[0], v[1]), vpmaxq_f32(v[2], v[3]))) }
    }
    #[inline(always)]
    unsafe fn sum_quads<const R: usize>(v: [[float32x4_t; 4]; R], out: *mut f32, stride: usize) {
        for (r, row) in v.iter().enumerate() {
            // SAFETY: see the impl.
            unsafe {
                vst1q_f32(
                    out.add(r * stride),
                    vpaddq_f32(vpaddq_f32(row[0], row[1]), vpaddq_f32(row[2], row[3])),
                );
            }
        }
    }
    #[inline(always)]
    unsafe fn all_below(v: float32x4_t, bound: f32) -> bool {
        // SAFETY: see the impl.
        unsafe { vminvq_u32(vcltq_f32(vabsq_f32(v), vdupq_n_f32(bound))) != 0 }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u8, v: float32x4_t) {
        // SAFETY: see the impl.
        unsafe { vst1_u16(p.cast(), vreinterpret_u16_f16(vcvt_f16_f32(v))) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u8, v: float32x4_t) {
        // SAFETY: see the impl.
        unsafe {
            let bits = vreinterpretq_u32_f32(v);
            let upper = vshrq_n_u32::<16>(bits);
            let bias = vaddq_u32(vandq_u32(upper, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
            let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, bias));
            let quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
            vst1_u16(p.cast(), vmovn_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet)));
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe {
            let bytes = vreinterpret_s8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe {
            let bytes = vreinterpret_s8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
            let code = vshl_n_s16::<7>(vget_low_s16(vmovl_s8(bytes)));
            let half = vand_s16(code, vdup_n_s16(!0x4000));
            let nan = vand_s16(vadd_s16(half, vdup_n_s16(0x80)), vdup_n_s16(0x4000));
            vcvt_f32_f16(vreinterpret_f16_s16(vorr_s16(half, nan)))
        }
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(p.cast::<u16>().read_unaligned()))) }
    }
    #[inline(always)]
    unsafe fn lookup(p: *const u8, high: bool, table: &[f32; 16]) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe {
            let codes = p.cast::<[u8; 4]>().read_unaligned();
            let shift = if high { 4 } else { 0 };
            vld1q_f32(codes.map(|code| table[usize::from(code >> shift & 15)]).as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn masked(bits: u32, v: float32x4_t) -> float32x4_t {
        // SAFETY: see the impl.
        unsafe {
            let set = vtstq_u32(vdupq_n_u32(bits), vld1q_u32([1, 2, 4, 8].as_ptr()));
            vreinterpretq_f32_u32(vandq_u32(set, vreinterpretq_u32_f32(v)))
        }
    }
    #[inline(always)]
    unsafe fn half_f32(_: *const u8) -> float32x4_t {
        unreachable!("rows are whole vectors")
    }
    #[inline(always)]
    unsafe fn half_f16(_: *const u8) -> float32x4_t {
        unreachable!("rows are whole vectors")
    }
    #[inline(always)]
    unsafe fn half_bf16(_: *const u8) -> float32x4_t {
        unreachable!("rows are whole vectors")
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
        }
    }
}
