// What cuda/pagoda/machine.cuh does, on a CPU: include paths put this one first.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace pagoda {

using uint8 = unsigned char;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

constexpr int WARP = 32;

inline uint8* shared_memory() { return emulator::block->shared; }
template <int BYTES = 16>
void copy_async(void* target, const void* source, bool valid) { emulator::copy_async(target, source, BYTES, valid); }
inline void copy_commit() { emulator::copy_commit(); }
template <int PENDING>
void copy_wait() { emulator::copy_wait(PENDING); }

inline int count_up(int* counter) { return atomicAdd(counter, 1); }

/// Element `e` of row `row` of matrix `matrix`, from the rows that the lanes named.
inline uint32 matrix_element(const emulator::Offer* met, int matrix, int row, int e) {
    const unsigned short* address;
    std::memcpy(&address, met[matrix * 8 + row].data, sizeof address);
    return address[e];
}

inline void load_matrices(uint32 (&r)[4], const emulator::Offer* met, bool transposed) {
    const int lane = emulator::lane(), row = lane / 4, e = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
        r[i] = transposed ? matrix_element(met, i, e, row) | matrix_element(met, i, e + 1, row) << 16
                          : matrix_element(met, i, row, e) | matrix_element(met, i, row, e + 1) << 16;
    }
}

inline void load_matrix(uint32 (&r)[4], const void* row) {
    emulator::check_row("ldmatrix", row);
    load_matrices(r, emulator::meet("ldmatrix", ~0u, &row, sizeof row), false);
}

inline void load_matrix_transposed(uint32 (&r)[4], const void* row) {
    emulator::check_row("ldmatrix.trans", row);
    load_matrices(r, emulator::meet("ldmatrix.trans", ~0u, &row, sizeof row), true);
}

inline uint32 transpose(uint32 pair) {
    const emulator::Offer* met = emulator::meet("movmatrix", ~0u, &pair, sizeof pair);
    const int lane = emulator::lane();
    uint32 turned = 0;
    for (int i = 0; i < 2; ++i) {
        uint32 row;
        std::memcpy(&row, met[(lane % 4 * 2 + i) * 4 + lane / 8].data, sizeof row);
        turned |= (row >> lane / 4 % 2 * 16 & 0xffff) << 16 * i;
    }
    return turned;
}

inline double number(unsigned short bits, __half) { return __half2float(__ushort_as_half(bits)); }
/// Also below 2^-126.
inline double number(unsigned short bits, __nv_bfloat16) {
    if ((bits & 0x7f80) == 0) return (bits & 0x8000 ? -0x1p-133 : 0x1p-133) * (bits & 0x7f);
    return __bfloat162float(__ushort_as_bfloat16(bits));
}

inline unsigned short rounded(double x, __half) { return __half_as_ushort(__float2half_rn(static_cast<float>(x))); }
inline unsigned short rounded(double x, __nv_bfloat16) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(static_cast<float>(x)));
}
template <class Element>
uint32 round_pair(float x, float y, Element element) {
    return rounded(x, element) | static_cast<uint32>(rounded(y, element)) << 16;
}

template <class Element>
uint32 fuse_pair(uint32 a, uint32 b, uint32 c, Element element) {
    uint32 d = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const auto of = [&](uint32 pair) { return number(static_cast<unsigned short>(pair >> shift), element); };
        d |= static_cast<uint32>(rounded(of(a) * of(b) + of(c), element)) << shift;
    }
    return d;
}

inline uint32 add_pair(uint32 a, uint32 b, __half element) { return fuse_pair(a, 0x3c003c00u, b, element); }

/// What a lane brings to a product, and takes from it in `d`.
struct Product {
    uint32 a[4], b[2];
    float d[4];
};

