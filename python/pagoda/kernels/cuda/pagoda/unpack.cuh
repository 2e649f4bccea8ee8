// Writes a step's changes to its tables where kernels expect them: one upload, whatever the number of tables.
#pragma once

#include <pagoda/machine.cuh>

namespace pagoda {

struct Unpack {
    /// The number of runs; for each its target (low and high word), the place of its source in what follows, and its length; then
    /// the words. All in words of 32 bits.
    const uint32* words;
};

/// One warp a run.
__global__ void unpack(const Unpack args) {
    const uint32 count = args.words[0], warps = gridDim.x * blockDim.x / WARP;
    const uint32 *runs = args.words + 1, *payload = runs + 4 * count;
    for (uint32 i = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; i < count; i += warps) {
        const uint32* run = runs + 4 * i;
        uint32* target = reinterpret_cast<uint32*>(static_cast<uint64>(run[1]) << 32 | run[0]);
        for (uint32 word = threadIdx.x % WARP; word < run[3]; word += WARP) target[word] = payload[run[2] + word];
    }
}

}  // namespace pagoda
