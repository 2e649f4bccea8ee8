//! Softmax over the tiles of a row, one after the other, and of partial results.

use std::f32::consts::LN_2;

use pagoda_core::work::TILE;

use crate::kernel::ALIGN;
use crate::simd::Simd;

/// Vectors that are reduced to a number each at once.
const QUAD: usize = 4;
/// How far a score may be above what weights are relative to, in powers of two. That does not follow every maximum, so
/// weights need not wait for the maximum of their tile.
const RISE: f32 = 8.0;
/// From this magnitude of a score or its bias on, the bias is added before anything else, so that all scores of a row are
/// rounded alike. Below, what weights are relative to is off by 24 at most: they are finite, and the largest is not 0.
const FAR: f32 = (1 << 28) as f32;

/// Arguments of [`softmax`]: scores of some query rows become weights.
pub(crate) struct Softmax<'a> {
    /// `[count][TILE]`: on entry scores as base-2 logarithms (with `cap` as fractions of it), on return weights.
    pub(crate) scores: &'a mut [f32],
    /// If given, scores stand for `cap * tanh(score)`.
    pub(crate) cap: Option<f32>,
    /// Every row sees the tokens `low..high` of the tile, at least one.
    pub(crate) low: usize,
    pub(crate) high: usize,
    /// What to add to all scores of a row.
    pub(crate) bias: &'a [f32],
    /// What the weights of every row are relative to: no score so far was more than [`RISE`] above.
    pub(crate) max: &'a mut [f32],
    /// The running sum of weights of every row.
    pub(crate) sum: &'a mut [f32],
    /// What the row's values must be multiplied by.
    pub(crate) decay: &'a mut [f32],
}

/// Online softmax over one tile.
#[inline(always)]
pub(crate) unsafe fn softmax<S: Simd>(args: &mut Softmax<'_>) {
    let mut row = 0;
    // SAFETY: the caller has the instruction set.
    unsafe {
        while args.max.len() - row >= QUAD {
            softmax_rows::<S, QUAD>(args, row);
            row += QUAD;
        }
        match args.max.len() - row {
            0 => {}
            1 => softmax_rows::<S, 1>(args, row),
            2 => softmax_rows::<S, 2>(args, row),
            _ => softmax_rows::<S, 3>(args, row),
        }
    }
}

