//! Dot products of stored codes, with the byte products of AVX-512 VNNI.
//!
//! Codes are read as unsigned bytes, of which one stands for 0; what they are multiplied with are signed bytes, two for a
//! number or, with 4-bit codes, one (see [`integers`](crate::integers)). Of K, 16 rows are transposed so that a word of a vector holds four elements of
//! one row: scores come out 16 at a time. Of V, 4 rows are interleaved so that a word holds one element of each; weights times
//! the scales of V become integers for every tile and step. Sums of products are exact; they are converted and scaled once
//! a step, in an order that does not depend on how many query rows there are.

mod codes;

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use pagoda_core::layout::RowFormat;
use pagoda_core::work::TILE;

use self::codes::{Codes, Int8, Mxfp4, Q4_0, Q5_0, Q8_0};
use super::RowKernels;
use crate::integers::{self, QueryStep, STEP, code_max};
use crate::kernel::{Accumulate, RowSize, Score};
use crate::stored::Row;

/// Rows of K that are scored together: the lanes of a vector.
const LANES: usize = 16;
/// Rows of V that are weighed together: the bytes of a word.
const QUAD: usize = 4;
/// Steps of V whose weights are made at once.
const PART: usize = 4;
/// Vectors of the words of a step of V.
const VECTORS: usize = STEP / LANES;

macro_rules! vnni {
    ($(#[$doc:meta])* unsafe fn $($rest:tt)*) => {
        $(#[$doc])*
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512bitalg,avx2,fma")]
        unsafe fn $($rest)*
    };
}

/// The kernels for rows of a format.
pub(super) fn rows(format: RowFormat) -> Option<&'static RowKernels> {
    const fn kernels<C: Codes>() -> RowKernels {
        RowKernels { score: score::<C>, accumulate: accumulate::<C>, quantise: Some(quantise::<C>) }
    }
    match format {
        RowFormat::Int8 => Some(const { &kernels::<Int8>() }),
        RowFormat::Q8_0 => Some(const { &kernels::<Q8_0>() }),
        RowFormat::Q5_0 => Some(const { &kernels::<Q5_0>() }),
        RowFormat::Q4_0 => Some(const { &kernels::<Q4_0>() }),
        RowFormat::Mxfp4 => Some(const { &kernels::<Mxfp4>() }),
        _ => None,
    }
}

vnni! {
    unsafe fn quantise<C: Codes>(row: &[f32], steps: &mut [QueryStep]) {
        integers::quantise(row, C::ZERO, C::BYTES, steps);
    }
}

/// Asks for a part of 16 rows: of the bytes that they have for a step.
#[inline(always)]
unsafe fn prefetch<C: Codes>(rows: *const u8, part: usize, parts: usize) {
    let bytes = LANES * C::STEP_BYTES / parts;
    for line in (0..bytes).step_by(64) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(rows.wrapping_add(part * bytes + line).cast()) };
    }
}

/// Asks for the scales of 16 rows.
#[inline(always)]
unsafe fn prefetch_scales(scales: *const u8, size: RowSize) {
    for line in (0..LANES * size.scale_bytes).step_by(64) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(scales.wrapping_add(line).cast()) };
    }
}

/// `$kernel::<C, R, STEPS>($args, row)` for all rows. Strides that are known when this is compiled spare the kernels their registers.
macro_rules! for_rows {
    ($kernel:ident::<$codes:ident>($args:ident), $dim:expr) => {{
        let mut row = 0;
        while row < $args.count {
            let rows = match $args.count - row {
                1 => 1,
                2..4 => 2,
                _ => 4,
            };
            // SAFETY: as the caller promises; every block gets as many query rows as there are.
            unsafe {
                match (rows, if $args.size.dim == $dim { $dim } else { 0 }) {
                    (1, 128) => $kernel::<$codes, 1, 4>($args, row),
                    (2, 128) => $kernel::<$codes, 2, 4>($args, row),
                    (_, 128) => $kernel::<$codes, 4, 4>($args, row),
                    (1, 256) => $kernel::<$codes, 1, 8>($args, row),
                    (2, 256) => $kernel::<$codes, 2, 8>($args, row),
                    (_, 256) => $kernel::<$codes, 4, 8>($args, row),
                    (1, _) => $kernel::<$codes, 1, 0>($args, row),
                    (2, _) => $kernel::<$codes, 2, 0>($args, row),
                    _ => $kernel::<$codes, 4, 0>($args, row),
                }
            }
            row += rows;
        }
    }};
}

