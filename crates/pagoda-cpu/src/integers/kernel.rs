//! The two loops: dot products of queries with rows of K, and of weights with columns of V.
//!
//! For K, 16 rows are transposed so that a word of a vector holds four elements of one row: scores come out 16 at a time. For
//! V, 4 rows are interleaved so that a word holds one element of each; weights times the scales of V become integers for
//! every tile and step. Sums of products are exact; they are converted and scaled once a step, in an order that does not
//! depend on the number of query rows.

#![expect(clippy::needless_range_loop, reason = "an index runs over several arrays of vectors")]

use std::mem::MaybeUninit;
use std::ops::Range;

use pagoda_core::work::TILE;

use super::tile::{BLOCKS, Stored, Tile, Unpacked};
use super::{Codes, QUAD, QueryStep, STEP, code_max};
use crate::chunk::{LINE, RowSize, Streams};
use crate::kernel::{Accumulate, Score, rows_at_once};
use crate::simd::dot::{COLUMNS, Cache, Dot, LANES};

/// Products with one byte that are added before sums are settled.
const UNSETTLED: usize = LANES / QUAD;
/// Scales of V for which weights are made at once.
const PART: usize = 4;

/// See [`super::quantise`].
#[inline(always)]
pub(crate) fn quantise<S: Dot, C: Codes>(row: &[f32], steps: &mut [QueryStep]) {
    super::quantise(row, C::zero::<S>(), C::BYTES, S::SHORTS, C::SCALES, steps);
}

/// The lines of part `part`, with parts of `bytes` bytes. Their number is always the same, even if that repeats a line of
/// another part: a loop with an unknown count takes up to a fifth longer.
#[inline(always)]
fn lines(part: usize, bytes: usize) -> Range<usize> {
    let first = part * bytes / LINE;
    first..first + bytes.div_ceil(LINE)
}

/// The cache that a tile's successors are prefetched into.
#[inline(always)]
fn cache(in_order: bool) -> Cache {
    if in_order { Cache::L2 } else { Cache::L1 }
}

/// Prefetches some lines of what lies ahead.
#[inline(always)]
unsafe fn prefetch<S: Dot>(ahead: &Streams, lines: Range<usize>, to: Cache) {
    for line in lines {
        // SAFETY: a prefetch never faults.
        unsafe { S::prefetch(ahead.line(line), to) };
    }
}

/// Prefetches the scales of 16 rows.
#[inline(always)]
unsafe fn prefetch_scales<S: Dot>(scales: *const u8, size: RowSize, to: Cache) {
    for line in (0..LANES * size.scale_bytes).step_by(LINE) {
        // SAFETY: a prefetch never faults.
        unsafe { S::prefetch(scales.wrapping_add(line), to) };
    }
}

/// The size of rows: that of `STEPS` steps, or `said` if that is 0. Strides known at compile time save registers.
#[inline(always)]
fn size<C: Codes, const STEPS: usize>(said: RowSize) -> RowSize {
    if STEPS == 0 {
        return said;
    }
    debug_assert_eq!(said, C::size(STEPS));
    C::size(STEPS)
}

/// `$kernel::<S, C, _, R>($args, row, $size, $tile)` for all rows; `$alone` if one of them may come alone.
macro_rules! for_rows {
    ($kernel:ident::<$simd:ident, $codes:ident>($args:ident, $size:expr, $tile:ident), alone: $alone:expr) => {{
        let (mut row, mut block) = (0, 0);
        while row < $args.count {
            let rows = rows_at_once($args.count - row, $simd::ROWS);
            Tile::<$simd>::share(&mut $tile, block, $args.count.div_ceil($simd::ROWS));
            // SAFETY: as the caller promises; every block gets as many query rows as there are.
            unsafe {
                match rows {
                    1 if const { $alone } => $kernel::<$simd, $codes, _, 1>($args, row, $size, &$tile),
                    2 => $kernel::<$simd, $codes, _, 2>($args, row, $size, &$tile),
                    3 if const { $simd::ROWS > 2 } => {
                        $kernel::<$simd, $codes, _, 3>($args, row, $size, &$tile)
                    }
                    4 if const { $simd::ROWS > 2 } => {
                        $kernel::<$simd, $codes, _, 4>($args, row, $size, &$tile)
                    }
                    _ => unreachable!("not so many at once"),
                }
            }
            (row, block) = (row + rows, block + 1);
        }
    }};
}

