//! What happens to rows before they are quantised, so that few large elements do not cost the others their precision.
//!
//! K is centred: a constant vector is subtracted from every K row of a head. Scores of a query then lack the product of the
//! query with that vector, which is the same for all rows and is added back. K and V are rotated: by random signs and a
//! Hadamard matrix, over blocks of the largest power of two that divides the row. Queries are rotated likewise, which leaves
//! their products with K unchanged, and results are rotated back.

use crate::kernel::ALIGN;
use crate::layer::HEAD_DIM_MAX;
use crate::simd::Simd;

/// The transforms of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Transform {
    /// `[num_kv_heads][head_dim]`, subtracted from K; empty for none.
    pub center: Vec<f32>,
    /// Whether K rows and queries are rotated.
    pub rotate_k: bool,
    /// Whether V rows and results are rotated.
    pub rotate_v: bool,
}

impl Transform {
    /// What is subtracted from the K rows of a head, if anything.
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

/// Elements of a row are limited to this before rotation, which adds up to 2^10 of them: infinities of both signs would make
/// NaN. Models store nothing near it, q8_0 has scales up to it, and sums over rows are finite by far. It is no larger because
/// of GPU kernels: a score from 2^31 on has such a rounding error that 2 to that power, by which its weight is off, is
/// infinite.
const STORED_MAX: f32 = (1 << 23) as f32;

/// For each bit of lane numbers: 1 for lanes without it, -1 for lanes with it.
static SIDES: [[f32; ALIGN]; 4] = {
    let mut sides = [[1.0; ALIGN]; 4];
    let mut i = 0;
    while i < sides.len() * ALIGN {
        if (i % ALIGN) >> (i / ALIGN) & 1 == 1 {
            sides[i / ALIGN][i % ALIGN] = -1.0;
        }
        i += 1;
    }
    sides
};

/// Multiplies the elements by their signs.
#[inline(always)]
fn flip(row: &mut [f32]) {
    row.iter_mut().zip(&SIGNS).for_each(|(x, sign)| *x *= sign);
}

/// Elements that a rotation mixes in rows of `dim`.
fn block(dim: usize) -> usize {
    1 << dim.trailing_zeros()
}

/// The sums and differences of lanes whose numbers differ by `H`.
#[inline(always)]
unsafe fn mix_lanes<S: Simd, const H: usize>(v: S::V) -> S::V {
    // SAFETY: the caller has the instruction set, and a vector has at most ALIGN lanes.
    unsafe { S::fma(S::load(SIDES[H.ilog2() as usize].as_ptr()), v, S::swap::<H>(v)) }
}

/// Those of all lanes of a vector in the same block of `size`.
#[inline(always)]
unsafe fn mix_vector<S: Simd>(p: *mut f32, size: usize) {
    // SAFETY: the caller has the instruction set, and a vector at `p`.
    unsafe {
        let mut v = mix_lanes::<S, 2>(mix_lanes::<S, 1>(S::load(p)));
        if S::LANES > 4 {
            v = mix_lanes::<S, 4>(v);
        }
        if S::LANES > 8 && size > 8 {
            v = mix_lanes::<S, 8>(v);
        }
        S::store(p, v);
    }
}

/// Multiplies each block by its Hadamard matrix (Sylvester's), which is its own inverse.
#[inline(always)]
unsafe fn hadamard<S: Simd>(row: &mut [f32]) {
    let size = block(row.len());
    let mut vectors = row.chunks_exact_mut(S::LANES);
    // SAFETY: the caller has the instruction set.
    unsafe {
        for vector in vectors.by_ref() {
            mix_vector::<S>(vector.as_mut_ptr(), size);
        }
        let half = vectors.into_remainder();
        if !half.is_empty() {
            let mut lanes = [0.0; ALIGN];
            lanes[..half.len()].copy_from_slice(half);
            mix_vector::<S>(lanes.as_mut_ptr(), size);
            half.copy_from_slice(&lanes[..half.len()]);
        }
        // Elements that lie `apart`.
        let mut apart = S::LANES;
        while apart < size {
            for pair in row.chunks_exact_mut(2 * apart) {
                let (a, b) = pair.split_at_mut(apart);
                for (a, b) in a.chunks_exact_mut(S::LANES).zip(b.chunks_exact_mut(S::LANES)) {
                    let (x, y) = (S::load(a.as_ptr()), S::load(b.as_ptr()));
                    S::store(a.as_mut_ptr(), S::add(x, y));
                    S::store(b.as_mut_ptr(), S::sub(x, y));
                }
            }
            apart *= 2;
        }
    }
    scale(row, 1.0 / (size as f32).sqrt());
}

/// Multiplies the elements of a row.
#[inline(always)]
pub(crate) fn scale(row: &mut [f32], factor: f32) {
    row.iter_mut().for_each(|x| *x *= factor);
}

/// The dot product of rows, as eight sums none of which waits for another.
#[inline(always)]
pub(crate) fn product(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 8];
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum()
}

