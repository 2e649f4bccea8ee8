#pragma once
#include <emulator.h>
struct __half { unsigned short bits; };
inline float __half2float(__half h) { return static_cast<float>(emulated_bits<_Float16>(h.bits)); }
inline __half __float2half_rn(float x) { return {emulated_bits<unsigned short>(static_cast<_Float16>(x))}; }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
