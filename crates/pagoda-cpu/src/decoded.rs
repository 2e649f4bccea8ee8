//! Many query rows: a tile is decoded once for all of them, and multiplied as a matrix.
//!
//! [`kernel`](crate::kernel) converts a row of K or V again for every few query rows, and adds up the lanes of every score:
//! with few rows it waits for memory anyway. With many, arithmetic takes most of the time. So K becomes columns of floats
//! here, which puts scores into vectors, and V becomes rows of floats. Both are in scratch memory that stays in the cache,
//! and the same loop multiplies both. Sums are added in another order than there, so deterministic backends do not use it.

#![expect(clippy::needless_range_loop, reason = "an index runs over several arrays of vectors")]

use pagoda_core::layout::RowFormat;
use pagoda_core::work::TILE;

use crate::chunk::{Chunk, RowSize, StreamLines};
use crate::kernel::{ALIGN, Accumulate, Score};
use crate::simd::{Kernels, Simd};
use crate::stored::{Row, Stored};

/// Products that are added up one after the other: longer sums would be less exact. Prefetches come in between.
const STRETCH: usize = 32;

/// Floats of scratch memory for rows of up to `dim` elements.
pub(crate) fn scratch(dim: usize) -> usize {
    TILE * dim.next_multiple_of(ALIGN)
}

/// What [`kernel::score`](crate::kernel::score) writes, with other roundings.
///
/// # Safety
/// As there; and the kernels are for this CPU.
pub(crate) unsafe fn score(kernels: &Kernels, format: RowFormat, args: &Score<'_>, scratch: &mut [f32]) {
    let &Score { keys: chunk, size, low, high, .. } = args;
    let decode = Decode { chunk, size, dim: size.dim, low, high, to: scratch.as_mut_ptr(), prefetch: true };
    let first = low / ALIGN * ALIGN;
    let multiply = Multiply {
        rows: args.count,
        depth: size.dim,
        columns: high.next_multiple_of(ALIGN) - first,
        left: args.queries,
        left_stride: args.stride,
        right: scratch.as_ptr().wrapping_add(first),
        right_stride: TILE,
        decay: None,
        out: args.scores.wrapping_add(first),
        out_stride: TILE,
        chunk,
        size,
        prefetch: true,
    };
    // SAFETY: as the caller promises; scores of rows that nobody sees are overwritten with anything.
    unsafe {
        (kernels.decoders(format).columns)(&decode);
        (kernels.multiply)(&multiply);
    }
}

/// What [`kernel::accumulate`](crate::kernel::accumulate) adds, with other roundings.
///
/// # Safety
/// As there; and the kernels are for this CPU.
pub(crate) unsafe fn accumulate(
    kernels: &Kernels,
    format: RowFormat,
    args: &Accumulate<'_>,
    scratch: &mut [f32],
) {
    let &Accumulate { chunk, size, dim, low, high, prefetch, .. } = args;
    let stride = dim.next_multiple_of(ALIGN);
    let decode = Decode { chunk, size, dim, low, high, to: scratch.as_mut_ptr(), prefetch };
    let multiply = Multiply {
        rows: args.count,
        depth: high - low,
        columns: stride,
        left: args.weights.wrapping_add(low),
        left_stride: TILE,
        right: scratch.as_ptr().wrapping_add(low * stride),
        right_stride: stride,
        decay: args.decay,
        out: args.values,
        out_stride: args.stride,
        chunk,
        size,
        prefetch,
    };
    // SAFETY: as the caller promises; values are followed by room up to a multiple of `ALIGN`.
    unsafe {
        (kernels.decoders(format).rows)(&decode);
        (kernels.multiply)(&multiply);
    }
}

/// Kernels that decode the rows of one format.
pub(crate) struct Decoders {
    pub(crate) columns: unsafe fn(&Decode<'_>),
    pub(crate) rows: unsafe fn(&Decode<'_>),
}

/// Arguments of [`columns`] and [`rows`]: the rows `low..high` of a tile become floats.
pub(crate) struct Decode<'a> {
    chunk: &'a Chunk<'a>,
    /// The size of a stored row, of which `dim` elements are needed.
    size: RowSize,
    dim: usize,
    low: usize,
    high: usize,
    /// `[dim][TILE]`, or `[TILE][dim]`, with `dim` padded by zeros to a multiple of [`ALIGN`].
    to: *mut f32,
    /// Whether to prefetch half of what lies ahead.
    prefetch: bool,
}

impl Decode<'_> {
    /// Vector `c` of a row.
    #[inline(always)]
    unsafe fn load<S: Simd, F: Stored>(&self, row: Row, c: usize) -> S::V {
        // SAFETY: as the caller promises.
        unsafe {
            let first = c * S::LANES;
            if first >= self.dim {
                return S::splat(0.0);
            }
            let v =
                if first + S::LANES > self.dim { F::half::<S>(row, first) } else { F::load::<S>(row, first) };
            if F::ROW_SCALE { S::mul(v, S::splat(F::row_scale(row))) } else { v }
        }
    }
}

