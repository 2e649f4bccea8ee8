// Writes K and V of the new tokens of one layer into their pages where one of them is quantised: one launch, one warp for a row.
#pragma once

#include <pagoda/append.cuh>
#include <pagoda/encode.cuh>

namespace pagoda {

/// A lane's elements of a part of a row, whose address is a multiple of an element's size.
template <class Input>
__device__ void load_part(const uint8* source, bool aligned, float (&x)[4]) {
    if (aligned) return Input::load_four(source, x);
    for (int i = 0; i < 4; ++i) x[i] = Input::load_one(source + i * Input::BYTES);
}

/// Stores a row that the warp holds, and sets `misfit`, if it is not null, where a number does not fit.
template <class Format, int PARTS>
__device__ void store_numbers(float (&x)[PARTS][4], const Target& to, int* misfit) {
    if constexpr (Format::QUANTISED) {
        limit(x, Encoder<Format>::limit(), misfit);
        Encoder<Format>::store(x, to);
    } else {
        bool fits = true;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            for (int i = 0; i < 4; ++i) fits &= fabsf(x[p][i]) < bound<Format>();
            if (first_of(p, to.lane) < to.dim) Format::store_four(to.row + first_of(p, to.lane) * Format::BYTES, x[p]);
        }
        if (!fits && misfit != nullptr) *misfit = 1;
    }
}

/// K and V in `Input` are centred, rotated and stored; v_head_dim is 0 where V is a part of K. PARTS: of the longer rows. Threads:
/// whole warps, 256 at most. Four thread blocks of so many find registers on a multiprocessor, unless rows have several parts.
template <class K, class V, class Input, int PARTS>
__global__ void __launch_bounds__(256, PARTS == 1 ? 4 : 1) append_rows(const Append args) {
    const int tokens = *args.tokens, planes = args.v_head_dim == 0 ? 1 : 2, kinds = args.kv_heads * planes;
    const int lane = kept(threadIdx.x % WARP), per_block = blockDim.x / WARP, warps = gridDim.x * per_block;
    // From one lane, so that the compiler knows that all of a warp go the same way.
    const int warp = __shfl_sync(~0u, static_cast<int>(blockIdx.x * per_block + threadIdx.x / WARP), 0);
    // A warp has rows of one head of K or of V, and `step` warps share those. Where there are fewer warps than kinds of rows it has
    // one kind after the other.
    const int step = max(warps / kinds, 1);
    for (int i = warp; i < kinds * step; i += warps) {
        const int first = i / kinds, kind = i % kinds, head = kind / planes;
        const bool is_v = kind % planes == 1;
        const Plane& plane = is_v ? args.v_plane : args.k_plane;
        const Rows& given = is_v ? args.v : args.k;
        const int dim = is_v ? args.v_head_dim : args.head_dim;
        const bool rotated = is_v ? args.rotate_v : args.rotate_k;
        const uint32 row_bytes = kept(dim * (is_v ? V::BITS : K::BITS) / 8);
        const uint32 scale_bytes = kept(is_v ? V::scale_bytes(dim) : K::scale_bytes(dim));
        const Rotation<PARTS> rotation(dim, lane);
        float center[PARTS][4] = {};
        if (!is_v && args.center != nullptr) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if (first_of(p, lane) < dim) F32::load_four(args.center + head * dim + first_of(p, lane), center[p]);
            }
        }
        uint8* const rows = args.base + plane.rows.offset + head * plane.rows.head_stride;
        uint8* const scales = args.base + plane.scales.offset + head * plane.scales.head_stride;
        const uint8* source = given.row(first, head);
        const int64 stride = step * given.token_stride;
        const bool aligned = (reinterpret_cast<uint64>(source) | stride) % (4 * Input::BYTES) == 0;
        for (int token = first; token < tokens; token += step, source += stride) {
            const int64 slot = args.slots[token];
            float x[PARTS][4] = {};
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if (first_of(p, lane) < dim) load_part<Input>(source + first_of(p, lane) * Input::BYTES, aligned, x[p]);
            }
            if (slot < 0) continue;
#pragma unroll
            for (int n = 0; n < 4 * PARTS; ++n) x[n / 4][n % 4] = subtract_exact(x[n / 4][n % 4], center[n / 4][n % 4]);
            if (rotated) {
                limit(x, STORED_MAX, args.misfit);
                rotation.rotate(x);
            }
            // Numbers of blocks, of rows in them and of bytes in a page have 32 bits.
            const uint32 block = static_cast<uint32>(slot >> args.page_shift);
            const uint32 in_page = static_cast<uint32>(slot) & ((1u << args.page_shift) - 1);
            const uint64 start = block * static_cast<uint64>(args.block_bytes);
            const Target to{dim, rows + (start + in_page * row_bytes), scales + (start + in_page * scale_bytes), lane};
            is_v ? store_numbers<V>(x, to, args.misfit) : store_numbers<K>(x, to, args.misfit);
        }
    }
}

}  // namespace pagoda