/// Rotates a row of a multiple of 8 elements.
///
/// # Safety
/// The CPU has the instruction set.
#[inline(always)]
pub(crate) unsafe fn rotate<S: Simd>(row: &mut [f32]) {
    flip(row);
    // SAFETY: as the caller promises.
    unsafe { hadamard::<S>(row) };
}

/// Rotates a row that is to be stored. Larger elements, infinities included, count as [`STORED_MAX`]. False if there are any,
/// or a NaN, which turns the row into NaN.
///
/// # Safety
/// As of [`rotate`].
#[inline(always)]
pub(crate) unsafe fn rotate_stored<S: Simd>(row: &mut [f32]) -> bool {
    let mut fits = true;
    for (x, sign) in row.iter_mut().zip(&SIGNS) {
        fits &= x.abs() <= STORED_MAX;
        // NaN stays NaN.
        *x = x.clamp(-STORED_MAX, STORED_MAX) * sign;
    }
    // SAFETY: as the caller promises.
    unsafe { hadamard::<S>(row) };
    fits
}

/// Undoes [`rotate`].
///
/// # Safety
/// As there.
#[inline(always)]
pub(crate) unsafe fn rotate_back<S: Simd>(row: &mut [f32]) {
    // SAFETY: as the caller promises.
    unsafe { hadamard::<S>(row) };
    flip(row);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;
    use crate::tests::samples::Random;

    #[test]
    fn rotations_are_those_of_the_definition_and_the_same_everywhere() {
        let mut random = Random(9);
        for dim in (8..=HEAD_DIM_MAX as usize).step_by(8) {
            let row: Vec<f32> = (0..dim).map(|_| random.float()).collect();
            let size = block(dim);
            // Sylvester's matrix has -1 where the numbers of row and column have an odd number of bits in common.
            let right = |i: usize| {
                let first = i / size * size;
                let term = |j: usize| {
                    let sign = if (i & j).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
                    sign * f64::from(SIGNS[first + j]) * f64::from(row[first + j])
                };
                (0..size).map(term).sum::<f64>() / (size as f64).sqrt()
            };
            let mut bits = None;
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
                let kernels = isa.kernels().expect("supported");
                let mut is = row.clone();
                // SAFETY: the instruction set is supported.
                unsafe { (kernels.rotate)(&mut is) };
                for (i, &x) in is.iter().enumerate() {
                    assert!((f64::from(x) - right(i)).abs() < 1e-5, "{isa}, {dim}: {x}, not {}", right(i));
                }
                let these: Vec<u32> = is.iter().map(|x| x.to_bits()).collect();
                assert_eq!(*bits.get_or_insert(these.clone()), these, "{isa}, {dim}");
                // SAFETY: the instruction set is supported.
                unsafe { (kernels.rotate_back)(&mut is) };
                assert!(is.iter().zip(&row).all(|(x, y)| (x - y).abs() < 1e-5), "{isa}, {dim}");
            }
        }
    }
}
