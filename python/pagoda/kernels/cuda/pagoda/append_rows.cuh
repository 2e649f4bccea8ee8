// Writes K and V of the new tokens of one layer into their pages where one of them is quantised: one launch, one warp for a row.
#pragma once

#include <pagoda/append.cuh>
#include <pagoda/encode.cuh>

namespace pagoda {

/// Stores a row of numbers in shared memory; false if this lane has seen one that does not fit.
template <class Format>
__device__ bool store_numbers(const float* x, int dim, uint8* row, uint8* scales) {
    bool fits = true;
    if constexpr (Format::QUANTISED) {
        for (int e = lane_of_warp(); e < dim; e += WARP) fits &= fabsf(x[e]) <= Encoder<Format>::limit();
        Encoder<Format>::store(x, dim, row, scales);
    } else {
        for (int first = 8 * lane_of_warp(); first < dim; first += 8 * WARP) {
            float part[8];
            for (int i = 0; i < 8; ++i) {
                part[i] = x[first + i];
                fits &= fabsf(part[i]) < bound<Format>();
            }
            Format::store(row + first * Format::BYTES, part);
        }
    }
    return fits;
}

/// K and V in `Input` are centred, rotated and stored; v_head_dim is 0 where V is a part of K. Threads: whole warps, each with
/// the larger of head_dim and v_head_dim floats of shared memory.
template <class K, class V, class Input>
__global__ void append_rows(const Append args) {
    const int lane = lane_of_warp(), warps = blockDim.x / WARP, planes = args.v_head_dim == 0 ? 1 : 2;
    float* const x = reinterpret_cast<float*>(shared_memory()) + threadIdx.x / WARP * max(args.head_dim, args.v_head_dim);
    const int64 all = static_cast<int64>(*args.tokens) * args.kv_heads * planes;
    const int64 step = static_cast<int64>(gridDim.x) * warps;
    for (int64 i = static_cast<int64>(blockIdx.x) * warps + threadIdx.x / WARP; i < all; i += step) {
        const bool is_v = i % planes == 1;
        const int64 row = i / planes, token = row / args.kv_heads, head = row % args.kv_heads;
        const int64 slot = args.slots[token], in_page = slot & ((1ll << args.page_shift) - 1);
        if (slot < 0) continue;
        const Plane& plane = is_v ? args.v_plane : args.k_plane;
        const int dim = is_v ? args.v_head_dim : args.head_dim;
        uint8* const block = args.base + (slot >> args.page_shift) * args.block_bytes;
        uint8* const rows = block + plane.rows.offset + head * plane.rows.head_stride;
        uint8* const scales = block + plane.scales.offset + head * plane.scales.head_stride;
        const uint8* const source = (is_v ? args.v : args.k).row(token, head);
        const float* const center = is_v || args.center == nullptr ? nullptr : args.center + head * dim;
        const bool rotated = is_v ? args.rotate_v : args.rotate_k;
        bool fits = true;
        for (int e = lane; e < dim; e += WARP) {
            float number = Input::load_one(source + e * Input::BYTES);
            if (center != nullptr) number = subtract_exact(number, center[e]);
            if (rotated) {
                fits &= fabsf(number) <= STORED_MAX;
                number = limited(number, STORED_MAX);
            }
            x[e] = number;
        }
        __syncwarp();
        if (rotated) rotate(x, dim);
        const auto store = [&](auto format) {
            using Format = decltype(format);
            const int row_bytes = dim * Format::BITS / 8;
            return store_numbers<Format>(x, dim, rows + in_page * row_bytes, scales + in_page * Format::scale_bytes(dim));
        };
        fits &= is_v ? store(V()) : store(K());
        if (args.misfit != nullptr && !fits) *args.misfit = 1;
        __syncwarp();
    }
}

}  // namespace pagoda
