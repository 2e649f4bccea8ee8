//! Queries as integers, for dot products with the codes that rows are stored as.
//!
//! A number of a query becomes an integer of 16 bits in two bytes, `256 * high + low`, of a scale that 32 elements share. So
//! a product with a row is a sum of exact products of integers, twice as long as with one byte and 256 times as fine: what is
//! rounded is at most 2^-15.99 of the largest of the 32 elements. With rows of 4 bits, which themselves are sixteen times
//! as coarse, it is one byte, `high`.

/// Elements that share a scale.
pub(crate) const STEP: usize = 32;
/// The largest magnitude of which all bytes, one or two, fit: `127` or `256 * 127 + 127`.
pub(crate) const fn code_max(bytes: usize) -> f32 {
    if bytes == 1 { 127.0 } else { 32639.0 }
}

/// `STEP` elements of a query, four to a word as dot products take them.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(crate) struct QueryStep {
    pub(crate) high: [i32; STEP / 4],
    pub(crate) low: [i32; STEP / 4],
    /// What sums of products with codes begin with: minus the products with the code of 0.
    pub(crate) start: i32,
    /// What an integer of 1 stands for.
    pub(crate) scale: f32,
}

/// Writes the elements of `row`, whole steps, as integers of one or two bytes, to be multiplied with codes of which `zero`
/// stands for 0. A step with a NaN or an infinity gets a scale that is one.
#[inline(always)]
pub(crate) fn quantise(row: &[f32], zero: i32, bytes: usize, steps: &mut [QueryStep]) {
    let code_max = code_max(bytes);
    for (elements, step) in row.as_chunks::<STEP>().0.iter().zip(steps) {
        // As bits, of which a NaN has the most.
        let most = elements.iter().fold(0, |most, x| x.abs().to_bits().max(most));
        let most = f32::from_bits(most);
        if !most.is_finite() {
            *step = QueryStep { scale: most, ..QueryStep::default() };
            continue;
        }
        // Below, the inverse would be infinite.
        let inverse = if most < f32::MIN_POSITIVE * code_max { 0.0 } else { code_max / most };
        let (mut high, mut low, mut sum) = ([0u8; STEP], [0u8; STEP], 0);
        for i in 0..STEP {
            // To nearest even: numbers of this size have no other digits.
            let code = (elements[i] * inverse + 1.5 * 2f32.powi(23)).to_bits() as i32 - 0x4b40_0000;
            (high[i], low[i]) =
                if bytes == 1 { (code as u8, 0) } else { (((code + 128) >> 8) as u8, code as u8) };
            sum += code;
        }
        let words = |bytes: &[u8; STEP], words: &mut [i32; STEP / 4]| {
            for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
                *word = i32::from_le_bytes(*bytes);
            }
        };
        words(&high, &mut step.high);
        words(&low, &mut step.low);
        step.start = -zero * sum;
        step.scale = most / code_max;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the integers of a step stand for.
    fn numbers(step: &QueryStep, bytes_each: usize) -> Vec<f64> {
        let shift = 8 * (bytes_each as i32 - 1);
        let bytes =
            |words: [i32; STEP / 4]| words.into_iter().flat_map(|word| word.to_le_bytes().map(i32::from));
        let signed = |byte: i32| (byte + 128) % 256 - 128;
        let pairs = bytes(step.high).zip(bytes(step.low));
        pairs.map(|(h, l)| f64::from((signed(h) << shift) + signed(l)) * f64::from(step.scale)).collect()
    }

    #[test]
    fn integers_are_within_half_a_unit() {
        for (bytes, largest) in [(1, 127.0), (2, 32639.0)] {
            for scale in [1e-35f32, 1e-3, 1.0, 1e30] {
                let row: [f32; 2 * STEP] =
                    std::array::from_fn(|i| ((i * i * 37 % 101) as f32 - 50.0) * scale);
                let mut steps = [QueryStep::default(); 2];
                quantise(&row, 8, bytes, &mut steps);
                for (elements, step) in row.chunks(STEP).zip(&steps) {
                    let most = f64::from(elements.iter().fold(0.0, |a: f32, x| a.max(x.abs())));
                    let all = numbers(step, bytes);
                    for (x, y) in elements.iter().zip(&all) {
                        assert!((f64::from(*x) - y).abs() <= most / largest / 2.0 * 1.001, "{x} became {y}");
                    }
                    let sum: f64 = all.iter().sum::<f64>() / f64::from(step.scale);
                    assert_eq!(step.start, -8 * sum.round() as i32);
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_so_and_nothing_is_nothing() {
        for (x, scale) in
            [(f32::NAN, f32::NAN), (f32::INFINITY, f32::INFINITY), (0.0, 0.0), (1e-40, 1e-40 / code_max(2))]
        {
            let mut steps = [QueryStep::default()];
            let mut row = [0.0; STEP];
            row[5] = x;
            quantise(&row, 128, 2, &mut steps);
            assert_eq!(steps[0].scale.to_bits(), scale.to_bits(), "{x}");
            assert!(x == 0.0 || x.is_nan() || x.is_infinite() || numbers(&steps[0], 2)[5] == 0.0);
        }
    }
}
