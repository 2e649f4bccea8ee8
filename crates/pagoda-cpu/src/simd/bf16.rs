//! Dot products of bfloat16 with rows of fp8_e4m3 (AVX-512 BF16).
//!
//! Every E4M3 number is a bfloat16 number; a table in registers has the two bytes of all of them. Queries and weights are
//! rounded to bfloat16, to 2^-8 of each, which is a sixteenth of what rounding to E4M3 did to the rows. Products are
//! exact and added up in f32, two at a time.

#![expect(clippy::needless_range_loop, reason = "an index runs over several arrays of vectors")]

use std::arch::x86_64::*;

use pagoda_core::work::TILE;

use super::avx512::Avx512;
use super::{PRODUCT_ROWS, Simd};
use crate::codec::e4m3;
use crate::integers::QueryStep;
use crate::kernel::{Accumulate, Score, rows_at_once, scale_rows};
use crate::stored::Fp8E4m3;

/// Codes that become numbers at once: a cache line. Rows are as many such long.
pub(super) const CODES: usize = 64;
/// Rows that are scored at once, all of one page.
const ROWS: usize = 4;

/// One byte of what the codes without a sign stand for as bfloat16, times 2^-8 as in [`Stored`](crate::stored::Stored).
const fn table(byte: usize) -> [u8; 128] {
    let mut table = [0; 128];
    let mut code = 0;
    while code < 128 {
        table[code] = (e4m3(code as u8) / 256.0).to_bits().to_le_bytes()[2 + byte];
        code += 1;
    }
    table
}

/// What decodes E4M3.
#[derive(Clone, Copy)]
struct Tables {
    low: [__m512i; 2],
    high: [__m512i; 2],
}

impl Tables {
    #[inline(always)]
    unsafe fn load() -> Self {
        const LOW: [u8; 128] = table(0);
        const HIGH: [u8; 128] = table(1);
        // SAFETY: the caller has AVX-512.
        unsafe {
            let two = |table: &[u8; 128]| {
                let first = _mm512_loadu_si512(table.as_ptr().cast());
                [first, _mm512_loadu_si512(table.as_ptr().add(64).cast())]
            };
            Self { low: two(&LOW), high: two(&HIGH) }
        }
    }

    /// The numbers of 64 codes: in every 128 bits the first 8 of 16, and the others.
    #[inline(always)]
    unsafe fn decode(&self, codes: __m512i) -> [__m512i; 2] {
        // SAFETY: the caller has AVX-512 VBMI. Only the lower 7 bits of an index count; the eighth is the sign.
        unsafe {
            let low = _mm512_permutex2var_epi8(self.low[0], codes, self.low[1]);
            let high = _mm512_permutex2var_epi8(self.high[0], codes, self.high[1]);
            let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, _mm512_set1_epi8(-128));
            [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
        }
    }
}

/// Adds 32 products, two to each lane.
#[inline(always)]
unsafe fn add_products(sums: __m512, a: __m512i, b: __m512i) -> __m512 {
    // SAFETY: the caller has AVX-512 BF16; these are bits.
    unsafe {
        let [a, b] = std::mem::transmute::<[__m512i; 2], [__m512bh; 2]>([a, b]);
        _mm512_dpbf16_ps(sums, a, b)
    }
}

/// Sixteen f32 as bfloat16.
#[inline(always)]
unsafe fn round(v: __m512) -> __m256i {
    // SAFETY: the caller has AVX-512 BF16; these are bits.
    unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v)) }
}

/// Writes a query as [`Tables::decode`] orders codes: a step for every 32 of them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn quantise(row: &[f32], steps: &mut [QueryStep]) {
    for (elements, steps) in row.as_chunks::<CODES>().0.iter().zip(steps.as_chunks_mut::<2>().0) {
        for (half, step) in steps.iter_mut().enumerate() {
            let mut ordered = [0.0; CODES / 2];
            for (i, eight) in ordered.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                eight.copy_from_slice(&elements[16 * i + 8 * half..][..8]);
            }
            // SAFETY: a step has 64 bytes of words.
            unsafe {
                let low = round(_mm512_loadu_ps(ordered.as_ptr()));
                let high = round(_mm512_loadu_ps(ordered.as_ptr().add(16)));
                let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                _mm512_storeu_si512((&raw mut step.words).cast(), both);
            }
        }
    }
}

