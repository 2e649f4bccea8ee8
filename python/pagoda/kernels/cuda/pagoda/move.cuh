// Copies runs of bytes between any two memories that the device reaches, including pinned host memory.
#pragma once

#include <pagoda/machine.cuh>

namespace pagoda {

/// `bytes` is a multiple of 16, and so are the addresses.
struct Run {
    const uint4* source;
    uint4* target;
    uint64 bytes;
};

struct Move {
    /// May lie in pinned memory.
    const Run* runs;
    uint32 count;
};

/// Any number of thread blocks; each takes the next run that is its turn.
__global__ void move(const Move args) {
    constexpr int AHEAD = 4;
    Run next = {nullptr, nullptr, 0};
    if (blockIdx.x < args.count) next = args.runs[blockIdx.x];
    for (uint32 i = blockIdx.x; i < args.count; i += gridDim.x) {
        const Run run = next;
        // The way to pinned memory is long: the next run is known when this one is done.
        if (i + gridDim.x < args.count) next = args.runs[i + gridDim.x];
        const uint64 words = run.bytes / sizeof(uint4);
        for (uint64 at = threadIdx.x; at < words; at += AHEAD * blockDim.x) {
            uint4 held[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                if (at + k * blockDim.x < words) held[k] = run.source[at + k * blockDim.x];
            }
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                if (at + k * blockDim.x < words) run.target[at + k * blockDim.x] = held[k];
            }
        }
    }
}

}  // namespace pagoda
