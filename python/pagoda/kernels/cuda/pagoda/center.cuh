// What K rows are centred by where nobody has said: the mean of the first rows that an empty cache is given.
#pragma once

#include <pagoda/formats.cuh>
#include <pagoda/tables.cuh>

namespace pagoda {

struct Center {
    Rows k;
    /// How many there are, on the device; 0 where other rows came first: the centre stays what it is when a graph is replayed then.
    const int* tokens;
    int kv_heads, head_dim;
    /// [kv_heads, head_dim].
    float* center;
};

/// Means of all elements over the tokens, added in order and in double as on the CPU; zeros if one is NaN or larger
/// than any f16. One thread block.
template <class Input>
__global__ void center(const Center args) {
    const int tokens = *args.tokens, all = args.kv_heads * args.head_dim;
    if (tokens == 0) return;
    int fit = 1;
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
        const int64 at = static_cast<int64>(i % args.head_dim) * Input::BYTES;
        double sum = 0.0;
#pragma unroll 8
        for (int token = 0; token < tokens; ++token) sum += widen_exact(Input::load_one(args.k.row(token, i / args.head_dim) + at));
        const float mean = narrow_exact(sum / tokens);
        args.center[i] = mean;
        fit &= fabsf(mean) <= F16_MAX;
    }
    fit = __syncthreads_and(fit);
    for (int i = threadIdx.x; !fit && i < all; i += blockDim.x) args.center[i] = 0.0f;
}

}  // namespace pagoda
