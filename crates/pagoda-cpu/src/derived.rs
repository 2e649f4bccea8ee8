//! Keys that are not stored: Gemma 4's `attention_k_eq_v`.
//!
//! K and V of such a layer come from one projection: V is its norm without a weight, and K is that norm times a weight and
//! then rotated, `K = RoPE(weight * V)`. So only V is stored. When a tile is scored its keys are made from V, eight at a
//! time, in the L1 cache, for all query rows together. The key at place `j` of tile `t` of a run that begins at position `p`
//! needs a turn by `p + 64 t + j` positions. Keys are turned by `j` only; queries are turned back by `p` once a run and by
//! `64 t` once a tile. So two short tables hold every angle.

use pagoda_core::layout::RowFormat;
use pagoda_core::work::{RUN_TILES, TILE};

use crate::chunk::{Chunk, Lines, PIECES, RowSize, STREAMS};
use crate::kernel::{ALIGN, Score};
use crate::layer::HEAD_DIM_MAX;
use crate::rope::Rope;
use crate::simd::{Kernels, Simd};
use crate::stored::Stored;

/// Keys that are made at a time: the rows of a tile's smallest piece.
const ROWS: usize = TILE / PIECES;

/// How the keys of a layer are derived from its values.
#[derive(Clone, Debug)]
pub struct DerivedKeys {
    /// What values are multiplied by, element by element; padded with 0 to a multiple of [`ALIGN`].
    weight: Vec<f32>,
    /// Elements of a row.
    dim: usize,
    turns: Option<Turns>,
}

/// Angles of a layer's rotation.
#[derive(Clone, Debug)]
struct Turns {
    shape: Pairs,
    /// For each place in a tile, see [`Turn::angles`].
    places: Vec<f32>,
    /// For each tile in a run, backwards.
    tiles: Vec<f32>,
}

/// Which elements of a row turn together: the first elements of `count` pairs, `step` apart, and the distance to the second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pairs {
    count: usize,
    step: usize,
    distance: usize,
}

impl DerivedKeys {
    /// `weight` has one number for each element of a row; `rope` has no more pairs than fit a row.
    pub fn new(weight: &[f32], rope: Option<&Rope>) -> Self {
        let dim = weight.len();
        assert!(rope.is_none_or(|rope| 2 * rope.inv_freq.len() <= dim), "pairs of a row");
        let mut padded = weight.to_vec();
        padded.resize(dim.next_multiple_of(ALIGN), 0.0);
        Self { weight: padded, dim, turns: rope.and_then(Turns::new) }
    }

    /// Elements of a row.
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// Floats of scratch memory that `score` takes for `queries` rows.
    pub(crate) fn scratch(&self, queries: usize) -> usize {
        (queries + ROWS) * self.weight.len()
    }

    /// Writes what [`kernel::score`](crate::kernel::score) would for tile `tile` of the span, if keys were stored. Queries
    /// are turned back for its run; `args.size` and `args.keys` are those of the stored values.
    ///
    /// # Safety
    /// As there; and the kernels are for this CPU.
    pub(crate) unsafe fn score(
        &self,
        kernels: &Kernels,
        format: RowFormat,
        args: &Score<'_>,
        tile: usize,
        scratch: &mut [f32],
    ) {
        let stride = self.weight.len();
        let (queries, keys) = scratch[..self.scratch(args.count)].split_at_mut(args.count * stride);
        // SAFETY: as the caller promises; query rows are as long as keys, and aligned alike.
        unsafe { queries.as_mut_ptr().copy_from_nonoverlapping(args.queries, queries.len()) };
        if let Some(turns) = &self.turns {
            turns.turn(kernels, queries, stride, turns.tile(tile % RUN_TILES), 0);
        }
        let blocks = [keys.as_ptr().cast(); PIECES];
        let lines = Lines { blocks: &blocks, rows: 0, scales: 0 };
        let made =
            Chunk { here: lines, ahead: &[lines; STREAMS], in_order: false, piece_shift: ROWS.ilog2() };
        for first in (args.low / ROWS * ROWS..args.high).step_by(ROWS) {
            let derive = Derive {
                values: args.keys,
                size: args.size,
                first,
                weight: self.weight.as_ptr(),
                keys: keys.as_mut_ptr(),
                stride,
            };
            // SAFETY: as the caller promises; the scratch memory has room for ROWS keys.
            unsafe { kernels.derive(format)(&derive) };
            if let Some(turns) = &self.turns {
                turns.turn(kernels, keys, stride, turns.place(first), turns.shape.floats());
            }
            let score = Score {
                queries: queries.as_ptr(),
                stride,
                codes: std::ptr::null(),
                count: args.count,
                size: RowSize { dim: self.dim, bytes: stride * size_of::<f32>(), scale_bytes: 0 },
                keys: &made,
                low: args.low.max(first),
                high: args.high.min(first + ROWS),
                scores: args.scores,
            };
            // SAFETY: as the caller promises; the keys are in the scratch memory.
            unsafe { (kernels.float_rows(RowFormat::F32).score)(&score) };
        }
    }
}

