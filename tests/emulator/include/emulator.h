// CUDA's threads, barriers and warp collectives on one CPU thread, for tests. Every CUDA thread is a fiber; which runs next is
// drawn from a seed. Barriers are counted, per block and per warp: a fiber waits until all that must arrive have arrived.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

namespace emulator {

constexpr int LANES = 32;
constexpr unsigned char POISON = 0xff;

[[noreturn]] void fail(const std::string& message);

struct Barrier {
    int arrived = 0;
    std::vector<int> waiting;
};

/// A copy that this thread has started and nobody may see yet.
struct Copy {
    unsigned char* target;
    const unsigned char* source;
    size_t bytes;
    bool valid;
    int group;
};

struct Fiber {
    void* stack_pointer = nullptr;
    unsigned char* stack = nullptr;
    dim3 thread;
    int index = 0;
    bool done = false;
    std::vector<Copy> copies;
    int group = 0;
    /// The collective that this thread was in last, and may still be reading.
    struct Meeting* last = nullptr;
    /// Barriers of the block that this thread has passed, and those of its warp as well.
    int block_phase = 0, warp_phase = 0;
    /// The first of these when this thread last wrote to global memory, and when it was last at a fence; whether it wrote since.
    int wrote = -1, fenced = -1;
    bool wrote_since = false;
};

/// Who has last written to a byte of shared memory, and who has read it since, as far as no barrier lies between. In phase 0 is nobody.
struct Touched {
    static constexpr int SEVERAL = -1;
    int writer = 0, write_block_phase = 0, write_warp_phase = 0;
    int reading_warp = 0, reader = 0, read_block_phase = 0, read_warp_phase = 0;
};

/// What a lane brings to a collective.
struct Offer {
    alignas(16) unsigned char data[48];
};

/// One collective of the lanes of a mask, at a line of the program or, for 0, at any. It lasts until each of them has come to its next
/// one: lanes of other masks may have been through many meanwhile.
struct Meeting {
    const char* name = nullptr;
    int line = 0;
    unsigned mask = 0, arrived = 0, unread = 0;
    Barrier barrier;
    Offer offers[LANES];
};

struct Warp {
    std::vector<std::unique_ptr<Meeting>> meetings;
};

struct Block {
    std::vector<Fiber> fibers;
    /// Those that may run, in no order.
    std::vector<int> ready;
    std::vector<Warp> warps;
    Barrier barrier;
    unsigned char* shared = nullptr;
    size_t shared_bytes = 0;
    /// Of each byte of shared memory.
    Touched* touched = nullptr;
    int alive = 0;
    /// Whether all threads that have come to a `__syncthreads_and` so far say yes.
    bool agreed = true;
};

extern Block* block;
extern Fiber* current;
extern dim3 block_index, block_size, grid_size;

void block_barrier();
void warp_barrier(unsigned mask);
/// Meets the lanes of `mask`, all in the same collective at the same line; returns what they brought, after `finish` has seen it once.
const Offer* meet(const char* name, unsigned mask, const void* data, size_t bytes, void (*finish)(Offer*) = nullptr, int line = 0);
/// Notes that this thread reads or writes shared memory. Fails if another has written there, or read what is overwritten, and no
/// barrier lies between: warps advance as they like, and so do lanes but for `__syncwarp`.
void touch(const void* at, size_t bytes, bool writes);
/// Notes that this thread writes to global memory, or is at a fence. Before an atomic operation publishes to other blocks what
/// this one wrote, a barrier has to come and then a fence: fails otherwise.
void wrote_globally();
void fence();
void publish();
/// Fails unless so many bytes of shared memory, aligned to as many, are there.
void check_row(const char* name, const void* row, size_t bytes = 16);

inline int lane() { return current->index % LANES; }

void copy_async(void* target, const void* source, size_t bytes, bool valid);
void copy_commit();
void copy_wait(int pending);

/// sums += a b as tensor cores add, 8 products at a time: every addend is cut off one bit behind the last of a float as large as
/// the largest, and the sum behind a float's last. Those of Ampere do so (Fasi et al., Numerical behavior of NVIDIA tensor cores,
/// 2021); later ones are more exact. Products of elements have to be exact.
void add_products(float (&sums)[16][8], const double (&a)[16][16], const double (&b)[16][8]);

/// Whether floats below 2^-126 are 0: on in kernels, since CuPy compiles them with -ftz=true, but for some instructions.
void flush(bool on);

/// Runs a kernel; empty, or what went wrong.
std::string launch(dim3 grid, unsigned threads, size_t shared_bytes, uint64_t seed, const std::function<void()>& kernel);

template <class T>
T shuffle(const char* name, unsigned mask, T value, int from) {
    const Offer* met = meet(name, mask, &value, sizeof(T));
    const int source = from >= 0 && from < LANES ? from : lane();
    if (!(mask >> source & 1)) fail(std::string(name) + ": lane " + std::to_string(source) + " is not in the mask");
    T result;
    std::memcpy(&result, met[source].data, sizeof(T));
    return result;
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

inline void __syncthreads() { emulator::block_barrier(); }
inline bool __syncthreads_and(int predicate) {
    emulator::block->agreed &= predicate != 0;
    __syncthreads();
    const bool agreed = emulator::block->agreed;
    __syncthreads();
    emulator::block->agreed = true;
    __syncthreads();
    return agreed;
}
inline void __syncwarp(unsigned mask = ~0u) { emulator::warp_barrier(mask); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int = 32) { return emulator::shuffle("__shfl_sync", mask, value, lane & 31); }
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int = 32) {
    return emulator::shuffle("__shfl_xor_sync", mask, value, emulator::lane() ^ bits);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const emulator::Offer* met = emulator::meet("__ballot_sync", mask, &predicate, sizeof predicate);
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) {
        int one = 0;
        if (mask >> i & 1) std::memcpy(&one, met[i].data, sizeof one);
        result |= static_cast<unsigned>(one != 0) << i;
    }
    return result;
}
inline bool __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline bool __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    const emulator::Offer* met = emulator::meet("__reduce_max_sync", mask, &value, sizeof value);
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) {
        unsigned one = 0;
        if (mask >> i & 1) std::memcpy(&one, met[i].data, sizeof one);
        result = std::max(result, one);
    }
    return result;
}
template <class T>
T atomicAdd(T* target, T value) {
    const T before = *target;
    *target += value;
    return before;
}
template <class T>
T __ldcg(const T* source) { return *source; }
template <class T>
T __ldcs(const T* source) { return *source; }

struct alignas(8) float2 { float x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class To, class From>
To emulated_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
/// Byte i of the result is byte `selector >> 4 i & 7` of x (0 to 3) and y (4 to 7).
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
/// Rounded towards 0.
inline float __fadd_rz(float x, float y) {
    const double sum = static_cast<double>(x) + y;
    const float near = static_cast<float>(sum);
    return std::fabs(near) > std::fabs(sum) && std::isfinite(near) ? emulated_bits<float>(emulated_bits<unsigned>(near) - 1) : near;
}
/// The nearest integer that there is; 0 for NaN.
template <class T>
T emulated_integer(double x) {
    return x != x ? 0 : static_cast<T>(std::clamp<double>(x, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
}
inline int __float2int_rn(float x) { return emulated_integer<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return emulated_integer<int>(std::trunc(x)); }
inline unsigned __float2uint_rz(float x) { return emulated_integer<unsigned>(std::trunc(x)); }
using std::max;
using std::min;