/// Calls a kernel for all rows of queries.
macro_rules! for_rows {
    ($kernel:ident($args:ident)) => {
        let mut row = 0;
        while row < $args.count {
            // SAFETY: as the caller promises; every block gets as many query rows as there are.
            row += unsafe {
                match rows_at_once($args.count - row, 4) {
                    1 => $kernel::<1>($args, row),
                    2 => $kernel::<2>($args, row),
                    3 => $kernel::<3>($args, row),
                    _ => $kernel::<4>($args, row),
                }
            };
        }
    };
}

/// See [`kernel::score`](crate::kernel::score).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn score(args: &Score<'_>) {
    for_rows!(score_rows(args));
    // SAFETY: as the caller promises.
    unsafe {
        scale_rows::<Avx512, Fp8E4m3>(args.keys, args.size, args.low..args.high, args.scores, args.count)
    };
}

/// Scores of `R` query rows, before scaling; how many these are.
#[inline(always)]
unsafe fn score_rows<const R: usize>(args: &Score<'_>, row: usize) -> usize {
    let size = args.size;
    let steps = size.dim / (CODES / 2);
    // SAFETY: 4 rows lie within a page; `codes` and `scores` are as large as `Score` says.
    unsafe {
        let tables = Tables::load();
        let queries = args.codes.add(row * steps);
        let words = |r: usize, step: usize| {
            _mm512_loadu_si512((&raw const (*queries.add(r * steps + step)).words).cast())
        };
        let ahead = args.keys.streams(0, size);
        for first in (args.low / ROWS * ROWS..args.high).step_by(ROWS) {
            let keys = args.keys.row(first, size);
            let mut sums = [[_mm512_setzero_ps(); ROWS]; R];
            for c in 0..size.dim / CODES {
                for i in 0..ROWS {
                    let codes = size.after(keys, i).data.add(c * CODES);
                    let numbers = tables.decode(_mm512_loadu_si512(codes.cast()));
                    for r in 0..R {
                        for half in 0..2 {
                            sums[r][i] = add_products(sums[r][i], numbers[half], words(r, 2 * c + half));
                        }
                    }
                    if row == 0 {
                        Avx512::prefetch(ahead.line(first * (size.dim / CODES) + ROWS * c + i));
                    }
                }
            }
            Avx512::sum_quads(sums, args.scores.add(row * TILE + first), TILE);
        }
    }
    R
}

/// See [`kernel::accumulate`](crate::kernel::accumulate).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn accumulate(args: &Accumulate<'_>) {
    // SAFETY: as the caller promises.
    unsafe {
        scale_rows::<Avx512, Fp8E4m3>(args.chunk, args.size, args.low..args.high, args.weights, args.count)
    };
    for_rows!(accumulate_rows(args));
}

