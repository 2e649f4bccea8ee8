// What the instructions of PTX do, as the PTX ISA has it, one function each: emulator/ptx.py turns kernels that NVRTC has
// compiled into calls of these. A register is bits; an instruction says what they mean.
#pragma once

#include <emulator.h>
#include <xmmintrin.h>

#include <limits>

namespace ptx {

using emulator::fail;
using emulator::meet;
using emulator::Offer;

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;
using b8 = u8;
using b16 = u16;
using b32 = u32;
using b64 = u64;
using pred = bool;

/// Where shared memory begins in its window; a driver keeps the first bytes of it.
constexpr u32 SHARED = 1024;

/// What registers hold that nobody has written to.
template <class T>
constexpr T POISON = static_cast<T>(~0ull);

/// A register, which holds anything, as a number of a type: its lowest bits.
template <class T, class Bits>
T as(Bits bits) {
    static_assert(std::is_integral_v<Bits> && sizeof(T) <= sizeof(Bits));
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

/// An integer is widened by its sign; a NaN that arithmetic gives has these bits, whatever it comes from.
template <class Bits, class T>
void put(Bits& target, T value) {
    if constexpr (std::is_integral_v<T>) {
        target = static_cast<Bits>(value);
    } else {
        static_assert(sizeof value <= sizeof target);
        std::memcpy(&target, &value, sizeof value);
        if (value != value) target = sizeof value == 4 ? static_cast<Bits>(0x7fffffff) : static_cast<Bits>(0x7fffffffffffffff);
    }
}

/// As long as this lives numbers below 2^-126 are not 0; kernels run where they are, as most of their instructions say .ftz.
struct Subnormals {
    Subnormals() { emulator::flush(false); }
    ~Subnormals() { emulator::flush(true); }
};

/// What the compiler may not move to where another mode of arithmetic is.
template <class T>
T here(T value) {
    volatile T kept = value;
    return kept;
}

#define PTX_UNARY(name, To, From, result)     \
    template <class D, class A>               \
    void name(D& d, A a_) {                   \
        [[maybe_unused]] const From a = as<From>(a_); \
        put(d, static_cast<To>(result));      \
    }
#define PTX_BINARY(name, To, From, result)    \
    template <class D, class A, class B>      \
    void name(D& d, A a_, B b_) {             \
        const From a = as<From>(a_);          \
        const From b = as<From>(b_);          \
        put(d, static_cast<To>(result));      \
    }
#define PTX_TERNARY(name, To, From, result)   \
    template <class D, class A, class B, class C> \
    void name(D& d, A a_, B b_, C c_) {       \
        const From a = as<From>(a_);          \
        const From b = as<From>(b_);          \
        const From c = as<From>(c_);          \
        put(d, static_cast<To>(result));      \
    }

/// What no integer divides by, PTX leaves open.
template <class T>
T divisor(T x) {
    if (x == 0) fail("division by 0");
    return x;
}

// Integers, with twice as many bits where a product needs them. Those that wrap do so whether they are signed or not.
__extension__ using s128 = __int128;
__extension__ using u128 = unsigned __int128;
#define PTX_INTEGER(type, Unsigned, Wide)                                               \
    PTX_BINARY(add_##type, Unsigned, Unsigned, a + b)                                   \
    PTX_BINARY(sub_##type, Unsigned, Unsigned, a - b)                                   \
    PTX_UNARY(neg_##type, Unsigned, Unsigned, 0 - a)                                    \
    PTX_BINARY(mul_lo_##type, Unsigned, Unsigned, static_cast<u64>(a) * b)              \
    PTX_BINARY(mul_hi_##type, type, type, static_cast<Wide>(a) * b >> 8 * sizeof a)     \
    PTX_TERNARY(mad_lo_##type, Unsigned, Unsigned, static_cast<u64>(a) * b + c)         \
    PTX_BINARY(div_##type, type, type, static_cast<Wide>(a) / divisor(b))               \
    PTX_BINARY(rem_##type, type, type, static_cast<Wide>(a) % divisor(b))               \
    PTX_BINARY(min_##type, type, type, std::min(a, b))                                  \
    PTX_BINARY(max_##type, type, type, std::max(a, b))
PTX_INTEGER(s16, u16, s32)
PTX_INTEGER(u16, u16, u32)
PTX_INTEGER(s32, u32, s64)
PTX_INTEGER(u32, u32, u64)
PTX_INTEGER(s64, u64, s128)
PTX_INTEGER(u64, u64, u128)
PTX_BINARY(mul_wide_s16, s32, s16, static_cast<s32>(a) * b)
PTX_BINARY(mul_wide_u16, u32, u16, static_cast<u32>(a) * b)
PTX_BINARY(mul_wide_s32, s64, s32, static_cast<s64>(a) * b)
PTX_BINARY(mul_wide_u32, u64, u32, static_cast<u64>(a) * b)
/// Two numbers of 16 bits by the lower two bytes.
PTX_TERNARY(dp2a_lo_u32_u32, u32, u32, (a & 0xffff) * (b & 255) + (a >> 16) * (b >> 8 & 255) + c)

#define PTX_LOGIC(type)                          \
    PTX_BINARY(and_##type, type, type, a & b)    \
    PTX_BINARY(or_##type, type, type, a | b)     \
    PTX_BINARY(xor_##type, type, type, a ^ b)
PTX_LOGIC(b16)
PTX_LOGIC(b32)
PTX_LOGIC(b64)
PTX_LOGIC(pred)
PTX_UNARY(not_b16, u16, u16, ~a)
PTX_UNARY(not_b32, u32, u32, ~a)
PTX_UNARY(not_b64, u64, u64, ~a)
PTX_UNARY(not_pred, bool, bool, !a)

/// Shifts by more than all bits are shifts by all bits.
#define PTX_SHIFT(name, T, result, beyond)                    \
    template <class D, class A, class B>                      \
    void name(D& d, A a_, B b_) {                             \
        const T a = as<T>(a_);                                \
        const u32 b = static_cast<u32>(b_);                   \
        put(d, static_cast<T>(b < 8 * sizeof a ? (result) : (beyond))); \
    }
PTX_SHIFT(shl_b16, u16, a << b, 0)
PTX_SHIFT(shl_b32, u32, a << b, 0)
PTX_SHIFT(shl_b64, u64, a << b, 0)
PTX_SHIFT(shr_u16, u16, a >> b, 0)
PTX_SHIFT(shr_u32, u32, a >> b, 0)
PTX_SHIFT(shr_u64, u64, a >> b, 0)
PTX_SHIFT(shr_s16, s16, a >> b, a < 0 ? -1 : 0)
PTX_SHIFT(shr_s32, s32, a >> b, a < 0 ? -1 : 0)
PTX_SHIFT(shr_s64, s64, a >> b, a < 0 ? -1 : 0)

/// `a` in the place of `length` bits of `b` from `start` on.
template <class T>
T inserted(T a, T b, u32 start, u32 length) {
    const u32 bits = 8 * sizeof(T);
    const T mask = (length >= bits ? ~T{0} : (T{1} << length) - 1);
    return start >= bits ? b : (b & ~(mask << start)) | (a & mask) << start;
}
template <class D, class A, class B>
void bfi_b32(D& d, A a, B b, u32 start, u32 length) { put(d, inserted(as<u32>(a), as<u32>(b), start & 255, length & 255)); }
template <class D, class A, class B>
void bfi_b64(D& d, A a, B b, u32 start, u32 length) { put(d, inserted(as<u64>(a), as<u64>(b), start & 255, length & 255)); }
PTX_UNARY(bfind_shiftamt_u32, u32, u32, a == 0 ? ~0u : static_cast<u32>(__builtin_clz(a)))
inline u32 reversed(u32 x) {
    u32 y = 0;
    for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
    return y;
}
PTX_UNARY(brev_b32, u32, u32, reversed(a))
PTX_UNARY(popc_b32, u32, u32, static_cast<u32>(__builtin_popcount(a)))
/// Four bytes out of eight; bit 3 of a selector asks for the byte's sign instead, eight times.
inline u32 permuted(u32 a, u32 b, u32 selectors) {
    u32 result = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 selector = selectors >> 4 * i & 15, from = selector & 7;
        u32 byte = (from < 4 ? a >> 8 * from : b >> 8 * (from - 4)) & 255;
        if (selector & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}
PTX_TERNARY(prmt_b32, u32, u32, permuted(a, b, c))

#define PTX_SELECT(type)                                      \
    template <class D, class A, class B>                      \
    void selp_##type(D& d, A a, B b, bool p) {                \
        d = p ? static_cast<D>(a) : static_cast<D>(b);        \
    }
PTX_SELECT(b16)
PTX_SELECT(b32)
PTX_SELECT(b64)
PTX_SELECT(f32)
PTX_SELECT(s16)
PTX_SELECT(s32)
PTX_SELECT(s64)
PTX_SELECT(u16)
PTX_SELECT(u32)
PTX_SELECT(u64)

#define PTX_EQUAL(type)                            \
    PTX_BINARY(setp_eq_##type, bool, type, a == b) \
    PTX_BINARY(setp_ne_##type, bool, type, a != b)
#define PTX_COMPARE(type)                          \
    PTX_EQUAL(type)                                \
    PTX_BINARY(setp_lt_##type, bool, type, a < b)  \
    PTX_BINARY(setp_le_##type, bool, type, a <= b) \
    PTX_BINARY(setp_gt_##type, bool, type, a > b)  \
    PTX_BINARY(setp_ge_##type, bool, type, a >= b)
PTX_EQUAL(b16)
PTX_EQUAL(b32)
PTX_EQUAL(b64)
PTX_COMPARE(s16)
PTX_COMPARE(u16)
PTX_COMPARE(s32)
PTX_COMPARE(u32)
PTX_COMPARE(s64)
PTX_COMPARE(u64)

// Floats. A comparison that ends in u is true of NaN.
PTX_BINARY(setp_eq_ftz_f32, bool, f32, a == b)
PTX_BINARY(setp_ne_ftz_f32, bool, f32, a < b || a > b)
PTX_BINARY(setp_lt_ftz_f32, bool, f32, a < b)
PTX_BINARY(setp_le_ftz_f32, bool, f32, a <= b)
PTX_BINARY(setp_gt_ftz_f32, bool, f32, a > b)
PTX_BINARY(setp_ge_ftz_f32, bool, f32, a >= b)
PTX_BINARY(setp_equ_ftz_f32, bool, f32, !(a < b || a > b))
PTX_BINARY(setp_neu_ftz_f32, bool, f32, a != b)
PTX_BINARY(setp_ltu_ftz_f32, bool, f32, !(a >= b))
PTX_BINARY(setp_leu_ftz_f32, bool, f32, !(a > b))
PTX_BINARY(setp_gtu_ftz_f32, bool, f32, !(a <= b))
PTX_BINARY(setp_geu_ftz_f32, bool, f32, !(a < b))
PTX_BINARY(setp_num_ftz_f32, bool, f32, a == a && b == b)
PTX_BINARY(setp_nan_ftz_f32, bool, f32, a != a || b != b)
PTX_BINARY(add_ftz_f32, f32, f32, a + b)
PTX_BINARY(sub_ftz_f32, f32, f32, a - b)
PTX_BINARY(mul_ftz_f32, f32, f32, a * b)
PTX_BINARY(mul_rn_ftz_f32, f32, f32, a * b)
PTX_BINARY(div_rn_ftz_f32, f32, f32, a / b)
PTX_TERNARY(fma_rn_ftz_f32, f32, f32, std::fma(a, b, c))
/// To 2 ulp; 0 where the divisor is above 2^126.
PTX_BINARY(div_approx_ftz_f32, f32, f32, std::fabs(b) > 0x1p126f && std::fabs(b) < INFINITY ? a * 0.0f : a / b)
/// As arithmetic does of itself.
inline f32 flushed(f32 x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
/// The other number where one is NaN; 0 is more than -0.
inline f32 larger(f32 a, f32 b) {
    if (a != a || b != b) return a != a ? b : a;
    if (a == b) return std::signbit(a) ? b : a;
    return std::max(a, b);
}
PTX_BINARY(max_ftz_f32, f32, f32, larger(flushed(a), flushed(b)))
PTX_UNARY(abs_ftz_f32, f32, f32, std::fabs(flushed(a)))
PTX_UNARY(neg_ftz_f32, f32, f32, -flushed(a))
/// The sign of the first, the rest of the second.
PTX_BINARY(copysign_f32, u32, u32, (a & 0x80000000u) | (b & 0x7fffffffu))
PTX_UNARY(ex2_approx_ftz_f32, f32, f32, flushed(std::exp2(a)))
PTX_UNARY(sin_approx_ftz_f32, f32, f32, std::sin(static_cast<f64>(a)))
PTX_UNARY(cos_approx_ftz_f32, f32, f32, std::cos(static_cast<f64>(a)))

template <class T, class Operation>
T exact(T a, T b, Operation operation) {
    const T left = here(a), right = here(b);
    const Subnormals kept;
    return here(operation(here(left), here(right)));
}
PTX_BINARY(add_rn_f32, f32, f32, exact(a, b, std::plus<>()))
PTX_BINARY(sub_rn_f32, f32, f32, exact(a, b, std::minus<>()))
PTX_BINARY(mul_rn_f32, f32, f32, exact(a, b, std::multiplies<>()))
PTX_TERNARY(fma_rn_f32, f32, f32, exact(a, b, [&](f32 x, f32 y) { return std::fma(x, y, here(c)); }))
PTX_UNARY(rcp_rn_f32, f32, f32, exact(1.0f, a, std::divides<>()))
PTX_UNARY(abs_f32, u32, u32, a & 0x7fffffff)
/// NaN where one is; numbers below 2^-126 stay.
PTX_BINARY(min_NaN_f32, f32, f32, a != a ? a : b != b ? b : exact(a, b, [](f32 x, f32 y) { return std::min(x, y); }))
PTX_BINARY(max_NaN_f32, f32, f32, a != a ? a : b != b ? b : exact(a, b, [](f32 x, f32 y) { return std::max(x, y); }))
PTX_BINARY(div_rn_f32, f32, f32, exact(a, b, std::divides<>()))
PTX_UNARY(sqrt_rn_f32, f32, f32, exact(a, a, [](f32 x, f32) { return std::sqrt(x); }))
PTX_BINARY(add_f64, f64, f64, exact(a, b, std::plus<>()))
PTX_BINARY(div_rn_f64, f64, f64, exact(a, b, std::divides<>()))
inline f32 added_towards_0(f32 a, f32 b) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_ROUND_TOWARD_ZERO);
    const f32 sum = here(here(a) + here(b));
    _mm_setcsr(mode);
    return sum;
}
PTX_BINARY(add_rz_ftz_f32, f32, f32, added_towards_0(a, b))

// Conversions.
#define PTX_CONVERT_FROM(type, From) PTX_UNARY(cvt_##type##_##From, type, From, a)
#define PTX_CONVERT(type)                                                                                 \
    PTX_CONVERT_FROM(type, s8) PTX_CONVERT_FROM(type, s16) PTX_CONVERT_FROM(type, s32) PTX_CONVERT_FROM(type, s64) \
    PTX_CONVERT_FROM(type, u8) PTX_CONVERT_FROM(type, u16) PTX_CONVERT_FROM(type, u32) PTX_CONVERT_FROM(type, u64)
PTX_CONVERT(s8)
PTX_CONVERT(s16)
PTX_CONVERT(s32)
PTX_CONVERT(s64)
PTX_CONVERT(u8)
PTX_CONVERT(u16)
PTX_CONVERT(u32)
PTX_CONVERT(u64)
/// An address of global memory is the same without its space.
PTX_UNARY(cvta_to_global_u64, u64, u64, a)
PTX_UNARY(cvt_rn_f32_s32, f32, s32, a)
PTX_UNARY(cvt_rn_f32_s64, f32, s64, a)
PTX_UNARY(cvt_rn_f64_s32, f64, s32, a)
PTX_UNARY(cvt_rzi_f32_f32, f32, f32, std::trunc(a))
PTX_UNARY(cvt_rni_f32_f32, f32, f32, std::nearbyint(a))
/// The nearest integer that there is; 0 for NaN.
template <class T>
T truncated(f32 x) {
    if (x != x) return 0;
    const f64 least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
    return static_cast<T>(std::clamp(std::trunc(static_cast<f64>(x)), least, most));
}
PTX_UNARY(cvt_rzi_ftz_s32_f32, s32, f32, truncated<s32>(a))
PTX_UNARY(cvt_rni_ftz_s32_f32, s32, f32, truncated<s32>(std::nearbyint(a)))
PTX_UNARY(cvt_rzi_ftz_u32_f32, u32, f32, truncated<u32>(a))
inline u32 saturated(u32 x) { return static_cast<u32>(std::clamp(static_cast<s32>(x), -128, 127)); }
/// Two bytes in front of those of the third.
PTX_TERNARY(cvt_pack_sat_s8_s32_b32, u32, u32, c << 16 | (saturated(a) & 0xff) << 8 | (saturated(b) & 0xff))
/// The E4M3 nearest to a number: of three bits behind the first, the least multiples of 2^-9, the largest 448.
inline u32 nearest_e4m3(f32 x) {
    if (x != x) return 0x7f;
    const u32 sign = std::signbit(x) ? 0x80 : 0;
    const f64 size = std::fabs(static_cast<f64>(x));
    if (size >= 448) return sign | 0x7e;
    const int exponent = size < 0x1p-6 ? -6 : std::ilogb(size);
    // In units of the last bit: from 8 on where there is a first bit, 16 of them are one exponent more.
    return sign | static_cast<u32>(8 * (exponent + 6) + static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent))));
}
PTX_BINARY(cvt_rn_satfinite_e4m3x2_f32, u16, f32, nearest_e4m3(a) << 8 | nearest_e4m3(b))
inline f64 widened(f32 x) {
    const f32 from = here(x);
    const Subnormals kept;
    return here(static_cast<f64>(here(from)));
}
inline f32 narrowed(f64 x) {
    const f64 from = here(x);
    const Subnormals kept;
    return here(static_cast<f32>(here(from)));
}
PTX_UNARY(cvt_f64_f32, f64, f32, widened(a))
PTX_UNARY(cvt_rn_f32_f64, f32, f64, narrowed(a))

/// Numbers of 16 bits: how many bits their fractions have, the exponent of the smallest normal one, and infinity.
struct F16 {
    static constexpr int FRACTION = 10, LEAST = -14;
    static constexpr u16 INFINITE = 0x7c00;
};
struct BF16 {
    static constexpr int FRACTION = 7, LEAST = -126;
    static constexpr u16 INFINITE = 0x7f80;
};
constexpr u16 NAN16 = 0x7fff;

template <class Format>
f64 number(u16 bits) {
    const f64 sign = bits & 0x8000 ? -1 : 1;
    const int exponent = (bits & 0x7fff) >> Format::FRACTION, fraction = bits & ((1 << Format::FRACTION) - 1);
    if ((bits & Format::INFINITE) == Format::INFINITE) return fraction ? NAN : sign * INFINITY;
    const int whole = exponent ? fraction + (1 << Format::FRACTION) : fraction;
    return sign * std::ldexp(whole, std::max(exponent, 1) - 1 + Format::LEAST - Format::FRACTION);
}

/// The nearest; of two the even one.
template <class Format>
u16 nearest(f64 x) {
    if (x != x) return NAN16;
    const u16 sign = std::signbit(x) ? 0x8000 : 0;
    const f64 size = std::fabs(x);
    if (size == 0) return sign;
    if (size == INFINITY) return sign | Format::INFINITE;
    const int exponent = std::max(std::ilogb(size), Format::LEAST), unit = exponent - Format::FRACTION;
    // A fraction that is rounded up to the next power of two carries into the exponent, as bits are laid out.
    const s64 steps = std::llrint(std::ldexp(size, -unit));
    const s64 bits = (static_cast<s64>(exponent - Format::LEAST) << Format::FRACTION) + steps;
    return sign | static_cast<u16>(std::min<s64>(bits, Format::INFINITE));
}
/// The second in the lower half. There is none of a single element: what comes of two of those is slower on some GPUs.
template <class Format>
u32 nearest_two(f32 high, f32 low) {
    return static_cast<u32>(nearest<Format>(widened(high))) << 16 | nearest<Format>(widened(low));
}
PTX_BINARY(cvt_rn_f16x2_f32, u32, f32, nearest_two<F16>(a, b))
PTX_BINARY(cvt_rn_bf16x2_f32, u32, f32, nearest_two<BF16>(a, b))
PTX_UNARY(cvt_f32_f16, f32, u16, narrowed(number<F16>(a)))
PTX_UNARY(cvt_f32_bf16, f32, u16, narrowed(number<BF16>(a)))

template <class Format>
u32 fused(u32 a, u32 b, u32 c) {
    u32 d = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const auto of = [&](u32 pair) { return number<Format>(static_cast<u16>(pair >> shift)); };
        d |= static_cast<u32>(nearest<Format>(of(a) * of(b) + of(c))) << shift;
    }
    return d;
}
PTX_TERNARY(fma_rn_f16x2, u32, u32, fused<F16>(a, b, c))
PTX_TERNARY(fma_rn_bf16x2, u32, u32, fused<BF16>(a, b, c))
PTX_BINARY(add_rn_f16x2, u32, u32, fused<F16>(a, 0x3c003c00u, b))

/// A register, or two halves of one.
template <class D, class A>
void mov(D& d, A a) { d = static_cast<D>(a); }
template <class D, class Half>
void mov(D& d, Half low, Half high) {
    static_assert(sizeof(D) == 2 * sizeof(Half));
    d = low | static_cast<D>(high) << 8 * sizeof(Half);
}
template <class Low, class High, class A>
void unpack(Low& low, High& high, A a) {
    using Half = std::conditional_t<sizeof(A) == 8, u32, u16>;
    low = static_cast<Half>(a);
    high = static_cast<Half>(a >> 8 * sizeof(Half));
}
/// In the place of a half that nobody wants.
struct Nowhere {
    template <class Half>
    void operator=(Half) {}
};
inline Nowhere _;

// Memory.
struct Global {};
struct Shared {};
struct Param {};

/// Where `count` numbers of a type are. Fails where a GPU faults: they are aligned to their size, and shared memory ends.
template <class Space, class T>
unsigned char* place(u64 address, int count) {
    const size_t bytes = sizeof(T) * static_cast<size_t>(count);
    if constexpr (std::is_same_v<Space, Shared>) {
        unsigned char* at = emulator::block->shared + (static_cast<s64>(address) - SHARED);
        emulator::check_row("shared memory", at, bytes);
        return at;
    } else {
        if (address % bytes) fail("an address is not aligned to " + std::to_string(bytes) + " bytes");
        return reinterpret_cast<unsigned char*>(address);
    }
}
template <class Space, class T, class... D>
void load(u64 address, D&... d) {
    const unsigned char* at = place<Space, T>(address, sizeof...(d));
    if constexpr (std::is_same_v<Space, Shared>) emulator::touch(at, sizeof(T) * sizeof...(d), false);
    const auto next = [&](auto& target) {
        T value;
        std::memcpy(&value, at, sizeof value);
        at += sizeof value;
        target = static_cast<std::remove_reference_t<decltype(target)>>(value);
    };
    (next(d), ...);
}
template <class Space, class T, class... A>
void store(u64 address, A... a) {
    unsigned char* at = place<Space, T>(address, sizeof...(a));
    if constexpr (std::is_same_v<Space, Shared>) {
        emulator::touch(at, sizeof(T) * sizeof...(a), true);
    } else {
        emulator::wrote_globally();
    }
    const auto next = [&](auto bits) {
        std::memcpy(at, &bits, sizeof(T));
        at += sizeof(T);
    };
    (next(a), ...);
}
inline void atom_global_add_u32(u32& d, u64 address, u32 a) {
    emulator::publish();
    unsigned char* at = place<Global, u32>(address, 1);
    std::memcpy(&d, at, sizeof d);
    const u32 sum = d + a;
    std::memcpy(at, &sum, sizeof sum);
}
inline void atom_relaxed_gpu_global_add_u32(u32& d, u64 address, u32 a) { atom_global_add_u32(d, address, a); }
inline void atom_acq_rel_gpu_global_add_u32(u32& d, u64 address, u32 a) {
    emulator::fence();
    atom_global_add_u32(d, address, a);
}
inline void cp_async_cg_shared_global(u32 target, u64 source, int bytes, u32 from_source) {
    if (from_source != 0 && from_source != static_cast<u32>(bytes)) fail("cp.async of a part");
    const auto* from = reinterpret_cast<const void*>(source);
    emulator::copy_async(place<Shared, u8>(target, bytes), from, static_cast<size_t>(bytes), from_source != 0);
}
inline void cp_async_ca_shared_global(u32 target, u64 source, int bytes, u32 from_source) {
    cp_async_cg_shared_global(target, source, bytes, from_source);
}
inline void cp_async_commit_group() { emulator::copy_commit(); }
inline void cp_async_wait_group(int pending) { emulator::copy_wait(pending); }

// Threads and warps.
inline void bar_sync(int barrier) {
    if (barrier != 0) fail("bar.sync of another barrier than 0");
    emulator::block_barrier();
}
inline void bar_red_and_pred(bool& p, int barrier, bool q) {
    if (barrier != 0) fail("bar.red of another barrier than 0");
    p = __syncthreads_and(q);
}
inline void bar_warp_sync(u32 mask) { emulator::warp_barrier(mask); }

/// What each lane of a mask brings.
template <class T>
std::vector<T> gathered(const char* name, u32 mask, T mine, int line = 0) {
    const Offer* met = meet(name, mask, &mine, sizeof mine, nullptr, line);
    std::vector<T> all(emulator::LANES);
    for (int i = 0; i < emulator::LANES; ++i) {
        if (mask >> i & 1) std::memcpy(&all[static_cast<size_t>(i)], met[i].data, sizeof mine);
    }
    return all;
}
/// `clamp`: the last lane in bits 0 to 4, those that name a segment from bit 8 on.
template <class Choose>
void shuffle(const char* name, u32& d, bool& p, u32 a, u32 clamp, u32 mask, Choose choose) {
    const u32 lane = static_cast<u32>(emulator::lane()), segment = clamp >> 8 & 31, least = lane & segment;
    const u32 most = least | (clamp & 31 & ~segment), from = choose(lane, least, ~segment);
    p = from <= most;
    const u32 source = p ? from : lane;
    if (!(mask >> source & 1)) fail(std::string(name) + ": lane " + std::to_string(source) + " is not in the mask");
    d = gathered(name, mask, a)[source];
}
inline void shfl_sync_bfly_b32(u32& d, bool& p, u32 a, u32 b, u32 clamp, u32 mask) {
    shuffle("shfl.bfly", d, p, a, clamp, mask, [&](u32 lane, u32, u32) { return lane ^ (b & 31); });
}
inline void shfl_sync_idx_b32(u32& d, bool& p, u32 a, u32 b, u32 clamp, u32 mask) {
    shuffle("shfl.idx", d, p, a, clamp, mask, [&](u32, u32 least, u32 free) { return least | (b & 31 & free); });
}
inline void vote_sync_ballot_b32(u32& d, bool a, u32 mask) {
    const auto all = gathered<u32>("vote.ballot", mask, a);
    d = 0;
    for (u32 i = 0; i < 32; ++i) d |= all[i] << i;
}
inline void vote_sync_any_pred(bool& p, bool a, u32 mask) {
    const auto all = gathered<u32>("vote.any", mask, a);
    p = std::any_of(all.begin(), all.end(), [](u32 one) { return one != 0; });
}
inline void vote_sync_all_pred(bool& p, bool a, u32 mask) {
    const auto all = gathered<u32>("vote.all", mask, !a);
    p = std::none_of(all.begin(), all.end(), [](u32 one) { return one != 0; });
}
inline void redux_sync_max_u32(u32& d, u32 a, u32 mask) {
    const auto all = gathered("redux.max", mask, a);
    d = *std::max_element(all.begin(), all.end());
}

// Matrices. Lanes 8 i to 8 i + 7 name the rows of matrix i, and lane l gets two elements of row l / 4 of each, or of column
// l / 4. These instructions are aligned: all lanes are at the same one, and not at another like it.

/// Fails where two of the eight rows of a matrix, of 16 bytes each, are in the same banks, and would be read one after the other.
inline void check_banks(const u64* rows) {
    u32 banks = 0;
    for (size_t i = 0; i < 8; ++i) banks |= 1u << rows[i] / 16 % 8;
    if (banks != 0xff) fail("ldmatrix: two rows in the same banks");
}
template <bool TRANSPOSED>
void load_matrices(int line, u32& d0, u32& d1, u32& d2, u32& d3, u32 row) {
    const unsigned char* mine = place<Shared, u8>(row, 16);
    emulator::touch(mine, 16, false);
    const auto rows = gathered("ldmatrix", ~0u, reinterpret_cast<u64>(mine), line);
    u32* const to[4] = {&d0, &d1, &d2, &d3};
    const size_t lane = static_cast<size_t>(emulator::lane()), own = lane / 4, pair = lane % 4 * 2;
    for (size_t matrix = 0; matrix < 4; ++matrix) {
        check_banks(&rows[8 * matrix]);
        u16 two[2];
        for (size_t i = 0; i < 2; ++i) {
            const size_t at = TRANSPOSED ? pair + i : own, element = TRANSPOSED ? own : pair + i;
            std::memcpy(&two[i], reinterpret_cast<const u16*>(rows[8 * matrix + at]) + element, sizeof two[i]);
        }
        *to[matrix] = two[0] | static_cast<u32>(two[1]) << 16;
    }
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(int line, u32& d0, u32& d1, u32& d2, u32& d3, u32 row) {
    load_matrices<false>(line, d0, d1, d2, d3, row);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(int line, u32& d0, u32& d1, u32& d2, u32& d3, u32 row) {
    load_matrices<true>(line, d0, d1, d2, d3, row);
}
inline void movmatrix_sync_aligned_m8n8_trans_b16(int line, u32& d, u32 a) {
    const auto all = gathered("movmatrix", ~0u, a, line);
    const size_t lane = static_cast<size_t>(emulator::lane()), column = lane / 4;
    d = 0;
    for (size_t i = 0; i < 2; ++i) {
        const size_t row = lane % 4 * 2 + i;
        d |= (all[row * 4 + column / 2] >> column % 2 * 16 & 0xffff) << 16 * i;
    }
}

/// What a lane brings to a product of A, 16 x 16, and B, 16 x 8, and takes from it in `c`, 16 x 8.
struct Operands {
    u32 a[4], b[2];
    f32 c[4];
};
/// Of all lanes. The figures of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type", say where elements
/// are. Sums are rounded once: more exact than any tensor core.
template <class Format>
void multiply(Offer* offers) {
    f64 a[16][16], b[16][8];
    Operands lanes[emulator::LANES];
    for (size_t lane = 0; lane < emulator::LANES; ++lane) {
        std::memcpy(&lanes[lane], offers[lane].data, sizeof(Operands));
        const size_t group = lane / 4, in_group = lane % 4;
        const auto half = [](const u32* pairs, size_t i) {
            return number<Format>(static_cast<u16>(pairs[i / 2] >> 16 * (i % 2)));
        };
        for (size_t i = 0; i < 8; ++i) {
            const bool above = i < 2 || (4 <= i && i < 6);
            a[above ? group : group + 8][in_group * 2 + (i & 1) + (i < 4 ? 0 : 8)] = half(lanes[lane].a, i);
        }
        for (size_t i = 0; i < 4; ++i) b[in_group * 2 + (i & 1) + (i < 2 ? 0 : 8)][group] = half(lanes[lane].b, i);
    }
    for (size_t lane = 0; lane < emulator::LANES; ++lane) {
        for (size_t i = 0; i < 4; ++i) {
            const size_t row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + (i & 1);
            f64 sum = lanes[lane].c[i];
            for (size_t k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            lanes[lane].c[i] = narrowed(sum);
        }
        std::memcpy(offers[lane].data, &lanes[lane], sizeof(Operands));
    }
}
template <class Format>
void mma(const char* name, int line, u32& d0, u32& d1, u32& d2, u32& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, u32 c0,
         u32 c1, u32 c2, u32 c3) {
    Operands mine{{a0, a1, a2, a3}, {b0, b1}, {as<f32>(c0), as<f32>(c1), as<f32>(c2), as<f32>(c3)}};
    std::memcpy(&mine, meet(name, ~0u, &mine, sizeof mine, multiply<Format>, line)[emulator::lane()].data, sizeof mine);
    u32* const to[4] = {&d0, &d1, &d2, &d3};
    for (size_t i = 0; i < 4; ++i) put(*to[i], mine.c[i]);
}
template <class... Registers>
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(int line, Registers&&... registers) { mma<F16>("mma.f16", line, registers...); }
template <class... Registers>
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(int line, Registers&&... registers) { mma<BF16>("mma.bf16", line, registers...); }

}  // namespace ptx
