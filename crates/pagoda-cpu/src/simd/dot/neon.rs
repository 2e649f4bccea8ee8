//! Byte products of arm64 (FEAT_DotProd). Both factors are signed.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{COLUMNS, Cache, Dot, LANES, column};
use crate::simd::Simd;
use crate::simd::neon::Neon;

/// Advanced SIMD with dot products.
pub(crate) struct NeonDot;

/// Four vectors, from an expression in `i`, without closures: those that are not inlined pass vectors through memory.
macro_rules! four {
    (|$i:ident| $value:expr) => {
        [
            {
                const $i: usize = 0;
                $value
            },
            {
                const $i: usize = 1;
                $value
            },
            {
                const $i: usize = 2;
                $value
            },
            {
                const $i: usize = 3;
                $value
            },
        ]
    };
}

/// Adds four products of signed bytes to each word.
#[inline(always)]
unsafe fn sdot(sum: int32x4_t, a: int32x4_t, b: int32x4_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: the caller has FEAT_DotProd.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// In word `i` of vector `j`, word `j` of vector `i`.
#[inline(always)]
unsafe fn transpose([a, b, c, d]: [int32x4_t; 4]) -> [int32x4_t; 4] {
    // SAFETY: the caller has NEON.
    unsafe {
        let wide = |v| vreinterpretq_s64_s32(v);
        let (ab, cd) = (wide(vtrn1q_s32(a, b)), wide(vtrn1q_s32(c, d)));
        let (ef, gh) = (wide(vtrn2q_s32(a, b)), wide(vtrn2q_s32(c, d)));
        [
            vreinterpretq_s32_s64(vtrn1q_s64(ab, cd)),
            vreinterpretq_s32_s64(vtrn1q_s64(ef, gh)),
            vreinterpretq_s32_s64(vtrn2q_s64(ab, cd)),
            vreinterpretq_s32_s64(vtrn2q_s64(ef, gh)),
        ]
    }
}

/// 16 bytes.
#[inline(always)]
unsafe fn load(p: *const u8) -> int32x4_t {
    // SAFETY: as the caller promises.
    unsafe { vreinterpretq_s32_u8(vld1q_u8(p)) }
}

/// Of 16 rows of 16 bytes, word `i` of row `t` in word `t` of vector `i`.
#[inline(always)]
unsafe fn columns(rows: *const u8, stride: usize) -> [[int32x4_t; 4]; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        let parts = four!(|I| transpose([
            load(rows.wrapping_add(4 * I * stride)),
            load(rows.wrapping_add((4 * I + 1) * stride)),
            load(rows.wrapping_add((4 * I + 2) * stride)),
            load(rows.wrapping_add((4 * I + 3) * stride)),
        ]));
        four!(|I| [parts[0][I], parts[1][I], parts[2][I], parts[3][I]])
    }
}

/// Of 4 rows of 16 bytes, byte `i` of row `r` in byte `r` of word `i`.
#[inline(always)]
unsafe fn words(rows: *const u8, stride: usize) -> [int32x4_t; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        let row = |r: usize| vld1q_u8(rows.wrapping_add(r * stride));
        let (a, b, c, d) = (row(0), row(1), row(2), row(3));
        let wide = |v| vreinterpretq_u16_u8(v);
        let (ab, cd) = (wide(vzip1q_u8(a, b)), wide(vzip1q_u8(c, d)));
        let (ef, gh) = (wide(vzip2q_u8(a, b)), wide(vzip2q_u8(c, d)));
        [
            vreinterpretq_s32_u16(vzip1q_u16(ab, cd)),
            vreinterpretq_s32_u16(vzip2q_u16(ab, cd)),
            vreinterpretq_s32_u16(vzip1q_u16(ef, gh)),
            vreinterpretq_s32_u16(vzip2q_u16(ef, gh)),
        ]
    }
}