/// `R` rows, none of which waits for another.
#[inline(always)]
unsafe fn softmax_rows<S: Simd, const R: usize>(args: &mut Softmax<'_>, row: usize) {
    let scores = &mut args.scores[row * TILE..][..R * TILE];
    let mut bias: [f32; R] = std::array::from_fn(|r| args.bias[row + r]);
    if let Some(cap) = args.cap {
        for (i, lanes) in scores.chunks_exact_mut(S::LANES).enumerate() {
            let (p, bias) = (lanes.as_mut_ptr(), bias[i * S::LANES / TILE]);
            // SAFETY: the caller has the instruction set.
            unsafe { S::store(p, S::mul(S::splat(cap), tanh::<S>(S::add(S::load(p), S::splat(bias))))) };
        }
        bias = [0.0; R];
    }
    if args.low > 0 || args.high < TILE {
        for scores in scores.chunks_exact_mut(TILE) {
            scores[..args.low].fill(f32::NEG_INFINITY);
            scores[args.high..].fill(f32::NEG_INFINITY);
        }
    }
    let scores = scores.as_mut_ptr();
    let (max, sum) = (&mut args.max[row..][..R], &mut args.sum[row..][..R]);
    let decay = &mut args.decay[row..][..R];
    // For as many rows as are reduced at once, whatever `R`.
    let (mut top, mut total) = ([0.0; QUAD], [0.0; QUAD]);
    // SAFETY: the caller has the instruction set, and a row of scores is TILE long.
    unsafe {
        // Several chains a row, so that no maximum or sum waits for the one before.
        let mut tops = [S::splat(f32::NEG_INFINITY); QUAD];
        for (r, top) in tops[..R].iter_mut().enumerate() {
            let mut chains = [*top; 4];
            for i in 0..TILE / S::LANES {
                let score = S::load(scores.add(r * TILE + i * S::LANES));
                chains[i % 4] = if i < 4 { score } else { S::max(chains[i % 4], score) };
            }
            *top = S::max(S::max(chains[0], chains[1]), S::max(chains[2], chains[3]));
        }
        S::max_quad(tops, top.as_mut_ptr());
        decay.fill(1.0);
        for r in 0..R {
            top[r] += bias[r];
        }
        // One test for all: a branch for each takes four times as many instructions.
        if (0..R).fold(false, |far, r| far | (top[r].abs() >= FAR) | (bias[r].abs() >= FAR)) {
            add_biases(&top, &mut bias, std::slice::from_raw_parts_mut(scores, R * TILE));
        }
        if (0..R).any(|r| top[r] > max[r] + RISE) {
            rise(&top, max, decay);
        }
        let mut totals = [S::splat(0.0); QUAD];
        for (r, total) in totals[..R].iter_mut().enumerate() {
            // Where everything is -inf so far, every weight is exp2(-inf - 0) = 0.
            let base = if max[r] == f32::NEG_INFINITY { 0.0 } else { max[r] };
            let mut chains = [*total; 4];
            for i in 0..TILE / S::LANES {
                let p = scores.add(r * TILE + i * S::LANES);
                let weight = exp2::<S>(S::sub(S::load(p), S::splat(base - bias[r])));
                S::store(p, weight);
                chains[i % 4] = if i < 4 { weight } else { S::add(chains[i % 4], weight) };
            }
            *total = S::add(S::add(chains[0], chains[1]), S::add(chains[2], chains[3]));
        }
        S::sum_quads([totals], total.as_mut_ptr(), 0);
        for r in 0..R {
            sum[r] = sum[r] * decay[r] + total[r];
        }
    }
}

/// Adds biases to scores, where either is far from 0.
#[cold]
#[inline(never)]
fn add_biases(top: &[f32; QUAD], bias: &mut [f32], scores: &mut [f32]) {
    for ((&top, bias), scores) in top.iter().zip(bias).zip(scores.chunks_exact_mut(TILE)) {
        if top.abs() >= FAR || bias.abs() >= FAR {
            scores.iter_mut().for_each(|score| *score += *bias);
            *bias = 0.0;
        }
    }
}

/// Raises what the weights of rows are relative to, where a score of a tile is too far above it.
#[cold]
#[inline(never)]
fn rise(top: &[f32; QUAD], max: &mut [f32], decay: &mut [f32]) {
    for ((&top, max), decay) in top.iter().zip(max).zip(decay) {
        if top > *max + RISE {
            *decay = (*max - top).exp2();
            *max = top;
        }
    }
}

/// Arguments of [`fold`]: two partial results of the same query rows.
pub(crate) struct Fold<'a> {
    /// Elements of a row of values, a multiple of [`ALIGN`].
    pub(crate) stride: usize,
    /// The earlier pages, and the result.
    pub(crate) values: &'a mut [f32],
    pub(crate) max: &'a mut [f32],
    pub(crate) sum: &'a mut [f32],
    /// The later pages.
    pub(crate) later_values: &'a [f32],
    pub(crate) later_max: &'a [f32],
    pub(crate) later_sum: &'a [f32],
}

/// Merges partial results by log-sum-exp. A row that saw nothing changes nothing.
#[inline(always)]
pub(crate) unsafe fn fold<S: Simd>(args: &mut Fold<'_>) {
    for (r, (max, sum)) in args.max.iter_mut().zip(args.sum.iter_mut()).enumerate() {
        let (later_max, later_sum) = (args.later_max[r], args.later_sum[r]);
        if later_sum == 0.0 {
            continue;
        }
        let values = &mut args.values[r * args.stride..][..args.stride];
        let later = &args.later_values[r * args.stride..][..args.stride];
        if *sum == 0.0 {
            values.copy_from_slice(later);
            (*max, *sum) = (later_max, later_sum);
            continue;
        }
        let top = if later_max > *max { later_max } else { *max };
        // SAFETY: the caller has the instruction set; rows are multiples of ALIGN long.
        unsafe {
            let (a, b) = (exp2_one::<S>(*max - top), exp2_one::<S>(later_max - top));
            for i in (0..args.stride).step_by(S::LANES) {
                let scaled = S::mul(S::splat(b), S::load(later.as_ptr().add(i)));
                let p = values.as_mut_ptr().add(i);
                S::store(p, S::fma(S::splat(a), S::load(p), scaled));
            }
            *sum = *sum * a + later_sum * b;
        }
        *max = top;
    }
}

