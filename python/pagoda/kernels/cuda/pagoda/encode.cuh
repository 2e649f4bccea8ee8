// Rows of numbers become quantised rows: a warp encodes a row, which lies in shared memory. Formulas, the order of operations
// and what becomes of NaN and infinity are those of crates/pagoda-cpu/src/codec.rs: bytes are the same on the CPU and here.
// Magnitudes are compared as integers, in whose order NaN comes behind infinity and numbers below 2^-126 are not zero.
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

/// Infinities and what is larger than `limit` become it; NaN stays.
__device__ inline float limited(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

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

/// An integer from -128 to 127; 0 for NaN.
__device__ inline uint8 to_int8(float x) {
    const float inside = x >= 127.0f ? 127.0f : x <= -128.0f ? -128.0f : x == x ? x : 0.0f;
    return static_cast<uint8>(static_cast<signed char>(inside));
}

/// Writes the binary16 nearest to `x`.
__device__ inline void put_scale(uint8* target, float x) {
    const uint32 bits = magnitude(x) > INFINITE ? 0x7e00u : Pair<__half>::pack(x, 0.0f);
    *reinterpret_cast<unsigned short*>(target) = static_cast<unsigned short>(bits);
}

/// Writes 4-bit codes of 32 elements, one a lane: byte j holds element j below and j + 16 above.
__device__ inline void put_nibbles(uint8* target, uint32 code) {
    const int lane = lane_of_warp();
    const uint32 above = __shfl_xor_sync(~0u, code, 16);
    if (lane < 16) target[lane] = static_cast<uint8>(code | above << 4);
}

/// How a format stores rows. limit(): the largest magnitude that there is a scale for. store(x, dim, row, scales).
template <class Format>
struct Encoder;

/// A row with one scale, which brings its largest number to `most`; NaN if there is one.
template <class Code>
__device__ void store_row(const float* x, int dim, uint8* row, uint8* scales, float most, Code code) {
    const int lane = lane_of_warp();
    const float limit = half_of_largest();
    uint32 largest = 0;
    for (int e = lane; e < dim; e += WARP) largest = max(largest, magnitude(limited(x[e], limit)));
    largest = __reduce_max_sync(~0u, largest);
    const float scale = largest > INFINITE ? not_a_number() : divide_exact(__uint_as_float(largest), most);
    if (lane == 0) *reinterpret_cast<float*>(scales) = scale;
    for (int e = lane; e < dim; e += WARP) {
        const float quotient = divide_exact(limited(x[e], limit), scale);
        row[e] = magnitude(scale) == 0 ? 0 : code(quotient);
    }
}

template <>
struct Encoder<Fp8E4m3> {
    __device__ static float limit() { return half_of_largest(); }
    __device__ static void store(const float* x, int dim, uint8* row, uint8* scales) {
        store_row(x, dim, row, scales, E4M3_MAX, [](float q) { return static_cast<uint8>(to_e4m3(q)); });
    }
};

template <>
struct Encoder<Int8> {
    __device__ static float limit() { return half_of_largest(); }
    __device__ static void store(const float* x, int dim, uint8* row, uint8* scales) {
        store_row(x, dim, row, scales, 127.0f, [](float q) { return to_int8(rintf(q)); });
    }
};

template <>
struct Encoder<Q8_0> {
    __device__ static float limit() { return 127.0f * F16_MAX; }
    __device__ static void store(const float* x, int dim, uint8* row, uint8* scales) {
        const int lane = lane_of_warp();
        for (int block = 0; block < dim / Q8_0::BLOCK; ++block) {
            const float mine = limited(x[block * WARP + lane], limit());
            const uint32 largest = __reduce_max_sync(~0u, magnitude(mine));
            const float scale = largest > INFINITE ? not_a_number() : divide_exact(__uint_as_float(largest), 127.0f);
            const float inverse = magnitude(scale) == 0 ? 0.0f : divide_exact(1.0f, scale);
            // Halves away from 0.
            row[block * WARP + lane] = to_int8(roundf(multiply_exact(mine, inverse)));
            if (lane == 0) put_scale(scales + 2 * block, scale);
        }
    }
};

/// The code of a block's element `x`, one a lane: from 0 to 2 HALF - 1, HALF for 0. Writes their scale, which brings the largest to -HALF.
template <int HALF>
__device__ uint32 symmetric_code(float x, uint8* scale_there) {
    const float mine = limited(x, HALF * F16_MAX);
    const uint32 largest = __reduce_max_sync(~0u, magnitude(mine));
    // The first of the largest, with its sign.
    const int who = __ffs(static_cast<int>(__ballot_sync(~0u, magnitude(mine) == largest))) - 1;
    const float most = __shfl_sync(~0u, mine, who);
    const float scale = largest > INFINITE ? not_a_number() : divide_exact(largest == 0 ? 0.0f : most, -HALF);
    const float inverse = magnitude(scale) == 0 ? 0.0f : divide_exact(1.0f, scale);
    if (lane_of_warp() == 0) put_scale(scale_there, scale);
    // Truncation of what is above 0 rounds to nearest. NaN becomes 0.
    const float code = add_exact(multiply_exact(mine, inverse), HALF + 0.5f);
    return code >= 2 * HALF - 1 ? 2 * HALF - 1 : code > 0.0f ? static_cast<uint32>(code) : 0;
}

template <>
struct Encoder<Q5_0> {
    __device__ static float limit() { return 16.0f * F16_MAX; }
    __device__ static void store(const float* x, int dim, uint8* row, uint8* scales) {
        const int lane = lane_of_warp();
        for (int block = 0; block < dim / Q5_0::BLOCK; ++block) {
            const uint32 code = symmetric_code<16>(x[block * WARP + lane], scales + 2 * block);
            put_nibbles(row + block * 16, code & 15);
            const uint32 fifths = __ballot_sync(~0u, code > 15);
            if (lane == 0) reinterpret_cast<uint32*>(row + dim / 2)[block] = fifths;
        }
    }
};

template <>
struct Encoder<Q4_0> {
    __device__ static float limit() { return 8.0f * F16_MAX; }
    __device__ static void store(const float* x, int dim, uint8* row, uint8* scales) {
        const int lane = lane_of_warp();
        for (int block = 0; block < dim / Q4_0::BLOCK; ++block) {
            put_nibbles(row + block * 16, symmetric_code<8>(x[block * WARP + lane], scales + 2 * block));
        }
    }
};

template <>
struct Encoder<Mxfp4> {
    __device__ static float limit() { return half_of_largest(); }
    __device__ static void store(const float* x, int dim, uint8* row, uint8* scales) {
        const int lane = lane_of_warp();
        for (int block = 0; block < dim / Mxfp4::BLOCK; ++block) {
            const float mine = limited(x[block * WARP + lane], limit());
            const uint32 largest = __reduce_max_sync(~0u, magnitude(mine));
            // The largest number gets the exponent of 4. 2^-127 has none of its own.
            const uint32 code = largest > INFINITE ? 255 : max(static_cast<int>(largest >> 23) - 2, 0);
            const float scale = __uint_as_float(code == 255 ? 0x7fc00000u : code == 0 ? 0x00400000u : code << 23);
            put_nibbles(row + block * 16, to_e2m1(divide_exact(mine, scale)));
            if (lane == 0) scales[block] = static_cast<uint8>(code);
        }
    }
};

template <>
struct Encoder<Nvfp4> {
    __device__ static float limit() { return 6.0f * E4M3_MAX; }
    /// Two blocks at a time, each by half of the warp.
    __device__ static void store(const float* x, int dim, uint8* row, uint8* scales) {
        const int lane = lane_of_warp();
        for (int pair = 0; pair < dim / WARP; ++pair) {
            const float mine = limited(x[pair * WARP + lane], limit());
            uint32 largest = magnitude(mine);
            for (int step = Nvfp4::BLOCK / 2; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
            const uint32 code = to_e4m3(largest > INFINITE ? not_a_number() : divide_exact(__uint_as_float(largest), 6.0f));
            put_nibbles(row + pair * 16, code == 0 ? 0 : to_e2m1(divide_exact(mine, from_e4m3(code))));
            if (lane % Nvfp4::BLOCK == 0) scales[2 * pair + lane / Nvfp4::BLOCK] = static_cast<uint8>(code);
        }
    }
};

}  // namespace pagoda
