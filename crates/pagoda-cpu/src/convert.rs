//! Elements: how f32, f16 and bf16 become each other. Conversions round to nearest even; an f16 is never infinite.

use crate::simd::Simd;

/// The largest finite f16. Larger magnitudes, infinities included, are stored as this.
pub const F16_MAX: f32 = 65504.0;

/// An element format, as a type.
pub(crate) trait Format {
    /// Bytes of an element.
    const BYTES: usize;
    /// Magnitudes below this are stored without overflow.
    const BOUND: f32;
    /// Loads a vector.
    unsafe fn load<S: Simd>(p: *const u8) -> S::V;
    /// Loads 8 elements where a vector has 16 lanes.
    unsafe fn half<S: Simd>(p: *const u8) -> S::V;
    /// Stores a vector.
    unsafe fn store<S: Simd>(p: *mut u8, v: S::V);
}

/// IEEE binary32.
pub(crate) struct F32;
/// IEEE binary16.
pub(crate) struct F16;
/// The upper half of a binary32.
pub(crate) struct Bf16;

impl Format for F32 {
    const BYTES: usize = 4;
    const BOUND: f32 = f32::INFINITY;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { S::load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn half<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { S::half_f32(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut u8, v: S::V) {
        // SAFETY: as the caller promises.
        unsafe { S::store(p.cast(), v) }
    }
}

impl Format for F16 {
    const BYTES: usize = 2;
    const BOUND: f32 = 65520.0;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { S::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn half<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { S::half_f16(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut u8, v: S::V) {
        // SAFETY: as the caller promises. `max` and `min` return their second argument if it is NaN.
        unsafe { S::store_f16(p, S::min(S::splat(F16_MAX), S::max(S::splat(-F16_MAX), v))) }
    }
}

impl Format for Bf16 {
    const BYTES: usize = 2;
    const BOUND: f32 = f32::from_bits(0x7f7f_8000);
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { S::load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn half<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { S::half_bf16(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut u8, v: S::V) {
        // SAFETY: as the caller promises.
        unsafe { S::store_bf16(p, v) }
    }
}

/// See [`Convert`](crate::simd::Convert).
#[inline(always)]
pub(crate) unsafe fn convert<S: Simd, A: Format, B: Format>(
    source: *const u8,
    target: *mut u8,
    n: usize,
) -> bool {
    let mut fits = true;
    let whole = n - n % S::LANES;
    // SAFETY: the caller has `n` elements at `source` and room for `n` at `target`; `n` is a multiple of 8, so what
    // is left after whole vectors is half of one, which is stored through a buffer of a whole one.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            let v = A::load::<S>(source.add(i * A::BYTES));
            fits &= S::all_below(v, B::BOUND);
            B::store::<S>(target.add(i * B::BYTES), v);
        }
        if S::LANES > 8 && whole < n {
            let v = A::half::<S>(source.add(whole * A::BYTES));
            fits &= S::all_below(v, B::BOUND);
            let mut buffer = [0u8; 64];
            B::store::<S>(buffer.as_mut_ptr(), v);
            target.add(whole * B::BYTES).copy_from_nonoverlapping(buffer.as_ptr(), 8 * B::BYTES);
        }
    }
    fits
}

/// The value of a binary16.
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let value = match bits & 0x7c00 {
        0x7c00 => f32::from_bits(magnitude | 0x7f80_0000 | u32::from(bits & 0x3ff != 0) << 22),
        // Denormals are multiples of 2^-24; both factors are exact.
        0 => f32::from(bits & 0x3ff) * f32::from_bits(0x3380_0000),
        _ => f32::from_bits(magnitude + (112 << 23)),
    };
    f32::from_bits(value.to_bits() | sign)
}

/// The binary16 nearest to `x`, ties to even; infinite where `x` is out of range, NaN for NaN.
#[inline]
pub fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    let half = if magnitude > 0x7f80_0000 {
        0x7e00 | (bits >> 13 & 0x3ff) as u16
    } else if magnitude >= 0x477f_f000 {
        0x7c00
    } else if magnitude < 0x3880_0000 {
        // Below 2^-14: adding 1/2 leaves the multiple of 2^-24 in the last bits, rounded to even.
        ((f32::from_bits(magnitude) + 0.5).to_bits() - 0.5f32.to_bits()) as u16
    } else {
        ((magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13) as u16
    };
    sign | half
}

/// The value of a bf16.
#[inline]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The bf16 nearest to `x`, ties to even; NaN for NaN.
#[inline]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
}
