//! Rows of fp8_e4m3, whose codes become numbers off a table.

use pagoda_core::layout::RowFormat;
use pagoda_core::work::TILE;

use super::samples::{Random, read};
use crate::chunk::{Chunk, RowSize};
use crate::codec::e4m3;
use crate::integers::QueryStep;
use crate::kernel::{Accumulate, Score};
use crate::simd::Isa;

/// An instruction set that looks up the numbers of codes in a table, and how it rounds queries and weights.
type Rounding = (Isa, fn(f32) -> f32);

/// Those of this CPU.
fn roundings() -> impl Iterator<Item = Rounding> {
    let all: [Rounding; 2] = [(Isa::Avx512Vnni, |x| x), (Isa::Avx512Bf16, bf16)];
    all.into_iter().filter(|(isa, _)| isa.is_supported())
}

/// The nearest bfloat16, ties to even.
fn bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// A tile of rows, page by page: codes, then scales.
struct Tile {
    size: RowSize,
    page: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Tile {
    fn new(dim: usize, page: usize, mut code: impl FnMut(usize, usize) -> u8, scales: Vec<f32>) -> Self {
        let codes = (0..TILE * dim).map(|i| code(i / dim, i % dim)).collect();
        Self { size: RowSize { dim, bytes: dim, scale_bytes: 4 }, page, codes, scales }
    }

    /// What a code stands for.
    fn number(&self, t: usize, i: usize) -> f64 {
        f64::from(e4m3(self.codes[t * self.size.dim + i]))
    }

    /// Calls `with` the tile. Rows outside of `low..high` are NaN; the addresses of pages without others are null.
    fn read(&self, low: usize, high: usize, with: impl Fn(&Chunk<'_>)) {
        let mut pages = Vec::new();
        for first in (0..TILE).step_by(self.page) {
            let tokens = first..first + self.page;
            let seen = |t: &usize| (low..high).contains(t);
            let codes = tokens.clone().flat_map(|t| {
                let row = &self.codes[t * self.size.dim..][..self.size.dim];
                row.iter().map(move |&code| if seen(&t) { code } else { 0x7f })
            });
            let scales = tokens.flat_map(|t| if seen(&t) { self.scales[t] } else { f32::NAN }.to_le_bytes());
            pages.push(codes.chain(scales).collect::<Vec<u8>>());
        }
        read(&pages, 0, self.page, self.size, low..high, self.page == TILE, with);
    }
}

/// The scores of some queries.
fn scores(isa: Isa, tile: &Tile, queries: &[Vec<f32>], low: usize, high: usize) -> Vec<f32> {
    let (dim, count) = (tile.size.dim, queries.len());
    let kernels = isa.kernels().expect("supported");
    let kernels = kernels.rows(RowFormat::Fp8E4m3, dim as u32, dim as u32, tile.page as u32);
    let mut codes = vec![QueryStep::default(); count * dim / 32];
    if let Some(quantise) = kernels.quantise {
        for (row, steps) in queries.iter().zip(codes.chunks_mut(dim / 32)) {
            // SAFETY: the instruction set is supported.
            unsafe { quantise(row, steps) };
        }
    }
    let queries = queries.concat();
    let mut scores = vec![0.0; count * TILE];
    let to = scores.as_mut_ptr();
    tile.read(low, high, |keys| {
        let (queries, codes) = (queries.as_ptr(), codes.as_ptr());
        let score =
            Score { queries, stride: dim, codes, count, size: tile.size, keys, low, high, scores: to };
        // SAFETY: the rows are there, and as many scores.
        unsafe { (kernels.score)(&score) };
    });
    scores
}

/// Tiles of random rows, the part of them that is seen, and a number of queries.
fn cases(mut case: impl FnMut(Rounding, &mut Random, Tile, usize, usize, usize)) {
    for rounding in roundings() {
        for dim in [64, 128, 192, 512] {
            for page in [16, 32, 64] {
                for (low, high) in [(0, 64), (0, 1), (63, 64), (5, 64), (17, 50), (2, 37), (30, 33)] {
                    let mut random = Random((dim * page * high + low) as u64);
                    let scales =
                        (0..TILE).map(|_| random.float() * random.pick(&[1.0, 1e-3, 1e30])).collect();
                    // Anything but NaN.
                    let tile = Tile::new(
                        dim,
                        page,
                        |_, _| random.below(127) as u8 | random.pick(&[0, 0x80]),
                        scales,
                    );
                    let count = random.pick(&[1, 2, 3, 4, 5, 7, 8]);
                    case(rounding, &mut random, tile, low, high, count);
                }
            }
        }
    }
}

#[test]
fn scores_are_those_of_rounded_queries() {
    cases(|(isa, rounded), random, tile, low, high, count| {
        let dim = tile.size.dim;
        let queries: Vec<Vec<f32>> = (0..count).map(|_| (0..dim).map(|_| random.float()).collect()).collect();
        let found = scores(isa, &tile, &queries, low, high);
        for (r, query) in queries.iter().enumerate() {
            for t in low..high {
                let scale = f64::from(tile.scales[t]);
                let product = |i: usize| f64::from(rounded(query[i])) * tile.number(t, i) * scale;
                let (sum, all) =
                    (0..dim).map(product).fold((0.0, 0.0), |(s, a), x: f64| (s + x, a + x.abs()));
                let found = f64::from(found[r * TILE + t]);
                assert!(
                    (found - sum).abs() <= 1e-6 * all,
                    "{isa}, {dim} row {r} token {t}: {found}, not {sum}"
                );
            }
        }
    });
}

#[test]
fn values_are_those_of_rounded_weights() {
    cases(|(isa, rounded), random, tile, low, high, count| {
        let dim = tile.size.dim;
        let kernels = isa.kernels().expect("supported");
        let kernels = kernels.rows(RowFormat::Fp8E4m3, dim as u32, dim as u32, tile.page as u32);
        let mut weights = vec![f32::NAN; count * TILE];
        for (i, weight) in weights.iter_mut().enumerate() {
            if (low..high).contains(&(i % TILE)) {
                *weight = random.float().abs();
            }
        }
        let given = weights.clone();
        let decay: Vec<f32> = (0..count).map(|_| random.float().abs()).collect();
        let before: Vec<f32> = (0..count * dim).map(|_| random.float()).collect();
        let mut values = before.clone();
        let (to, from) = (values.as_mut_ptr(), weights.as_mut_ptr());
        tile.read(low, high, |chunk| {
            let accumulate = Accumulate {
                weights: from,
                decay: Some(decay.as_ptr()),
                values: to,
                stride: dim,
                count,
                dim,
                size: tile.size,
                chunk,
                low,
                high,
                prefetch: true,
            };
            // SAFETY: the rows are there, and as many weights, factors and values.
            unsafe { (kernels.accumulate)(&accumulate) };
        });
        for r in 0..count {
            for i in 0..dim {
                let start = f64::from(decay[r]) * f64::from(before[r * dim + i]);
                let product = |t: usize| {
                    let weight = rounded(given[r * TILE + t] * (256.0 * tile.scales[t]));
                    f64::from(weight) * tile.number(t, i) / 256.0
                };
                let add = |(s, a): (f64, f64), x: f64| (s + x, a + x.abs());
                let (sum, all) = (low..high).map(product).fold((start, start.abs()), add);
                let found = f64::from(values[r * dim + i]);
                assert!(
                    (found - sum).abs() <= 1e-6 * all,
                    "{isa}, {dim} row {r} element {i}: {found}, not {sum}"
                );
            }
        }
    });
}

#[test]
fn every_code_is_its_number() {
    for (isa, _) in roundings() {
        let code = |t: usize, i: usize| ((t * 64 + i) % 256) as u8;
        let number = |t, i| if code(t, i) & 0x7f == 0x7f { 0 } else { code(t, i) };
        let tile = Tile::new(64, 64, number, vec![1.0; TILE]);
        let one = |i: usize| (0..64).map(|j| f32::from(u8::from(i == j))).collect::<Vec<_>>();
        for i in 0..64 {
            let found = scores(isa, &tile, &[one(i)], 0, TILE);
            for (t, found) in found.iter().enumerate() {
                assert_eq!(*found, e4m3(number(t, i)), "{isa}, code {}", code(t, i));
            }
        }
        let tile = Tile::new(64, 64, code, vec![1.0; TILE]);
        let found = scores(isa, &tile, &[one(0)], 0, TILE);
        assert!((0..TILE).all(|t| found[t].is_nan() == (t % 2 == 1)), "rows 1 and 3 of four have a NaN");
    }
}
