#pragma once
#include <emulator.h>
struct __half { unsigned short bits; };
inline float __half2float(__half h) {
    // The exponent is 112 too small; multiplied right, subnormal numbers too. Infinity and NaN have all exponent bits.
    const float magnitude = __uint_as_float((h.bits & 0x7fffu) << 13) * 0x1p112f;
    const unsigned infinite = (h.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
    return __uint_as_float(__float_as_uint(magnitude) | infinite | (h.bits & 0x8000u) << 16);
}
inline __half __float2half_rn(float x) { return {emulated_bits<unsigned short>(static_cast<_Float16>(x))}; }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