/// Decodes K: element `d` of row `t` to `[d][t]`.
#[inline(always)]
pub(crate) unsafe fn columns<S: Simd, F: Stored>(args: &Decode<'_>) {
    let vectors = args.dim.next_multiple_of(ALIGN) / S::LANES;
    let mut ahead = args.chunk.lines_ahead(0, args.size);
    let share = if args.prefetch { args.size.bytes * S::LANES / 2 / vectors } else { 0 };
    for first in (args.low / S::LANES * S::LANES..args.high).step_by(S::LANES) {
        // Rows that nobody sees are not read: they may have no page.
        let row = |i: usize| args.chunk.row((first + i).clamp(args.low, args.high - 1), args.size);
        let rows: [Row; ALIGN] = std::array::from_fn(|i| row(i % S::LANES));
        for c in 0..vectors {
            // SAFETY: as the caller promises.
            unsafe {
                let mut block = [S::splat(0.0); ALIGN];
                for i in 0..S::LANES {
                    block[i] = args.load::<S, F>(rows[i], c);
                }
                S::transpose(&mut block);
                for (i, &v) in block[..S::LANES].iter().enumerate() {
                    S::store(args.to.add((c * S::LANES + i) * TILE + first), v);
                }
                ahead.ask::<S>(share);
            }
        }
    }
}

/// Decodes V: element `d` of row `t` to `[t][d]`.
#[inline(always)]
pub(crate) unsafe fn rows<S: Simd, F: Stored>(args: &Decode<'_>) {
    let stride = args.dim.next_multiple_of(ALIGN);
    let mut ahead = args.chunk.lines_ahead(0, args.size);
    let share = if args.prefetch { args.size.bytes / 2 } else { 0 };
    for t in args.low..args.high {
        let row = args.chunk.row(t, args.size);
        for c in 0..stride / S::LANES {
            // SAFETY: as the caller promises.
            unsafe { S::store(args.to.add(t * stride + c * S::LANES), args.load::<S, F>(row, c)) };
        }
        // SAFETY: a prefetch never faults.
        unsafe { ahead.ask::<S>(share) };
    }
}

/// Arguments of [`multiply`]: a product of matrices.
pub(crate) struct Multiply<'a> {
    rows: usize,
    depth: usize,
    /// Whole vectors.
    columns: usize,
    /// `[rows][depth]`.
    left: *const f32,
    left_stride: usize,
    /// `[depth][columns]`.
    right: *const f32,
    right_stride: usize,
    /// If given, old contents are multiplied by these, one a row, and products are added; else they are overwritten.
    decay: Option<*const f32>,
    /// `[rows][columns]`.
    out: *mut f32,
    out_stride: usize,
    /// With `prefetch`, the other half of what lies ahead of this is prefetched.
    chunk: &'a Chunk<'a>,
    size: RowSize,
    prefetch: bool,
}

/// Multiplies; every sum goes over `depth` in order, one stretch after the other.
#[inline(always)]
pub(crate) unsafe fn multiply<S: Simd>(args: &Multiply<'_>) {
    let vectors = args.columns / S::LANES;
    let most = S::REGISTERS / 8;
    let steps = vectors.div_ceil(most) * args.rows.div_ceil(4) * args.depth.div_ceil(STRETCH);
    let share = if args.prefetch { (TILE / 2 * args.size.bytes).div_ceil(steps) } else { 0 };
    let mut ahead = args.chunk.lines_ahead(TILE / 2, args.size);
    let mut c = 0;
    // SAFETY: as the caller promises; every block gets as many vectors as there are.
    unsafe {
        // The vectors of `right` that one block of rows reads stay in the L1 cache for the next block.
        while most == 4 && vectors - c >= 4 {
            multiply_vectors::<S, 4>(args, c, &mut ahead, share);
            c += 4;
        }
        while vectors - c >= 2 {
            multiply_vectors::<S, 2>(args, c, &mut ahead, share);
            c += 2;
        }
        if c < vectors {
            multiply_vectors::<S, 1>(args, c, &mut ahead, share);
        }
    }
}

