// Encodes rows of numbers as quantised rows: one warp a row, which it holds as in rotation.cuh. Formulas, the order of operations
// and the treatment of NaN and infinity are those of crates/pagoda-cpu/src/codec.rs: bytes are the same on the CPU and here.
// Magnitudes are compared as integers; in their order NaN comes after infinity and numbers below 2^-126 are not zero.
#pragma once

#include <pagoda/quantised.cuh>
#include <pagoda/rotation.cuh>

namespace pagoda {

constexpr float E4M3_MAX = 448.0f;
constexpr uint32 INFINITE = 0x7f800000u;

/// Half of the largest float: the largest number of formats that any scale will do for.
__device__ inline float half_of_largest() { return __uint_as_float(0x7effffffu); }
__device__ inline float not_a_number() { return __uint_as_float(0x7fc00000u); }
__device__ inline uint32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

/// The E4M3 nearest to `x`, ties to even; 448 for what is above. NaN has no sign: each machine gives it another.
__device__ inline uint32 to_e4m3(float x) {
    const uint32 bits = magnitude(x), sign = __float_as_uint(x) >> 24 & 0x80;
    if (bits > INFINITE) return 0x7f;
    const float size = __uint_as_float(bits);
    if (size >= E4M3_MAX) return sign | 0x7e;
    // Multiples of 2^-9. The next one up is the first normal number.
    if (size < 0.015625f) return sign | static_cast<uint32>(rintf(size * 512.0f));
    return sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120u << 3));
}

/// The E2M1 nearest to `x`, ties to the even code; 6 for what is above, 0 for NaN.
__device__ inline uint32 to_e2m1(float x) {
    const uint32 bits = magnitude(x);
    if (bits > INFINITE) return 0;
    const float size = __uint_as_float(bits);
    const uint32 code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
    return (__float_as_uint(x) >> 28 & 8) | code;
}

/// Writes the binary16 nearest to `x`.
__device__ inline void put_scale(uint8* target, float x) {
    const uint32 bits = magnitude(x) > INFINITE ? 0x7e00u : Pair<__half>::pack(x, 0.0f);
    *reinterpret_cast<unsigned short*>(target) = static_cast<unsigned short>(bits);
}

/// The largest magnitude of a lane's elements of a part, that of all parts, and that of so many lanes beside each other.
__device__ inline uint32 largest_of(const float (&x)[4]) {
    return __float_as_uint(larger_magnitude(larger_magnitude(x[0], x[1]), larger_magnitude(x[2], x[3])));
}
template <int PARTS>
__device__ uint32 largest_of(const float (&x)[PARTS][4]) {
    uint32 largest = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) largest = max(largest, largest_of(x[p]));
    return largest;
}
template <int LANES>
__device__ uint32 largest_among(uint32 largest) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    return largest;
}

/// Brings a row that a warp holds within `most`; NaN stays. Sets `misfit`, if it is not null, where there is NaN or what was not within.
/// Most rows are within.
template <int PARTS>
__device__ void limit(float (&x)[PARTS][4], float most, int* misfit) {
    const bool within = largest_of(x) <= __float_as_uint(most);
    if (__all_sync(~0u, within)) return;
    if (!within && misfit != nullptr) *misfit = 1;
#pragma unroll
    for (int i = 0; i < 4 * PARTS; ++i) x[i / 4][i % 4] = clamp_exact(x[i / 4][i % 4], most);
}

/// x / DIVISOR for 127, rounded once: a quotient, and what it is off by (Markstein, 1990); tried for every x from 0 on. For 6 too, but
/// for quotients below 2^-126.
template <int DIVISOR>
__device__ float divided_by(float x) {
    constexpr float INVERSE = 1.0f / DIVISOR;
    const float near = multiply_exact(x, INVERSE);
    return fuse_exact(fuse_exact(near, -DIVISOR, x), INVERSE, near);
}

/// 1 / `scale`, and 0 for 0.
__device__ inline float inverse_of(float scale) { return magnitude(scale) == 0 ? 0.0f : inverse_exact(scale); }