/// Adds to the values of `R` query rows; how many these are.
#[inline(always)]
unsafe fn accumulate_rows<const R: usize>(args: &Accumulate<'_>, row: usize) -> usize {
    let (size, low, high) = (args.size, args.low, args.high);
    let seen = (u64::MAX >> (TILE - high)) & (u64::MAX << low);
    // SAFETY: as the caller promises; 16 rows lie within a page, and those that are not seen are not read.
    unsafe {
        let tables = Tables::load();
        let ahead = args.chunk.streams(0, size);
        // Of two tokens in a word; 0 of those that are not seen.
        let mut weights = [[0u32; TILE / 2]; R];
        for (r, weights) in weights.iter_mut().enumerate() {
            for i in 0..TILE / 16 {
                let weight = _mm512_loadu_ps(args.weights.add((row + r) * TILE + 16 * i));
                let weight = _mm512_maskz_mov_ps((seen >> (16 * i)) as u16, weight);
                _mm256_storeu_si256(weights[8 * i..][..8].as_mut_ptr().cast(), round(weight));
            }
        }
        for c in 0..args.dim / CODES {
            let mut sums = [[_mm512_setzero_ps(); 4]; R];
            for block in low / PRODUCT_ROWS..high.div_ceil(PRODUCT_ROWS) {
                let rows = args.chunk.row(block * PRODUCT_ROWS, size);
                let first = (block * PRODUCT_ROWS).max(low / 2 * 2);
                for t in (first..((block + 1) * PRODUCT_ROWS).min(high)).step_by(2) {
                    let codes = |t: usize| {
                        if t < low || t >= high {
                            return _mm512_setzero_si512();
                        }
                        let row = size.after(rows, t - block * PRODUCT_ROWS);
                        _mm512_loadu_si512(row.data.add(c * CODES).cast())
                    };
                    let (a, b) = (tables.decode(codes(t)), tables.decode(codes(t + 1)));
                    let pairs = [
                        _mm512_unpacklo_epi16(a[0], b[0]),
                        _mm512_unpackhi_epi16(a[0], b[0]),
                        _mm512_unpacklo_epi16(a[1], b[1]),
                        _mm512_unpackhi_epi16(a[1], b[1]),
                    ];
                    if args.prefetch && row == 0 {
                        Avx512::prefetch(ahead.line(c * TILE + t));
                        Avx512::prefetch(ahead.line(c * TILE + t + 1));
                    }
                    for r in 0..R {
                        let weight = _mm512_set1_epi32(weights[r][t / 2] as i32);
                        for i in 0..4 {
                            sums[r][i] = add_products(sums[r][i], pairs[i], weight);
                        }
                    }
                }
            }
            for r in 0..R {
                let decay = _mm512_set1_ps(args.decay.map_or(1.0, |decay| *decay.add(row + r)));
                let values = args.values.add((row + r) * args.stride + c * CODES);
                for (i, sum) in in_order(sums[r]).into_iter().enumerate() {
                    let values = values.add(16 * i);
                    _mm512_storeu_ps(values, _mm512_fmadd_ps(decay, _mm512_loadu_ps(values), sum));
                }
            }
        }
    }
    R
}

/// Four numbers of every 16 in each vector, as four vectors of 16.
#[inline(always)]
unsafe fn in_order(v: [__m512; 4]) -> [__m512; 4] {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let halves =
            |a, b| [_mm512_shuffle_f32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b)];
        let ([a, b], [c, d]) = (halves(v[0], v[1]), halves(v[2], v[3]));
        let even = |a, b| _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        let odd = |a, b| _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
        [even(a, c), odd(a, c), even(b, d), odd(b, d)]
    }
}

#[cfg(test)]
mod tests {
    use pagoda_core::layout::RowFormat;

    use super::*;
    use crate::kernel::{Chunk, RowSize};
    use crate::simd::Isa;
    use crate::tests::samples::{Random, read};

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

        /// Calls `with` what a kernel reads; rows outside of `low..high` are NaN, pages without others are nowhere.
        fn read(&self, low: usize, high: usize, with: impl Fn(&Chunk<'_>)) {
            let mut pages = Vec::new();
            for first in (0..TILE).step_by(self.page) {
                let tokens = first..first + self.page;
                let seen = |t: &usize| (low..high).contains(t);
                let codes = tokens.clone().flat_map(|t| {
                    let row = &self.codes[t * self.size.dim..][..self.size.dim];
                    row.iter().map(move |&code| if seen(&t) { code } else { 0x7f })
                });
                let scales =
                    tokens.flat_map(|t| if seen(&t) { self.scales[t] } else { f32::NAN }.to_le_bytes());
                pages.push(codes.chain(scales).collect::<Vec<u8>>());
            }
            read(&pages, 0, self.page, self.size, low..high, with);
        }
    }

