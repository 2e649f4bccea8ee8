//! Dot products with the codes that rows are stored as: what is computed, for all instruction sets.
//!
//! A number of a query becomes an integer of 16 bits, with a scale that 32 elements share. A product with a row is then a sum
//! of exact products of integers, and the rounding error is at most 2^-15.99 of the largest of the 32 elements. For rows of
//! 4 or 5 bits, which are themselves at least eight times as coarse, one byte is enough. Weights become such integers as
//! well, after multiplication by the scales of V, again for every tile and step.
//!
//! [`kernel`] has the two loops, over K and over V, and [`codes`] the formats. Both are written once, for vectors of 16
//! numbers that an instruction set splits as it likes ([`Dot`](crate::simd::dot::Dot)). Sums of products are exact, and
//! floats are multiplied and added in the same order everywhere: instruction sets give the same bits, except where something
//! is infinite or NaN.

mod codes;
pub(crate) mod kernel;
mod tile;

use crate::codec::{largest, nearest};

pub(crate) use codes::{Codes, Int8, Mxfp4, Nvfp4, Q4_0, Q5_0, Q8_0};
pub(crate) use tile::scratch;

/// Elements that share a scale.
pub(crate) const STEP: usize = 32;
/// Numbers that are multiplied at once, in one or two words: as many as a word has bytes.
pub(crate) const QUAD: usize = 4;

/// From this many query rows of a head on, codes are unpacked once for all of them.
pub(crate) const MANY: usize = 5;

/// The largest magnitude whose bytes, one or two, all fit: `127` or `256 * 127 + 127`.
pub(crate) const fn code_max(bytes: usize) -> f32 {
    if bytes == 1 { 127.0 } else { 32639.0 }
}

/// Numbers as instruction sets take them, four in two words. With one byte each, all are in the first word. With two, the
/// high bytes, `(n + 128) >> 8`, are in the first and the low ones, the rest, in the second, all from -128 to 127; or, as
/// shorts, numbers 0 and 2, and 1 and 3, of 16 bits each.
#[inline(always)]
pub(crate) fn words(numbers: &[i32; STEP], bytes: usize, shorts: bool) -> [[i32; STEP / QUAD]; 2] {
    // Loops over all of them, which are vectorised.
    let of_bytes = |shift: u32, half: i32| {
        let (mut bytes, mut words) = ([0; STEP], [0; STEP / QUAD]);
        for (byte, n) in bytes.iter_mut().zip(numbers) {
            *byte = ((n + half) >> shift) as u8;
        }
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = i32::from_le_bytes(*bytes);
        }
        words
    };
    let of_shorts = |first: usize| {
        let mut words = [0; STEP / QUAD];
        for (word, quad) in words.iter_mut().zip(numbers.as_chunks::<QUAD>().0) {
            *word = (quad[first] & 0xffff) | (quad[first + 2] << 16);
        }
        words
    };
    match (bytes, shorts) {
        (1, _) => [of_bytes(0, 0), [0; STEP / QUAD]],
        (_, false) => [of_bytes(8, 128), of_bytes(0, 0)],
        (_, true) => [of_shorts(0), of_shorts(1)],
    }
}

/// `STEP` elements of a query: four to one or two words, as dot products take them; or bfloat16, two to a word, and no more.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(crate) struct QueryStep {
    pub(crate) words: [[i32; STEP / QUAD]; 2],
    /// The start of sums of products with codes: minus the products with the code of 0, for the elements of each scale of K.
    pub(crate) start: [i32; 2],
    /// What an integer of 1 stands for.
    pub(crate) scale: f32,
}

