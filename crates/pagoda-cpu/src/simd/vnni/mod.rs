//! Dot products of stored codes, with the byte products of AVX-512 VNNI.
//!
//! Codes are read as unsigned bytes, of which one stands for 0; what they are multiplied with are signed bytes, two for a
//! number (see [`integers`](crate::integers)). Of K, 16 rows are transposed so that a word of a vector holds four elements of
//! one row: scores come out 16 at a time. Of V, 4 rows are interleaved so that a word holds one element of each; weights times
//! the scales of V become integers for every tile and step. Sums of products are exact; they are converted and scaled once
//! a step, in an order that does not depend on how many query rows there are.

mod codes;

use std::arch::x86_64::*;

use pagoda_core::layout::RowFormat;
use pagoda_core::work::TILE;

use self::codes::{Codes, Int8, Mxfp4, Q4_0, Q5_0, Q8_0};
use super::RowKernels;
use crate::integers::{self, CODE_MAX, QueryStep, STEP};
use crate::kernel::{Accumulate, RowSize, Score};

/// Rows of K that are scored together: the lanes of a vector.
const LANES: usize = 16;
/// Rows of V that are weighed together: the bytes of a word.
const QUAD: usize = 4;
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
        integers::quantise(row, C::ZERO, steps);
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

/// Scores of `R` query rows, of `STEPS` steps if not 0.
#[inline(always)]
unsafe fn score_rows<C: Codes, const R: usize, const STEPS: usize>(args: &Score<'_>, row: usize) {
    let size = if STEPS == 0 { args.size } else { C::size(STEPS) };
    let steps = size.dim / STEP;
    // SAFETY: 16 rows lie within a page; `codes` and `scores` are as large as `Score` says.
    unsafe {
        let queries = args.codes.add(row * steps);
        for first in (args.low / LANES * LANES..args.high).step_by(LANES) {
            let (keys, ahead) = (args.keys.row(first, size), args.keys.row_of_next(first, size));
            if row == 0 {
                prefetch_scales(ahead.scales, size);
            }
            let mut scores = [_mm512_setzero_ps(); R];
            for step in 0..steps {
                let columns = C::columns(keys.data, size, step);
                let scales = C::scales(keys.scales, size, step);
                let ahead = ahead.data.wrapping_add(step * LANES * C::STEP_BYTES);
                for (r, score) in scores.iter_mut().enumerate() {
                    // Evenly: what is asked for in bursts is not fetched.
                    if row == 0 {
                        prefetch::<C>(ahead, r, R);
                    }
                    let query = &*queries.add(r * steps + step);
                    let mut high = _mm512_setzero_si512();
                    let mut low = _mm512_set1_epi32(query.start);
                    for (i, &column) in columns.iter().enumerate() {
                        high = _mm512_dpbusd_epi32(high, column, _mm512_set1_epi32(query.high[i]));
                        low = _mm512_dpbusd_epi32(low, column, _mm512_set1_epi32(query.low[i]));
                    }
                    let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low);
                    let sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(query.scale));
                    *score = _mm512_fmadd_ps(sum, scales, *score);
                }
            }
            for (r, score) in scores.into_iter().enumerate() {
                _mm512_storeu_ps(args.scores.add((row + r) * TILE + first), score);
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

/// Reduces four vectors to a number each.
#[inline(always)]
unsafe fn reduce(v: [__m512i; 4], with: impl Fn(__m512i, __m512i) -> __m512i) -> __m128i {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let ab = with(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
        let cd = with(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
        let all = with(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        let all = with(all, _mm512_shuffle_i32x4::<0b10_11_00_01>(all, all));
        _mm512_castsi512_si128(with(all, _mm512_shuffle_i32x4::<0b01_00_11_10>(all, all)))
    }
}

/// The weights of a tile for `R` query rows, times the scales of a step of V, as integers.
#[repr(C, align(64))]
struct Weights<const R: usize> {
    /// Four to a word.
    high: [[i32; TILE / QUAD]; R],
    low: [[i32; TILE / QUAD]; R],
    /// What sums of products with codes begin with: minus the products with the code of 0.
    start: [i32; 4],
    /// What an integer of 1 stands for.
    scale: [f32; 4],
}

impl<const R: usize> Weights<R> {
    const NONE: Self =
        Self { high: [[0; TILE / QUAD]; R], low: [[0; TILE / QUAD]; R], start: [0; 4], scale: [0.0; 4] };

    #[inline(always)]
    unsafe fn fill(&mut self, weights: *const f32, scales: [__m512; TILE / LANES], zero: i32) {
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
            let mut products = [[_mm512_setzero_ps(); TILE / LANES]; R];
            let mut most = [zeros; 4];
            for r in 0..R {
                for i in 0..TILE / LANES {
                    let weight = _mm512_loadu_ps(weights.add(r * TILE + i * LANES));
                    products[r][i] = _mm512_mul_ps(weight, scales[i]);
                    // As bits, of which a NaN has the most.
                    most[r] = _mm512_max_epi32(most[r], _mm512_castps_si512(_mm512_abs_ps(products[r][i])));
                }
            }
            let most = _mm_castsi128_ps(reduce(most, |a, b| _mm512_max_epi32(a, b)));
            _mm_storeu_ps(self.scale.as_mut_ptr(), _mm_mul_ps(most, _mm_set1_ps(1.0 / CODE_MAX)));
            let inverses = _mm_div_ps(_mm_set1_ps(CODE_MAX), most);
            let mut inverse = [0.0; 4];
            _mm_storeu_ps(inverse.as_mut_ptr(), inverses);
            let order = _mm512_loadu_si512(LOW.as_ptr().cast());
            let next = _mm512_add_epi8(order, _mm512_set1_epi8(1));
            let ones = _mm512_set1_epi8(1);
            let mut sums = [zeros; 4];
            for r in 0..R {
                let code =
                    |i: usize| _mm512_cvtps_epi32(_mm512_mul_ps(products[r][i], _mm512_set1_ps(inverse[r])));
                let (a, b) = (_mm512_packs_epi32(code(0), code(1)), _mm512_packs_epi32(code(2), code(3)));
                let low = _mm512_permutex2var_epi8(a, order, b);
                let half = _mm512_set1_epi16(128);
                let high =
                    _mm512_permutex2var_epi8(_mm512_add_epi16(a, half), next, _mm512_add_epi16(b, half));
                _mm512_store_si512(self.high[r].as_mut_ptr().cast(), high);
                _mm512_store_si512(self.low[r].as_mut_ptr().cast(), low);
                let highs = _mm512_slli_epi32::<8>(_mm512_dpbusd_epi32(zeros, ones, high));
                sums[r] = _mm512_dpbusd_epi32(highs, ones, low);
            }
            let sums = reduce(sums, |a, b| _mm512_add_epi32(a, b));
            _mm_storeu_si128(self.start.as_mut_ptr().cast(), _mm_mullo_epi32(sums, _mm_set1_epi32(-zero)));
        }
    }
}

/// `R` query rows, of `STEPS` steps if not 0.
#[inline(always)]
unsafe fn accumulate_rows<C: Codes, const R: usize, const STEPS: usize>(args: &Accumulate<'_>, row: usize) {
    let size = if STEPS == 0 { args.size } else { C::size(STEPS) };
    let steps = if STEPS == 0 { args.dim / STEP } else { STEPS };
    let prefetches = args.prefetch && row == 0;
    // SAFETY: as the caller promises; 16 rows lie within a page, and pages without a row that is seen are not read.
    unsafe {
        let mut weights = Weights::<R>::NONE;
        for step in 0..steps {
            if step == 0 || !C::ROW_SCALE {
                let mut scales = [_mm512_setzero_ps(); TILE / LANES];
                for (i, scales) in scales.iter_mut().enumerate() {
                    let below = |t: usize| (1u32 << t.saturating_sub(i * LANES).min(LANES)) - 1;
                    let seen = (below(args.high) & !below(args.low)) as __mmask16;
                    if seen != 0 {
                        let row = args.chunk.row(i * LANES, size);
                        *scales = _mm512_maskz_mov_ps(seen, C::scales(row.scales, size, step));
                    }
                }
                weights.fill(args.weights.add(row * TILE), scales, C::ZERO);
            }
            let mut high = [[_mm512_setzero_si512(); VECTORS]; R];
            let mut low = [[_mm512_setzero_si512(); VECTORS]; R];
            for first in (args.low / LANES * LANES..args.high).step_by(LANES) {
                let rows = args.chunk.row(first, size).data;
                let ahead = args.chunk.row_of_next(first, size);
                if prefetches && step == 0 {
                    prefetch_scales(ahead.scales, size);
                }
                let ahead = ahead.data.wrapping_add(step * LANES * C::STEP_BYTES);
                for quad in 0..LANES / QUAD {
                    let codes = C::words(rows.wrapping_add(quad * QUAD * size.bytes), size, step);
                    if prefetches {
                        prefetch::<C>(ahead, quad, LANES / QUAD);
                    }
                    for r in 0..R {
                        let weight = _mm512_set1_epi32(weights.high[r][first / QUAD + quad]);
                        for i in 0..VECTORS {
                            high[r][i] = _mm512_dpbusd_epi32(high[r][i], codes[i], weight);
                        }
                        let weight = _mm512_set1_epi32(weights.low[r][first / QUAD + quad]);
                        for i in 0..VECTORS {
                            low[r][i] = _mm512_dpbusd_epi32(low[r][i], codes[i], weight);
                        }
                    }
                }
            }
            for r in 0..R {
                let decay = _mm512_set1_ps(args.decay.map_or(1.0, |decay| *decay.add(row + r)));
                let start = _mm512_set1_epi32(weights.start[r]);
                let scale = _mm512_set1_ps(weights.scale[r]);
                for i in 0..VECTORS {
                    let sum = _mm512_add_epi32(
                        _mm512_slli_epi32::<8>(high[r][i]),
                        _mm512_add_epi32(low[r][i], start),
                    );
                    let sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
                    let values = args.values.add((row + r) * args.stride + step * STEP + i * LANES);
                    _mm512_storeu_ps(values, _mm512_fmadd_ps(decay, _mm512_loadu_ps(values), sum));
                }
            }
        }
    }
}