    /// The scores of some queries.
    fn scores(tile: &Tile, queries: &[Vec<f32>], low: usize, high: usize) -> Vec<f32> {
        let (dim, count) = (tile.size.dim, queries.len());
        let kernels = Isa::Avx512Bf16.kernels().expect("supported");
        let kernels = kernels.rows(RowFormat::Fp8E4m3, dim as u32, tile.page as u32);
        let mut codes = vec![QueryStep::default(); count * dim / 32];
        for (row, steps) in queries.iter().zip(codes.chunks_mut(dim / 32)) {
            // SAFETY: the instruction set is supported.
            unsafe { kernels.quantise.expect("products")(row, steps) };
        }
        let mut scores = vec![0.0; count * TILE];
        let to = scores.as_mut_ptr();
        tile.read(low, high, |keys| {
            let (queries, codes) = (std::ptr::null(), codes.as_ptr());
            let score =
                Score { queries, stride: 0, codes, count, size: tile.size, keys, low, high, scores: to };
            // SAFETY: the rows are there, and as many scores.
            unsafe { (kernels.score)(&score) };
        });
        scores
    }

    /// Tiles of random rows, the part of them that is seen, and a number of queries.
    fn cases(mut case: impl FnMut(&mut Random, Tile, usize, usize, usize)) {
        if !Isa::Avx512Bf16.is_supported() {
            return;
        }
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
                    case(&mut random, tile, low, high, count);
                }
            }
        }
    }

    #[test]
    fn scores_are_those_of_rounded_queries() {
        cases(|random, tile, low, high, count| {
            let dim = tile.size.dim;
            let queries: Vec<Vec<f32>> =
                (0..count).map(|_| (0..dim).map(|_| random.float()).collect()).collect();
            let found = scores(&tile, &queries, low, high);
            for (r, query) in queries.iter().enumerate() {
                for t in low..high {
                    let scale = f64::from(tile.scales[t]);
                    let product = |i: usize| f64::from(bf16(query[i])) * tile.number(t, i) * scale;
                    let (sum, all) =
                        (0..dim).map(product).fold((0.0, 0.0), |(s, a), x: f64| (s + x, a + x.abs()));
                    let found = f64::from(found[r * TILE + t]);
                    assert!((found - sum).abs() <= 1e-6 * all, "{dim} row {r} token {t}: {found}, not {sum}");
                }
            }
        });
    }

    #[test]
    fn values_are_those_of_rounded_weights() {
        cases(|random, tile, low, high, count| {
            let dim = tile.size.dim;
            let kernels = Isa::Avx512Bf16.kernels().expect("supported");
            let kernels = kernels.rows(RowFormat::Fp8E4m3, dim as u32, tile.page as u32);
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
                        let weight = bf16(given[r * TILE + t] * (256.0 * tile.scales[t]));
                        f64::from(weight) * tile.number(t, i) / 256.0
                    };
                    let add = |(s, a): (f64, f64), x: f64| (s + x, a + x.abs());
                    let (sum, all) = (low..high).map(product).fold((start, start.abs()), add);
                    let found = f64::from(values[r * dim + i]);
                    assert!(
                        (found - sum).abs() <= 1e-6 * all,
                        "{dim} row {r} element {i}: {found}, not {sum}"
                    );
                }
            }
        });
    }

    #[test]
    fn every_code_is_its_number() {
        if !Isa::Avx512Bf16.is_supported() {
            return;
        }
        let code = |t: usize, i: usize| ((t * 64 + i) % 256) as u8;
        let number = |t, i| if code(t, i) & 0x7f == 0x7f { 0 } else { code(t, i) };
        let tile = Tile::new(64, 64, number, vec![1.0; TILE]);
        let one = |i: usize| (0..64).map(|j| f32::from(u8::from(i == j))).collect::<Vec<_>>();
        for i in 0..64 {
            let found = scores(&tile, &[one(i)], 0, TILE);
            for (t, found) in found.iter().enumerate() {
                assert_eq!(*found, e4m3(number(t, i)), "code {}", code(t, i));
            }
        }
        let tile = Tile::new(64, 64, code, vec![1.0; TILE]);
        let found = scores(&tile, &[one(0)], 0, TILE);
        assert!((0..TILE).all(|t| found[t].is_nan() == (t % 2 == 1)), "rows 1 and 3 of four have a NaN");
    }
}