/// See [`kernel::score`](crate::kernel::score).
#[inline(always)]
pub(crate) unsafe fn score<S: Dot, C: Codes, const STEPS: usize>(args: &Score<'_>) {
    let size = size::<C, STEPS>(args.size);
    let mut tile = Stored::<C>::new(args.keys, size);
    for_rows!(score_rows::<S, C>(args, size, tile), alone: true);
}

/// The same for many query rows, with codes unpacked to scratch memory.
#[inline(always)]
pub(crate) unsafe fn score_many<S: Dot, C: Codes>(args: &Score<'_>, scratch: &mut [f32]) {
    let mut tile = Unpacked::<S>::new(scratch, args.size.dim);
    let seen = args.low / LANES..args.high.div_ceil(LANES);
    // SAFETY: as the caller promises.
    unsafe { tile.fill_columns::<C>(&Stored::new(args.keys, args.size), seen) };
    // Five rows and more go in groups of two to four, if groups of four are possible.
    for_rows!(score_rows::<S, C>(args, args.size, tile), alone: S::ROWS == 2);
}

/// Scores of `R` query rows.
#[inline(always)]
unsafe fn score_rows<S: Dot, C: Codes, T: Tile<S>, const R: usize>(
    args: &Score<'_>,
    row: usize,
    size: RowSize,
    tile: &T,
) {
    // SAFETY: as the caller promises.
    unsafe {
        if const { !S::MANY_REGISTERS } {
            score_blocks::<S, C, T, R, 1, false>(args, row, size, tile);
        } else if const { C::BYTES == 1 } {
            score_blocks::<S, C, T, R, 2, false>(args, row, size, tile);
        } else {
            // Twice as many sums leave registers for the columns of one block twice, but not for those of two blocks.
            score_blocks::<S, C, T, R, 1, true>(args, row, size, tile);
        }
    }
}

/// The columns of some blocks.
#[inline(always)]
unsafe fn columns_of<S: Dot, T: Tile<S>, const B: usize>(
    tile: &T,
    blocks: [T::Block; B],
    step: usize,
) -> [T::Columns; B] {
    // SAFETY: as the caller promises.
    unsafe {
        let mut columns = [tile.columns(blocks[0], step); B];
        for b in 1..B {
            columns[b] = tile.columns(blocks[b], step);
        }
        columns
    }
}

