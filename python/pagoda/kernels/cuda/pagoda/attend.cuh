// Exact attention of the new tokens of a step over pages: decode, speculative verify and prefill.
#pragma once

#include <pagoda/cuda_cores.cuh>
#include <pagoda/few_queries.cuh>
#include <pagoda/many_queries.cuh>

namespace pagoda {

/// The unit that a piece of work belongs to. Work is numbered unit after unit, sets of heads of a block of queries side by side.
struct Place {
    int block, set;
    /// Where the unit's work begins, and how much it is.
    int64 start;
    int work;

    /// For whole warps, whose lanes look at 32 blocks at once: each look takes the way to memory and back.
    __device__ static Place of(const Attend& args, int blocks, int64 at) {
        int low = 0, high = blocks;
        while (high - low > 1) {
            const int step = (high - low + WARP - 1) / WARP, mine = low + lane_of_warp() * step;
            const bool begun = mine < high && static_cast<int64>(args.prefix[mine]) * args.sets <= at;
            low += (__popc(__ballot_sync(~0u, begun)) - 1) * step;
            high = min(high, low + step);
        }
        Place place;
        const int64 before = static_cast<int64>(args.prefix[low]) * args.sets;
        place.block = low;
        place.work = args.prefix[low + 1] - args.prefix[low];
        place.set = static_cast<int>((at - before) / place.work);
        place.start = before + static_cast<int64>(place.set) * place.work;
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

/// What a thread block is at: the part [at, end) of all work that is left of its share, of that `count` of the unit at `place`.
/// `begins`: its part of the unit is the first; `begun`: it has put aside some of that part.
struct Progress {
    int64 at, end, all, grid;
    Place place;
    int count;
    bool begins, begun;

    __device__ int64 unit_end() const { return place.start + place.work; }
    /// Where its part of the unit ends.
    __device__ int64 part_end() const { return min(unit_end(), end); }
};
static_assert(sizeof(Progress) <= KEPT_BYTES, "it is kept in shared memory while a unit is worked on: registers are short");

/// What becomes of the part of a unit that has been worked on.
template <class Engine>
__device__ void finish(const Attend& args, const Engine& engine, const Progress& now) {
    const Place place = now.place;
    const int64 stop = now.at + now.count;
    // Each run has a slot for partial results, or each thread block two: of the unit that its share begins in, and of those that begin there.
    const bool runs = args.division == RUNS;
    const int slots = runs ? 1 : 2;
    float* const slot = engine.slot(runs ? now.at : 2 * static_cast<int64>(block_here()) + now.begins);
    const int64 part_end = runs ? stop : now.part_end();
    const bool whole = now.begins && part_end == now.unit_end();
    const bool done = stop == part_end;
    engine.take_in(slot, whole, now.begun, done);
    if (whole || !done) return;
    // The thread block whose share holds `x` is the last that begins at or before it.
    const auto owner = [=](int64 x) { return runs ? x : ((x + 1) * now.grid - 1) / now.all; };
    const int64 first_owner = owner(place.start), last_owner = owner(now.unit_end() - 1);
    const int parts = static_cast<int>(last_owner - first_owner + 1), unit = place.block * args.sets + place.set;
    if (engine.is_last(unit, parts)) engine.merge(parts, slots * first_owner, slots);
}

/// Grid: any number of thread blocks, in one dimension, with Engine::Shape::THREADS threads and SHARED_BYTES of shared memory.
template <class Engine>
__global__ void __launch_bounds__(Engine::Shape::THREADS, Engine::BLOCKS) attend(const Attend args) {
    const int blocks = args.totals[0];
    Progress now;
    // Not from `prefix`, whose last would have to wait for the number of blocks.
    now.all = static_cast<int64>(args.totals[1]) * args.sets;
    // Nobody's share is empty, unless units are whole.
    now.grid = min(static_cast<int64>(gridDim.x), now.all);
    if (block_here() >= now.grid) return;
    now.at = share_start(args, blocks, now.all, block_here(), now.grid);
    now.end = share_start(args, blocks, now.all, block_here() + 1, now.grid);
    Progress* const kept = reinterpret_cast<Progress*>(shared_memory() + Engine::Shape::SHARED_BYTES - KEPT_BYTES);
    now.begun = false;
    Engine engine(args);
    while (now.at < now.end) {
        now.place = Place::of(args, args.totals[0], now.at);
        const int first = static_cast<int>(now.at - now.place.start);
        const int64 stretch = static_cast<int64>(args.stretch) * Engine::Shape::TEAMS;
        now.count = args.division == TILES ? static_cast<int>(min(now.part_end() - now.at, stretch)) : 1;
        if (!now.begun) now.begins = first == 0;
        if (threadIdx.x == 0) *kept = now;
        engine.index = now.place.block;
        engine.set = now.place.set;
        engine.rows = engine.block().queries * args.group;
        engine.begun = now.begun;
        engine.work(first, now.count);
        now = *kept;
        finish(args, engine, now);
        __syncthreads();
        now.at += now.count;
        // Runs with partial results of their own do not go on.
        now.begun = args.division != RUNS && now.at < now.part_end();
    }
}

}  // namespace pagoda
