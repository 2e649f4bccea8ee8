// Exact attention of the new tokens of a step over pages: decode, speculative verify and prefill.
#pragma once

#include <pagoda/cuda_cores.cuh>
#include <pagoda/tensor_cores.cuh>

namespace pagoda {

/// The unit that a piece of work belongs to. Work is numbered unit after unit, heads of a block of queries side by side.
struct Place {
    int block, head;
    /// Where the unit's work begins, and how much it is.
    int64 start;
    int work;

    __device__ static Place of(const Attend& args, int blocks, int64 at) {
        int low = 0, high = blocks;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (static_cast<int64>(args.prefix[middle]) * args.kv_heads <= at) {
                low = middle;
            } else {
                high = middle;
            }
        }
        Place place;
        const int64 before = static_cast<int64>(args.prefix[low]) * args.kv_heads;
        place.block = low;
        place.work = args.prefix[low + 1] - args.prefix[low];
        place.head = static_cast<int>((at - before) / place.work);
        place.start = before + static_cast<int64>(place.head) * place.work;
        return place;
    }
};

/// Where thread block `index` of `grid` begins: shares are equal, but whole units where those must not be cut.
__device__ inline int64 share_start(const Attend& args, int blocks, int64 all, int64 index, int64 grid) {
    const int64 at = all * index / grid;
    if (args.division != UNITS || at == all) return at;
    const Place place = Place::of(args, blocks, at);
    return at == place.start ? at : place.start + place.work;
}

/// Grid: any number of thread blocks, in one dimension, with Engine::Shape::THREADS threads and SHARED_BYTES of shared memory.
template <class Engine>
__global__ void __launch_bounds__(Engine::Shape::THREADS, Engine::BLOCKS) attend(const Attend args) {
    const int blocks = *args.block_count;
    const int64 all = static_cast<int64>(args.prefix[blocks]) * args.kv_heads;
    // Nobody's share is empty, unless units are whole.
    const int64 grid = min(static_cast<int64>(gridDim.x), all);
    if (blockIdx.x >= grid) return;
    int64 at = share_start(args, blocks, all, blockIdx.x, grid);
    const int64 end = share_start(args, blocks, all, blockIdx.x + 1, grid);
    Engine engine(args);
    while (at < end) {
        const Place place = Place::of(args, blocks, at);
        const int first = static_cast<int>(at - place.start);
        const int count =
            args.division == TILES ? static_cast<int>(min(static_cast<int64>(place.work - first), end - at)) : 1;
        engine.index = place.block;
        engine.block = args.blocks[place.block];
        engine.head = place.head;
        engine.rows = engine.block.queries * args.group;
        engine.work(first, count);
        const int unit = place.block * args.kv_heads + place.head;
        if (count == place.work) {
            engine.write_all();
        } else if (args.division == UNITS) {
            engine.add_run(first == 0, first + 1 == place.work);
        } else if (args.division == RUNS) {
            engine.write_partial(at);
            if (engine.is_last(unit, place.work)) engine.merge(place.work, [=](int part) { return place.start + part; });
        } else {
            // The thread block whose share holds `x` is the last that begins at or before it.
            const auto owner = [=](int64 x) { return ((x + 1) * grid - 1) / all; };
            const int64 first_owner = owner(place.start), last_owner = owner(place.start + place.work - 1);
            const int parts = static_cast<int>(last_owner - first_owner + 1);
            engine.write_partial(2 * static_cast<int64>(blockIdx.x) + (first == 0));
            if (engine.is_last(unit, parts)) {
                engine.merge(parts, [=](int part) { return 2 * (first_owner + part) + (part == 0); });
            }
        }
        __syncthreads();
        at += count;
    }
}

}  // namespace pagoda
