//! The arithmetic of one tile: scores, softmax and values, for any number of query rows.
//!
//! A tile is [`TILE`] stored rows of one K/V head. How many query rows share a register block never changes the order in
//! which numbers are added: a score is summed lane by lane over the row and then over the lanes, a value lane takes the
//! tokens one after the other. So decode and prefill agree to the last bit, unless a tile is [decoded](crate::decoded) for
//! many query rows.

use std::f32::consts::LN_2;

use std::ops::Range;

use pagoda_core::work::TILE;

use crate::integers::QueryStep;
use crate::simd::Simd;
use crate::stored::{Row, Stored};

/// The most pages that a tile touches: the smallest page holds 8 tokens.
pub(crate) const PIECES: usize = TILE / 8;
/// Vectors that are reduced to a number each at once.
const QUAD: usize = 4;
/// How far a score may be above what weights are relative to, in powers of two. That does not follow every maximum, so
/// weights need not wait for the maximum of their tile.
const RISE: f32 = 8.0;
/// From this magnitude of a score or its bias on, the bias is added before anything else, so that all scores of a row are
/// rounded alike. Below, what weights are relative to is off by 24 at most: they are finite, and the largest is not 0.
const FAR: f32 = (1 << 28) as f32;
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

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;
/// Places from which lines are prefetched in turn.
pub(crate) const STREAMS: usize = 4;
/// Rows that are prefetched in each of them while a tile is read.
const STREAM_ROWS: usize = TILE / STREAMS;

/// Rows of scratch start at multiples of this many floats.
pub(crate) const ALIGN: usize = 16;

/// Where the K or V rows of one head in one tile lie.
#[derive(Clone, Copy)]
pub(crate) struct Lines<'a> {
    /// The blocks, page by page. Those without a token of the sequence are never read.
    pub(crate) blocks: &'a [*const u8; PIECES],
    /// Where the rows begin in each.
    pub(crate) rows: usize,
    /// Where their scales begin, for formats with scales.
    pub(crate) scales: usize,
}

impl Lines<'_> {
    pub(crate) const NOWHERE: Self = Self { blocks: &[std::ptr::null(); PIECES], rows: 0, scales: 0 };
}

/// The K or V rows of one head in one tile.
pub(crate) struct Chunk<'a> {
    pub(crate) here: Lines<'a>,
    /// What will be read after that, in order, to be prefetched.
    pub(crate) ahead: &'a [Lines<'a>; STREAMS],
    /// Whether lines of floats, fp8_e4m3 and bytes are prefetched in order, from one place: for pages of whole tiles.
    pub(crate) in_order: bool,
    /// Rows of a piece, as a power of two.
    pub(crate) piece_shift: u32,
}

