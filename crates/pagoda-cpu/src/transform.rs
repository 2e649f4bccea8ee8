//! What happens to rows before they are quantised, so that few large elements do not cost the others their precision.
//!
//! K is centred: a constant vector is taken off every K row of a head. Scores of a query then miss the product of the query
//! with that vector, which is the same for all rows, and is added back. K and V are rotated: by random signs and a Hadamard
//! matrix, over blocks of the largest power of two that divides the row. Queries are rotated likewise, which leaves their
//! products with K as they were, and results are rotated back.

use crate::layer::HEAD_DIM_MAX;

/// The transforms of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Transform {
    /// `[num_kv_heads][head_dim]`, taken off K; empty for nothing.
    pub center: Vec<f32>,
    /// Whether K rows and queries are rotated.
    pub rotate_k: bool,
    /// Whether V rows and results are rotated.
    pub rotate_v: bool,
}

impl Transform {
    /// What is taken off the K rows of a head, if anything is.
    pub(crate) fn center(&self, head: usize, dim: usize) -> Option<&[f32]> {
        (!self.center.is_empty()).then(|| &self.center[head * dim..][..dim])
    }
}

/// The signs of elements: bits of SplitMix64 of their numbers.
static SIGNS: [f32; HEAD_DIM_MAX as usize] = {
    let mut signs = [1.0; HEAD_DIM_MAX as usize];
    let mut i = 0;
    while i < signs.len() {
        let mut z = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        if (z ^ (z >> 31)) & 1 == 1 {
            signs[i] = -1.0;
        }
        i += 1;
    }
    signs
};

/// Multiplies the elements with their signs.
fn flip(row: &mut [f32]) {
    row.iter_mut().zip(&SIGNS).for_each(|(x, sign)| *x *= sign);
}

/// Elements that a rotation mixes in rows of `dim`.
fn block(dim: usize) -> usize {
    1 << dim.trailing_zeros()
}

/// The sums and differences of elements that lie `H` apart, and of these those that lie `2 * H` apart. `H` is known when this is
/// compiled, so that it becomes vectors.
#[inline(always)]
fn mix_fours<const H: usize>(row: &mut [f32]) {
    for four in row.chunks_exact_mut(4 * H) {
        let (low, high) = four.split_at_mut(2 * H);
        let ((a, b), (c, d)) = (low.split_at_mut(H), high.split_at_mut(H));
        for i in 0..H {
            let (ab, cd) = ([a[i] + b[i], a[i] - b[i]], [c[i] + d[i], c[i] - d[i]]);
            (a[i], b[i], c[i], d[i]) = (ab[0] + cd[0], ab[1] + cd[1], ab[0] - cd[0], ab[1] - cd[1]);
        }
    }
}

/// The sums and differences of elements that lie `H` apart.
#[inline(always)]
fn mix_pairs<const H: usize>(row: &mut [f32]) {
    for pair in row.chunks_exact_mut(2 * H) {
        let (a, b) = pair.split_at_mut(H);
        for i in 0..H {
            (a[i], b[i]) = (a[i] + b[i], a[i] - b[i]);
        }
    }
}

/// Multiplies each block by its Hadamard matrix (Sylvester's), which is its own inverse.
fn hadamard(row: &mut [f32]) {
    let size = block(row.len());
    let mixers = [mix_fours::<1>, mix_fours::<4>, mix_fours::<16>, mix_fours::<64>, mix_fours::<256>];
    mixers.iter().take(size.ilog2() as usize / 2).for_each(|mix| mix(row));
    match size {
        2 => mix_pairs::<1>(row),
        8 => mix_pairs::<4>(row),
        32 => mix_pairs::<16>(row),
        128 => mix_pairs::<64>(row),
        512 => mix_pairs::<256>(row),
        _ => {}
    }
    let scale = 1.0 / (size as f32).sqrt();
    row.iter_mut().for_each(|x| *x *= scale);
}

/// Rotates a row.
pub(crate) fn rotate(row: &mut [f32]) {
    flip(row);
    hadamard(row);
}

/// Undoes [`rotate`].
pub(crate) fn rotate_back(row: &mut [f32]) {
    hadamard(row);
    flip(row);
}