/// Where [`exp2`] ends, as a power of two.
const LEAST: f32 = -64.0;

/// `2^v - 2^LEAST` for `v <= 127`, and 0 from `LEAST` down; NaN for NaN. Compared with a weight of 1, which every sum has,
/// `2^30` weights of that size are `2^-34`; and arithmetic with subnormal ones would take tens of times as long. The
/// polynomial is within 2^-25 of `2^f` on [-1/2, 1/2] and exact at 0.
#[inline(always)]
unsafe fn exp2<S: Simd>(v: S::V) -> S::V {
    const COEFFICIENTS: [f32; 7] =
        [1.0, LN_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_4, 0.000_153_533_62];
    // SAFETY: the caller has the instruction set.
    unsafe {
        // `max` returns its second argument if it is NaN.
        let v = S::max(S::splat(LEAST), v);
        let n = S::round(v);
        let f = S::sub(v, n);
        let mut p = S::splat(COEFFICIENTS[6]);
        for &c in COEFFICIENTS[..6].iter().rev() {
            p = S::fma(p, f, S::splat(c));
        }
        S::sub(S::scale(p, n), S::splat(LEAST.exp2()))
    }
}

/// `tanh(v)`, to 4e-7 of itself and never beyond 1; NaN for NaN. A rational approximation on `|v| < 7.9`, where tanh is 1 in
/// float: `generic_fast_tanh_float` of Eigen (MathFunctionsImpl.h, MPL-2.0).
#[inline(always)]
unsafe fn tanh<S: Simd>(v: S::V) -> S::V {
    const LIMIT: f32 = 7.905_311;
    const ODD: [f32; 7] = [
        4.893_524_6e-3,
        6.372_619e-4,
        1.485_722_3e-5,
        5.122_297e-8,
        -8.604_672e-11,
        2.000_188e-13,
        -2.760_768_4e-16,
    ];
    const EVEN: [f32; 4] = [4.893_525e-3, 2.268_434_6e-3, 1.185_347_1e-4, 1.198_258_4e-6];
    // SAFETY: the caller has the instruction set.
    unsafe {
        // `min` and `max` return their second argument if it is NaN.
        let v = S::max(S::splat(-LIMIT), S::min(S::splat(LIMIT), v));
        let square = S::mul(v, v);
        let polynomial = |coefficients: &[f32]| {
            coefficients.iter().rev().fold(S::splat(0.0), |p, &c| S::fma(p, square, S::splat(c)))
        };
        S::div(S::mul(v, polynomial(&ODD)), polynomial(&EVEN))
    }
}

