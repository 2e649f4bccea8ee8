// Writes K and V of the new tokens of one layer into their pages, neither of them quantised: one launch, one thread for 8 elements.
#pragma once

#include <pagoda/formats.cuh>
#include <pagoda/tables.cuh>

namespace pagoda {

struct Append {
    Rows k, v;
    /// [tokens]: block * page_size + row on the device tier; below 0: nothing is written.
    const int64* slots;
    /// How many there are, on the device.
    const int* tokens;
    int kv_heads, head_dim, v_head_dim;
    uint8* base;
    int64 block_bytes;
    int page_shift;
    Plane k_plane, v_plane;
    /// Of quantised rows: [kv_heads, head_dim] taken off K, or null; and whether rows are rotated.
    const float* center;
    int rotate_k, rotate_v;
    /// If not null, set to 1 where a value does not fit its format, is infinite or NaN.
    int* misfit;
};

/// Magnitudes below this are stored without overflow: half a unit above the largest finite number.
template <class Format>
__device__ float bound();
template <>
__device__ inline float bound<F32>() { return __uint_as_float(0x7f800000u); }
template <>
__device__ inline float bound<F16>() { return 65520.0f; }
template <>
__device__ inline float bound<BF16>() { return __uint_as_float(0x7f7f8000u); }

template <class Format, class Input>
__device__ void append_chunk(const uint8* source, uint8* target, int* misfit) {
    float x[8];
    // The caller's rows need not be aligned to more than an element.
    for (int i = 0; i < 8; ++i) x[i] = Input::load_one(source + i * Input::BYTES);
    if (misfit != nullptr) {
        bool fits = true;
        for (int i = 0; i < 8; ++i) fits &= fabsf(x[i]) < bound<Format>();
        if (!fits) *misfit = 1;
    }
    Format::store(target, x);
}

/// K and V in `Input` are converted to their row formats, to nearest even. Threads: any number, in one dimension.
/// v_head_dim is 0 where V is a part of K.
template <class K, class V, class Input>
__global__ void append(const Append args) {
    const int k_chunks = args.head_dim / 8, chunks = k_chunks + args.v_head_dim / 8;
    const int64 all = static_cast<int64>(*args.tokens) * args.kv_heads * chunks;
    const int64 step = static_cast<int64>(gridDim.x) * blockDim.x;
    for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += step) {
        const int chunk = static_cast<int>(i % chunks);
        const int64 row = i / chunks, token = row / args.kv_heads, head = row % args.kv_heads;
        const int64 slot = args.slots[token];
        if (slot < 0) continue;
        uint8* block = args.base + (slot >> args.page_shift) * args.block_bytes;
        const int64 in_page = slot & ((1ll << args.page_shift) - 1);
        if (chunk < k_chunks) {
            uint8* target = block + args.k_plane.rows.offset + head * args.k_plane.rows.head_stride;
            target += (in_page * args.head_dim + chunk * 8) * K::BYTES;
            append_chunk<K, Input>(args.k.row(token, head) + chunk * 8 * Input::BYTES, target, args.misfit);
        } else {
            const int at = (chunk - k_chunks) * 8;
            uint8* target = block + args.v_plane.rows.offset + head * args.v_plane.rows.head_stride;
            target += (in_page * args.v_head_dim + at) * V::BYTES;
            append_chunk<V, Input>(args.v.row(token, head) + at * Input::BYTES, target, args.misfit);
        }
    }
}

}  // namespace pagoda
