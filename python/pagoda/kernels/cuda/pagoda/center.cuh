// The centre of K rows where the caller gave none: the mean of the first rows that an empty cache is given, for elements where it
// stands out; or the previous centre, where that fits the first rows and these are few.
#pragma once

#include <pagoda/formats.cuh>
#include <pagoda/tables.cuh>

namespace pagoda {

/// Rows that are enough to say what K is centred by.
constexpr int CENTER_TOKENS_MIN = 8;

struct Center {
    Rows k;
    /// How many there are, on the device; 0 where other rows came first: the centre stays what it is when a graph is replayed then.
    const int* tokens;
    int kv_heads, head_dim;
    /// [kv_heads, head_dim]: in, of the rows before, if any; out, of these.
    float* center;
};

/// The mean of each element over the tokens where it is at least twice the standard deviation, else 0; of too few tokens, the centre
/// there was where that is nearer to the mean than 0 is, else 0; zeros if a mean is NaN or larger than any f16. Numbers and their
/// squares, which doubles hold exactly, are added in order as on the CPU. One thread block.
template <class Input>
__global__ void center(const Center args) {
    const int tokens = *args.tokens, all = args.kv_heads * args.head_dim;
    if (tokens == 0) return;
    int fit = 1;
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
        const int64 at = static_cast<int64>(i % args.head_dim) * Input::BYTES;
        double sum = 0.0, squares = 0.0;
#pragma unroll 8
        for (int token = 0; token < tokens; ++token) {
            const double x = widen_exact(Input::load_one(args.k.row(token, i / args.head_dim) + at));
            sum += x;
            squares += x * x;
        }
        const double mean = sum / tokens;
        float center = narrow_exact(mean);
        fit &= fabsf(center) <= F16_MAX;
        // mean^2 >= 4 (squares / tokens - mean^2)
        bool holds = 5.0 * sum * sum >= 4.0 * tokens * squares;
        if (tokens < CENTER_TOKENS_MIN) {
            center = args.center[i];
            holds = fabs(mean - widen_exact(center)) < fabs(mean);
        }
        args.center[i] = holds ? center : 0.0f;
    }
    fit = __syncthreads_and(fit);
    for (int i = threadIdx.x; !fit && i < all; i += blockDim.x) args.center[i] = 0.0f;
}

}  // namespace pagoda
