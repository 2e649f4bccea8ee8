#pragma once
#include <emulator.h>
struct __half { unsigned short bits; };
inline float __half2float(__half h) {
    const unsigned exponent = h.bits & 0x7c00u, sign = (h.bits & 0x8000u) << 16;
    if (exponent == 0) return __uint_as_float(__float_as_uint(static_cast<float>(h.bits & 0x3ffu) * 0x1p-24f) | sign);
    // The exponent is 112 too small. Infinity and NaN have all exponent bits.
    return __uint_as_float((((h.bits & 0x7fffu) << 13) + (exponent == 0x7c00u ? 224u << 23 : 112u << 23)) | sign);
}
inline __half __float2half_rn(float x) {
    if (x != x) return {0x7fff};
    return {emulated_bits<unsigned short>(static_cast<_Float16>(x))};
}
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