/// The vectors `c..c + C` of all rows.
#[inline(always)]
unsafe fn multiply_vectors<S: Simd, const C: usize>(
    args: &Multiply<'_>,
    c: usize,
    ahead: &mut StreamLines,
    share: usize,
) {
    let mut row = 0;
    // SAFETY: as the caller promises; every block gets as many rows as there are.
    unsafe {
        while row < args.rows {
            let block = block_rows(args.rows - row, S::REGISTERS);
            match block {
                6 => multiply_block::<S, 6, C>(args, row, c, ahead, share),
                4 => multiply_block::<S, 4, C>(args, row, c, ahead, share),
                3 => multiply_block::<S, 3, C>(args, row, c, ahead, share),
                2 => multiply_block::<S, 2, C>(args, row, c, ahead, share),
                _ => multiply_block::<S, 1, C>(args, row, c, ahead, share),
            }
            row += block;
        }
    }
}

/// Rows of the next block if `left` are left: 6, 4, or the last three, two or one.
#[inline(always)]
fn block_rows(left: usize, registers: usize) -> usize {
    match left {
        0..4 => left,
        // Eight sums are as many as begin before the first is done; four rows more than whole sixes make a block, too.
        6.. if registers == 16 && !matches!(left % 6, 2 | 4) => 6,
        _ => 4,
    }
}