/// The lower (half 0) or the upper nibbles of bytes.
#[inline(always)]
unsafe fn nibbles(v: int32x4_t, half: usize) -> int32x4_t {
    // SAFETY: the caller has NEON.
    unsafe {
        let v = vreinterpretq_u8_s32(v);
        let v = if half == 0 { vandq_u8(v, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(v) };
        vreinterpretq_s32_u8(v)
    }
}

/// Adds 16 where one of the bits of `mask` is set in the bytes `order` of `bits`.
#[inline(always)]
unsafe fn add_16(codes: int32x4_t, bits: uint8x16_t, order: uint8x16_t, mask: uint8x16_t) -> int32x4_t {
    // SAFETY: the caller has NEON.
    unsafe {
        let set = vtstq_u8(vqtbl1q_u8(bits, order), mask);
        let set = vandq_u8(set, vdupq_n_u8(16));
        vreinterpretq_s32_u8(vorrq_u8(vreinterpretq_u8_s32(codes), set))
    }
}

/// The larger, unsigned.
#[inline(always)]
unsafe fn larger(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    // SAFETY: the caller has NEON.
    unsafe { vreinterpretq_s32_u32(vmaxq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b))) }
}

/// The larger of neighbours, unsigned.
#[inline(always)]
unsafe fn larger_pairs(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    // SAFETY: the caller has NEON.
    unsafe { vreinterpretq_s32_u32(vpmaxq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b))) }
}

/// Reduces vectors to a number each: of `v[i][j]` at `4 * i + j`.
macro_rules! reduce {
    ($v:expr, $with:ident, $with_neighbours:ident) => {{
        let mut all = [0; LANES];
        for (all, v) in all.chunks_exact_mut(4).zip($v) {
            let [a, b, c, d] = four!(|I| $with($with(v[I][0], v[I][1]), $with(v[I][2], v[I][3])));
            vst1q_s32(all.as_mut_ptr(), $with_neighbours($with_neighbours(a, b), $with_neighbours(c, d)));
        }
        all
    }};
}

// SAFETY (of every block): callers of `Dot` have FEAT_DotProd, and pointers good for as much as the name says.
impl Dot for NeonDot {
    type Words = [int32x4_t; 4];
    type Floats = [float32x4_t; 4];
    const ROWS: usize = 2;
    const MANY_REGISTERS: bool = false;
    const ZERO: i32 = 0;
    const SHORTS: bool = false;

