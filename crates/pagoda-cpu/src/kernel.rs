//! The scores and values of one tile, in floats, for any number of query rows.
//!
//! A tile is [`TILE`] stored rows of one K/V head. How many query rows share a register block never changes the order in
//! which numbers are added: a score is summed lane by lane over the row and then over the lanes, a value lane takes the
//! tokens one after the other. So decode and prefill agree to the last bit, unless a tile is [decoded](crate::decoded) for
//! many query rows.

use std::ops::Range;

use pagoda_core::work::TILE;

use crate::chunk::{Chunk, LINE, RowSize, StreamLines};
use crate::integers::QueryStep;
use crate::simd::Simd;
use crate::stored::Stored;

/// Up to this many query rows, reading the tile takes most of the time.
const FEW_ROWS: usize = 8;

/// Bytes of V rows that are worked on at once. Rows that do not fit the registers are read several times, and stay in the L1
/// cache if they are few. With many query rows, loading their accumulators again costs more.
const fn step<F: Stored>(rows: usize) -> usize {
    if rows > FEW_ROWS {
        8 << 10
    } else if F::BITS == 32 {
        2 << 10
    } else {
        4 << 10
    }
}

/// Rows of scratch start at multiples of this many floats.
pub(crate) const ALIGN: usize = 16;

/// Arguments of [`score`]: dot products of query rows with the K rows `low..high` of a tile.
pub(crate) struct Score<'a> {
    /// Query rows, f32, scaled, zero past `dim` up to a multiple of [`ALIGN`].
    pub(crate) queries: *const f32,
    /// Floats from one query row to the next.
    pub(crate) stride: usize,
    /// The same queries as integers or bfloat16, `[count][dim / STEP]`, for kernels that need them.
    pub(crate) codes: *const QueryStep,
    /// Query rows.
    pub(crate) count: usize,
    /// The size of a K row.
    pub(crate) size: RowSize,
    pub(crate) keys: &'a Chunk<'a>,
    pub(crate) low: usize,
    pub(crate) high: usize,
    /// `[count][TILE]`.
    pub(crate) scores: *mut f32,
}

/// How many of `left` query rows go next, `most` at once: in equal shares, so that eight go as four and four, not as six and
/// two.
#[inline(always)]
pub(crate) fn rows_at_once(left: usize, most: usize) -> usize {
    // Few rows avoid the divisions, which would take a twentieth of their time.
    if left <= most { left } else { left.div_ceil(left.div_ceil(most)) }
}

/// Writes `scores` for the rows `low..high`; other entries are left or overwritten with anything.
#[inline(always)]
pub(crate) unsafe fn score<S: Simd, F: Stored>(args: &Score<'_>) {
    let mut row = 0;
    // SAFETY: as the caller promises; every block gets as many query rows as there are.
    unsafe {
        while row < args.count {
            let rows = rows_at_once(args.count - row, S::ROWS);
            match (rows, S::REGISTERS) {
                (1, _) => score_rows::<S, F, 2, 1, 8>(args, row),
                (2, 16) => score_rows::<S, F, 1, 2, 4>(args, row),
                (2, _) => score_rows::<S, F, 2, 2, 8>(args, row),
                (3, 16) => score_rows::<S, F, 1, 3, 2>(args, row),
                (4, 16) => score_rows::<S, F, 1, 4, 2>(args, row),
                (3, _) => score_rows::<S, F, 1, 3, 4>(args, row),
                (4, _) => score_rows::<S, F, 1, 4, 4>(args, row),
                (5, _) if S::ROWS > 4 => score_rows::<S, F, 1, 5, 4>(args, row),
                (6, _) if S::ROWS > 4 => score_rows::<S, F, 1, 6, 4>(args, row),
                _ => unreachable!("more than registers hold"),
            }
            row += rows;
        }
        scale_rows::<S, F>(args.keys, args.size, args.low..args.high, args.scores, args.count);
    }
}

/// Multiplies numbers of the rows `seen` of a tile, `[count][TILE]`, by the scales of those rows, if they have any.
#[inline(always)]
pub(crate) unsafe fn scale_rows<S: Simd, F: Stored>(
    chunk: &Chunk<'_>,
    size: RowSize,
    seen: Range<usize>,
    numbers: *mut f32,
    count: usize,
) {
    if !F::ROW_SCALE {
        return;
    }
    let mut scales = [0.0; TILE];
    // SAFETY: as the caller promises.
    unsafe {
        for t in seen {
            scales[t] = F::row_scale(chunk.row(t, size));
        }
        for i in (0..TILE).step_by(S::LANES) {
            let scale = S::load(scales.as_ptr().add(i));
            for r in 0..count {
                let p = numbers.add(r * TILE + i);
                S::store(p, S::mul(S::load(p), scale));
            }
        }
    }
}

