//! Eight lanes of portable Rust.

use std::array::from_fn;

use super::Simd;
use crate::codec::e4m3;
use crate::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::kernel::ALIGN;

/// Portable Rust.
pub(crate) struct Scalar;

type V = [f32; 8];

/// Pairs, then pairs of pairs.
#[inline(always)]
fn reduce(v: V, f: impl Fn(f32, f32) -> f32) -> f32 {
    f(f(f(v[0], v[1]), f(v[2], v[3])), f(f(v[4], v[5]), f(v[6], v[7])))
}

#[inline(always)]
fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

impl Simd for Scalar {
    const LANES: usize = 8;
    const REGISTERS: usize = 16;
    const ROWS: usize = 4;
    type V = V;

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> V {
        // SAFETY: the caller has 8 elements at `p`.
        unsafe { p.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: V) {
        // SAFETY: the caller has 8 elements at `p`.
        unsafe { p.cast::<V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        from_fn(|i| greater(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn round(v: V) -> V {
        v.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn scale(v: V, n: V) -> V {
        from_fn(|i| v[i] * f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn swap<const H: usize>(v: V) -> V {
        from_fn(|i| v[i ^ H])
    }
    #[inline(always)]
    unsafe fn transpose(v: &mut [V; ALIGN]) {
        let rows = *v;
        for (j, column) in v[..8].iter_mut().enumerate() {
            *column = from_fn(|i| rows[i][j]);
        }
    }
    #[inline(always)]
    unsafe fn max_quad(v: [V; 4], out: *mut f32) {
        let all = v.map(|v| reduce(v, greater));
        // SAFETY: the caller has room for 4 elements.
        unsafe { out.cast::<[f32; 4]>().write_unaligned(all) };
    }
    #[inline(always)]
    unsafe fn sum_quads<const R: usize>(v: [[V; 4]; R], out: *mut f32, stride: usize) {
        for (r, row) in v.into_iter().enumerate() {
            let sums = row.map(|v| reduce(v, |a, b| a + b));
            // SAFETY: the caller has room for 4 elements at each multiple of `stride`.
            unsafe { out.add(r * stride).cast::<[f32; 4]>().write_unaligned(sums) };
        }
    }
    #[inline(always)]
    unsafe fn all_below(v: V, bound: f32) -> bool {
        v.iter().all(|x| x.abs() < bound)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> V {
        // SAFETY: the caller has 8 elements at `p`.
        unsafe { p.cast::<[u16; 8]>().read_unaligned() }.map(f16_to_f32)
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> V {
        // SAFETY: the caller has 8 elements at `p`.
        unsafe { p.cast::<[u16; 8]>().read_unaligned() }.map(bf16_to_f32)
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u8, v: V) {
        // SAFETY: the caller has 8 elements at `p`.
        unsafe { p.cast::<[u16; 8]>().write_unaligned(v.map(f32_to_f16)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u8, v: V) {
        // SAFETY: the caller has 8 elements at `p`.
        unsafe { p.cast::<[u16; 8]>().write_unaligned(v.map(f32_to_bf16)) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> V {
        // SAFETY: the caller has 8 elements at `p`.
        unsafe { p.cast::<[i8; 8]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> V {
        // SAFETY: the caller has 8 elements at `p`.
        unsafe { p.cast::<[u8; 8]>().read_unaligned() }.map(|code| e4m3(code) / 256.0)
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> V {
        // SAFETY: the caller has an element at `p`.
        [f16_to_f32(unsafe { p.cast::<u16>().read_unaligned() }); 8]
    }
    #[inline(always)]
    unsafe fn lookup(p: *const u8, high: bool, table: &[f32; 16]) -> V {
        let shift = if high { 4 } else { 0 };
        // SAFETY: the caller has 8 bytes at `p`.
        let codes = unsafe { p.cast::<[u8; 8]>().read_unaligned() };
        codes.map(|code| table[usize::from(code >> shift & 15)])
    }
    #[inline(always)]
    unsafe fn masked(bits: u32, v: V) -> V {
        from_fn(|i| if bits >> i & 1 == 1 { v[i] } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn half_f32(_: *const u8) -> V {
        unreachable!("rows are whole vectors")
    }
    #[inline(always)]
    unsafe fn half_f16(_: *const u8) -> V {
        unreachable!("rows are whole vectors")
    }
    #[inline(always)]
    unsafe fn half_bf16(_: *const u8) -> V {
        unreachable!("rows are whole vectors")
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}
