// The instructions that CUDA C++ cannot express, one thin function each. Nothing else in cuda/ contains assembly, and nothing here
// knows what a page is. tests/emulator has a file of the same name that does the same on a CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace pagoda {

using uint8 = unsigned char;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

constexpr int WARP = 32;

/// The block's dynamic shared memory, aligned to 128 bytes.
__device__ __forceinline__ uint8* shared_memory() {
    extern __shared__ __align__(128) uint8 pagoda_shared[];
    return pagoda_shared;
}

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

/// Starts copying 16 bytes, or 8 or 4, to shared memory; zeros if not `valid`, and then `source` is not read. Both are aligned to as many.
/// With 16 the whole line of 128 bytes is brought to L2: what is left of it other lanes ask for.
template <int BYTES = 16>
__device__ __forceinline__ void copy_async(void* target, const void* source, bool valid) {
    static_assert(BYTES == 16 || BYTES == 8 || BYTES == 4, "PTX ISA, cp.async");
    const int bytes = valid ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source), "r"(bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(target)), "l"(source), "r"(bytes), "n"(BYTES)
                     : "memory");
    }
}

/// Closes the group of copies that this thread has started.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `PENDING` of this thread's groups are under way. Other threads see the bytes after a barrier.
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/// Adds 1 to a counter and returns what it was. Who counts later sees what this thread had written or seen: one instruction releases and
/// acquires, where two fences would wait for memory one after the other.
__device__ __forceinline__ int count_up(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

/// Four 8 x 8 matrices of 16-bit elements: lanes 8 i to 8 i + 7 name the rows (16 bytes each) of matrix i. Lane l gets
/// elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix i in `r[i]`.
__device__ __forceinline__ void load_matrix(uint32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/// The same, each matrix transposed.
__device__ __forceinline__ void load_matrix_transposed(uint32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/// Transposes an 8 x 8 matrix of 16-bit elements that is held as one of those above.
__device__ __forceinline__ uint32 transpose(uint32 pair) {
    uint32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

/// d += a b for a [16 x 16], b [16 x 8], d [16 x 8], as in the PTX manual, mma.m16n8k16. Lane l holds of
/// a: rows l / 4 (r0, r2) and l / 4 + 8 (r1, r3), columns 2 (l % 4) and the next, from 8 on in r2 and r3;
/// b: rows 2 (l % 4) and the next (b0), from 8 on (b1), column l / 4; d: rows l / 4 (d0, d1), l / 4 + 8 (d2, d3), columns 2 (l % 4), the next.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, __half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, __nv_bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two 16-bit elements nearest to x and y, x in the lower half. Made one by one they would be two conversions and a permutation
/// for compute capability 10 and above, where the compiler does not join them.
__device__ __forceinline__ uint32 round_pair(float x, float y, __half) {
    uint32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

__device__ __forceinline__ uint32 round_pair(float x, float y, __nv_bfloat16) {
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

/// a + b of two 16-bit elements at once; subnormal ones stay.
__device__ __forceinline__ uint32 add_pair(uint32 a, uint32 b, __half) {
    uint32 c;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

/// a b + c of two 16-bit elements at once, each rounded once; subnormal ones stay.
__device__ __forceinline__ uint32 fuse_pair(uint32 a, uint32 b, uint32 c, __half) {
    uint32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ uint32 fuse_pair(uint32 a, uint32 b, uint32 c, __nv_bfloat16) {
    uint32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/// Four integers as the bytes of a word, the first lowest; each from -128 to 127, which larger ones become.
__device__ __forceinline__ uint32 pack_int8(int a, int b, int c, int d) {
    uint32 above, word;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(above) : "r"(d), "r"(c));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(b), "r"(a), "r"(above));
    return word;
}

#if __CUDA_ARCH__ >= 890
/// The E4M3 nearest to four numbers, ties to even, as the bytes of a word, the first lowest; 448 for what is above, 0x7f for NaN.
__device__ __forceinline__ uint32 four_e4m3(float a, float b, float c, float d) {
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | static_cast<uint32>(high) << 16;
}
#endif

/// A constant that the compiler does not know: it stays in a register, and is not made anew wherever it is used.
__device__ __forceinline__ uint32 held(uint32 constant) {
    uint32 x;
    asm("{ .reg .u32 one; mov.u32 one, %%nctaid.z; add.u32 %0, one, %1; }" : "=r"(x) : "r"(constant - 1));
    return x;
}

/// What the compiler is not to make anew wherever it is used: it stays in a register.
__device__ __forceinline__ uint32 kept(uint32 x) {
    uint32 y;
    asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/// threadIdx.x and blockIdx.x, read where this stands: what follows from them is not kept in registers all the while.
__device__ __forceinline__ int thread_here() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
__device__ __forceinline__ int block_here() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

/// Sine and cosine, right to 2^-20.9 from -pi to pi.
__device__ __forceinline__ float sine_fast(float x) {
    float y;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float cosine_fast(float x) {
    float y;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// 2^x; 0 for -inf.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// x + y, x - y, x y, x y + z, x / y, 1 / x, the root of x: rounded once, never fused otherwise, and numbers below 2^-126 stay though CuPy
/// compiles with -ftz=true.
__device__ __forceinline__ float add_exact(float x, float y) {
    float z;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ __forceinline__ float subtract_exact(float x, float y) {
    float z;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ __forceinline__ float multiply_exact(float x, float y) {
    float z;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ __forceinline__ float fuse_exact(float x, float y, float z) {
    float sum;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(x), "f"(y), "f"(z));
    return sum;
}
__device__ __forceinline__ float divide_exact(float x, float y) {
    float z;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ __forceinline__ float inverse_exact(float x) {
    float y;
    asm("rcp.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float root_exact(float x) {
    float y;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// The larger of |x| and |y|, and the number from -most to most that is nearest to x, in the same way; NaN stays.
__device__ __forceinline__ float larger_magnitude(float x, float y) {
    float z;
    asm("{ .reg .f32 a; .reg .f32 b; abs.f32 a, %1; abs.f32 b, %2; max.NaN.f32 %0, a, b; }" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ __forceinline__ float clamp_exact(float x, float most) {
    float y;
    asm("{ .reg .f32 low; max.NaN.f32 low, %1, %3; min.NaN.f32 %0, low, %2; }" : "=f"(y) : "f"(x), "f"(most), "f"(-most));
    return y;
}

/// A float as a double, and the float nearest to a double, in the same way.
__device__ __forceinline__ double widen_exact(float x) {
    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float narrow_exact(double x) {
    float y;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
    return y;
}

/// x / y to 2 ulp for |y| from 2^-126 to 2^126, 0 beyond.
__device__ __forceinline__ float divide_fast(float x, float y) { return __fdividef(x, y); }

}  // namespace pagoda
