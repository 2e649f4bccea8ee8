//! One vector type per instruction set behind one small trait, and the table of kernels compiled for each. The kernels are
//! written once, generic over [`Simd`] and always inlined.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod bf16;
pub(crate) mod dot;
#[cfg(target_arch = "x86_64")]
mod e4m3;
mod isa;
pub(crate) mod kernels;
#[cfg(target_arch = "aarch64")]
mod neon;
pub(crate) mod scalar;

use crate::kernel::ALIGN;

pub use isa::Isa;
pub(crate) use isa::asks_in_order;
pub(crate) use kernels::{Kernels, Many, RowKernels};

/// A vector of f32 lanes. Every method may only run on a CPU that has the instruction set.
pub(crate) trait Simd {
    /// Lanes of a vector: 4, 8 or 16.
    const LANES: usize;
    /// Vectors that are in registers at once: 16 or 32.
    const REGISTERS: usize;
    /// The most query rows that share one conversion of a K or V vector in registers: 4 or 6.
    const ROWS: usize;
    /// The vector.
    type V: Copy;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` if either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` if either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// Nearest integers, ties to even.
    unsafe fn round(v: Self::V) -> Self::V;
    /// `v * 2^n` for integers `n` in -64..=8.
    unsafe fn scale(v: Self::V, n: Self::V) -> Self::V;
    /// Swaps lanes whose numbers differ in `H` alone, 1 to half of the lanes.
    unsafe fn swap<const H: usize>(v: Self::V) -> Self::V;
    /// Transposes `LANES` vectors: lane `i` of vector `j` goes to lane `j` of vector `i`. Vectors after these are left alone.
    unsafe fn transpose(v: &mut [Self::V; ALIGN]);
    /// Writes the largest lanes of four vectors.
    unsafe fn max_quad(v: [Self::V; 4], out: *mut f32);
    /// Writes the lane sums of `v[r][0..4]` to `out + r * stride`, added in an order that does not depend on `R`.
    unsafe fn sum_quads<const R: usize>(v: [[Self::V; 4]; R], out: *mut f32, stride: usize);
    /// Whether every lane has a magnitude below `bound`.
    unsafe fn all_below(v: Self::V, bound: f32) -> bool;

    unsafe fn load_f16(p: *const u8) -> Self::V;
    unsafe fn load_bf16(p: *const u8) -> Self::V;
    /// Rounds to nearest even.
    unsafe fn store_f16(p: *mut u8, v: Self::V);
    /// Rounds to nearest even.
    unsafe fn store_bf16(p: *mut u8, v: Self::V);

    /// 8-bit integers.
    unsafe fn load_i8(p: *const u8) -> Self::V;
    /// E4M3, times 2^-8: as binary16 with the same bits of exponent, whose bias is 15 where that of E4M3 is 7.
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    /// One binary16, in all lanes.
    unsafe fn splat_f16(p: *const u8) -> Self::V;
    /// The lower (or `high`) nibble of each of LANES bytes, as an entry of a table.
    unsafe fn lookup(p: *const u8, high: bool, table: &[f32; 16]) -> Self::V;
    /// Lane `i` where bit `i` is set, else 0.
    unsafe fn masked(bits: u32, v: Self::V) -> Self::V;

    /// Loads 8 elements where a vector has 16 lanes; the other lanes are zero.
    unsafe fn half_f32(p: *const u8) -> Self::V;
    unsafe fn half_f16(p: *const u8) -> Self::V;
    unsafe fn half_bf16(p: *const u8) -> Self::V;

    /// Prefetches the cache line of `p`, which need not be mapped; on x86 into L2, because L1 cannot have enough misses under
    /// way to keep memory busy.
    unsafe fn prefetch(p: *const u8);
}
