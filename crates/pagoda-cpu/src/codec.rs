//! Rows, number by number: what is stored for a row of numbers, and which numbers stored rows stand for.
//!
//! Within a block of 32 elements 4-bit numbers lie as in ggml: byte `j` holds element `j` below and `j + 16` above. The fifth
//! bits of q5_0 follow the nibbles of all blocks, 4 bytes a block, element `j` in bit `j`. Formulas are those of ggml's
//! reference (`ggml-quants.c`) for q8_0, q5_0 and q4_0, of the OCP Microscaling specification 1.0 for mxfp4 (scale
//! 2^(floor(log2 max) - 2)), and of NVIDIA's for nvfp4 with a tensor scale of 1 (scale max / 6).
//!
//! A block (a row, for formats with one scale a row) that holds a NaN is stored as NaN, all of it. Infinities count as the
//! largest number that the format has a scale for.

use pagoda_core::layout::RowFormat;

use crate::convert::{Bf16, F16, F16_MAX, F32, Format, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::layer::HEAD_DIM_MAX;

/// Elements that share a scale.
pub(crate) const BLOCK: usize = 32;
/// As [`BLOCK`], for nvfp4.
pub(crate) const NV_BLOCK: usize = 16;

const E4M3_MAX: f32 = 448.0;
/// The code of NaN in E4M3.
const E4M3_NAN: u8 = 0x7f;
/// The code of NaN in E8M0.
const E8M0_NAN: u8 = 0xff;
/// The bits of NaN in binary16.
const F16_NAN: u16 = 0x7e00;

/// What E2M1 codes stand for.
pub(crate) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Writes a row and its scales. False if it holds something infinite, NaN or too large for the format.
///
/// `rows` and `scales` have the sizes that the format says for `x`, whose length is a multiple of its unit.
///
/// # Panics
/// For slices of other sizes.
pub fn encode_row(format: RowFormat, x: &[f32], rows: &mut [u8], scales: &mut [u8]) -> bool {
    encode(format, x, rows, scales)
}

/// See [`encode_row`]. Compiled for every instruction set; its loops are written so that they are vectorised.
#[inline(always)]
pub(crate) fn encode(format: RowFormat, x: &[f32], rows: &mut [u8], scales: &mut [u8]) -> bool {
    let dim = x.len() as u32;
    assert_eq!(
        (rows.len() as u64, scales.len() as u64),
        (format.row_bytes(dim), format.scale_bytes(dim)),
        "{dim} {format:?}"
    );
    // The largest magnitude that a scale can be found for.
    let limit = match format {
        RowFormat::F32 | RowFormat::F16 | RowFormat::Bf16 => return encode_plain(format, x, rows),
        RowFormat::Fp8E4m3 | RowFormat::Int8 | RowFormat::Mxfp4 => f32::MAX / 2.0,
        RowFormat::Q8_0 => 127.0 * F16_MAX,
        RowFormat::Q5_0 => 16.0 * F16_MAX,
        RowFormat::Q4_0 => 8.0 * F16_MAX,
        RowFormat::Nvfp4 => 6.0 * E4M3_MAX,
    };
    let fits = largest(x) <= limit;
    let mut clamped;
    let numbers = if fits {
        x
    } else {
        clamped = [0.0; HEAD_DIM_MAX as usize];
        for (clamped, x) in clamped.iter_mut().zip(x) {
            // NaN stays NaN.
            *clamped = x.clamp(-limit, limit);
        }
        &clamped[..x.len()]
    };
    encode_blocks(format, numbers, rows, scales);
    fits
}

/// Formats with scales, for numbers that have one.
#[inline(always)]
fn encode_blocks(format: RowFormat, x: &[f32], rows: &mut [u8], scales: &mut [u8]) {
    let blocks = x.as_chunks::<BLOCK>().0;
    match format {
        RowFormat::Fp8E4m3 => row_of_e4m3(x, rows, scales),
        RowFormat::Int8 => row_of_int8(x, rows, scales),
        RowFormat::Q8_0 => {
            let rows = rows.as_chunks_mut::<BLOCK>().0;
            for ((x, row), scale) in blocks.iter().zip(rows).zip(scales.as_chunks_mut().0) {
                block_of_q8_0(x, row, scale);
            }
        }
        RowFormat::Q5_0 => {
            let (nibbles, fifths) = rows.split_at_mut(x.len() / 2);
            let rows = nibbles.as_chunks_mut().0.iter_mut().zip(fifths.as_chunks_mut::<{ BLOCK / 8 }>().0);
            for ((x, (row, fifths)), scale) in blocks.iter().zip(rows).zip(scales.as_chunks_mut().0) {
                let codes = symmetric::<16>(x, scale);
                put_nibbles(row, &codes);
                for (bits, codes) in fifths.iter_mut().zip(codes.as_chunks().0) {
                    // The bit of byte `j` of the product's highest byte comes from 2^(56 - 7 * j).
                    let fifth = u64::from_le_bytes(*codes) >> 4 & 0x0101_0101_0101_0101;
                    *bits = (fifth.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
                }
            }
        }
        RowFormat::Q4_0 => {
            let rows = rows.as_chunks_mut().0;
            for ((x, row), scale) in blocks.iter().zip(rows).zip(scales.as_chunks_mut().0) {
                put_nibbles(row, &symmetric::<8>(x, scale));
            }
        }
        RowFormat::Mxfp4 => {
            for ((x, row), scale) in blocks.iter().zip(rows.as_chunks_mut().0).zip(scales) {
                let max = largest(x);
                *scale = if max.is_nan() { E8M0_NAN } else { (exponent(max) + 125).clamp(0, 254) as u8 };
                let scale = e8m0(*scale);
                let mut codes = [0; BLOCK];
                for (code, x) in codes.iter_mut().zip(x) {
                    *code = to_e2m1(x / scale);
                }
                put_nibbles(row, &codes);
            }
        }
        RowFormat::Nvfp4 => {
            for ((x, row), scales) in
                blocks.iter().zip(rows.as_chunks_mut().0).zip(scales.as_chunks_mut::<2>().0)
            {
                let mut codes = [0; BLOCK];
                let halves = x.as_chunks::<NV_BLOCK>().0.iter().zip(codes.as_chunks_mut::<NV_BLOCK>().0);
                for ((x, codes), code) in halves.zip(scales) {
                    *code = to_e4m3(largest(x) / 6.0);
                    let scale = e4m3(*code);
                    for (code, x) in codes.iter_mut().zip(x) {
                        *code = if scale == 0.0 { 0 } else { to_e2m1(x / scale) };
                    }
                }
                put_nibbles(row, &codes);
            }
        }
        RowFormat::F32 | RowFormat::F16 | RowFormat::Bf16 => unreachable!("they have no scales"),
    }
}

/// Reads what [`encode_row`] has written.
///
/// # Panics
/// For slices that are too short.
pub fn decode_row(format: RowFormat, rows: &[u8], scales: &[u8], x: &mut [f32]) {
    let nibbles = x.len() / 2;
    let nibble = |i: usize| rows[i / BLOCK * NV_BLOCK + i % NV_BLOCK] >> (i % BLOCK / NV_BLOCK * 4) & 15;
    let f16_scale = |i: usize| {
        let at = i / BLOCK * 2;
        f16_to_f32(u16::from_le_bytes([scales[at], scales[at + 1]]))
    };
    let f32_scale = || f32::from_le_bytes([scales[0], scales[1], scales[2], scales[3]]);
    for (i, x) in x.iter_mut().enumerate() {
        *x = match format {
            RowFormat::Fp8E4m3 => e4m3(rows[i]) * f32_scale(),
            RowFormat::Int8 => f32::from(rows[i] as i8) * f32_scale(),
            RowFormat::Q8_0 => f32::from(rows[i] as i8) * f16_scale(i),
            RowFormat::Q5_0 => {
                let high = rows[nibbles + i / 8] >> (i % 8) & 1;
                (f32::from(nibble(i) | high << 4) - 16.0) * f16_scale(i)
            }
            RowFormat::Q4_0 => (f32::from(nibble(i)) - 8.0) * f16_scale(i),
            RowFormat::Mxfp4 => E2M1[nibble(i) as usize] * e8m0(scales[i / BLOCK]),
            RowFormat::Nvfp4 => E2M1[nibble(i) as usize] * e4m3(scales[i / NV_BLOCK]),
            RowFormat::F32 => {
                f32::from_le_bytes([rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]])
            }
            RowFormat::F16 => f16_to_f32(u16::from_le_bytes([rows[2 * i], rows[2 * i + 1]])),
            RowFormat::Bf16 => bf16_to_f32(u16::from_le_bytes([rows[2 * i], rows[2 * i + 1]])),
        };
    }
}

/// Formats that store each number by itself.
fn encode_plain(format: RowFormat, x: &[f32], rows: &mut [u8]) -> bool {
    let mut fits = true;
    for (i, &x) in x.iter().enumerate() {
        let bound = match format {
            RowFormat::F16 => {
                // NaN stays NaN.
                let bits = f32_to_f16(if x.abs() > F16_MAX { F16_MAX.copysign(x) } else { x });
                rows[2 * i..][..2].copy_from_slice(&bits.to_le_bytes());
                F16::BOUND
            }
            RowFormat::Bf16 => {
                rows[2 * i..][..2].copy_from_slice(&f32_to_bf16(x).to_le_bytes());
                Bf16::BOUND
            }
            _ => {
                rows[4 * i..][..4].copy_from_slice(&x.to_le_bytes());
                F32::BOUND
            }
        };
        fits &= x.abs() < bound;
    }
    fits
}

/// The integer nearest to a number below 2^22, ties to even. For the product of 0 and infinity its lowest byte is 0.
#[inline(always)]
pub(crate) fn nearest(x: f32) -> i32 {
    // Floats of the size of this sum have no fraction.
    (x + 1.5 * 2f32.powi(23)).to_bits() as i32 - 0x4b40_0000
}

/// The largest magnitude, or NaN if there is one.
#[inline(always)]
pub(crate) fn largest(x: &[f32]) -> f32 {
    // Compared as bits: those of NaN are the largest.
    let bits = x.iter().fold(0, |most: u32, x| most.max(x.abs().to_bits()));
    if bits > f32::INFINITY.to_bits() { f32::NAN } else { f32::from_bits(bits) }
}

#[inline(always)]
fn f16_scale(d: f32) -> [u8; 2] {
    if d.is_nan() { F16_NAN.to_le_bytes() } else { f32_to_f16(d).to_le_bytes() }
}

#[inline(always)]
fn block_of_q8_0(x: &[f32; BLOCK], row: &mut [u8; BLOCK], scale: &mut [u8; 2]) {
    let d = largest(x) / 127.0;
    *scale = f16_scale(d);
    if d > 0.0 {
        let inverse = 1.0 / d;
        // Halves away from 0.
        for (q, x) in row.iter_mut().zip(x) {
            *q = nearest((x * inverse).round().clamp(-128.0, 127.0)) as u8;
        }
    } else {
        row.fill(0);
    }
}

/// Codes `0..2 * HALF` around `HALF`, with the scale that maps the first of the largest numbers to code 0.
#[inline(always)]
fn symmetric<const HALF: i32>(x: &[f32; BLOCK], scale: &mut [u8; 2]) -> [u8; BLOCK] {
    let most = largest(x);
    let first = x.iter().find(|x| x.abs() == most).unwrap_or(&most);
    // Adding 0 turns -0 into 0, so that both give a scale of the same sign.
    let d = (first + 0.0) / -(HALF as f32);
    *scale = f16_scale(d);
    if d.is_nan() {
        return [0; BLOCK];
    }
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    // Adding one half and taking the floor rounds to nearest.
    let mut codes = [0; BLOCK];
    for (code, x) in codes.iter_mut().zip(x) {
        let half_more = x * inverse + (HALF as f32 + 0.5);
        *code = nearest(half_more.floor().clamp(0.0, (2 * HALF - 1) as f32)) as u8;
    }
    codes
}

#[inline(always)]
fn put_nibbles(row: &mut [u8; BLOCK / 2], codes: &[u8; BLOCK]) {
    for j in 0..BLOCK / 2 {
        row[j] = codes[j] & 15 | codes[j + BLOCK / 2] << 4;
    }
}

/// The scale is max / 448; every number is divided by it.
#[inline(always)]
fn row_of_e4m3(x: &[f32], rows: &mut [u8], scales: &mut [u8]) {
    let scale = largest(x) / E4M3_MAX;
    scales.copy_from_slice(&scale.to_le_bytes());
    if scale == 0.0 {
        return rows.fill(0);
    }
    for (q, x) in rows.iter_mut().zip(x) {
        *q = to_e4m3((x / scale).clamp(-E4M3_MAX, E4M3_MAX));
    }
}

/// The scale is max / 127; every number is divided by it and rounded to nearest even.
#[inline(always)]
fn row_of_int8(x: &[f32], rows: &mut [u8], scales: &mut [u8]) {
    let scale = largest(x) / 127.0;
    scales.copy_from_slice(&scale.to_le_bytes());
    if scale == 0.0 || scale.is_nan() {
        return rows.fill(0);
    }
    for (q, x) in rows.iter_mut().zip(x) {
        *q = nearest((x / scale).clamp(-128.0, 127.0)) as u8;
    }
}

/// The floor of the base-2 logarithm; -127 and less below all normal numbers.
#[inline(always)]
fn exponent(x: f32) -> i32 {
    (x.to_bits() >> 23) as i32 - 127
}

/// 2^(code - 127), or NaN.
#[inline(always)]
pub(crate) fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        E8M0_NAN => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// What an E4M3 code stands for.
pub(crate) const fn e4m3(code: u8) -> f32 {
    let magnitude = code & 0x7f;
    let value = if magnitude == E4M3_NAN {
        f32::NAN
    } else if magnitude < 8 {
        // Not by way of a binary32 denormal, which counts as 0 in threads that flush them.
        magnitude as f32 / 512.0
    } else {
        // The bias is 7 where that of binary32 is 127.
        f32::from_bits(((magnitude as u32) << 20) + (120 << 23))
    };
    if code & 0x80 == 0 { value } else { -value }
}

/// The E4M3 nearest to `x`, ties to even; 448 for what is above. NaN gets no sign, since machines give it different ones.
#[inline(always)]
pub(crate) fn to_e4m3(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24 & 0x80) as u8;
    let magnitude = x.abs();
    let code = if magnitude >= E4M3_MAX {
        0x7e
    } else if magnitude < 1.0 / 64.0 {
        // Multiples of 2^-9. The next one up is the first normal number.
        nearest(magnitude * 512.0) as u8
    } else {
        let bits = magnitude.to_bits();
        ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3) as u8
    };
    if x.is_nan() { E4M3_NAN } else { sign | code }
}