/// Four codes as the bytes of a word.
template <class Code>
__device__ uint32 four_codes(const float (&x)[4], Code code) {
    return code(x[0]) | code(x[1]) << 8 | code(x[2]) << 16 | code(x[3]) << 24;
}

/// Where a row that a warp holds is stored.
struct Target {
    int dim;
    uint8 *row, *scales;
    /// Of this thread.
    int lane;
};

/// Writes a lane's 4-bit codes of a part, the bytes of a word: byte j of 32 elements holds element j below and j + 16 above.
__device__ inline void put_nibbles(const Target& to, int first, uint32 codes) {
    const uint32 above = __shfl_xor_sync(~0u, codes, 4);
    if (first < to.dim && first % 32 < 16) *reinterpret_cast<uint32*>(to.row + first / 32 * 16 + first % 32) = codes | above << 4;
}

/// How a format stores such rows. limit(): the largest magnitude that there is a scale for, which elements are within or NaN.
/// store(x, target): elements behind the row are 0.
template <class Format>
struct Encoder;

/// A row with one scale, which brings its largest number to `most`; NaN if there is one. codes(x): of four quotients.
template <int PARTS, class Codes>
__device__ void store_row(const float (&x)[PARTS][4], const Target& to, float most, Codes codes) {
    const uint32 largest = __reduce_max_sync(~0u, largest_of(x));
    const float scale = largest > INFINITE ? not_a_number() : divide_exact(__uint_as_float(largest), most);
    if (to.lane == 0) *reinterpret_cast<float*>(to.scales) = scale;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const int first = first_of(p, to.lane);
        float quotients[4];
        for (int i = 0; i < 4; ++i) quotients[i] = divide_exact(x[p][i], scale);
        if (first < to.dim) *reinterpret_cast<uint32*>(to.row + first) = magnitude(scale) == 0 ? 0 : codes(quotients);
    }
}

template <>
struct Encoder<Fp8E4m3> {
    __device__ static float limit() { return half_of_largest(); }
    template <int PARTS>
    __device__ static void store(const float (&x)[PARTS][4], const Target& to) {
        store_row(x, to, E4M3_MAX, [](const float (&q)[4]) {
#if __CUDA_ARCH__ >= 890
            return four_e4m3(q[0], q[1], q[2], q[3]);
#else
            return four_codes(q, to_e4m3);
#endif
        });
    }
};

template <>
struct Encoder<Int8> {
    __device__ static float limit() { return half_of_largest(); }
    template <int PARTS>
    __device__ static void store(const float (&x)[PARTS][4], const Target& to) {
        store_row(x, to, 127.0f, [](const float (&q)[4]) {
            return pack_int8(__float2int_rn(q[0]), __float2int_rn(q[1]), __float2int_rn(q[2]), __float2int_rn(q[3]));
        });
    }
};

template <>
struct Encoder<Q8_0> {
    /// Lanes that have the elements of a block.
    static constexpr int LANES = Q8_0::BLOCK / 4;

    __device__ static float limit() { return 127.0f * F16_MAX; }
    template <int PARTS>
    __device__ static void store(const float (&x)[PARTS][4], const Target& to) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const int first = first_of(p, to.lane);
            const uint32 largest = largest_among<LANES>(largest_of(x[p]));
            const float scale = largest > INFINITE ? not_a_number() : divided_by<127>(__uint_as_float(largest));
            const float inverse = inverse_of(scale);
            // Halves away from 0; what is not far enough from the next integer is cut off with the sum.
            const auto code = [&](float x) {
                const float near = multiply_exact(x, inverse);
                return __float2int_rz(__fadd_rz(near, copysignf(0.5f, near)));
            };
            const uint32 codes = pack_int8(code(x[p][0]), code(x[p][1]), code(x[p][2]), code(x[p][3]));
            if (first >= to.dim) continue;
            *reinterpret_cast<uint32*>(to.row + first) = codes;
            if (to.lane % LANES == 0) put_scale(to.scales + first / Q8_0::BLOCK * 2, scale);
        }
    }
};