/// The vectors `c..c + C` of `R` rows.
#[inline(always)]
unsafe fn multiply_block<S: Simd, const R: usize, const C: usize>(
    args: &Multiply<'_>,
    row: usize,
    c: usize,
    ahead: &mut StreamLines,
    share: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let left = args.left.add(row * args.left_stride);
        let right = args.right.add(c * S::LANES);
        let out = args.out.add(row * args.out_stride + c * S::LANES);
        for first in (0..args.depth).step_by(STRETCH) {
            ahead.ask::<S>(share);
            let mut sums = [[S::splat(0.0); C]; R];
            for k in first..args.depth.min(first + STRETCH) {
                let mut vectors = [S::splat(0.0); C];
                for i in 0..C {
                    vectors[i] = S::load(right.add(k * args.right_stride + i * S::LANES));
                }
                for r in 0..R {
                    let factor = S::splat(*left.add(r * args.left_stride + k));
                    for i in 0..C {
                        sums[r][i] = S::fma(factor, vectors[i], sums[r][i]);
                    }
                }
            }
            for r in 0..R {
                let decay = if first == 0 { args.decay.map(|decay| *decay.add(row + r)) } else { Some(1.0) };
                for i in 0..C {
                    let out = out.add(r * args.out_stride + i * S::LANES);
                    let sum = match decay {
                        Some(decay) => S::fma(S::splat(decay), S::load(out), sums[r][i]),
                        None => sums[r][i],
                    };
                    S::store(out, sum);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{decode_row, encode_row};
    use crate::simd::Isa;
    use crate::tests::samples::{Random, read};

    /// A tile of random rows, page by page: rows, then scales. Those outside of `low..high` are not numbers.
    struct Tile {
        size: RowSize,
        page: usize,
        low: usize,
        high: usize,
        pages: Vec<Vec<u8>>,
        /// What the rows stand for, `[TILE][dim]`.
        numbers: Vec<f32>,
    }

    impl Tile {
        fn new(random: &mut Random, format: RowFormat, dim: usize) -> Self {
            let bytes = format.row_bytes(dim as u32) as usize;
            let scale_bytes = format.scale_bytes(dim as u32) as usize;
            let page = random.pick(&[8, 16, 32, 64]);
            let (low, high) = random.pick(&[(0, 64), (0, 1), (63, 64), (5, 64), (17, 50), (2, 37), (30, 33)]);
            let mut pages = vec![vec![0xff; page * (bytes + scale_bytes)]; TILE / page];
            let mut numbers = vec![0.0; TILE * dim];
            for t in low..high {
                let row: Vec<f32> = (0..dim).map(|_| random.float()).collect();
                let (place, (rows, scales)) = (t % page, pages[t / page].split_at_mut(page * bytes));
                let row_at = &mut rows[place * bytes..][..bytes];
                let scales = &mut scales[place * scale_bytes..][..scale_bytes];
                assert!(encode_row(format, &row, row_at, scales));
                decode_row(format, row_at, scales, &mut numbers[t * dim..][..dim]);
            }
            Self { size: RowSize { dim, bytes, scale_bytes }, page, low, high, pages, numbers }
        }

        fn number(&self, t: usize, i: usize) -> f64 {
            f64::from(self.numbers[t * self.size.dim + i])
        }

        fn read(&self, with: impl FnOnce(&Chunk<'_>)) {
            read(&self.pages, 0, self.page, self.size, self.low..self.high, self.page == TILE, with);
        }
    }

    /// Cases for every instruction set, format and head size, with some query rows.
    fn cases(mut case: impl FnMut(&mut Random, &'static Kernels, RowFormat, Tile, usize)) {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for format in RowFormat::ALL {
                for dim in [8, 24, 32, 64, 72, 80, 128, 160, 256] {
                    if dim % format.unit() as usize == 0 {
                        let mut random = Random(dim as u64 + 1000 * format as u64);
                        let tile = Tile::new(&mut random, format, dim);
                        let count = random.pick(&[1, 2, 3, 4, 5, 6, 8, 10, 25]);
                        case(&mut random, isa.kernels().expect("supported"), format, tile, count);
                    }
                }
            }
        }
    }

    /// Holds a number against the exact sum of some terms.
    fn hold(found: f32, terms: impl Iterator<Item = f64>) {
        let (sum, all) = terms.fold((0.0, 0.0), |(sum, all), x| (sum + x, all + x.abs()));
        assert!((f64::from(found) - sum).abs() <= 1e-5 * all, "{found}, not {sum}");
    }

    #[test]
    fn scores_are_products_with_what_rows_stand_for() {
        cases(|random, kernels, format, tile, count| {
            let dim = tile.size.dim;
            let stride = dim.next_multiple_of(ALIGN);
            let queries: Vec<f32> = (0..count * stride).map(|_| random.float()).collect();
            let (mut scores, mut memory) = (vec![f32::NAN; count * TILE], vec![f32::NAN; scratch(dim)]);
            let (to, from) = (scores.as_mut_ptr(), memory.as_mut_ptr());
            tile.read(|keys| {
                let score = Score {
                    queries: queries.as_ptr(),
                    stride,
                    codes: std::ptr::null(),
                    count,
                    size: tile.size,
                    keys,
                    low: tile.low,
                    high: tile.high,
                    scores: to,
                };
                // SAFETY: the rows are there, and as many queries, scores and floats of scratch memory.
                unsafe {
                    super::score(kernels, format, &score, std::slice::from_raw_parts_mut(from, scratch(dim)))
                };
            });
            for r in 0..count {
                for t in tile.low..tile.high {
                    let product = |i: usize| f64::from(queries[r * stride + i]) * tile.number(t, i);
                    hold(scores[r * TILE + t], (0..dim).map(product));
                }
            }
        });
    }

    #[test]
    fn values_are_sums_of_what_rows_stand_for() {
        cases(|random, kernels, format, tile, count| {
            // V may be the first part of a row.
            let unit = format.unit() as usize;
            let dim = unit * (1 + random.below(tile.size.dim / unit));
            let stride = dim.next_multiple_of(ALIGN);
            let mut weights: Vec<f32> = (0..count * TILE).map(|_| random.float()).collect();
            for (i, weight) in weights.iter_mut().enumerate() {
                if !(tile.low..tile.high).contains(&(i % TILE)) {
                    *weight = f32::NAN;
                }
            }
            let decay: Vec<f32> = (0..count).map(|_| random.float()).collect();
            let before: Vec<f32> = (0..count * stride).map(|_| random.float()).collect();
            let (mut values, mut memory) = (before.clone(), vec![f32::NAN; scratch(dim)]);
            let (to, from, weighed) = (values.as_mut_ptr(), memory.as_mut_ptr(), weights.as_mut_ptr());
            tile.read(|chunk| {
                let accumulate = Accumulate {
                    weights: weighed,
                    decay: Some(decay.as_ptr()),
                    values: to,
                    stride,
                    count,
                    dim,
                    size: tile.size,
                    chunk,
                    low: tile.low,
                    high: tile.high,
                    prefetch: true,
                };
                // SAFETY: the rows are there, and as many weights, factors, values and floats of scratch memory.
                unsafe {
                    let memory = std::slice::from_raw_parts_mut(from, scratch(dim));
                    super::accumulate(kernels, format, &accumulate, memory);
                }
            });
            for r in 0..count {
                for i in 0..dim {
                    let start = f64::from(decay[r]) * f64::from(before[r * stride + i]);
                    let product = |t: usize| f64::from(weights[r * TILE + t]) * tile.number(t, i);
                    hold(
                        values[r * stride + i],
                        std::iter::once(start).chain((tile.low..tile.high).map(product)),
                    );
                }
            }
        });
    }
}