/// Scores of `R` query rows, `4 * Q` K rows at a time; the sums of `K` of them are in registers at once.
#[inline(always)]
unsafe fn score_rows<S: Simd, F: Stored, const Q: usize, const R: usize, const K: usize>(
    args: &Score<'_>,
    row: usize,
) {
    let size = args.size;
    let vector = S::LANES * F::BITS / 8;
    let chunks = size.dim / S::LANES;
    let has_half = !size.dim.is_multiple_of(S::LANES);
    // Vectors that are read between prefetches.
    let asks = (LINE / vector).min(K);
    // SAFETY: blocks of 8 rows lie within a page; `queries` and `scores` are as large as `Score` says.
    unsafe {
        let queries = args.queries.add(row * args.stride);
        let scores = args.scores.add(row * TILE);
        let mut t = args.low & !7;
        let mut ahead = args.keys.lines_ahead(t, size);
        while t < args.high {
            // With pages of 8 tokens, the second pages of the streams begin here.
            if t == TILE / 2 {
                ahead = args.keys.lines_ahead(t, size);
            }
            let keys = args.keys.row(t, size);
            let mut sums = [[[S::splat(0.0); 4]; R]; Q];
            for first in (0..4 * Q).step_by(K) {
                for c in 0..chunks {
                    let query: [S::V; R] =
                        std::array::from_fn(|r| S::load(queries.add(r * args.stride + c * S::LANES)));
                    for i in first..first + K {
                        let key = F::load::<S>(size.after(keys, i), c * S::LANES);
                        for r in 0..R {
                            sums[i / 4][r][i % 4] = S::fma(query[r], key, sums[i / 4][r][i % 4]);
                        }
                        // Evenly spread: lines that are prefetched in bursts come later.
                        if row == 0 && (i + 1).is_multiple_of(asks) {
                            ahead.ask::<S>(asks * vector);
                        }
                    }
                }
            }
            if has_half {
                let query: [S::V; R] =
                    std::array::from_fn(|r| S::load(queries.add(r * args.stride + chunks * S::LANES)));
                for i in 0..4 * Q {
                    let key = F::half::<S>(size.after(keys, i), chunks * S::LANES);
                    for r in 0..R {
                        sums[i / 4][r][i % 4] = S::fma(query[r], key, sums[i / 4][r][i % 4]);
                    }
                }
            }
            for (q, sums) in sums.into_iter().enumerate() {
                S::sum_quads(sums, scores.add(t + 4 * q), TILE);
            }
            t += 4 * Q;
        }
    }
}

/// Arguments of [`accumulate`]: weights times the V rows `low..high` of a tile.
#[derive(Clone, Copy)]
pub(crate) struct Accumulate<'a> {
    /// `[count][TILE]`, none of them negative. Kernels may overwrite them.
    pub(crate) weights: *mut f32,
    /// If given, what each row of values is multiplied by first.
    pub(crate) decay: Option<*const f32>,
    /// `[count]` rows of f32.
    pub(crate) values: *mut f32,
    /// Floats from one row of `values` to the next, a multiple of [`ALIGN`].
    pub(crate) stride: usize,
    /// Query rows.
    pub(crate) count: usize,
    /// Elements of V.
    pub(crate) dim: usize,
    /// The size of the row that V is, or is the first part of.
    pub(crate) size: RowSize,
    pub(crate) chunk: &'a Chunk<'a>,
    pub(crate) low: usize,
    pub(crate) high: usize,
    /// Whether to prefetch what lies ahead of `chunk`.
    pub(crate) prefetch: bool,
}

/// Adds the weighted V rows to `values`, token by token.
#[inline(always)]
pub(crate) unsafe fn accumulate<S: Simd, F: Stored>(args: &Accumulate<'_>) {
    // SAFETY: as the caller promises.
    unsafe { scale_rows::<S, F>(args.chunk, args.size, args.low..args.high, args.weights, args.count) };
    let step = (step::<F>(args.count) * 8 / (args.dim * F::BITS)).next_power_of_two().clamp(2, TILE);
    let mut low = args.low;
    let mut ahead = args.chunk.lines_ahead(low, args.size);
    while low < args.high {
        // As in `score_rows`.
        if low == TILE / 2 {
            ahead = args.chunk.lines_ahead(low, args.size);
        }
        let high = args.high.min((low / step + 1) * step);
        let decay = args.decay.filter(|_| low == args.low);
        // SAFETY: as the caller promises.
        unsafe { accumulate_step::<S, F>(&Accumulate { low, high, decay, ..*args }, &mut ahead) };
        low = high;
    }
}