vnni! {
    /// See [`kernel::score`](crate::kernel::score).
    unsafe fn score<C: Codes>(args: &Score<'_>) {
        for_rows!(score_rows::<C>(args), args.size.dim);
    }
}

/// Sums of products with high and low bytes, as one.
#[inline(always)]
unsafe fn joined<C: Codes>(high: __m512i, low: __m512i) -> __m512i {
    // SAFETY: the caller has AVX-512.
    if C::BYTES == 1 { high } else { unsafe { _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low) } }
}

/// Scores of `R` query rows, of `STEPS` steps if not 0.
#[inline(always)]
unsafe fn score_rows<C: Codes, const R: usize, const STEPS: usize>(args: &Score<'_>, row: usize) {
    let size = if STEPS == 0 { args.size } else { C::size(STEPS) };
    let steps = size.dim / STEP;
    // SAFETY: 16 rows lie within a page; `codes` and `scores` are as large as `Score` says.
    unsafe {
        let queries = args.codes.add(row * steps);
        for first in (args.low / LANES * LANES..args.high).step_by(2 * LANES) {
            // Two blocks of rows share the loads of queries. Rows that nobody sees may have no page.
            let firsts = [first, if first + LANES < args.high { first + LANES } else { first }];
            let keys = firsts.map(|first| args.keys.row(first, size));
            let ahead = firsts.map(|first| args.keys.row_of_next(first, size));
            if row == 0 {
                prefetch_scales(ahead[0].scales, size);
                prefetch_scales(ahead[1].scales, size);
            }
            let mut scores = [[_mm512_setzero_ps(); R]; 2];
            for step in 0..steps {
                let columns = C::columns(keys[0].data, size, step);
                let others = C::columns(keys[1].data, size, step);
                let mut high = [[_mm512_setzero_si512(); 2]; R];
                let mut low = [[_mm512_setzero_si512(); 2]; R];
                for r in 0..R {
                    let start = _mm512_set1_epi32((*queries.add(r * steps + step)).start);
                    *(if C::BYTES == 1 { &mut high[r] } else { &mut low[r] }) = [start; 2];
                }
                for (i, (&column, &other)) in columns.iter().zip(&others).enumerate() {
                    // Evenly: what is asked for in bursts is not fetched.
                    if row == 0 && i % 2 == 0 {
                        for ahead in ahead {
                            let rows = ahead.data.wrapping_add(step * LANES * C::STEP_BYTES);
                            prefetch::<C>(rows, i / 2, STEP / 8);
                        }
                    }
                    for r in 0..R {
                        let query = &*queries.add(r * steps + step);
                        let word = _mm512_set1_epi32(query.high[i]);
                        high[r][0] = _mm512_dpbusd_epi32(high[r][0], column, word);
                        high[r][1] = _mm512_dpbusd_epi32(high[r][1], other, word);
                        if C::BYTES == 2 {
                            let word = _mm512_set1_epi32(query.low[i]);
                            low[r][0] = _mm512_dpbusd_epi32(low[r][0], column, word);
                            low[r][1] = _mm512_dpbusd_epi32(low[r][1], other, word);
                        }
                    }
                }
                for block in 0..2 {
                    let scales = C::scales(keys[block].scales, size, step);
                    for r in 0..R {
                        let scale = _mm512_set1_ps((*queries.add(r * steps + step)).scale);
                        let sum = _mm512_cvtepi32_ps(joined::<C>(high[r][block], low[r][block]));
                        let sum = _mm512_mul_ps(sum, scale);
                        scores[block][r] = _mm512_fmadd_ps(sum, scales, scores[block][r]);
                    }
                }
            }
            for (first, scores) in firsts.into_iter().zip(scores) {
                for (r, score) in scores.into_iter().enumerate() {
                    _mm512_storeu_ps(args.scores.add((row + r) * TILE + first), score);
                }
            }
        }
    }
}

vnni! {
    /// See [`kernel::accumulate`](crate::kernel::accumulate).
    unsafe fn accumulate<C: Codes>(args: &Accumulate<'_>) {
        for_rows!(accumulate_rows::<C>(args), args.dim);
    }
}

