// Reads memory and does nothing with it: stands in for a model's weights in measurements, and is the ceiling of everything else.
#pragma once

#include <pagoda/machine.cuh>

namespace pagoda {

struct Read {
    /// Aligned to 16.
    const uint4* words;
    uint64 count;
    /// Written to by a thread whose words, all combined by exclusive or, come to `sought`: no read can be left out.
    uint32* found;
    uint32 sought;
};

/// Any number of threads.
__global__ void __launch_bounds__(512, 2) read(const Read args) {
    constexpr int AHEAD = 8;
    const uint64 threads = static_cast<uint64>(gridDim.x) * blockDim.x;
    uint32 seen = 0;
    uint64 at = static_cast<uint64>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; at + (AHEAD - 1) * threads < args.count; at += AHEAD * threads) {
        uint4 held[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) held[k] = __ldcs(args.words + at + k * threads);
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) seen ^= held[k].x ^ held[k].y ^ held[k].z ^ held[k].w;
    }
    for (; at < args.count; at += threads) {
        const uint4 word = __ldcs(args.words + at);
        seen ^= word.x ^ word.y ^ word.z ^ word.w;
    }
    if (seen == args.sought) *args.found = seen;
}

}  // namespace pagoda