/// `B` blocks of 16 rows at a time, which share the loads of queries. `AHEAD`: the next columns are unpacked while the
/// current ones are multiplied.
#[inline(always)]
unsafe fn score_blocks<S: Dot, C: Codes, T: Tile<S>, const R: usize, const B: usize, const AHEAD: bool>(
    args: &Score<'_>,
    row: usize,
    size: RowSize,
    tile: &T,
) {
    let steps = size.dim / STEP;
    // SAFETY: 16 rows lie within a page; `codes` and `scores` are as large as `Score` says.
    unsafe {
        let queries = args.codes.add(row * steps);
        let in_order = tile.in_order();
        let ahead = args.keys.to_ask_for(in_order, size);
        // Blocks without a visible row may have no page.
        let firsts = |first: usize| {
            std::array::from_fn::<_, B, _>(|b| {
                if first + b * LANES < args.high { first + b * LANES } else { first }
            })
        };
        let blocks_at = |firsts: [usize; B]| firsts.map(|first| tile.block(first / LANES));
        let begin = args.low / LANES * LANES;
        let mut next = columns_of(tile, blocks_at(firsts(begin)), 0);
        for first in (begin..args.high).step_by(B * LANES) {
            let here = firsts(first);
            let blocks = blocks_at(here);
            if tile.asks(row, 0) {
                for ahead in ahead.rows.iter().skip(first / LANES).take(B) {
                    prefetch_scales::<S>(ahead.scales, size, cache(in_order));
                }
            }
            let mut scores = [[S::floats(0.0); R]; B];
            for step in 0..steps {
                let part = first / (B * LANES) * steps + step;
                let bytes = B * LANES * C::STEP_BYTES;
                if in_order && tile.asks(row, 0) {
                    prefetch::<S>(&ahead, lines(part, bytes), Cache::L2);
                    // L1 has room for the next rows, which are prefetched: otherwise it misses those of a step all at once.
                    let near = args.keys.row_or_next(first + B * LANES, size).data;
                    for line in lines(step, bytes) {
                        S::prefetch(near.wrapping_add(line * LINE), Cache::L1);
                    }
                }
                let columns = if AHEAD {
                    // After the last step any block will do.
                    let follows = if first + B * LANES < args.high { first + B * LANES } else { first };
                    let (blocks, step) =
                        if step + 1 < steps { (blocks, step + 1) } else { (blocks_at(firsts(follows)), 0) };
                    std::mem::replace(&mut next, columns_of(tile, blocks, step))
                } else {
                    columns_of(tile, blocks, step)
                };
                for scale in 0..C::SCALES {
                    let mut sums = [[S::begin(0, C::BYTES); B]; R];
                    for r in 0..R {
                        sums[r] = [S::begin((*queries.add(r * steps + step)).start[scale], C::BYTES); B];
                    }
                    for i in scale * COLUMNS / C::SCALES..(scale + 1) * COLUMNS / C::SCALES {
                        // Evenly spread: prefetches from several places in bursts are dropped.
                        if !in_order && tile.asks(row, i) {
                            prefetch::<S>(&ahead, lines(part * COLUMNS + i, bytes / COLUMNS), Cache::L1);
                        }
                        for r in 0..R {
                            let query = &*queries.add(r * steps + step);
                            let words = [query.words[0][i], query.words[1][i]];
                            for b in 0..B {
                                let column = T::column(&columns[b], i);
                                sums[r][b] = S::add_products(sums[r][b], column, words, C::BYTES);
                                if (i + 1) % UNSETTLED == 0 {
                                    sums[r][b] = S::settle(sums[r][b], C::BYTES);
                                }
                            }
                        }
                    }
                    for b in 0..B {
                        let scales = tile.scales(blocks[b], step * C::SCALES + scale);
                        for r in 0..R {
                            let query_scale = S::floats((*queries.add(r * steps + step)).scale);
                            let sum = S::mul(S::to_floats(S::total(sums[r][b], C::BYTES)), query_scale);
                            scores[b][r] = S::fma(sum, scales, scores[b][r]);
                        }
                    }
                }
            }
            for b in 0..B {
                for r in 0..R {
                    S::store(args.scores.add((row + r) * TILE + here[b]), scores[b][r]);
                }
            }
        }
    }
}

/// See [`kernel::accumulate`](crate::kernel::accumulate).
#[inline(always)]
pub(crate) unsafe fn accumulate<S: Dot, C: Codes, const STEPS: usize>(args: &Accumulate<'_>) {
    let size = size::<C, STEPS>(args.size);
    let mut tile = Stored::<C>::new(args.chunk, size);
    for_rows!(accumulate_rows::<S, C>(args, size, tile), alone: true);
}

/// The same for many query rows, with codes unpacked to scratch memory.
#[inline(always)]
pub(crate) unsafe fn accumulate_many<S: Dot, C: Codes>(args: &Accumulate<'_>, scratch: &mut [f32]) {
    let mut tile = Unpacked::<S>::new(scratch, args.dim);
    let seen = args.low / LANES..args.high.div_ceil(LANES);
    // SAFETY: as the caller promises.
    unsafe { tile.fill_words::<C>(&Stored::new(args.chunk, args.size), seen) };
    for_rows!(accumulate_rows::<S, C>(args, args.size, tile), alone: S::ROWS == 2);
}

