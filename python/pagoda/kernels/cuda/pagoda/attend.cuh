// Exact attention of the new tokens of a step over pages: decode, speculative verify and prefill.
#pragma once

#include <pagoda/cuda_cores.cuh>
#include <pagoda/tensor_cores.cuh>

namespace pagoda {

/// Grid: any number of thread blocks, in one dimension, with Engine::Shape::THREADS threads and SHARED_BYTES of shared memory.
template <class Engine>
__global__ void __launch_bounds__(Engine::Shape::THREADS, Engine::BLOCKS) attend(const Attend args) {
    const int blocks = *args.block_count;
    const int64 all = static_cast<int64>(args.prefix[blocks]) * args.kv_heads;
    // Nobody's share is empty.
    const int64 grid = min(static_cast<int64>(gridDim.x), all);
    if (blockIdx.x >= grid) return;
    int64 at = all * blockIdx.x / grid;
    const int64 end = all * (blockIdx.x + 1) / grid;
    Engine engine(args);
    while (at < end) {
        // The block of queries whose work holds `at`.
        int low = 0, high = blocks;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (static_cast<int64>(args.prefix[middle]) * args.kv_heads <= at) {
                low = middle;
            } else {
                high = middle;
            }
        }
        const int64 before = static_cast<int64>(args.prefix[low]) * args.kv_heads;
        const int work = args.prefix[low + 1] - args.prefix[low];
        const int head = static_cast<int>((at - before) / work), first = static_cast<int>((at - before) % work);
        const int64 start = at - first;
        const int count = args.by_runs ? 1 : static_cast<int>(min(static_cast<int64>(work - first), end - at));
        engine.block = args.blocks[low];
        engine.head = head;
        engine.rows = engine.block.queries * args.group;
        engine.work(first, count);
        const int unit = low * args.kv_heads + head;
        if (count == work) {
            engine.write_all();
        } else if (args.by_runs) {
            engine.write_partial(at);
            if (engine.is_last(unit, work)) engine.merge(work, [=](int part) { return start + part; });
        } else {
            // The thread block whose share holds `x` is the last that begins at or before it.
            const auto owner = [=](int64 x) { return ((x + 1) * grid - 1) / all; };
            const int64 first_owner = owner(start), last_owner = owner(start + work - 1);
            engine.write_partial(2 * static_cast<int64>(blockIdx.x) + (first == 0));
            if (engine.is_last(unit, static_cast<int>(last_owner - first_owner + 1))) {
                engine.merge(static_cast<int>(last_owner - first_owner + 1),
                                [=](int part) { return 2 * (first_owner + part) + (part == 0); });
            }
        }
        __syncthreads();
        at += count;
    }
}

}  // namespace pagoda
