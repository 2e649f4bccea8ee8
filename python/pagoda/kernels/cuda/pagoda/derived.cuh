// Keys that are not stored: Gemma 4's attention_k_eq_v. K and V of such a layer come from one projection. V is its norm without a
// weight, and K is that norm times a weight and then rotated: K = RoPE(weight V). The code that has brought V to shared memory makes
// K there.
#pragma once

#include <pagoda/unit.cuh>

namespace pagoda {

/// Cosine and sine of so many 2^-64 of a turn, right to 1e-6.
__device__ inline float2 turned(uint64 parts) {
    // A float holds 2^-32 of a turn.
    const float angle = static_cast<float>(static_cast<int>(parts >> 32)) * 1.46291807927e-9f;
    return {cosine_fast(angle), sine_fast(angle)};
}

/// Makes the keys of ROWS stored rows of span `span`, of which the first is at `place` of the token axis. value(row, e) is an element
/// of V, and keep(row, e, x) takes one of K: DIM of a row, and zeros up to DEPTH. By THREADS threads.
///
/// A thread has pairs of elements that turn together, the same of all rows. Positions times turns wrap around as angles do.
template <int DIM, int DEPTH, int ROWS, int THREADS, class Value, class Keep>
__device__ void derive_keys(const Attend& args, int span, int place, Value value, Keep keep) {
    const int64 position = args.pages.spans[span].position + (place - args.pages.spans[span].before);
#pragma unroll 1
    for (int i = threadIdx.x % THREADS; i < DEPTH / 2; i += THREADS) {
        const bool beside = args.interleaved || i >= args.rotary_pairs, real = 2 * i < DIM;
        const int first = beside ? 2 * i : i, second = beside ? 2 * i + 1 : i + args.rotary_pairs;
        const uint64 turn = i < args.rotary_pairs ? args.turns[i] : 0;
        const float2 weight = real ? float2{args.key_weight[first], args.key_weight[second]} : float2{0.0f, 0.0f};
#pragma unroll 4
        for (int row = 0; row < ROWS; ++row) {
            float x = real ? weight.x * value(row, first) : 0.0f, y = real ? weight.y * value(row, second) : 0.0f;
            if (turn != 0) {
                const float2 angle = turned(turn * static_cast<uint64>(position + row));
                const float from = x;
                x = from * angle.x - y * angle.y;
                y = from * angle.y + y * angle.x;
            }
            keep(row, first, x);
            keep(row, second, y);
        }
    }
}

}  // namespace pagoda