/// Some consecutive rows of [`accumulate`].
#[inline(always)]
unsafe fn accumulate_step<S: Simd, F: Stored>(args: &Accumulate<'_>, ahead: &mut StreamLines) {
    let mut row = 0;
    // SAFETY: as the caller promises; every block gets as many query rows as there are.
    unsafe {
        while row < args.count {
            let rows = rows_at_once(args.count - row, S::ROWS);
            match (rows, S::REGISTERS) {
                (1, _) => accumulate_rows::<S, F, 1, 8>(args, row, ahead),
                (2, 16) => accumulate_rows::<S, F, 2, 4>(args, row, ahead),
                (2, _) => accumulate_rows::<S, F, 2, 8>(args, row, ahead),
                // With more vectors, converting them leaves too few registers.
                (3, 16) if F::BITS < 32 => accumulate_rows::<S, F, 3, 2>(args, row, ahead),
                (4, 16) => accumulate_rows::<S, F, 4, 2>(args, row, ahead),
                (3, _) => accumulate_rows::<S, F, 3, 4>(args, row, ahead),
                (4, _) => accumulate_rows::<S, F, 4, 4>(args, row, ahead),
                (5, _) if S::ROWS > 4 => accumulate_rows::<S, F, 5, 4>(args, row, ahead),
                (6, _) if S::ROWS > 4 => accumulate_rows::<S, F, 6, 4>(args, row, ahead),
                _ => unreachable!("more than registers hold"),
            }
            row += rows;
        }
    }
}

/// `R` query rows, up to `C` vectors of each at a time.
#[inline(always)]
unsafe fn accumulate_rows<S: Simd, F: Stored, const R: usize, const C: usize>(
    args: &Accumulate<'_>,
    row: usize,
    ahead: &mut StreamLines,
) {
    let chunks = args.dim / S::LANES;
    let mut c = 0;
    // SAFETY: as the caller promises; blocks cover the vectors of a row, the last of which may be a half.
    unsafe {
        while chunks - c >= C {
            accumulate_block::<S, F, R, C, false>(args, row, c, ahead);
            c += C;
        }
        if C > 4 && chunks - c >= 4 {
            accumulate_block::<S, F, R, 4, false>(args, row, c, ahead);
            c += 4;
        }
        if chunks - c >= 2 {
            accumulate_block::<S, F, R, 2, false>(args, row, c, ahead);
            c += 2;
        }
        if c < chunks {
            accumulate_block::<S, F, R, 1, false>(args, row, c, ahead);
            c += 1;
        }
        if !args.dim.is_multiple_of(S::LANES) {
            accumulate_block::<S, F, R, 1, true>(args, row, c, ahead);
        }
    }
}

/// `R` query rows, the vectors `c..c + C` of each, or the half vector `c`.
#[inline(always)]
unsafe fn accumulate_block<S: Simd, F: Stored, const R: usize, const C: usize, const HALF: bool>(
    args: &Accumulate<'_>,
    row: usize,
    c: usize,
    ahead: &mut StreamLines,
) {
    let (size, vector) = (args.size, S::LANES * F::BITS / 8);
    let prefetch = args.prefetch && row == 0;
    // SAFETY: as the caller promises.
    unsafe {
        let values = args.values.add(row * args.stride + c * S::LANES);
        let weights = args.weights.add(row * TILE);
        let mut sums: [[S::V; C]; R] = std::array::from_fn(|r| {
            let decay = S::splat(args.decay.map_or(1.0, |decay| *decay.add(row + r)));
            std::array::from_fn(|i| S::mul(decay, S::load(values.add(r * args.stride + i * S::LANES))))
        });
        let mut low = args.low;
        while low < args.high {
            let high = args.high.min(((low >> args.chunk.piece_shift) + 1) << args.chunk.piece_shift);
            let mut stored = args.chunk.row(low, size);
            for t in low..high {
                let v: [S::V; C] = std::array::from_fn(|i| {
                    let first = (c + i) * S::LANES;
                    if HALF { F::half::<S>(stored, first) } else { F::load::<S>(stored, first) }
                });
                for (r, sums) in sums.iter_mut().enumerate() {
                    let weight = S::splat(*weights.add(r * TILE + t));
                    for (sum, &v) in sums.iter_mut().zip(&v) {
                        *sum = S::fma(weight, v, *sum);
                    }
                }
                if prefetch {
                    ahead.ask::<S>(C * vector);
                }
                stored = size.after(stored, 1);
            }
            low = high;
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (i, sum) in sums.into_iter().enumerate() {
                S::store(values.add(r * args.stride + i * S::LANES), sum);
            }
        }
    }
}