/// The E2M1 nearest to `x`, ties to the even code; 6 for what is above. NaN becomes 0.
#[inline(always)]
pub(crate) fn to_e2m1(x: f32) -> u8 {
    let sign = (x.to_bits() >> 28 & 8) as u8;
    let x = x.abs();
    let [a, b, c, d, e, f, g] =
        [x > 0.25, x >= 0.75, x > 1.25, x >= 1.75, x > 2.5, x >= 3.5, x > 5.0].map(u8::from);
    if x.is_nan() { 0 } else { sign | (a + b + c + d + e + f + g) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;
    use crate::simd::kernels::Encode;
    use crate::tests::samples::Random;

    /// Numbers that formats round, clamp or cannot hold.
    fn number(random: &mut Random) -> f32 {
        const ODD: [f32; 8] =
            [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-44, -1e-38];
        match random.below(400) {
            0 => random.pick(&ODD),
            // Halfway between codes, where the largest is a power of two.
            1..200 => (random.below(513) as f32 - 256.0) / 64.0,
            _ => random.float(),
        }
    }

    #[test]
    fn all_instruction_sets_write_the_same_bytes() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let kernels = isa.kernels().expect("supported");
            for format in RowFormat::ALL {
                for dim in [32, 64, 96, 128, 160, 1024] {
                    let mut random = Random(u64::from(dim));
                    for _ in 0..100 {
                        let scale = random.pick(&[1.0, 1.0, 1e-3, 1e6, 1e-40]);
                        let x: Vec<_> = (0..dim).map(|_| number(&mut random) * scale).collect();
                        let encoded = |encode: Encode| {
                            let mut rows = vec![0xa5; format.row_bytes(dim) as usize];
                            let mut scales = vec![0xa5; format.scale_bytes(dim) as usize];
                            // SAFETY: the instruction set is supported.
                            let fits = unsafe { encode(format, &x, &mut rows, &mut scales) };
                            (fits, rows, scales)
                        };
                        assert_eq!(encoded(kernels.encode), encoded(encode_row), "{isa} {format:?} {x:?}");
                    }
                }
            }
        }
    }

    /// Libraries that are made for speed set that mode for threads that call them.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_thread_that_flushes_denormals_reads_and_writes_the_same_numbers() {
        let numbers = || {
            let x: Vec<_> = (0..320).map(|n| ((n * 37 % 101) as f32 - 50.0) * 4e-4).collect();
            let written =
                RowFormat::ALL.into_iter().filter(|format| format.scale_bytes(320) > 0).map(|format| {
                    let mut rows = vec![0; format.row_bytes(320) as usize];
                    let mut scales = vec![0; format.scale_bytes(320) as usize];
                    encode_row(format, std::hint::black_box(&x), &mut rows, &mut scales);
                    (rows, scales)
                });
            let read = (0..=255).map(|code| e4m3(std::hint::black_box(code)).to_bits());
            (written.collect::<Vec<_>>(), read.collect::<Vec<_>>())
        };
        let flushing = move || {
            let (mode, tiny) = (0x9fc0_u32, std::hint::black_box(1e-40_f32));
            // SAFETY: the thread ends with the test.
            unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &mode) };
            (tiny * 2.0, numbers())
        };
        assert_eq!(std::thread::spawn(flushing).join().unwrap(), (0.0, numbers()));
    }
}