/// [`exp2`] of one number.
#[inline(always)]
unsafe fn exp2_one<S: Simd>(x: f32) -> f32 {
    let mut lanes = [0.0; ALIGN];
    // SAFETY: the caller has the instruction set; no vector is longer than ALIGN.
    unsafe { S::store(lanes.as_mut_ptr(), exp2::<S>(S::splat(x))) };
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;
    use crate::simd::scalar::Scalar;
    use crate::tests::samples::Random;

    /// The results for tiles of scores: weights and factors of each; at the end, what weights are relative to and their sums.
    struct Weighed {
        weights: Vec<Vec<f32>>,
        decays: Vec<Vec<f32>>,
        max: Vec<f32>,
        sum: Vec<f32>,
    }

    fn weigh(isa: Isa, tiles: &[Vec<f32>], bias: &[f32]) -> Weighed {
        let rows = bias.len();
        let (mut max, mut sum) = (vec![f32::NEG_INFINITY; rows], vec![0.0; rows]);
        let (mut weights, mut decays) = (Vec::new(), Vec::new());
        for tile in tiles {
            let (mut scores, mut decay) = (tile.clone(), vec![f32::NAN; rows]);
            let mut softmax = Softmax {
                scores: &mut scores,
                cap: None,
                low: 0,
                high: TILE,
                bias,
                max: &mut max,
                sum: &mut sum,
                decay: &mut decay,
            };
            // SAFETY: the instruction set is supported, and a row of scores is TILE long.
            unsafe { (isa.kernels().expect("supported").softmax)(&mut softmax) };
            weights.push(scores);
            decays.push(decay);
        }
        Weighed { weights, decays, max, sum }
    }

    /// Rows of scores that rise from tile to tile: not at all, little by little, by more than [`RISE`], from nothing.
    fn rising(random: &mut Random, rows: usize) -> Vec<Vec<f32>> {
        let steps: Vec<f32> = (0..rows).map(|_| random.pick(&[0.0, 0.7, 3.0, 9.0, 20.0, -5.0])).collect();
        let dark: Vec<usize> = (0..rows).map(|_| random.below(3)).collect();
        let row = |random: &mut Random, t: usize, r: usize| -> Vec<f32> {
            let base = t as f32 * steps[r];
            (0..TILE)
                .map(|_| if t < dark[r] { f32::NEG_INFINITY } else { base + 2.0 * random.float() })
                .collect()
        };
        (0..8).map(|t| (0..rows).flat_map(|r| row(random, t, r)).collect()).collect()
    }

    #[test]
    fn weights_are_those_of_the_definition_however_scores_rise() {
        let mut random = Random(7);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for _ in 0..50 {
                let rows = random.pick(&[1, 2, 4, 5, 8]);
                let tiles = rising(&mut random, rows);
                let near = random.pick(&[3.0, 3.0, FAR]);
                let bias: Vec<f32> = (0..rows).map(|_| near * random.float()).collect();
                let Weighed { weights, decays, max, sum } = weigh(isa, &tiles, &bias);
                for r in 0..rows {
                    let scores = |tile: &[f32]| -> Vec<f64> {
                        tile[r * TILE..][..TILE].iter().map(|&x| f64::from(x) + f64::from(bias[r])).collect()
                    };
                    let (mut kept, mut total) = (1.0, 0.0);
                    for t in (0..tiles.len()).rev() {
                        for (weight, score) in weights[t][r * TILE..][..TILE].iter().zip(scores(&tiles[t])) {
                            assert!(near == FAR || *weight <= RISE.exp2(), "{isa}: {weight}");
                            let right = (score - f64::from(max[r])).exp2();
                            let is = f64::from(*weight) * kept;
                            assert!(
                                (is - right).abs() <= 3e-5 * right + f64::from(LEAST).exp2(),
                                "{isa} row {r} tile {t}: {is}, not {right}"
                            );
                            total += right;
                        }
                        kept *= f64::from(decays[t][r]);
                    }
                    assert!(
                        (f64::from(sum[r]) - total).abs() <= 1e-5 * total,
                        "{isa}: {}, not {total}",
                        sum[r]
                    );
                }
            }
        }
    }

    #[test]
    fn scores_far_from_0_have_the_weights_of_what_they_are_in_f32() {
        let mut random = Random(9);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for _ in 0..50 {
                let rows = random.pick(&[1, 2, 4, 5, 8]);
                let mut tiles = rising(&mut random, rows);
                let mut bias: Vec<f32> = (0..rows).map(|_| 3000.0 * random.float()).collect();
                for (r, bias) in bias.iter_mut().enumerate() {
                    let far = random.pick(&[2.0, -2.0]) * FAR * (60.0 * random.float().abs()).exp2();
                    if random.below(2) == 0 {
                        *bias = far;
                    } else {
                        tiles
                            .iter_mut()
                            .flat_map(|tile| &mut tile[r * TILE..][..TILE])
                            .for_each(|x| *x += far);
                    }
                }
                let sums: Vec<Vec<f32>> = tiles
                    .iter()
                    .map(|tile| tile.iter().enumerate().map(|(i, x)| x + bias[i / TILE]).collect())
                    .collect();
                let is = weigh(isa, &tiles, &bias);
                let right = weigh(isa, &sums, &vec![0.0; rows]);
                assert!(is.sum.iter().all(|sum| sum.is_finite() && *sum >= 1.0), "{isa}: {:?}", is.sum);
                assert_eq!((is.weights, is.decays), (right.weights, right.decays), "{isa}");
                assert_eq!((is.max, is.sum), (right.max, right.sum), "{isa}");
            }
        }
    }

    #[test]
    fn weights_next_to_nothing_are_nothing() {
        // From 0 to far beyond what a float can be, and closer together where weights end.
        let scores: Vec<f32> = (0..128u8).map(f32::from).map(|i| -3.0 * i).collect();
        let close: Vec<f32> = (0..64u8).map(f32::from).map(|i| LEAST + 0.1 - i / 256.0).collect();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let tiles = [
                scores[..TILE].to_vec(),
                scores[TILE..].to_vec(),
                close.clone(),
                vec![f32::NEG_INFINITY; TILE],
            ];
            let Weighed { weights, sum, .. } = weigh(isa, &tiles, &[0.0]);
            for (&weight, &score) in weights.iter().flatten().zip(tiles.iter().flatten()) {
                assert!(weight == 0.0 || weight.is_normal(), "{isa}: {weight:e}");
                assert_eq!(weight == 0.0, score <= LEAST, "{isa}: 2^{score} is {weight:e}");
                let right = f64::from(score).exp2();
                assert!((f64::from(weight) - right).abs() <= 3e-7 * right + f64::from(LEAST).exp2());
            }
            let right: f64 = tiles.iter().flatten().map(|&score| f64::from(score).exp2()).sum();
            assert!((f64::from(sum[0]) - right).abs() <= 1e-7 * right, "{isa}: {}", sum[0]);
        }
    }

    #[test]
    fn a_row_has_the_same_weights_beside_any_others() {
        let mut random = Random(8);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for _ in 0..50 {
                let tiles = rising(&mut random, 4);
                let bias: Vec<f32> = (0..4).map(|_| 3.0 * random.float()).collect();
                let Weighed { weights, decays, max, sum } = weigh(isa, &tiles, &bias);
                for r in 0..4 {
                    let alone: Vec<Vec<f32>> =
                        tiles.iter().map(|tile| tile[r * TILE..][..TILE].to_vec()).collect();
                    let one = weigh(isa, &alone, &bias[r..r + 1]);
                    for t in 0..tiles.len() {
                        assert_eq!(weights[t][r * TILE..][..TILE], one.weights[t], "{isa} row {r} tile {t}");
                        assert_eq!(decays[t][r], one.decays[t][0], "{isa} row {r} tile {t}");
                    }
                    assert_eq!((max[r], sum[r]), (one.max[0], one.sum[0]), "{isa} row {r}");
                }
            }
        }
    }

    #[test]
    fn tanh_is_right_to_4e_7() {
        let tanh = |x: f32| {
            let mut lanes = [0.0; ALIGN];
            // SAFETY: every CPU has it, and no vector is longer than ALIGN.
            unsafe { <Scalar as Simd>::store(lanes.as_mut_ptr(), tanh::<Scalar>(Scalar::splat(x))) };
            lanes[0]
        };
        // Every 64th number from 2^-60 to 64.
        for bits in (2f32.powi(-60).to_bits()..64f32.to_bits()).step_by(64) {
            let x = f32::from_bits(bits);
            let (is, right) = (tanh(x), f64::from(x).tanh());
            assert!(
                (f64::from(is) - right).abs() <= 4e-7 * right && is <= 1.0,
                "tanh({x}) is {is}, not {right}"
            );
            assert_eq!(tanh(-x), -is);
        }
        assert_eq!([tanh(0.0), tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)], [0.0, tanh(9.0), tanh(-9.0)]);
        assert!(tanh(f32::NAN).is_nan());
    }
}