/// Codes of a block's elements, four a lane: from 0 to 2 HALF - 1, HALF for 0. Their scale brings the largest to -HALF.
template <int HALF>
__device__ uint32 symmetric_codes(const float (&x)[4], int lane, float& scale) {
    // The first of the largest, with its sign.
    float most = x[0];
    for (int i = 1; i < 4; ++i) most = magnitude(x[i]) > magnitude(most) ? x[i] : most;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
        const float other = __shfl_xor_sync(~0u, most, step);
        const uint32 is_before = (lane & step) != 0;
        most = magnitude(other) + is_before > magnitude(most) ? other : most;
    }
    scale = magnitude(most) > INFINITE ? not_a_number() : multiply_exact(magnitude(most) == 0 ? 0.0f : most, -1.0f / HALF);
    const float inverse = inverse_of(scale);
    // Truncation of what is above 0 rounds to nearest. NaN becomes 0.
    return four_codes(x, [&](float x) {
        return min(__float2uint_rz(add_exact(multiply_exact(x, inverse), HALF + 0.5f)), 2u * HALF - 1);
    });
}

template <>
struct Encoder<Q5_0> {
    __device__ static float limit() { return 16.0f * F16_MAX; }
    template <int PARTS>
    __device__ static void store(const float (&x)[PARTS][4], const Target& to) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const int first = first_of(p, to.lane);
            float scale;
            const uint32 codes = symmetric_codes<16>(x[p], to.lane, scale);
            put_nibbles(to, first, codes & 0x0f0f0f0fu);
            // The fifth bits of a block's codes are a word.
            uint32 fifths = ((codes >> 4 & 1) | (codes >> 11 & 2) | (codes >> 18 & 4) | (codes >> 25 & 8)) << first % 32;
#pragma unroll
            for (int step = 1; step < 8; step *= 2) fifths |= __shfl_xor_sync(~0u, fifths, step);
            if (first >= to.dim || first % 32 != 0) continue;
            reinterpret_cast<uint32*>(to.row + to.dim / 2)[first / 32] = fifths;
            put_scale(to.scales + first / 32 * 2, scale);
        }
    }
};

template <>
struct Encoder<Q4_0> {
    __device__ static float limit() { return 8.0f * F16_MAX; }
    template <int PARTS>
    __device__ static void store(const float (&x)[PARTS][4], const Target& to) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const int first = first_of(p, to.lane);
            float scale;
            put_nibbles(to, first, symmetric_codes<8>(x[p], to.lane, scale));
            if (first < to.dim && first % 32 == 0) put_scale(to.scales + first / 32 * 2, scale);
        }
    }
};

template <>
struct Encoder<Mxfp4> {
    __device__ static float limit() { return half_of_largest(); }
    template <int PARTS>
    __device__ static void store(const float (&x)[PARTS][4], const Target& to) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const int first = first_of(p, to.lane);
            const uint32 largest = largest_among<8>(largest_of(x[p]));
            // The largest number gets the exponent of 4. The inverse of the scale is exact.
            const uint32 code = largest > INFINITE ? 255 : max(static_cast<int>(largest >> 23) - 2, 0);
            const float inverse = code == 255 ? not_a_number() : __uint_as_float((254 - code) << 23);
            put_nibbles(to, first, four_codes(x[p], [&](float x) { return to_e2m1(multiply_exact(x, inverse)); }));
            if (first < to.dim && first % 32 == 0) to.scales[first / 32] = static_cast<uint8>(code);
        }
    }
};

template <>
struct Encoder<Nvfp4> {
    __device__ static float limit() { return 6.0f * E4M3_MAX; }
    template <int PARTS>
    __device__ static void store(const float (&x)[PARTS][4], const Target& to) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const int first = first_of(p, to.lane);
            const uint32 largest = largest_among<Nvfp4::BLOCK / 4>(largest_of(x[p]));
            const uint32 code = to_e4m3(largest > INFINITE ? not_a_number() : divided_by<6>(__uint_as_float(largest)));
            const float scale = from_e4m3(code);
            put_nibbles(to, first, four_codes(x[p], [&](float x) { return code == 0 ? 0 : to_e2m1(divide_exact(x, scale)); }));
            if (first < to.dim && first % Nvfp4::BLOCK == 0) to.scales[first / Nvfp4::BLOCK] = static_cast<uint8>(code);
        }
    }
};

}  // namespace pagoda
