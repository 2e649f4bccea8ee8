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
inline void copy_async(void* target, const void* source, bool valid) { emulator::copy_async(target, source, valid); }
inline void copy_commit() { emulator::copy_commit(); }
template <int PENDING>
void copy_wait() { emulator::copy_wait(PENDING); }

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

inline void check_row(const void* row) {
    if (reinterpret_cast<uintptr_t>(row) % 16) emulator::fail("ldmatrix: a row is not aligned to 16 bytes");
}

inline void load_matrix(uint32 (&r)[4], const void* row) {
    check_row(row);
    load_matrices(r, emulator::meet("ldmatrix", ~0u, &row, sizeof row), false);
}

inline void load_matrix_transposed(uint32 (&r)[4], const void* row) {
    check_row(row);
    load_matrices(r, emulator::meet("ldmatrix.trans", ~0u, &row, sizeof row), true);
}

inline float number(unsigned short bits, __half) { return __half2float(__ushort_as_half(bits)); }
inline float number(unsigned short bits, __nv_bfloat16) { return __bfloat162float(__ushort_as_bfloat16(bits)); }

template <class Element>
void multiply_add(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, Element type) {
    const uint32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const emulator::Offer* met = emulator::meet("mma", ~0u, mine, sizeof mine);
    const auto word = [&](int lane, int i) {
        uint32 w;
        std::memcpy(&w, met[lane].data + 4 * i, sizeof w);
        return w;
    };
    const auto half = [&](uint32 w, int i) { return static_cast<double>(number(static_cast<unsigned short>(w >> 16 * i), type)); };
    const int lane = emulator::lane();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const double x = half(word(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2), k % 2);
            const double y = half(word(column * 4 + k % 8 / 2, 4 + k / 8), k % 2);
            sum += x * y;
        }
        d[i] = static_cast<float>(sum);
    }
}

inline float exp2_fast(float x) { return std::exp2(x); }

}  // namespace pagoda
