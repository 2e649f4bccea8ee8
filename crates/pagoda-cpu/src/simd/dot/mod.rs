//! What instruction sets with dot products of bytes or 16-bit integers do for [`integers`](crate::integers), behind one trait.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

use crate::integers::{QUAD, STEP};

/// Words, integers or floats of a vector, however many registers it takes.
pub(crate) const LANES: usize = 16;
/// Words of a row of K in a step.
pub(crate) const COLUMNS: usize = STEP / QUAD;

/// Vectors of 16. Every method may only run on a CPU that has the instruction set.
///
/// Codes are four to a word, of two kinds: any bytes, each a stored byte plus `ZERO`, and those from 0 to 31, which may be
/// multiplied with numbers of one byte. Sums of products are two vectors, whose contents are up to the instruction set.
pub(crate) trait Dot {
    /// 16 words or integers.
    type Words: Copy;
    /// 16 floats.
    type Floats: Copy;
    /// Query rows that share codes in registers: 2 or 4.
    const ROWS: usize;
    /// Whether the sums of two vectors fit the registers, for `ROWS` query rows.
    const MANY_REGISTERS: bool;
    /// The code of a stored byte of 0, where bytes are stored: 128 if codes are unsigned, else 0.
    const ZERO: i32;
    /// Whether numbers of two bytes are taken as shorts (see [`words`](crate::integers::words)).
    const SHORTS: bool;

    unsafe fn integers(x: i32) -> Self::Words;
    unsafe fn floats(x: f32) -> Self::Floats;
    unsafe fn load(p: *const f32) -> Self::Floats;
    unsafe fn store(p: *mut f32, v: Self::Floats);
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`.
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// The lanes whose bits are set, and 0 elsewhere.
    unsafe fn masked(bits: u16, v: Self::Floats) -> Self::Floats;
    unsafe fn magnitudes(v: Self::Floats) -> Self::Floats;
    unsafe fn to_floats(v: Self::Words) -> Self::Floats;
    /// Nearest integers, ties to even.
    unsafe fn to_integers(v: Self::Floats) -> Self::Words;
    /// The larger, compared as bits of numbers that are not negative: those of NaN are the largest.
    unsafe fn larger(a: Self::Words, b: Self::Floats) -> Self::Words;
    /// The sums of vectors, that of `v[i][j]` at `4 * i + j`.
    unsafe fn sums(v: [[Self::Words; 4]; 4]) -> [i32; LANES];
    /// The largest lanes of vectors likewise.
    unsafe fn largest(v: [[Self::Words; 4]; 4]) -> [i32; LANES];
    /// Writes [`words`](crate::integers::words) of 64 numbers, and returns numbers that have the same sum.
    unsafe fn pack(numbers: [Self::Words; 4], bytes: usize, words: &mut [[i32; LANES]; 2]) -> Self::Words;

    /// Sums that begin with a number.
    unsafe fn begin(start: i32, bytes: usize) -> [Self::Words; 2];
    /// Adds the products of codes with four numbers of one or two bytes.
    unsafe fn add_products(
        sums: [Self::Words; 2],
        codes: Self::Words,
        words: [i32; 2],
        bytes: usize,
    ) -> [Self::Words; 2];
    /// Called after every four additions of products with one byte.
    unsafe fn settle(sums: [Self::Words; 2], bytes: usize) -> [Self::Words; 2];
    /// Settled sums.
    unsafe fn total(sums: [Self::Words; 2], bytes: usize) -> Self::Words;

    /// Of 16 rows of 32 bytes: word `t` of vector `i` is the bytes `4 * i..4 * i + 4` of row `t`, plus `ZERO`.
    unsafe fn byte_columns(rows: *const u8, stride: usize) -> [Self::Words; COLUMNS];
    /// Of 16 rows of 16 bytes likewise: the lower halves of bytes, then the upper ones.
    unsafe fn nibble_columns(rows: *const u8, stride: usize) -> [Self::Words; COLUMNS];
    /// Of 4 rows of 32 bytes: byte `r` of word `i` is byte `16 * half + i` of row `r`, plus `ZERO`; words are not `in_order`.
    unsafe fn byte_words(rows: *const u8, stride: usize, half: usize) -> Self::Words;
    /// Of 4 rows of 16 bytes likewise: the lower or the upper halves of bytes.
    unsafe fn nibble_words(rows: *const u8, stride: usize, half: usize) -> Self::Words;
    /// Adds 16 where bits are set, which 16 rows of 4 bytes hold.
    unsafe fn fifth_columns(
        columns: [Self::Words; COLUMNS],
        bits: *const u8,
        stride: usize,
    ) -> [Self::Words; COLUMNS];
    /// Adds 16 where bits are set, which 4 rows of 4 bytes hold.
    unsafe fn fifth_words(words: Self::Words, bits: *const u8, stride: usize, half: usize) -> Self::Words;
    /// Puts sums of products with words into the order of elements.
    unsafe fn in_order(v: Self::Words) -> Self::Words;
    /// Bytes below 16 as entries of a table.
    unsafe fn lookup(table: &[u8; 16], v: Self::Words) -> Self::Words;
    /// Of 16 rows of binary16, number `index` of each.
    unsafe fn f16_scales(scales: *const u8, stride: usize, index: usize) -> Self::Floats;
    /// Of 16 rows of E8M0, half of number `index` of each.
    unsafe fn half_e8m0_scales(scales: *const u8, stride: usize, index: usize) -> Self::Floats;
    /// Of 16 rows of E4M3, half of number `index` of each.
    unsafe fn half_e4m3_scales(scales: *const u8, stride: usize, index: usize) -> Self::Floats;

    /// Prefetches the cache line of `p`, which need not be mapped.
    unsafe fn prefetch(p: *const u8, to: Cache);
}

/// The cache that a line is prefetched into.
#[derive(Clone, Copy)]
pub(crate) enum Cache {
    L1,
    L2,
}

/// Of 16 rows of bytes, number `index` of each.
#[inline(always)]
unsafe fn column(rows: *const u8, stride: usize, index: usize) -> [u8; LANES] {
    // SAFETY: the caller has 16 rows.
    std::array::from_fn(|t| unsafe { *rows.wrapping_add(t * stride + index) })
}