impl Chunk<'_> {
    /// The place of row `t` in its piece.
    #[inline(always)]
    fn place(&self, t: usize) -> usize {
        t & ((1 << self.piece_shift) - 1)
    }
    /// Row `t` of the tile.
    #[inline(always)]
    pub(crate) fn row(&self, t: usize, size: RowSize) -> Row {
        self.find(&self.here, t, size)
    }
    /// Row `t` of the tile, or of the next one if `t` is past the end of this one.
    #[inline(always)]
    pub(crate) fn row_or_next(&self, t: usize, size: RowSize) -> Row {
        if t < TILE { self.row(t, size) } else { self.find(&self.ahead[0], t - TILE, size) }
    }
    /// What to prefetch while this is read from row `t` on: a part of each of the next tiles, from the last part of the
    /// nearest to the first of the farthest, so that all parts of a tile have been prefetched when its turn comes. All parts
    /// have the same number of rows, which are consecutive as far as pages go.
    #[inline(always)]
    fn streams(&self, t: usize, size: RowSize) -> Streams {
        let before = ((t / STREAMS) >> self.piece_shift) << self.piece_shift;
        let rows = std::array::from_fn(|i| {
            let row = self.find(&self.ahead[i], (STREAMS - 1 - i) * STREAM_ROWS + before, size);
            Row { data: row.data.wrapping_sub(before * size.bytes), ..row }
        });
        Streams { rows, stride: LINE }
    }
    /// The lines of the tile after the next from row `t` on, in order, and where the scales of its quarters begin.
    #[inline(always)]
    fn tile_ahead(&self, t: usize, size: RowSize) -> Streams {
        let first = self.find(&self.ahead[1], t, size);
        let rows = std::array::from_fn(|i| Row {
            data: first.data.wrapping_add(i * LINE),
            scales: first.scales.wrapping_add(i * STREAM_ROWS * size.scale_bytes),
            ..first
        });
        Streams { rows, stride: STREAMS * LINE }
    }
    /// What to prefetch while all of this is read: in order from one place, or from four in turn.
    #[inline(always)]
    pub(crate) fn to_ask_for(&self, in_order: bool, size: RowSize) -> Streams {
        if in_order { self.tile_ahead(0, size) } else { self.streams(0, size) }
    }
    /// The same line by line, while this is read from row `t` on.
    #[inline(always)]
    pub(crate) fn lines_ahead(&self, t: usize, size: RowSize) -> StreamLines {
        if self.in_order {
            let Streams { rows, stride } = self.tile_ahead(t, size);
            return StreamLines { next: rows.map(|row| row.data), stride, owed: 0 };
        }
        let (streams, asked) = (self.streams(t, size), t * size.bytes);
        let next = std::array::from_fn(|i| streams.line(asked / LINE + i));
        StreamLines { next, stride: LINE, owed: asked % LINE }
    }
    #[inline(always)]
    fn find(&self, lines: &Lines<'_>, t: usize, size: RowSize) -> Row {
        let (block, place) = (lines.blocks[t >> self.piece_shift], self.place(t));
        Row {
            data: block.wrapping_add(lines.rows + place * size.bytes),
            scales: block.wrapping_add(lines.scales + place * size.scale_bytes),
            dim: size.dim,
        }
    }
}

/// Rows in several places, to be prefetched in turn. A CPU by itself fetches ahead of accesses in order, but never across
/// 4 KiB and some 20 lines at most: it fetches from several such places at once (docs/benchmarks/2026-11-25-cpu-intel.md).
pub(crate) struct Streams {
    pub(crate) rows: [Row; STREAMS],
    /// Bytes from a line of a place to the next.
    stride: usize,
}

impl Streams {
    /// Line `n` of all.
    #[inline(always)]
    pub(crate) fn line(&self, n: usize) -> *const u8 {
        self.rows[n % STREAMS].data.wrapping_add(n / STREAMS * self.stride)
    }
}

/// Lines ahead, in the order in which they are prefetched. Cheaper than finding each line of [`Streams`] by its number, if
/// that is not known at compile time.
pub(crate) struct StreamLines {
    /// The next one, and those after it.
    next: [*const u8; STREAMS],
    /// Bytes from each to the one that comes four later.
    stride: usize,
    /// Bytes since the last one.
    owed: usize,
}

impl StreamLines {
    /// Prefetches the lines of the next `bytes` bytes.
    #[inline(always)]
    pub(crate) unsafe fn ask<S: Simd>(&mut self, bytes: usize) {
        // The same number every time if possible: a loop with an unknown count takes longer.
        let mut lines = bytes / LINE;
        if !bytes.is_multiple_of(LINE) {
            self.owed += bytes;
            lines = self.owed / LINE;
            self.owed %= LINE;
        }
        for _ in 0..lines {
            let [next, second, third, fourth] = self.next;
            self.next = [second, third, fourth, next.wrapping_add(self.stride)];
            // SAFETY: a prefetch never faults.
            unsafe { S::prefetch(next) };
        }
    }
}

/// Elements and bytes of a stored row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowSize {
    pub(crate) dim: usize,
    pub(crate) bytes: usize,
    pub(crate) scale_bytes: usize,
}

impl RowSize {
    /// The row that is `n` rows later in the same piece.
    #[inline(always)]
    pub(crate) fn after(&self, row: Row, n: usize) -> Row {
        Row {
            data: row.data.wrapping_add(n * self.bytes),
            scales: row.scales.wrapping_add(n * self.scale_bytes),
            dim: row.dim,
        }
    }
}

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