/// The weights of a tile for `R` query rows, times the scales of some steps of V, as integers.
#[repr(C, align(64))]
struct Weights<const R: usize> {
    words: [[[[i32; TILE / QUAD]; 2]; R]; PART],
    /// The initial value of sums of products with codes: minus the products with the code of 0.
    start: [[i32; 4]; PART],
    /// What an integer of 1 stands for.
    scale: [[f32; 4]; PART],
}

impl<const R: usize> Weights<R> {
    /// Writes the weights for `count` scales.
    #[inline(always)]
    unsafe fn fill<S: Dot, C: Codes>(
        this: *mut Self,
        weights: *const f32,
        scales: &[[S::Floats; BLOCKS]; PART],
        count: usize,
    ) {
        // SAFETY: as the caller promises.
        unsafe {
            let mut most = [[S::integers(0); 4]; PART];
            for part in 0..count {
                let mut magnitudes = scales[part];
                for i in 0..BLOCKS {
                    magnitudes[i] = S::magnitudes(magnitudes[i]);
                }
                for r in 0..R {
                    for i in 0..BLOCKS {
                        let weight = S::load(weights.add(r * TILE + i * LANES));
                        most[part][r] = S::larger(most[part][r], S::mul(weight, magnitudes[i]));
                    }
                }
            }
            let most = S::largest(most);
            let code_max = code_max(C::BYTES);
            let (mut scale, mut inverse) = ([0.0; LANES], [0.0; LANES]);
            for i in 0..LANES {
                // Compared as bits: those of NaN are the largest. An integer of 1 must stand for a normal number.
                let most = f32::from_bits((most[i] as u32).max((f32::MIN_POSITIVE * code_max).to_bits()));
                scale[i] = most * (1.0 / code_max);
                inverse[i] = code_max / most;
            }
            let mut sums = [[S::integers(0); 4]; PART];
            for part in 0..count {
                for r in 0..R {
                    let inverse = S::floats(inverse[PART * part + r]);
                    let mut codes = [S::integers(0); BLOCKS];
                    for i in 0..BLOCKS {
                        let weight = S::load(weights.add(r * TILE + i * LANES));
                        codes[i] = S::to_integers(S::mul(S::mul(weight, scales[part][i]), inverse));
                    }
                    sums[part][r] = S::pack(codes, C::BYTES, &mut (*this).words[part][r]);
                }
            }
            let mut start = S::sums(sums);
            for start in &mut start {
                *start = start.wrapping_mul(-C::zero::<S>());
            }
            (&raw mut (*this).start).cast::<[i32; LANES]>().write(start);
            (&raw mut (*this).scale).cast::<[f32; LANES]>().write(scale);
        }
    }
}

/// `R` query rows.
#[inline(always)]
unsafe fn accumulate_rows<S: Dot, C: Codes, T: Tile<S>, const R: usize>(
    args: &Accumulate<'_>,
    row: usize,
    size: RowSize,
    tile: &T,
) {
    let steps = args.dim / STEP;
    let seen_blocks = args.low / LANES..args.high.div_ceil(LANES);
    let blocks: [T::Block; BLOCKS] = std::array::from_fn(|index| tile.block(index));
    let ahead = args.prefetch.then(|| args.chunk.to_ask_for(tile.in_order(), size));
    let seen = (u64::MAX >> (TILE - args.high)) & (u64::MAX << args.low);
    // SAFETY: as the caller promises; 16 rows lie within a page, and pages without a row that is seen are not read.
    unsafe {
        for ahead in ahead.iter().flat_map(|ahead| &ahead.rows) {
            if tile.asks(row, 0) {
                prefetch_scales::<S>(ahead.scales, size, cache(tile.in_order()));
            }
        }
        let mut weights = MaybeUninit::<Weights<R>>::uninit();
        let weights = weights.as_mut_ptr();
        for step in 0..steps {
            let first = step * C::SCALES;
            let part = if C::ROW_SCALE { 0 } else { first % PART };
            if part == 0 && (step == 0 || !C::ROW_SCALE) {
                let count = if C::ROW_SCALE { 1 } else { PART.min(steps * C::SCALES - first) };
                let mut scales = [[S::floats(0.0); BLOCKS]; PART];
                for block in seen_blocks.clone() {
                    let seen = (seen >> (block * LANES)) as u16;
                    for (i, scales) in scales[..count].iter_mut().enumerate() {
                        scales[block] = S::masked(seen, tile.scales(blocks[block], first + i));
                    }
                }
                Weights::fill::<S, C>(weights, args.weights.add(row * TILE), &scales, count);
            }
            let this =
                Columns { args, row, step, part, tile, blocks: &blocks, ahead: ahead.as_ref(), weights };
            if const { S::MANY_REGISTERS } {
                this.add::<C, 2>(0);
            } else {
                this.add::<C, 1>(0);
                this.add::<C, 1>(1);
            }
        }
    }
}