/// Reduces vectors to a number each: of `v[i][j]` in lane `4 * i + j`.
#[inline(always)]
unsafe fn reduce(v: [[__m512i; 4]; PART], with: impl Fn(__m512i, __m512i) -> __m512i) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let mut parts = [_mm512_setzero_si512(); PART];
        for (part, [a, b, c, d]) in parts.iter_mut().zip(v) {
            let ab = with(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let cd = with(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            *part = with(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        }
        let neighbours = |a, b| {
            let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
            with(even, _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b))
        };
        let [a, b, c, d] = parts;
        neighbours(neighbours(a, b), neighbours(c, d))
    }
}

/// The weights of a tile for `R` query rows, times the scales of some steps of V, as integers.
#[repr(C, align(64))]
struct Weights<const R: usize> {
    /// Four to a word.
    high: [[[i32; TILE / QUAD]; R]; PART],
    low: [[[i32; TILE / QUAD]; R]; PART],
    /// What sums of products with codes begin with: minus the products with the code of 0.
    start: [[i32; 4]; PART],
    /// What an integer of 1 stands for.
    scale: [[f32; 4]; PART],
}

impl<const R: usize> Weights<R> {
    /// Writes those of `steps` steps.
    #[inline(always)]
    unsafe fn fill<C: Codes>(
        this: *mut Self,
        weights: *const f32,
        scales: &[[__m512; TILE / LANES]; PART],
        steps: usize,
    ) {
        /// Where the lower byte of a weight lies after two vectors have been packed to one, twice.
        const LOW: [u8; 64] = {
            let mut index = [0; 64];
            let mut i = 0;
            while i < 64 {
                let (half, vector, quarter, word) = (i / 32, i / 16 % 2, i / 4 % 4, i % 4);
                index[i] = (half * 64 + 2 * (quarter * 8 + vector * 4 + word)) as u8;
                i += 1;
            }
            index
        };
        // SAFETY: as the caller promises.
        unsafe {
            let zeros = _mm512_setzero_si512();
            let product = |step: usize, r: usize, i: usize| {
                _mm512_mul_ps(_mm512_loadu_ps(weights.add(r * TILE + i * LANES)), scales[step][i])
            };
            let mut most = [[zeros; 4]; PART];
            for (step, most) in most[..steps].iter_mut().enumerate() {
                for (r, most) in most[..R].iter_mut().enumerate() {
                    // As bits, of which a NaN has the most.
                    let bits = |i| _mm512_castps_si512(_mm512_abs_ps(product(step, r, i)));
                    let (a, b) = (_mm512_max_epi32(bits(0), bits(1)), _mm512_max_epi32(bits(2), bits(3)));
                    *most = _mm512_max_epi32(a, b);
                }
            }
            let most = _mm512_castsi512_ps(reduce(most, |a, b| _mm512_max_epi32(a, b)));
            let code_max = code_max(C::BYTES);
            _mm512_store_ps(
                (&raw mut (*this).scale).cast(),
                _mm512_mul_ps(most, _mm512_set1_ps(1.0 / code_max)),
            );
            let mut inverse = [[0.0; 4]; PART];
            _mm512_storeu_ps(inverse.as_mut_ptr().cast(), _mm512_div_ps(_mm512_set1_ps(code_max), most));
            let order = _mm512_loadu_si512(LOW.as_ptr().cast());
            let next = _mm512_add_epi8(order, _mm512_set1_epi8(1));
            // Of four vectors packed to one the words lie four apart.
            let words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let ones = _mm512_set1_epi8(1);
            let mut sums = [[zeros; 4]; PART];
            for step in 0..steps {
                for r in 0..R {
                    let inverse = _mm512_set1_ps(inverse[step][r]);
                    let code = |i| _mm512_cvtps_epi32(_mm512_mul_ps(product(step, r, i), inverse));
                    let (a, b) = (_mm512_packs_epi32(code(0), code(1)), _mm512_packs_epi32(code(2), code(3)));
                    let high = if C::BYTES == 1 {
                        _mm512_permutexvar_epi32(words, _mm512_packs_epi16(a, b))
                    } else {
                        let half = _mm512_set1_epi16(128);
                        let low = _mm512_permutex2var_epi8(a, order, b);
                        _mm512_store_si512((&raw mut (*this).low[step][r]).cast(), low);
                        sums[step][r] = _mm512_dpbusd_epi32(zeros, ones, low);
                        let (a, b) = (_mm512_add_epi16(a, half), _mm512_add_epi16(b, half));
                        _mm512_permutex2var_epi8(a, next, b)
                    };
                    _mm512_store_si512((&raw mut (*this).high[step][r]).cast(), high);
                    sums[step][r] = joined::<C>(_mm512_dpbusd_epi32(zeros, ones, high), sums[step][r]);
                }
            }
            let sums = reduce(sums, |a, b| _mm512_add_epi32(a, b));
            let start = _mm512_mullo_epi32(sums, _mm512_set1_epi32(-C::ZERO));
            _mm512_store_si512((&raw mut (*this).start).cast(), start);
        }
    }
}