impl Turns {
    /// None if nothing turns.
    fn new(rope: &Rope) -> Option<Self> {
        let pairs = rope.inv_freq.len();
        let (step, distance) = if rope.interleaved { (2, 1) } else { (1, pairs) };
        // Pairs at the end that do not turn are left alone: three quarters of those of Gemma 4.
        let count = pairs - rope.inv_freq.iter().rev().take_while(|&&frequency| frequency == 0.0).count();
        let table = |positions: usize, step: f64| -> Vec<f32> {
            let turned = |place: usize, turn: fn(f64) -> f64| {
                let angle = move |&frequency: &f32| place as f64 * step * f64::from(frequency);
                rope.inv_freq[..count].iter().map(move |frequency| turn(angle(frequency)) as f32)
            };
            (0..positions).flat_map(|place| turned(place, f64::cos).chain(turned(place, f64::sin))).collect()
        };
        (count > 0).then(|| Self {
            shape: Pairs { count, step, distance },
            places: table(TILE, 1.0),
            tiles: table(RUN_TILES, -(TILE as f64)),
        })
    }

    fn place(&self, place: usize) -> &[f32] {
        &self.places[place * self.shape.floats()..]
    }

    fn tile(&self, tile: usize) -> &[f32] {
        &self.tiles[tile * self.shape.floats()..]
    }

    /// Turns rows, each by the angles `apart` floats after those of the row before.
    fn turn(&self, kernels: &Kernels, rows: &mut [f32], stride: usize, angles: &[f32], apart: usize) {
        let count = rows.len() / stride;
        assert!((count - 1) * apart + self.shape.floats() <= angles.len(), "angles of every row");
        let turn = Turn {
            rows: rows.as_mut_ptr(),
            stride,
            count,
            pairs: self.shape,
            angles: angles.as_ptr(),
            apart,
        };
        // SAFETY: the kernels are for this CPU, pairs lie within a row, and there are angles for every row.
        unsafe { (kernels.turn)(&turn) };
    }
}

impl Pairs {
    /// Floats of the angles of a position.
    fn floats(self) -> usize {
        2 * self.count
    }
}

/// Arguments of [`derive`]: values times a weight.
pub(crate) struct Derive<'a> {
    /// The stored values of a tile.
    values: &'a Chunk<'a>,
    size: RowSize,
    /// The first of [`ROWS`] rows, all of one page.
    first: usize,
    /// As long as a row, padded with 0 to a multiple of [`ALIGN`].
    weight: *const f32,
    /// `[ROWS]` rows, `stride` floats apart.
    keys: *mut f32,
    stride: usize,
}

/// Makes keys that have yet to be turned.
#[inline(always)]
pub(crate) unsafe fn derive<S: Simd, F: Stored>(args: &Derive<'_>) {
    let size = args.size;
    let vector = S::LANES * F::BITS / 8;
    let chunks = size.dim / S::LANES;
    // SAFETY: as the caller promises; keys and weight are whole vectors long.
    unsafe {
        let values = args.values.row(args.first, size);
        let mut ahead = args.values.lines_ahead(args.first, size);
        let mut scales = [1.0; ROWS];
        if F::ROW_SCALE {
            scales = std::array::from_fn(|i| F::row_scale(size.after(values, i)));
        }
        let weighted = |i: usize, c: usize, value: S::V| {
            let at = c * S::LANES;
            let value = if F::ROW_SCALE { S::mul(S::splat(scales[i]), value) } else { value };
            S::store(args.keys.add(i * args.stride + at), S::mul(S::load(args.weight.add(at)), value));
        };
        for c in 0..chunks {
            ahead.ask::<S>(ROWS * vector);
            for i in 0..ROWS {
                weighted(i, c, F::load::<S>(size.after(values, i), c * S::LANES));
            }
        }
        if !size.dim.is_multiple_of(S::LANES) {
            for i in 0..ROWS {
                weighted(i, chunks, F::half::<S>(size.after(values, i), chunks * S::LANES));
            }
        }
    }
}

/// Arguments of [`turn`]: pairs of elements of some rows are turned.
pub(crate) struct Turn {
    rows: *mut f32,
    /// Floats from one row to the next.
    stride: usize,
    count: usize,
    pairs: Pairs,
    /// For the first row: cosines of all pairs, then sines.
    angles: *const f32,
    /// Floats from the angles of one row to those of the next.
    apart: usize,
}

/// Turns rows in place.
#[inline(always)]
pub(crate) unsafe fn turn<S: Simd>(args: &Turn) {
    let Pairs { count, step, distance } = args.pairs;
    // Vectors must not hold both elements of a pair.
    let whole = if step == 1 { count / S::LANES * S::LANES } else { 0 };
    for r in 0..args.count {
        // SAFETY: as the caller promises.
        unsafe {
            let (row, cos) = (args.rows.add(r * args.stride), args.angles.add(r * args.apart));
            let sin = cos.add(count);
            for i in (0..whole).step_by(S::LANES) {
                let (first, second) = (row.add(i), row.add(i + distance));
                let (x, y) = (S::load(first), S::load(second));
                let (cos, sin) = (S::load(cos.add(i)), S::load(sin.add(i)));
                S::store(first, S::sub(S::mul(x, cos), S::mul(y, sin)));
                S::store(second, S::fma(x, sin, S::mul(y, cos)));
            }
            for i in whole..count {
                let (first, second) = (row.add(i * step), row.add(i * step + distance));
                let (x, y, cos, sin) = (*first, *second, *cos.add(i), *sin.add(i));
                *first = x * cos - y * sin;
                *second = x * sin + y * cos;
            }
        }
    }
}

const _: () = assert!(HEAD_DIM_MAX as usize * ROWS * size_of::<f32>() <= 32 << 10, "keys fit the L1 cache");
