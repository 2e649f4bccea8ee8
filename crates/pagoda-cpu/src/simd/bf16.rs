//! Dot products of bfloat16 with rows of fp8_e4m3 (AVX-512 BF16).
//!
//! Every E4M3 number is a bfloat16 number (`e4m3.rs` makes it). Queries and weights are rounded to bfloat16, by up to 2^-8 of
//! each, a sixteenth of what rounding to E4M3 did to the rows. Products are exact and added up in f32, two at a time.

#![expect(clippy::needless_range_loop, reason = "an index runs over several arrays of vectors")]

use std::arch::x86_64::*;

use pagoda_core::work::TILE;

use super::Simd;
use super::avx512::Avx512;
use super::e4m3::{CODES, ROWS, Tables, for_rows};
use super::kernels::PRODUCT_ROWS;
use crate::integers::QueryStep;
use crate::kernel::{Accumulate, Score, scale_rows};
use crate::stored::Fp8E4m3;

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

/// See [`kernel::score`](crate::kernel::score).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn score(args: &Score<'_>) {
    for_rows!(score_rows(args));
    // SAFETY: as the caller promises.
    unsafe {
        scale_rows::<Avx512, Fp8E4m3>(args.keys, args.size, args.low..args.high, args.scores, args.count)
    };
}

/// Scores of `R` query rows, before scaling; returns `R`.
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
        let ahead = args.keys.to_ask_for(args.keys.in_order, size);
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

/// Adds to the values of `R` query rows; returns `R`.
#[inline(always)]
unsafe fn accumulate_rows<const R: usize>(args: &Accumulate<'_>, row: usize) -> usize {
    let (size, low, high) = (args.size, args.low, args.high);
    let seen = (u64::MAX >> (TILE - high)) & (u64::MAX << low);
    // SAFETY: as the caller promises; 16 rows lie within a page, and those that are not seen are not read.
    unsafe {
        let tables = Tables::load();
        let ahead = args.chunk.to_ask_for(args.chunk.in_order, size);
        // Of two tokens in a word; 0 for those that are not seen.
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
