// The rotation of rows before they are quantised: random signs and a Hadamard matrix, over blocks of the largest power of two
// that divides the row. Order and rounding are those of crates/pagoda-cpu/src/transform.rs: stored bytes are the same.
#pragma once

#include <pagoda/machine.cuh>

namespace pagoda {

/// STORED_MAX of that file: elements of a row are brought within it before the row is rotated and stored.
constexpr float STORED_MAX = 0x1p23f;

__device__ inline int lane_of_warp() { return thread_here() % WARP; }

/// Turns over the signs of elements: by a bit of SplitMix64 of their numbers. For a whole warp, on a row in shared memory.
__device__ inline void turn_signs(float* row, int dim) {
    for (int e = lane_of_warp(); e < dim; e += WARP) {
        uint64 z = static_cast<uint64>(e + 1) * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        if ((z ^ (z >> 31)) & 1) row[e] = __uint_as_float(__float_as_uint(row[e]) ^ 0x80000000u);
    }
    __syncwarp();
}

/// Multiplies each block with its Hadamard matrix (Sylvester's), which is its own inverse. As `turn_signs`.
__device__ inline void hadamard(float* row, int dim) {
    const int size = dim & -dim;
    for (int half = 1; half < size; half *= 2) {
        for (int i = lane_of_warp(); i < dim / 2; i += WARP) {
            float &low = row[i / half * half + i], &high = row[i / half * half + i + half];
            const float a = low, b = high;
            low = add_exact(a, b);
            high = subtract_exact(a, b);
        }
        __syncwarp();
    }
    const float scale = divide_exact(1.0f, root_exact(static_cast<float>(size)));
    for (int e = lane_of_warp(); e < dim; e += WARP) row[e] = multiply_exact(row[e], scale);
    __syncwarp();
}

/// What other lanes have written to the row is seen after a barrier of the warp, which the caller has.
__device__ inline void rotate(float* row, int dim) {
    turn_signs(row, dim);
    hadamard(row, dim);
}

__device__ inline void rotate_back(float* row, int dim) {
    hadamard(row, dim);
    turn_signs(row, dim);
}

}  // namespace pagoda