/// All lanes' products.
template <class Element>
void multiply_all(emulator::Offer* offers) {
    Product lanes[WARP];
    for (int lane = 0; lane < WARP; ++lane) std::memcpy(&lanes[lane], offers[lane].data, sizeof(Product));
    double a[16][16], b[16][8];
    float sums[16][8];
    const auto half = [](uint32 w, int i) { return number(static_cast<unsigned short>(w >> 16 * i), Element{}); };
    const auto sum = [&](int i, int j) -> float& { return lanes[i % 8 * 4 + j / 2].d[i / 8 * 2 + j % 2]; };
    for (int k = 0; k < 16; ++k) {
        for (int i = 0; i < 16; ++i) a[i][k] = half(lanes[i % 8 * 4 + k % 8 / 2].a[i / 8 + k / 8 * 2], k % 2);
        for (int j = 0; j < 8; ++j) b[k][j] = half(lanes[j * 4 + k % 8 / 2].b[k / 8], k % 2);
    }
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 8; ++j) sums[i][j] = sum(i, j);
    }
    emulator::add_products(sums, a, b);
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 8; ++j) sum(i, j) = sums[i][j];
    }
    for (int lane = 0; lane < WARP; ++lane) std::memcpy(offers[lane].data, &lanes[lane], sizeof(Product));
}

template <class Element>
void multiply_add(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, Element) {
    Product mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    const char* name = std::is_same_v<Element, __half> ? "mma.f16" : "mma.bf16";
    const emulator::Offer* met = emulator::meet(name, ~0u, &mine, sizeof mine, multiply_all<Element>);
    std::memcpy(&mine, met[emulator::lane()].data, sizeof mine);
    for (int i = 0; i < 4; ++i) d[i] = mine.d[i];
}

inline uint32 pack_int8(int a, int b, int c, int d) {
    const auto byte = [](int x) { return static_cast<uint32>(std::clamp(x, -128, 127)) & 0xff; };
    return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}
inline uint32 held(uint32 constant) { return constant; }
inline uint32 kept(uint32 x) { return x; }
inline int thread_here() { return threadIdx.x; }
inline int block_here() { return blockIdx.x; }
/// As inexact as the instructions may be.
inline float sine_fast(float x) { return static_cast<float>(std::nearbyint(std::sin(double(x)) * 0x1p20) * 0x1p-20); }
inline float cosine_fast(float x) { return static_cast<float>(std::nearbyint(std::cos(double(x)) * 0x1p20) * 0x1p-20); }
inline float exp2_fast(float x) { return std::exp2(x); }
/// An operation, or a conversion, with which floats below 2^-126 stay. The compiler does not know what `flush` does, but leaves
/// volatile ones in place. What becomes NaN has the bits that it has on a GPU: none of an operand, its sign neither.
template <class Operation>
float exact(float x, float y, Operation operation) {
    const volatile float left = x, right = y;
    emulator::flush(false);
    const volatile float result = operation(float(left), float(right));
    emulator::flush(true);
    return result == result ? result : __uint_as_float(0x7fffffffu);
}
template <class To, class From>
To converted(From x) {
    const volatile From from = x;
    emulator::flush(false);
    const volatile To to = static_cast<To>(from);
    emulator::flush(true);
    return to;
}
inline float add_exact(float x, float y) { return exact(x, y, std::plus<float>()); }
inline float subtract_exact(float x, float y) { return exact(x, y, std::minus<float>()); }
inline float multiply_exact(float x, float y) { return exact(x, y, std::multiplies<float>()); }
inline float fuse_exact(float x, float y, float z) {
    return exact(x, y, [&](float a, float b) { return std::fma(a, b, z); });
}
inline float divide_exact(float x, float y) { return exact(x, y, std::divides<float>()); }
inline float inverse_exact(float x) { return divide_exact(1.0f, x); }
inline float larger_magnitude(float x, float y) {
    // As integers numbers are in the same order, and NaN is the largest.
    const uint32 all = std::max(__float_as_uint(x) & 0x7fffffffu, __float_as_uint(y) & 0x7fffffffu);
    return __uint_as_float(all > 0x7f800000u ? 0x7fffffffu : all);
}
inline float clamp_exact(float x, float most) { return x != x ? __uint_as_float(0x7fffffffu) : x > most ? most : x < -most ? -most : x; }
inline double widen_exact(float x) { return converted<double>(x); }
inline float narrow_exact(double x) { return converted<float>(x); }
inline float root_exact(float x) { return std::sqrt(x); }
inline float divide_fast(float x, float y) { return x / y; }

}  // namespace pagoda