/// `R` query rows, of `STEPS` steps if not 0.
#[inline(always)]
unsafe fn accumulate_rows<C: Codes, const R: usize, const STEPS: usize>(args: &Accumulate<'_>, row: usize) {
    let size = if STEPS == 0 { args.size } else { C::size(STEPS) };
    let steps = if STEPS == 0 { args.dim / STEP } else { STEPS };
    let blocks = args.low / LANES..args.high.div_ceil(LANES);
    let rows: [Row; TILE / LANES] = std::array::from_fn(|i| args.chunk.row(i * LANES, size));
    let ahead = std::array::from_fn(|i| args.chunk.row_of_next(i * LANES, size));
    // Once; no branch is as cheap as to ask for what is there.
    let ahead: [Row; TILE / LANES] = if args.prefetch && row == 0 { ahead } else { rows };
    let seen = (u64::MAX >> (TILE - args.high)) & (u64::MAX << args.low);
    // SAFETY: as the caller promises; 16 rows lie within a page, and pages without a row that is seen are not read.
    unsafe {
        for block in blocks.clone() {
            prefetch_scales(ahead[block].scales, size);
        }
        let mut weights = MaybeUninit::<Weights<R>>::uninit();
        let weights = weights.as_mut_ptr();
        for step in 0..steps {
            let part = if C::ROW_SCALE { 0 } else { step % PART };
            if part == 0 && (step == 0 || !C::ROW_SCALE) {
                let count = if C::ROW_SCALE { 1 } else { PART.min(steps - step) };
                let mut scales = [[_mm512_setzero_ps(); TILE / LANES]; PART];
                for block in blocks.clone() {
                    let seen = (seen >> (block * LANES)) as __mmask16;
                    for (i, scales) in scales[..count].iter_mut().enumerate() {
                        scales[block] =
                            _mm512_maskz_mov_ps(seen, C::scales(rows[block].scales, size, step + i));
                    }
                }
                Weights::fill::<C>(weights, args.weights.add(row * TILE), &scales, count);
            }
            let mut high = [[_mm512_setzero_si512(); VECTORS]; R];
            let mut low = [[_mm512_setzero_si512(); VECTORS]; R];
            for block in blocks.clone() {
                let ahead = ahead[block].data.wrapping_add(step * LANES * C::STEP_BYTES);
                for quad in 0..LANES / QUAD {
                    let codes = C::words(rows[block].data.wrapping_add(quad * QUAD * size.bytes), size, step);
                    prefetch::<C>(ahead, quad, LANES / QUAD);
                    let word = block * (LANES / QUAD) + quad;
                    for r in 0..R {
                        let weight = _mm512_set1_epi32((*weights).high[part][r][word]);
                        for i in 0..VECTORS {
                            high[r][i] = _mm512_dpbusd_epi32(high[r][i], codes[i], weight);
                        }
                        if C::BYTES == 2 {
                            let weight = _mm512_set1_epi32((*weights).low[part][r][word]);
                            for i in 0..VECTORS {
                                low[r][i] = _mm512_dpbusd_epi32(low[r][i], codes[i], weight);
                            }
                        }
                    }
                }
            }
            for r in 0..R {
                let decay = _mm512_set1_ps(args.decay.map_or(1.0, |decay| *decay.add(row + r)));
                let start = _mm512_set1_epi32((*weights).start[part][r]);
                let scale = _mm512_set1_ps((*weights).scale[part][r]);
                for i in 0..VECTORS {
                    let sum = _mm512_add_epi32(joined::<C>(high[r][i], low[r][i]), start);
                    let sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
                    let values = args.values.add((row + r) * args.stride + step * STEP + i * LANES);
                    _mm512_storeu_ps(values, _mm512_fmadd_ps(decay, _mm512_loadu_ps(values), sum));
                }
            }
        }
    }
}