    #[inline(always)]
    unsafe fn integers(x: i32) -> [int32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe { [vdupq_n_s32(x); 4] }
    }
    #[inline(always)]
    unsafe fn floats(x: f32) -> [float32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [float32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe { four!(|I| vld1q_f32(p.add(4 * I))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: [float32x4_t; 4]) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: see the impl.
            unsafe { vst1q_f32(p.add(4 * i), v) };
        }
    }
    #[inline(always)]
    unsafe fn mul(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe { four!(|I| vmulq_f32(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn fma(a: [float32x4_t; 4], b: [float32x4_t; 4], c: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe { four!(|I| vfmaq_f32(c[I], a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn masked(bits: u16, v: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe {
            let lanes = vld1q_u32([1, 2, 4, 8].as_ptr());
            four!(|I| {
                let set = vtstq_u32(vdupq_n_u32(u32::from(bits) >> (4 * I)), lanes);
                vreinterpretq_f32_u32(vandq_u32(set, vreinterpretq_u32_f32(v[I])))
            })
        }
    }
    #[inline(always)]
    unsafe fn magnitudes(v: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe { four!(|I| vabsq_f32(v[I])) }
    }
    #[inline(always)]
    unsafe fn to_floats(v: [int32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe { four!(|I| vcvtq_f32_s32(v[I])) }
    }
    #[inline(always)]
    unsafe fn to_integers(v: [float32x4_t; 4]) -> [int32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe { four!(|I| vcvtnq_s32_f32(v[I])) }
    }
    #[inline(always)]
    unsafe fn larger(a: [int32x4_t; 4], b: [float32x4_t; 4]) -> [int32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe { four!(|I| larger(a[I], vreinterpretq_s32_f32(b[I]))) }
    }
    #[inline(always)]
    unsafe fn sums(v: [[[int32x4_t; 4]; 4]; 4]) -> [i32; LANES] {
        // SAFETY: see the impl.
        unsafe { reduce!(v, vaddq_s32, vpaddq_s32) }
    }
    #[inline(always)]
    unsafe fn largest(v: [[[int32x4_t; 4]; 4]; 4]) -> [i32; LANES] {
        // SAFETY: see the impl.
        unsafe { reduce!(v, larger, larger_pairs) }
    }
    #[inline(always)]
    unsafe fn pack(
        numbers: [[int32x4_t; 4]; 4],
        bytes: usize,
        words: &mut [[i32; LANES]; 2],
    ) -> [int32x4_t; 4] {
        for (i, [a, b, c, d]) in numbers.into_iter().enumerate() {
            // SAFETY: see the impl.
            unsafe {
                let short = |v| vreinterpretq_s16_s32(v);
                let (a, b) = (vuzp1q_s16(short(a), short(b)), vuzp1q_s16(short(c), short(d)));
                let byte = |v| vreinterpretq_s8_s16(v);
                let low = vreinterpretq_s32_s8(vuzp1q_s8(byte(a), byte(b)));
                if bytes == 1 {
                    vst1q_s32(words[0].as_mut_ptr().add(4 * i), low);
                    continue;
                }
                let half = vdupq_n_s16(128);
                let (a, b) = (vaddq_s16(a, half), vaddq_s16(b, half));
                let high = vreinterpretq_s32_s8(vuzp2q_s8(byte(a), byte(b)));
                vst1q_s32(words[0].as_mut_ptr().add(4 * i), high);
                vst1q_s32(words[1].as_mut_ptr().add(4 * i), low);
            }
        }
        let [a, b, c, d] = numbers;
        // SAFETY: see the impl.
        unsafe { four!(|I| vaddq_s32(vaddq_s32(a[I], b[I]), vaddq_s32(c[I], d[I]))) }
    }

    /// Products with high bytes, or the only ones, and with low bytes.
    #[inline(always)]
    unsafe fn begin(start: i32, bytes: usize) -> [[int32x4_t; 4]; 2] {
        // SAFETY: see the impl.
        unsafe {
            let (start, zeros) = ([vdupq_n_s32(start); 4], [vdupq_n_s32(0); 4]);
            if bytes == 1 { [start, zeros] } else { [zeros, start] }
        }
    }
    #[inline(always)]
    unsafe fn add_products(
        [high, low]: [[int32x4_t; 4]; 2],
        codes: [int32x4_t; 4],
        words: [i32; 2],
        bytes: usize,
    ) -> [[int32x4_t; 4]; 2] {
        // SAFETY: see the impl.
        unsafe {
            let word = vdupq_n_s32(words[0]);
            let high = four!(|I| sdot(high[I], codes[I], word));
            if bytes == 1 {
                return [high, low];
            }
            let word = vdupq_n_s32(words[1]);
            [high, four!(|I| sdot(low[I], codes[I], word))]
        }
    }
    #[inline(always)]
    unsafe fn settle(sums: [[int32x4_t; 4]; 2], _: usize) -> [[int32x4_t; 4]; 2] {
        sums
    }
    #[inline(always)]
    unsafe fn total([high, low]: [[int32x4_t; 4]; 2], bytes: usize) -> [int32x4_t; 4] {
        if bytes == 1 {
            return high;
        }
        // SAFETY: see the impl.
        unsafe { four!(|I| vaddq_s32(vshlq_n_s32::<8>(high[I]), low[I])) }
    }

    #[inline(always)]
    unsafe fn byte_columns(rows: *const u8, stride: usize) -> [[int32x4_t; 4]; COLUMNS] {
        // SAFETY: see the impl.
        unsafe {
            let (a, b) = (columns(rows, stride), columns(rows.wrapping_add(16), stride));
            [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
        }
    }
    #[inline(always)]
    unsafe fn nibble_columns(rows: *const u8, stride: usize) -> [[int32x4_t; 4]; COLUMNS] {
        // SAFETY: see the impl.
        unsafe {
            let v = columns(rows, stride);
            let mut all = [[vdupq_n_s32(0); 4]; COLUMNS];
            for i in 0..COLUMNS {
                all[i] = four!(|I| nibbles(v[i % 4][I], i / 4));
            }
            all
        }
    }
    #[inline(always)]
    unsafe fn byte_words(rows: *const u8, stride: usize, half: usize) -> [int32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe { words(rows.wrapping_add(16 * half), stride) }
    }
    #[inline(always)]
    unsafe fn nibble_words(rows: *const u8, stride: usize, half: usize) -> [int32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe {
            let v = words(rows, stride);
            four!(|I| nibbles(v[I], half))
        }
    }
    #[inline(always)]
    unsafe fn fifth_columns(
        mut columns: [[int32x4_t; 4]; COLUMNS],
        bits: *const u8,
        stride: usize,
    ) -> [[int32x4_t; 4]; COLUMNS] {
        // SAFETY: see the impl.
        unsafe {
            let row = |t: usize| bits.wrapping_add(t * stride).cast::<u32>().read_unaligned();
            let first = vld1q_u8([0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12].as_ptr());
            let masks = [0x0804_0201, 0x8040_2010].map(|mask| vreinterpretq_u8_u32(vdupq_n_u32(mask)));
            for t in 0..4 {
                let bits = [row(4 * t), row(4 * t + 1), row(4 * t + 2), row(4 * t + 3)];
                let bits = vreinterpretq_u8_u32(vld1q_u32(bits.as_ptr()));
                for (j, column) in columns.iter_mut().enumerate() {
                    let order = vaddq_u8(first, vdupq_n_u8(j as u8 / 2));
                    column[t] = add_16(column[t], bits, order, masks[j % 2]);
                }
            }
            columns
        }
    }
    #[inline(always)]
    unsafe fn fifth_words(
        words: [int32x4_t; 4],
        bits: *const u8,
        stride: usize,
        half: usize,
    ) -> [int32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe {
            let row = |r: usize| bits.wrapping_add(r * stride).cast::<u32>().read_unaligned();
            let bits = [row(0), row(1), row(2), row(3)];
            let bits = vreinterpretq_u8_u32(vld1q_u32(bits.as_ptr()));
            // Byte 0 or 1 of the half of each row.
            let first = vreinterpretq_u8_u32(vdupq_n_u32(0x0c08_0400));
            let masks = [[1, 2, 4, 8], [16, 32, 64, 128]].map(|bits: [u32; 4]| {
                vreinterpretq_u8_u32(vld1q_u32(bits.map(|bit| bit * 0x0101_0101).as_ptr()))
            });
            four!(|I| add_16(
                words[I],
                bits,
                vaddq_u8(first, vdupq_n_u8((2 * half + I / 2) as u8)),
                masks[I % 2]
            ))
        }
    }
    #[inline(always)]
    unsafe fn in_order(v: [int32x4_t; 4]) -> [int32x4_t; 4] {
        v
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], v: [int32x4_t; 4]) -> [int32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe {
            let table = vld1q_u8(table.as_ptr());
            four!(|I| vreinterpretq_s32_u8(vqtbl1q_u8(table, vreinterpretq_u8_s32(v[I]))))
        }
    }
    #[inline(always)]
    unsafe fn f16_scales(scales: *const u8, stride: usize, step: usize) -> [float32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe {
            let row = |t: usize| scales.wrapping_add(t * stride + 2 * step).cast::<u16>().read_unaligned();
            four!(|I| {
                let bits = [row(4 * I), row(4 * I + 1), row(4 * I + 2), row(4 * I + 3)];
                vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(bits.as_ptr())))
            })
        }
    }
    #[inline(always)]
    unsafe fn half_e8m0_scales(scales: *const u8, stride: usize, step: usize) -> [float32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe {
            let row = |t: usize| 0.5 * crate::codec::e8m0(*scales.wrapping_add(t * stride + step));
            four!(|I| {
                let values = [row(4 * I), row(4 * I + 1), row(4 * I + 2), row(4 * I + 3)];
                vld1q_f32(values.as_ptr())
            })
        }
    }

    #[inline(always)]
    unsafe fn half_e4m3_scales(scales: *const u8, stride: usize, index: usize) -> [float32x4_t; 4] {
        // SAFETY: see the impl.
        unsafe {
            let codes = column(scales, stride, index);
            four!(|I| vmulq_n_f32(Neon::load_e4m3(codes.as_ptr().add(4 * I)), 128.0))
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8, to: Cache) {
        // SAFETY: a prefetch never faults.
        unsafe {
            match to {
                Cache::L1 => {
                    asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
                }
                Cache::L2 => {
                    asm!("prfm pldl2keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
                }
            }
        }
    }
}
