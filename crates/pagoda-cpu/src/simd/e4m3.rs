//! Rows of fp8_e4m3 as floats, 64 codes at a time (AVX-512 VBMI): a table in registers has the two bytes of every E4M3 number
//! as bfloat16, which a shift turns into f32. With arithmetic on the bits of codes instead, attention takes a quarter longer.

#![expect(clippy::needless_range_loop, reason = "an index runs over several arrays of vectors")]

use std::arch::x86_64::*;

use pagoda_core::work::TILE;

use super::Simd;
use super::avx512::Avx512;
use super::kernels::PRODUCT_ROWS;
use crate::codec::e4m3;
use crate::kernel::{Accumulate, Score, scale_rows};
use crate::stored::Fp8E4m3;

/// Codes that become numbers at once: a cache line. The length of rows is a multiple of this.
pub(super) const CODES: usize = 64;
/// Vectors of f32 that these are.
const VECTORS: usize = 4;
/// Rows that are scored at once, all of one page.
pub(super) const ROWS: usize = 4;

/// One byte of each bfloat16 that a code without its sign stands for, times 2^-8 as in [`Stored`](crate::stored::Stored).
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
pub(super) struct Tables {
    low: [__m512i; 2],
    high: [__m512i; 2],
}

impl Tables {
    #[inline(always)]
    pub(super) unsafe fn load() -> Self {
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
    pub(super) unsafe fn decode(&self, codes: __m512i) -> [__m512i; 2] {
        // SAFETY: the caller has AVX-512 VBMI. Only the lower 7 bits of an index count; the eighth is the sign.
        unsafe {
            let low = _mm512_permutex2var_epi8(self.low[0], codes, self.low[1]);
            let high = _mm512_permutex2var_epi8(self.high[0], codes, self.high[1]);
            let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, _mm512_set1_epi8(-128));
            [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
        }
    }

    /// The numbers of 64 codes, in order.
    #[inline(always)]
    unsafe fn floats(&self, codes: __m512i) -> [__m512; VECTORS] {
        // SAFETY: the caller has AVX-512 VBMI.
        unsafe {
            let codes = _mm512_permutexvar_epi8(_mm512_loadu_si512(IN_TURN.as_ptr().cast()), codes);
            let [first, last] = self.decode(codes);
            let even = |pairs| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs));
            let odd = |pairs| _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(!0xffff)));
            [even(first), odd(first), even(last), odd(last)]
        }
    }
}

/// The code for each place, such that [`Tables::decode`] gives numbers of two vectors of f32 alternately.
const IN_TURN: [u8; CODES] = {
    let mut order = [0; CODES];
    let mut place = 0;
    while place < CODES {
        let (lane, byte) = (place / 16, place % 16);
        let (vector, element) = (byte / 8 * 2 + byte % 2, 4 * lane + byte % 8 / 2);
        order[place] = (16 * vector + element) as u8;
        place += 1;
    }
    order
};

/// Calls a kernel for all rows of queries.
macro_rules! for_rows {
    ($kernel:ident($args:ident)) => {
        let mut row = 0;
        while row < $args.count {
            // SAFETY: as the caller promises; every block gets as many query rows as there are.
            row += unsafe {
                match crate::kernel::rows_at_once($args.count - row, 4) {
                    1 => $kernel::<1>($args, row),
                    2 => $kernel::<2>($args, row),
                    3 => $kernel::<3>($args, row),
                    _ => $kernel::<4>($args, row),
                }
            };
        }
    };
}
pub(super) use for_rows;

/// See [`kernel::score`](crate::kernel::score).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c")]
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
    // SAFETY: 4 rows lie within a page; `queries` and `scores` are as large as `Score` says.
    unsafe {
        let tables = Tables::load();
        let queries = args.queries.add(row * args.stride);
        let chunks = size.dim / CODES;
        let ahead = args.keys.to_ask_for(args.keys.in_order, size);
        for first in (args.low / ROWS * ROWS..args.high).step_by(ROWS) {
            let keys = args.keys.row(first, size);
            let mut sums = [[_mm512_setzero_ps(); ROWS]; R];
            for c in 0..chunks {
                for i in 0..ROWS {
                    let codes = size.after(keys, i).data.add(c * CODES);
                    let numbers = tables.floats(_mm512_loadu_si512(codes.cast()));
                    for r in 0..R {
                        let query = queries.add(r * args.stride + c * CODES);
                        for v in 0..VECTORS {
                            let query = _mm512_loadu_ps(query.add(16 * v));
                            sums[r][i] = _mm512_fmadd_ps(numbers[v], query, sums[r][i]);
                        }
                    }
                    if row == 0 {
                        Avx512::prefetch(ahead.line(first * chunks + ROWS * c + i));
                    }
                }
            }
            Avx512::sum_quads(sums, args.scores.add(row * TILE + first), TILE);
        }
    }
    R
}

/// See [`kernel::accumulate`](crate::kernel::accumulate).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c")]
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
    let size = args.size;
    // SAFETY: as the caller promises.
    unsafe {
        let tables = Tables::load();
        let ahead = args.chunk.to_ask_for(args.chunk.in_order, size);
        let weights = args.weights.add(row * TILE);
        for c in 0..args.dim / CODES {
            let values = args.values.add(row * args.stride + c * CODES);
            let mut sums: [[__m512; VECTORS]; R] = std::array::from_fn(|r| {
                let decay = _mm512_set1_ps(args.decay.map_or(1.0, |decay| *decay.add(row + r)));
                std::array::from_fn(|v| {
                    _mm512_mul_ps(decay, _mm512_loadu_ps(values.add(r * args.stride + 16 * v)))
                })
            });
            let mut low = args.low;
            while low < args.high {
                let high = args.high.min((low / PRODUCT_ROWS + 1) * PRODUCT_ROWS);
                let rows = args.chunk.row(low, size);
                for t in low..high {
                    let codes = size.after(rows, t - low).data.add(c * CODES);
                    let numbers = tables.floats(_mm512_loadu_si512(codes.cast()));
                    for r in 0..R {
                        let weight = _mm512_set1_ps(*weights.add(r * TILE + t));
                        for v in 0..VECTORS {
                            sums[r][v] = _mm512_fmadd_ps(weight, numbers[v], sums[r][v]);
                        }
                    }
                    if args.prefetch && row == 0 {
                        Avx512::prefetch(ahead.line(c * TILE + t));
                    }
                }
                low = high;
            }
            for r in 0..R {
                for v in 0..VECTORS {
                    _mm512_storeu_ps(values.add(r * args.stride + 16 * v), sums[r][v]);
                }
            }
        }
    }
    R
}
