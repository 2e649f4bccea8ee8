// The rotation of rows before they are quantised: random signs and a Hadamard matrix, over blocks of the largest power of two
// that divides the row. Order and rounding are those of crates/pagoda-cpu/src/transform.rs: stored bytes are the same.
#pragma once

#include <pagoda/machine.cuh>

namespace pagoda {

/// STORED_MAX of that file: elements of a row are brought within it before the row is rotated and stored.
constexpr float STORED_MAX = 0x1p23f;

__device__ inline int lane_of_warp() { return thread_here() % WARP; }

/// A warp holds a row in registers as parts of so many elements, four in each lane: those of lane l are 4 l to 4 l + 3 of a part.
constexpr int PART = 4 * WARP;

/// How many parts a row has.
__device__ constexpr int parts_of(int dim) { return (dim + PART - 1) / PART; }

/// The first of a lane's elements of a part.
__device__ constexpr int first_of(int part, int lane) { return part * PART + 4 * lane; }

/// Of each element a bit: whether its sign is turned over, which is a bit of SplitMix64 of its number.
template <int WORDS>
struct SignBits {
    uint32 words[WORDS];

    __device__ constexpr SignBits() : words() {
        for (int e = 0; e < 32 * WORDS; ++e) {
            uint64 z = static_cast<uint64>(e + 1) * 0x9e3779b97f4a7c15ull;
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
            z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
            words[e / 32] |= static_cast<uint32>((z ^ (z >> 31)) & 1) << e % 32;
        }
    }
};

/// What the lanes of a warp need to rotate rows of `dim` elements. Elements behind a row's end may be anything.
template <int PARTS>
class Rotation {
    /// Bit 4 p + i: of element i of part p.
    uint32 signs = 0;
    /// By the bit of the lane's number that is looked at: 1 where it is 0, -1 where it is 1.
    float sides[5];
    int size;
    float scale;

    __device__ void turn_signs(float (&x)[PARTS][4]) const {
#pragma unroll
        for (int i = 0; i < 4 * PARTS; ++i) {
            float& here = x[i / 4][i % 4];
            here = __uint_as_float(__float_as_uint(here) ^ (signs << (31 - i) & 0x80000000u));
        }
    }

    __device__ static void mix(float& low, float& high) {
        const float a = low, b = high;
        low = add_exact(a, b);
        high = subtract_exact(a, b);
    }

    /// Multiplies each block with its Hadamard matrix (Sylvester's), which is its own inverse.
    __device__ void hadamard(float (&x)[PARTS][4]) const {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            mix(x[p][0], x[p][1]);
            mix(x[p][2], x[p][3]);
            mix(x[p][0], x[p][2]);
            mix(x[p][1], x[p][3]);
        }
#pragma unroll
        for (int bit = 0; bit < 5; ++bit) {
            if (4 << bit >= size) break;
#pragma unroll
            for (int i = 0; i < 4 * PARTS; ++i) {
                float& here = x[i / 4][i % 4];
                here = fuse_exact(sides[bit], here, __shfl_xor_sync(~0u, here, 1 << bit));
            }
        }
#pragma unroll
        for (int half = 1; half < PARTS; half *= 2) {
            if (half * PART >= size) break;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if ((p & half) != 0 || p + half >= PARTS) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i) mix(x[p][i], x[p + half][i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4 * PARTS; ++i) x[i / 4][i % 4] = multiply_exact(x[i / 4][i % 4], scale);
    }

public:
    __device__ Rotation(int dim, int lane) : size(dim & -dim), scale(divide_exact(1.0f, root_exact(static_cast<float>(size)))) {
        constexpr SignBits<PART / 32 * PARTS> SIGNS;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            // Eight lanes have the elements of a word.
            const uint32* const words = SIGNS.words + 4 * p;
            const uint32 low = lane & 8 ? words[1] : words[0], high = lane & 8 ? words[3] : words[2];
            signs |= ((lane & 16 ? high : low) >> 4 * (lane % 8) & 15) << 4 * p;
        }
        signs = kept(signs);
#pragma unroll
        for (int bit = 0; bit < 5; ++bit) sides[bit] = __uint_as_float(kept(__float_as_uint(lane >> bit & 1 ? -1.0f : 1.0f)));
    }

    __device__ void rotate(float (&x)[PARTS][4]) const {
        turn_signs(x);
        hadamard(x);
    }

    __device__ void rotate_back(float (&x)[PARTS][4]) const {
        hadamard(x);
        turn_signs(x);
    }
};

}  // namespace pagoda
