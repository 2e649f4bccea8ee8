// How one K or V row is stored, element by element: a format is a type with loads and stores of 8 elements. Also the types of
// queries and outputs. Rows whose elements share scales are in quantised.cuh.
#pragma once

#include <pagoda/machine.cuh>

namespace pagoda {

/// IEEE binary32.
struct F32 {
    static constexpr bool QUANTISED = false;
    static constexpr int BYTES = 4, BITS = 32;
    /// Of the smallest normal number.
    static constexpr int MIN_EXPONENT = -126;

    __device__ static void load(const void* source, float (&x)[8]) {
        const float4* words = static_cast<const float4*>(source);
        const float4 a = words[0], b = words[1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }
    __device__ static void store(void* target, const float (&x)[8]) {
        float4* words = static_cast<float4*>(target);
        words[0] = make_float4(x[0], x[1], x[2], x[3]);
        words[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
    __device__ static void load_four(const void* source, float (&x)[4]) {
        const float4 words = *static_cast<const float4*>(source);
        x[0] = words.x, x[1] = words.y, x[2] = words.z, x[3] = words.w;
    }
    __device__ static void store_four(void* target, const float (&x)[4]) {
        *static_cast<float4*>(target) = make_float4(x[0], x[1], x[2], x[3]);
    }
    __device__ static float load_one(const void* source) { return *static_cast<const float*>(source); }
};

/// Two 16-bit elements as the tensor cores take them, the first in the lower half.
template <class Element>
struct Pair;

template <>
struct Pair<__half> {
    /// All exponent bits set: infinite or NaN.
    static constexpr uint32 EXPONENT = 0x7c00;
    __device__ static uint32 pack(float x, float y) { return round_pair(x, y, __half()); }
    __device__ static float low(uint32 pair) { return __half2float(__ushort_as_half(static_cast<unsigned short>(pair))); }
    __device__ static float high(uint32 pair) {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
    }
};

template <>
struct Pair<__nv_bfloat16> {
    static constexpr uint32 EXPONENT = 0x7f80;
    __device__ static uint32 pack(float x, float y) { return round_pair(x, y, __nv_bfloat16()); }
    __device__ static float low(uint32 pair) { return __uint_as_float(pair << 16); }
    __device__ static float high(uint32 pair) { return __uint_as_float(pair & 0xffff0000u); }
};

/// Formats of 16 bits an element.
template <class E>
struct Half {
    using Element = E;
    static constexpr bool QUANTISED = false;
    /// Rows have a multiple of UNIT elements.
    static constexpr int BYTES = 2, BITS = 16, UNIT = 8;
    __device__ static constexpr int scale_bytes(int) { return 0; }

    __device__ static void load(const void* source, float (&x)[8]) {
        const uint4 words = *static_cast<const uint4*>(source);
        const uint32 pairs[4] = {words.x, words.y, words.z, words.w};
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = Pair<E>::low(pairs[i]);
            x[2 * i + 1] = Pair<E>::high(pairs[i]);
        }
    }
    __device__ static void load_four(const void* source, float (&x)[4]) {
        const uint2 words = *static_cast<const uint2*>(source);
        x[0] = Pair<E>::low(words.x), x[1] = Pair<E>::high(words.x), x[2] = Pair<E>::low(words.y), x[3] = Pair<E>::high(words.y);
    }
    __device__ static float load_one(const void* source) { return Pair<E>::low(*static_cast<const unsigned short*>(source)); }
    __device__ static void store_pairs(void* target, const float (&x)[8]) {
        *static_cast<uint4*>(target) = make_uint4(Pair<E>::pack(x[0], x[1]), Pair<E>::pack(x[2], x[3]),
                                                  Pair<E>::pack(x[4], x[5]), Pair<E>::pack(x[6], x[7]));
    }
};

/// The largest finite f16. Larger magnitudes, infinities included, are stored as this; NaN stays NaN.
constexpr float F16_MAX = 65504.0f;

/// IEEE binary16.
struct F16 : Half<__half> {
    /// What tensor cores take of K rows and of V rows.
    using Keys = F16;
    using Values = F16;
    static constexpr int MIN_EXPONENT = -14;
    /// Weights of such rows are up to 2^LIFT, so that f16 has those of light rows beside a heavy one. Above is room for what the largest
    /// of large scores is off by.
    static constexpr int LIFT = 14;

    __device__ static void store(void* target, const float (&x)[8]) {
        float y[8];
        for (int i = 0; i < 8; ++i) y[i] = saturated(x[i]);
        store_pairs(target, y);
    }
    __device__ static void store_four(void* target, const float (&x)[4]) {
        const uint32 low = Pair<__half>::pack(saturated(x[0]), saturated(x[1]));
        *static_cast<uint2*>(target) = make_uint2(low, Pair<__half>::pack(saturated(x[2]), saturated(x[3])));
    }
    __device__ static float saturated(float x) { return x > F16_MAX ? F16_MAX : x < -F16_MAX ? -F16_MAX : x; }
};

/// The upper half of a binary32, rounded.
struct BF16 : Half<__nv_bfloat16> {
    using Keys = BF16;
    using Values = BF16;
    static constexpr int MIN_EXPONENT = -126, LIFT = 0;

    __device__ static void store(void* target, const float (&x)[8]) { store_pairs(target, x); }
    __device__ static void store_four(void* target, const float (&x)[4]) {
        *static_cast<uint2*>(target) = make_uint2(Pair<__nv_bfloat16>::pack(x[0], x[1]), Pair<__nv_bfloat16>::pack(x[2], x[3]));
    }
    __device__ static float saturated(float x) { return x; }
};

/// In place of the format of V: V is the first elements of the stored K row.
struct PartOfK {};

/// In place of the format of K: keys are not stored, but made from values (derived.cuh).
struct FromV {
    using Keys = F16;
    static constexpr bool QUANTISED = false;
    static constexpr int BITS = 0, UNIT = 8;
    __device__ static constexpr int scale_bytes(int) { return 0; }
};

/// The format that V has.
template <class K, class V>
struct StoredV {
    using Format = V;
    static constexpr bool IN_K = false;
};
template <class K>
struct StoredV<K, PartOfK> {
    using Format = K;
    static constexpr bool IN_K = true;
};

/// In how many elements of type `To` a value of format `From` is held to about 2^-16 of itself: products with the rest of
/// a value are added to those with the value, so that float queries get float accuracy from 16-bit tensor cores.
template <class From, class To>
struct Splits;
template <class To>
struct Splits<To, To> {
    static constexpr int COUNT = 1;
};
template <>
struct Splits<F32, F16> {
    static constexpr int COUNT = 2;
};
template <>
struct Splits<F32, BF16> {
    static constexpr int COUNT = 3;
};
template <>
struct Splits<F16, BF16> {
    static constexpr int COUNT = 2;
};
template <>
struct Splits<BF16, F16> {
    static constexpr int COUNT = 1;
};

}  // namespace pagoda
