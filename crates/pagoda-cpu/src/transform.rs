//! What happens to rows before they are quantised, so that few large elements do not cost the others their precision.
//!
//! K is centred: a constant vector is taken off every K row of a head. Scores of a query then miss the product of the query
//! with that vector, which is the same for all rows, and is added back. K and V are rotated: by random signs and a Hadamard
//! matrix, over blocks of the largest power of two that divides the row. Queries are rotated likewise, which leaves their
//! products with K as they were, and results are rotated back.

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

/// The sign of element `i`: a bit of SplitMix64 of `i`.
fn sign(i: usize) -> f32 {
    let mut z = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    if (z ^ (z >> 31)) & 1 == 0 { 1.0 } else { -1.0 }
}

/// Elements that a rotation mixes in rows of `dim`.
fn block(dim: usize) -> usize {
    1 << dim.trailing_zeros()
}

/// Multiplies each block by its Hadamard matrix (Sylvester's), which is its own inverse.
fn hadamard(row: &mut [f32]) {
    let size = block(row.len());
    for block in row.chunks_exact_mut(size) {
        let mut half = 1;
        while half < size {
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        let scale = 1.0 / (size as f32).sqrt();
        block.iter_mut().for_each(|x| *x *= scale);
    }
}

/// Rotates a row.
pub(crate) fn rotate(row: &mut [f32]) {
    row.iter_mut().enumerate().for_each(|(i, x)| *x *= sign(i));
    hadamard(row);
}

/// Undoes [`rotate`].
pub(crate) fn rotate_back(row: &mut [f32]) {
    hadamard(row);
    row.iter_mut().enumerate().for_each(|(i, x)| *x *= sign(i));
}