/// A step of V, for `R` query rows.
struct Columns<'a, S: Dot, T: Tile<S>, const R: usize> {
    args: &'a Accumulate<'a>,
    row: usize,
    step: usize,
    /// The place of the step's first scale among those of `weights`.
    part: usize,
    tile: &'a T,
    blocks: &'a [T::Block; BLOCKS],
    /// What to prefetch, if anything.
    ahead: Option<&'a Streams>,
    weights: *const Weights<R>,
}

impl<S: Dot, T: Tile<S>, const R: usize> Columns<'_, S, T, R> {
    /// Adds the products of `H` halves of the step to the values.
    #[inline(always)]
    unsafe fn add<C: Codes, const H: usize>(&self, half: usize) {
        let Self { args, row, step, part, tile, blocks, ahead, weights } = *self;
        let part_of = |h: usize| part + (half + h) * C::SCALES / 2;
        // SAFETY: as the caller promises.
        unsafe {
            let mut sums = [[S::begin(0, C::BYTES); H]; R];
            for r in 0..R {
                for h in 0..H {
                    sums[r][h] = S::begin((*weights).start[part_of(h)][r], C::BYTES);
                }
            }
            for block in args.low / LANES..args.high.div_ceil(LANES) {
                for quad in 0..LANES / QUAD {
                    let mut codes = [tile.words(blocks[block], quad, step, half); H];
                    for h in 1..H {
                        codes[h] = tile.words(blocks[block], quad, step, half + h);
                    }
                    let word = block * (LANES / QUAD) + quad;
                    if let Some(ahead) = ahead.filter(|_| half == 0)
                        && tile.asks(row, word % 8)
                    {
                        let lines = lines(step * (TILE / QUAD) + word, QUAD * C::STEP_BYTES);
                        prefetch::<S>(ahead, lines, cache(tile.in_order()));
                    }
                    for r in 0..R {
                        for h in 0..H {
                            let words = &(*weights).words[part_of(h)][r];
                            let words = [words[0][word], words[1][word]];
                            sums[r][h] = S::add_products(sums[r][h], codes[h], words, C::BYTES);
                        }
                    }
                }
                for r in 0..R {
                    for h in 0..H {
                        sums[r][h] = S::settle(sums[r][h], C::BYTES);
                    }
                }
            }
            for r in 0..R {
                let decay = S::floats(args.decay.map_or(1.0, |decay| *decay.add(row + r)));
                for h in 0..H {
                    let scale = S::floats((*weights).scale[part_of(h)][r]);
                    let sum = S::to_floats(S::in_order(S::total(sums[r][h], C::BYTES)));
                    let sum = S::mul(sum, scale);
                    let first = step * STEP + (half + h) * LANES;
                    let values = args.values.add((row + r) * args.stride + first);
                    S::store(values, S::fma(decay, S::load(values), sum));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use pagoda_core::layout::RowFormat;

    use super::super::{MANY, scratch};
    use super::*;
    use crate::attend::Floats;
    use crate::chunk::Chunk;
    use crate::codec::decode_row;
    use crate::kernel::ALIGN;
    use crate::simd::{Isa, Many};
    use crate::tests::samples::{Random, read};

    const FORMATS: [RowFormat; 6] = [
        RowFormat::Int8,
        RowFormat::Q8_0,
        RowFormat::Q5_0,
        RowFormat::Q4_0,
        RowFormat::Mxfp4,
        RowFormat::Nvfp4,
    ];

    /// A tile of stored rows, from which scores and values are computed.
    struct Tile {
        size: RowSize,
        /// Rows of a page.
        page: usize,
        /// Pages of rows, then their scales, after some bytes of others.
        pages: Vec<Vec<u8>>,
        /// Stored numbers divided by their scales, twice that with mxfp4 and nvfp4; `[TILE][dim]`.
        integers: Vec<i32>,
        /// Those scales, or half of them; `[TILE][dim / unit]`.
        scales: Vec<f32>,
        /// Elements that share a scale in `scales`.
        unit: usize,
        /// See [`Chunk::in_order`].
        in_order: bool,
    }

    const BEFORE: usize = 48;

    impl Tile {
        fn new(random: &mut Random, format: RowFormat, dim: usize, page: usize) -> Self {
            let size = RowSize {
                dim,
                bytes: format.row_bytes(dim as u32) as usize,
                scale_bytes: format.scale_bytes(dim as u32) as usize,
            };
            let unit = if format == RowFormat::Nvfp4 { STEP / 2 } else { STEP };
            let mut pages = vec![vec![0xa5; BEFORE + page * (size.bytes + size.scale_bytes)]; TILE / page];
            let (mut integers, mut scales) = (Vec::new(), Vec::new());
            // Any bytes are codes. The largest and the smallest throughout, or anything.
            let extremes = [[0x80, 0x80], [0x7f, 0x80], [0xff, 0], [0x77, 0x77]];
            let extreme = (random.below(2) == 0).then(|| random.pick(&extremes));
            for t in 0..TILE {
                let mut row = vec![0u8; size.bytes];
                row.iter_mut()
                    .for_each(|x| *x = extreme.map_or(random.below(256) as u8, |e| random.pick(&e)));
                let (one, half): (&[u8], f32) = match format {
                    RowFormat::Int8 => (&[0, 0, 0x80, 0x3f], 1.0),
                    // Of two.
                    RowFormat::Mxfp4 => (&[128], 0.5),
                    RowFormat::Nvfp4 => (&[0x40], 0.5),
                    _ => (&[0, 0x3c], 1.0),
                };
                let mut x = vec![0.0; dim];
                decode_row(format, &row, &one.repeat(size.scale_bytes / one.len()), &mut x);
                integers.extend(x.iter().map(|&x| x as i32));
                let mut stored = Vec::new();
                while stored.len() < size.scale_bytes {
                    match format {
                        RowFormat::Int8 => {
                            stored.extend((random.float() * random.pick(&[0.0, 1e-3, 1e30])).to_le_bytes());
                        }
                        RowFormat::Mxfp4 => stored.push(random.pick(&[0, 1, 100, 127, 128, 140])),
                        // Anything but NaN.
                        RowFormat::Nvfp4 => stored.push(random.below(0x7f) as u8),
                        // Anything finite.
                        _ => stored.extend((random.below(1 << 16) as u16 & 0xbbff).to_le_bytes()),
                    }
                }
                // With codes of 1, numbers are scales.
                let ones = match format {
                    RowFormat::Int8 | RowFormat::Q8_0 => vec![1; size.bytes],
                    RowFormat::Q5_0 => [vec![0x11; dim / 2], vec![0xff; dim / 8]].concat(),
                    RowFormat::Q4_0 => vec![0x99; size.bytes],
                    _ => vec![0x22; size.bytes],
                };
                decode_row(format, &ones, &stored, &mut x);
                scales.extend(x.iter().step_by(unit).map(|scale| scale * half));
                let (block, place) = (&mut pages[t / page], t % page);
                block[BEFORE + place * size.bytes..][..size.bytes].copy_from_slice(&row);
                block[BEFORE + page * size.bytes + place * size.scale_bytes..][..size.scale_bytes]
                    .copy_from_slice(&stored);
            }
            let in_order = page == TILE && random.below(2) == 0;
            Self { size, page, pages, integers, scales, unit, in_order }
        }

        /// Makes the scales of a row NaN.
        fn poison(&mut self, t: usize) {
            let at = BEFORE + self.page * self.size.bytes + t % self.page * self.size.scale_bytes;
            self.pages[t / self.page][at..][..self.size.scale_bytes].fill(0xff);
        }

        /// Calls `with` the tile as a kernel reads the rows `low..high`; the addresses of other pages are null.
        fn read(&self, low: usize, high: usize, with: impl FnOnce(&Chunk<'_>)) {
            read(&self.pages, BEFORE, self.page, self.size, low..high, self.in_order, with);
        }
    }

    fn bytes_of(format: RowFormat) -> usize {
        if matches!(format, RowFormat::Int8 | RowFormat::Q8_0) { 2 } else { 1 }
    }

    /// Numbers as integers, and what the largest of these stands for: one stands for a normal number.
    fn rounded(x: &[f32], code_max: f32) -> (Vec<i32>, f32) {
        let most = x.iter().fold(f32::MIN_POSITIVE * code_max, |most, x| most.max(x.abs()));
        let inverse = code_max / most;
        (x.iter().map(|x| (x * inverse).round_ties_even() as i32).collect(), most)
    }

    /// Elements of queries that are hard on integers: low bytes of -128, nothing but the largest, one that is by far so.
    fn query(random: &mut Random, dim: usize, code_max: f32) -> Vec<f32> {
        let (kind, sign) = (random.below(4), random.pick(&[1.0, -1.0]));
        let element = |random: &mut Random| match kind {
            0 => random.float(),
            1 => sign,
            2 => (256.0 * random.below(100) as f32 - 128.0) / code_max,
            _ => random.float() * random.pick(&[1e-3, 1.0, 1e-4]),
        };
        let mut all: Vec<_> = (0..dim).map(|_| element(random)).collect();
        all.chunks_mut(STEP).for_each(|step| step[3] = sign);
        all
    }

    /// Cases for every instruction set, format and head size.
    fn cases(mut case: impl FnMut(&mut Random, Isa, RowFormat, Tile, usize, usize, usize)) {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported() && isa.multiplies_integers()) {
            for format in FORMATS {
                for dim in [32, 64, 96, 128, 160, 256] {
                    for page in [16, 32, 64] {
                        let mut random = Random((dim * page) as u64);
                        let mut tile = Tile::new(&mut random, format, dim, page);
                        let (low, high) =
                            random.pick(&[(0, 64), (0, 1), (0, 37), (5, 64), (17, 50), (63, 64)]);
                        (0..low).chain(high..TILE).for_each(|t| tile.poison(t));
                        let count = random.pick(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 13]);
                        case(&mut random, isa, format, tile, low, high, count);
                    }
                }
            }
        }
    }

    #[test]
    fn scores_have_the_bits_of_the_definition() {
        cases(|random, isa, format, tile, low, high, count| {
            let (dim, steps) = (tile.size.dim, tile.size.dim / STEP);
            let code_max = code_max(bytes_of(format));
            let kernels =
                isa.kernels().expect("supported").rows(format, dim as u32, dim as u32, tile.page as u32);
            let mut codes = vec![QueryStep::default(); count * steps];
            let mut scores = vec![0.0; count * TILE];
            let to = scores.as_mut_ptr();
            let queries: Vec<_> = (0..count).map(|_| query(random, dim, code_max)).collect();
            for (row, codes) in queries.iter().zip(codes.chunks_mut(steps)) {
                // SAFETY: the instruction set is supported.
                unsafe { kernels.quantise.expect("integers")(row, codes) };
            }
            let unpack = random.below(2) == 0 && count >= MANY;
            let mut memory = Floats::default();
            let unpacked = memory.take(scratch(dim));
            unpacked.fill(f32::NAN);
            tile.read(low, high, |keys| {
                let score = Score {
                    queries: std::ptr::null(),
                    stride: 0,
                    codes: codes.as_ptr(),
                    count,
                    size: tile.size,
                    keys,
                    low,
                    high,
                    scores: to,
                };
                // SAFETY: the rows are there, and as many scores.
                unsafe {
                    match kernels.many {
                        Many::Unpacked { score: many, .. } if unpack => many(&score, unpacked),
                        _ => (kernels.score)(&score),
                    }
                }
            });
            for (r, row) in queries.iter().enumerate() {
                let parts: Vec<_> = row.chunks(STEP).map(|step| rounded(step, code_max)).collect();
                for t in low..high {
                    let mut expected = 0.0;
                    for (step, (codes, most)) in parts.iter().enumerate() {
                        for (i, codes) in codes.chunks(tile.unit).enumerate() {
                            let first = step * STEP + i * tile.unit;
                            let stored = &tile.integers[t * dim + first..][..tile.unit];
                            let sum: i32 = codes.iter().zip(stored).map(|(a, b)| a * b).sum();
                            let scale = tile.scales[(t * dim + first) / tile.unit];
                            expected = (sum as f32 * (most / code_max)).mul_add(scale, expected);
                        }
                    }
                    let found = scores[r * TILE + t];
                    assert_eq!(
                        found.to_bits(),
                        expected.to_bits(),
                        "{isa} {format:?} {dim} row {r} token {t}"
                    );
                }
            }
        });
    }

    #[test]
    fn values_have_the_bits_of_the_definition() {
        cases(|random, isa, format, tile, low, high, count| {
            let dim = tile.size.dim;
            let code_max = code_max(bytes_of(format));
            let kernels =
                isa.kernels().expect("supported").rows(format, dim as u32, dim as u32, tile.page as u32);
            let kind = random.pick(&[0.0, 1.0, 1e-3, 1e-35]);
            let unit = if kind == 0.0 { 1.0 } else { kind };
            let weight = |random: &mut Random| {
                if kind == 0.0 { random.pick(&[0.0, 1.0]) } else { random.float().abs() * unit }
            };
            let mut weights: Vec<f32> = (0..count * TILE).map(|_| weight(random)).collect();
            let decay: Vec<f32> = (0..count).map(|_| random.float().abs()).collect();
            let stride = dim.next_multiple_of(ALIGN);
            let before: Vec<f32> = (0..count * stride).map(|_| random.float() * unit).collect();
            let mut values = before.clone();
            let (to, to_weights) = (values.as_mut_ptr(), weights.as_mut_ptr());
            let unpack = random.below(2) == 0 && count >= MANY;
            let mut memory = Floats::default();
            let unpacked = memory.take(scratch(dim));
            unpacked.fill(f32::NAN);
            tile.read(low, high, |chunk| {
                let accumulate = Accumulate {
                    weights: to_weights,
                    decay: Some(decay.as_ptr()),
                    values: to,
                    stride,
                    count,
                    dim,
                    size: tile.size,
                    chunk,
                    low,
                    high,
                    prefetch: true,
                };
                // SAFETY: the rows are there, and as many weights, factors and values.
                unsafe {
                    match kernels.many {
                        Many::Unpacked { accumulate: many, .. } if unpack => many(&accumulate, unpacked),
                        _ => (kernels.accumulate)(&accumulate),
                    }
                }
            });
            for r in 0..count {
                for first in (0..dim).step_by(tile.unit) {
                    let product =
                        |t: usize| weights[r * TILE + t] * tile.scales[(t * dim + first) / tile.unit];
                    let (codes, most) = rounded(&(low..high).map(product).collect::<Vec<_>>(), code_max);
                    for i in first..first + tile.unit {
                        let products = codes
                            .iter()
                            .enumerate()
                            .map(|(t, code)| code * tile.integers[(low + t) * dim + i]);
                        let sum = products.sum::<i32>() as f32 * (most * (1.0 / code_max));
                        let expected = decay[r].mul_add(before[r * stride + i], sum);
                        let found = values[r * stride + i];
                        assert_eq!(
                            found.to_bits(),
                            expected.to_bits(),
                            "{isa} {format:?} {dim} row {r} element {i}"
                        );
                    }
                }
            }
        });
    }
}