/// Writes the elements of `row`, whole steps, as integers of one or two bytes. They are to be multiplied with codes of which
/// `zero` stands for 0, with `scales` scales in a step. The scale of a step with a NaN or an infinity is NaN or infinite.
#[inline(always)]
pub(crate) fn quantise(
    row: &[f32],
    zero: i32,
    bytes: usize,
    shorts: bool,
    scales: usize,
    steps: &mut [QueryStep],
) {
    let code_max = code_max(bytes);
    for (elements, step) in row.as_chunks::<STEP>().0.iter().zip(steps) {
        let most = largest(elements);
        if !most.is_finite() {
            *step = QueryStep { scale: most, ..QueryStep::default() };
            continue;
        }
        // An integer of 1 must stand for a normal number.
        let most = most.max(f32::MIN_POSITIVE * code_max);
        let inverse = code_max / most;
        let mut codes = [0; STEP];
        for i in 0..STEP {
            codes[i] = nearest(elements[i] * inverse);
        }
        step.words = words(&codes, bytes, shorts);
        for (start, codes) in step.start.iter_mut().zip(codes.chunks_exact(STEP / scales)) {
            // By lane first, which is vectorised.
            let mut sums = [0; 8];
            for eight in codes.as_chunks::<8>().0 {
                for (sum, code) in sums.iter_mut().zip(eight) {
                    *sum += code;
                }
            }
            *start = -zero * sums.iter().sum::<i32>();
        }
        step.scale = most / code_max;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The integers of a step.
    fn integers(step: &QueryStep, bytes: usize, shorts: bool) -> Vec<i32> {
        let quad = |i: usize| {
            let [first, second] = [0, 1].map(|word| step.words[word][i].to_le_bytes());
            let signed = |byte: u8| i32::from(byte as i8);
            let short = |bytes: &[u8], i: usize| i32::from(i16::from_le_bytes([bytes[i], bytes[i + 1]]));
            match (bytes, shorts) {
                (1, _) => first.map(signed),
                (_, false) => std::array::from_fn(|i| 256 * signed(first[i]) + signed(second[i])),
                (_, true) => [short(&first, 0), short(&second, 0), short(&first, 2), short(&second, 2)],
            }
        };
        (0..STEP / QUAD).flat_map(quad).collect()
    }

    #[test]
    fn integers_are_within_half_a_unit() {
        for (bytes, largest) in [(1, 127.0), (2, 32639.0)] {
            for (shorts, scale) in [false, true]
                .into_iter()
                .flat_map(|shorts| [1e-36f32, 1e-3, 1.0, 1e30].map(|scale| (shorts, scale)))
            {
                let row: [f32; 2 * STEP] =
                    std::array::from_fn(|i| ((i * i * 37 % 101) as f32 - 50.0) * scale);
                let mut steps = [QueryStep::default(); 2];
                quantise(&row, 8, bytes, shorts, 1, &mut steps);
                for (elements, step) in row.chunks(STEP).zip(&steps) {
                    let most = f64::from(elements.iter().fold(0.0, |a: f32, x| a.max(x.abs())));
                    let all = integers(step, bytes, shorts);
                    for (x, code) in elements.iter().zip(&all) {
                        let y = f64::from(*code) * f64::from(step.scale);
                        let unit = (most / largest).max(f64::from(f32::MIN_POSITIVE));
                        assert!((f64::from(*x) - y).abs() <= unit / 2.0 * 1.001, "{x} became {y}");
                    }
                    assert_eq!(step.start, [-8 * all.iter().sum::<i32>(), 0]);
                    let mut halves = [QueryStep::default()];
                    quantise(elements, 8, bytes, shorts, 2, &mut halves);
                    assert_eq!(halves[0].start, [0, 1].map(|i| -8 * all[16 * i..][..16].iter().sum::<i32>()));
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_so_and_nothing_is_nothing() {
        let least = f32::MIN_POSITIVE;
        for (x, scale) in [(f32::NAN, f32::NAN), (f32::INFINITY, f32::INFINITY), (0.0, least), (1e-40, least)]
        {
            let mut steps = [QueryStep::default()];
            let mut row = [0.0; STEP];
            row[5] = x;
            quantise(&row, 128, 2, false, 1, &mut steps);
            assert_eq!(steps[0].scale.to_bits(), scale.to_bits(), "{x}");
            assert!(integers(&steps[0], 2, false).iter().all(|&code| code == 0));
        }
    }
}
