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

/// The largest magnitude, or NaN if there is one.
fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |a: f32, &x| if x.is_nan() || a.is_nan() { f32::NAN } else { a.max(x.abs()) })
}

/// Writes a row and its scales. False if it holds something infinite, NaN or too large for the format.
///
/// `rows` and `scales` have the sizes that the format says for `x`, whose length is a multiple of its unit.
///
/// # Panics
/// For slices that are too short.
pub fn encode_row(format: RowFormat, x: &[f32], rows: &mut [u8], scales: &mut [u8]) -> bool {
    // The largest magnitude that a scale can be found for.
    let limit = match format {
        RowFormat::F32 | RowFormat::F16 | RowFormat::Bf16 => return encode_plain(format, x, rows),
        RowFormat::Fp8E4m3 | RowFormat::Int8 | RowFormat::Mxfp4 => f32::MAX / 2.0,
        RowFormat::Q8_0 => 127.0 * F16_MAX,
        RowFormat::Q5_0 => 16.0 * F16_MAX,
        RowFormat::Q4_0 => 8.0 * F16_MAX,
        RowFormat::Nvfp4 => 6.0 * E4M3_MAX,
    };
    let fits = x.iter().all(|x| x.abs() <= limit);
    let size = match format {
        RowFormat::Fp8E4m3 | RowFormat::Int8 => x.len(),
        RowFormat::Nvfp4 => NV_BLOCK,
        _ => BLOCK,
    };
    let mut block = [0.0; 1024];
    let nibbles = x.len() / 2;
    for (index, part) in x.chunks_exact(size).enumerate() {
        let block = &mut block[..size];
        block.copy_from_slice(part);
        if !fits {
            block.iter_mut().for_each(|x| *x = if x.is_nan() { *x } else { x.clamp(-limit, limit) });
        }
        match format {
            RowFormat::Fp8E4m3 => row_of_e4m3(block, rows, scales),
            RowFormat::Int8 => row_of_int8(block, rows, scales),
            RowFormat::Q8_0 => {
                let d = largest(block) / 127.0;
                let inverse = inverse(d);
                put_f16(scales, index, d);
                for (q, x) in rows[index * BLOCK..].iter_mut().zip(&*block) {
                    // Halves away from 0. NaN becomes 0.
                    *q = (x * inverse).round() as i8 as u8;
                }
            }
            RowFormat::Q5_0 => {
                let codes = symmetric::<16>(block, scales, index);
                let mut high = 0u32;
                for (j, &q) in codes.iter().enumerate() {
                    high |= u32::from(q >> 4) << j;
                }
                put_nibbles(&mut rows[index * BLOCK / 2..], &codes);
                rows[nibbles + index * 4..][..4].copy_from_slice(&high.to_le_bytes());
            }
            RowFormat::Q4_0 => {
                let codes = symmetric::<8>(block, scales, index);
                put_nibbles(&mut rows[index * BLOCK / 2..], &codes);
            }
            RowFormat::Mxfp4 => {
                let max = largest(block);
                let code = if max.is_nan() { E8M0_NAN } else { (exponent(max) + 125).clamp(0, 254) as u8 };
                let scale = e8m0(code);
                let codes: [u8; BLOCK] = std::array::from_fn(|j| to_e2m1(block[j] / scale));
                put_nibbles(&mut rows[index * BLOCK / 2..], &codes);
                scales[index] = code;
            }
            RowFormat::Nvfp4 => {
                let code = to_e4m3(largest(block) / 6.0);
                let scale = e4m3(code);
                for (j, x) in block.iter().enumerate() {
                    let q = if scale == 0.0 { 0 } else { to_e2m1(x / scale) };
                    let byte = &mut rows[index / 2 * NV_BLOCK + j];
                    *byte = if index % 2 == 0 { q } else { *byte | q << 4 };
                }
                scales[index] = code;
            }
            RowFormat::F32 | RowFormat::F16 | RowFormat::Bf16 => unreachable!("has returned"),
        }
    }
    fits
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

fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

fn put_f16(scales: &mut [u8], index: usize, d: f32) {
    let bits = if d.is_nan() { F16_NAN } else { f32_to_f16(d) };
    scales[index * 2..][..2].copy_from_slice(&bits.to_le_bytes());
}

/// Codes `0..2 * HALF` around `HALF`, for the scale that takes the first of the largest numbers to code 0.
fn symmetric<const HALF: i32>(block: &[f32], scales: &mut [u8], index: usize) -> [u8; BLOCK] {
    let mut most = 0.0f32;
    for &x in block {
        if x.is_nan() {
            most = x;
            break;
        }
        if x.abs() > most.abs() {
            most = x;
        }
    }
    let d = most / -(HALF as f32);
    let inverse = inverse(d);
    put_f16(scales, index, d);
    // Truncation of what is above 0 rounds to nearest. NaN becomes 0.
    std::array::from_fn(|j| ((block[j] * inverse + (HALF as f32 + 0.5)) as i32).clamp(0, 2 * HALF - 1) as u8)
}

fn put_nibbles(rows: &mut [u8], codes: &[u8; BLOCK]) {
    for j in 0..BLOCK / 2 {
        rows[j] = codes[j] & 15 | codes[j + BLOCK / 2] << 4;
    }
}

/// The scale is max / 448; every number is divided by it.
fn row_of_e4m3(x: &[f32], rows: &mut [u8], scales: &mut [u8]) {
    let scale = largest(x) / E4M3_MAX;
    scales.copy_from_slice(&scale.to_le_bytes());
    for (q, &x) in rows.iter_mut().zip(x) {
        *q = if scale == 0.0 { 0 } else { to_e4m3((x / scale).clamp(-E4M3_MAX, E4M3_MAX)) };
    }
}

/// The scale is max / 127; every number is divided by it and rounded to nearest even.
fn row_of_int8(x: &[f32], rows: &mut [u8], scales: &mut [u8]) {
    let scale = largest(x) / 127.0;
    scales.copy_from_slice(&scale.to_le_bytes());
    for (q, &x) in rows.iter_mut().zip(x) {
        *q = if scale == 0.0 { 0 } else { (x / scale).round_ties_even() as i8 as u8 };
    }
}

/// The floor of the base-2 logarithm; -127 and less below all normal numbers.
fn exponent(x: f32) -> i32 {
    (x.to_bits() >> 23) as i32 - 127
}

/// 2^(code - 127), or NaN.
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
    } else {
        // The bias is 7 where that of binary32 is 127; denormals come out right.
        f32::from_bits((magnitude as u32) << 20) * f32::from_bits((127 + 120) << 23)
    };
    if code & 0x80 == 0 { value } else { -value }
}

/// The E4M3 nearest to `x`, ties to even; 448 for what is above.
pub(crate) fn to_e4m3(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24 & 0x80) as u8;
    let magnitude = x.abs();
    let code = if x.is_nan() {
        E4M3_NAN
    } else if magnitude >= E4M3_MAX {
        0x7e
    } else if magnitude < 1.0 / 64.0 {
        // Multiples of 2^-9. The next one up is the first normal number.
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        let bits = magnitude.to_bits();
        ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3) as u8
    };
    sign | code
}

/// The E2M1 nearest to `x`, ties to the even code; 6 for what is above. NaN becomes 0.
pub(crate) fn to_e2m1(x: f32) -> u8 {
    let sign = (x.to_bits() >> 28 & 8) as u8;
    let x = x.abs();
    let above = [x > 0.25, x >= 0.75, x > 1.25, x >= 1.75, x > 2.5, x >= 3.5, x > 5.0];
    if x.is_nan() { 0 } else { sign | above.iter().map(|&above| u8::from(above)).sum::<u8>() }
}
