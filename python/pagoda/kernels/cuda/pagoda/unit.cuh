// The work of an attend kernel and what becomes of its parts: shares, partial results, merging. How scores and values are
// computed is left to an engine (tensor_cores.cuh, cuda_cores.cuh).
//
// The work is a list: for each block of queries and each K/V head, the tiles of 64 stored rows that some query sees. It is
// cut into equal shares, one for each thread block, whatever borders that crosses, so that skewed batches stay balanced and
// the grid is the same at every step (a graph may replay it). What a share holds of a unit (block of queries, head) is a
// partial result unless it is all of it; the thread block that finishes a unit last merges its parts in order.
#pragma once

#include <pagoda/formats.cuh>
#include <pagoda/tables.cuh>

namespace pagoda {

constexpr float LN_2 = 0.693147180559945f;

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

/// Consecutive queries of one sequence.
struct QueryBlock {
    int sequence;
    /// The row of the first query in the batch, and how many there are.
    int token, queries;
    /// The place of the first query on the sequence's token axis.
    int position;
    /// The first place on the axis that some query sees.
    int low;
};

struct Attend {
    Pages pages;
    Plane k_plane, v_plane;
    Rows q, out;
    /// [tokens, kv_heads * group] or null: natural log-sum-exp.
    float* lse;
    const QueryBlock* blocks;
    /// [blocks + 1]: the tiles (or runs) of the blocks before, for one head.
    const int* prefix;
    /// How many blocks there are, on the device.
    const int* block_count;
    int kv_heads, group;
    /// Tokens that a query sees at most, itself included.
    int window;
    /// Work is counted in runs of RUN_TILES tiles, each with a partial result of its own (deterministic mode).
    int by_runs;
    /// Of scores, with the factor log2(e).
    float scale;
    /// [spans, rotary_pairs]: cosine and sine of a span's offset, to rotate queries back; null if no span has one. Element 2 i
    /// goes with 2 i + 1 if interleaved, else i with i + rotary_pairs.
    const float2* angles;
    int rotary_pairs, interleaved;
    /// [2 * grid or runs][ROWS * V_DIM + 2 * ROWS] and [blocks * kv_heads], which is 0 before and after.
    float* partials;
    int* pending;
};

/// The tiles of a part of a unit, one after the other, over the spans of the sequence.
struct Walk {
    const Span* span;
    int low, high;
    Piece piece;
    int tile, left;

    /// Begins at the tile (or run) `from` of what `[low, high)` of the token axis touches, for `count` tiles (or one run).
    __device__ void start(const Span* first, int low_, int high_, int from, int count, bool by_runs) {
        span = first, low = low_, high = high_;
        while (true) {
            piece = Piece::of(*span, low, high);
            const int tiles = piece.last_tile - piece.first_tile;
            const int first_run = piece.first_tile / RUN_TILES;
            const int here = !by_runs || tiles == 0 ? tiles : (piece.last_tile + RUN_TILES - 1) / RUN_TILES - first_run;
            if (from < here) {
                if (by_runs) {
                    const int run = first_run + from;
                    tile = max(run * RUN_TILES, piece.first_tile);
                    left = min((run + 1) * RUN_TILES, piece.last_tile) - tile;
                } else {
                    tile = piece.first_tile + from;
                    left = count;
                }
                return;
            }
            from -= here;
            ++span;
        }
    }

    __device__ void next() {
        ++tile, --left;
        while (left > 0 && tile == piece.last_tile) {
            piece = Piece::of(*++span, low, high);
            tile = piece.first_tile;
        }
    }
};

/// A unit of work in the hands of a thread block. An engine leaves its result in the exchange, in shared memory: for each of
/// Shape::TEAMS teams that saw other stored rows, values [ROWS][EXCHANGE], maxima [ROWS] and sums [ROWS].
template <class Shape>
struct Unit {
    using Q = typename Shape::Q;
    static constexpr int DV = Shape::DV, TEAMS = Shape::TEAMS;

    const Attend& args;
    /// Where the exchange is, and one word to tell all threads something.
    float* const exchanged;
    int* const flag;
    QueryBlock block;
    int head, rows;

    __device__ Unit(const Attend& args_, void* exchanged_, void* flag_)
        : args(args_), exchanged(static_cast<float*>(exchanged_)), flag(static_cast<int*>(flag_)) {}

    /// The query row of the batch and the query head of a row of the block.
    __device__ int64 token_of(int row) const { return block.token + row / args.group; }
    __device__ int head_of(int row) const { return head * args.group + row % args.group; }

    /// The angles of the span that a walk is in, if it has moved.
    __device__ const float2* angles_of(const Walk& walk) const {
        return walk.piece.offset == 0 ? nullptr : args.angles + (walk.span - args.pages.spans) * args.rotary_pairs;
    }

    /// Element `e` of a query row, rotated back by `angles` if there are any.
    __device__ float query_element(const uint8* row, int e, const float2* angles) const {
        const float x = Q::load_one(row + e * Q::BYTES);
        if (angles == nullptr || e >= 2 * args.rotary_pairs) return x;
        const int pair = args.interleaved ? e / 2 : e % args.rotary_pairs;
        const bool second = args.interleaved ? e % 2 : e >= args.rotary_pairs;
        const int other = args.interleaved ? e ^ 1 : second ? e - args.rotary_pairs : e + args.rotary_pairs;
        const float y = Q::load_one(row + other * Q::BYTES);
        return x * angles[pair].x + (second ? -y : y) * angles[pair].y;
    }

    __device__ float* exchange(int team) const { return exchanged + team * Shape::ROWS * (Shape::EXCHANGE + 2); }

    __device__ float top_of(int team, int row) const { return exchange(team)[Shape::ROWS * Shape::EXCHANGE + row]; }
    __device__ float sum_of(int team, int row) const {
        return exchange(team)[Shape::ROWS * Shape::EXCHANGE + Shape::ROWS + row];
    }

    /// Maximum and sum of a row over all teams.
    __device__ void total(int row, float& highest, float& all) const {
        highest = minus_infinity();
        for (int t = 0; t < TEAMS; ++t) highest = fmaxf(highest, top_of(t, row));
        all = 0.0f;
        for (int t = 0; t < TEAMS; ++t) all += sum_of(t, row) * factor(top_of(t, row), highest);
    }

    /// What values relative to `top` are multiplied with to be relative to `highest`.
    __device__ static float factor(float top, float highest) {
        return top == minus_infinity() ? 0.0f : exp2_fast(top - highest);
    }

    __device__ float value_of(int row, int column, float highest) const {
        float value = 0.0f;
        for (int t = 0; t < TEAMS; ++t) {
            value += factor(top_of(t, row), highest) * exchange(t)[row * Shape::EXCHANGE + column];
        }
        return value;
    }

    /// Writes one row's log-sum-exp and one of its values: 0 and -inf where the row saw nothing.
    __device__ void write(int row, int column, float value, float highest, float all) const {
        const int64 token = token_of(row);
        const int query_head = head_of(row);
        const float x = all > 0.0f ? value / all : 0.0f;
        store_one(args.out.row(token, query_head) + column * Q::BYTES, x);
        if (column == 0 && args.lse != nullptr) {
            args.lse[token * args.kv_heads * args.group + query_head] =
                all > 0.0f ? (highest + log2f(all)) * LN_2 : minus_infinity();
        }
    }

    __device__ static void store_one(uint8* target, float x) {
        if constexpr (Q::BYTES == 4) {
            *reinterpret_cast<float*>(target) = x;
        } else {
            *reinterpret_cast<unsigned short*>(target) = static_cast<unsigned short>(Pair<typename Q::Element>::pack(x, 0.0f));
        }
    }

    /// Writes the output of a unit that this thread block has done alone.
    __device__ void write_all() const {
        for (int i = threadIdx.x; i < rows * DV; i += Shape::THREADS) {
            float highest, all;
            total(i / DV, highest, all);
            write(i / DV, i % DV, value_of(i / DV, i % DV, highest), highest, all);
        }
    }

    __device__ void write_partial(int64 slot) const {
        float* partial = args.partials + slot * Shape::PARTIAL;
        for (int i = threadIdx.x; i < rows * DV; i += Shape::THREADS) {
            float highest, all;
            total(i / DV, highest, all);
            partial[i] = value_of(i / DV, i % DV, highest);
            if (i % DV == 0) {
                partial[Shape::ROWS * DV + i / DV] = highest;
                partial[Shape::ROWS * DV + Shape::ROWS + i / DV] = all;
            }
        }
    }

    /// Merges `count` partial results in order; `slot` names them.
    template <class Slot>
    __device__ void merge(int count, Slot slot) const {
        for (int i = threadIdx.x; i < rows * DV; i += Shape::THREADS) {
            const int row = i / DV;
            float highest = minus_infinity();
            for (int part = 0; part < count; ++part) {
                highest = fmaxf(highest, __ldcg(args.partials + slot(part) * Shape::PARTIAL + Shape::ROWS * DV + row));
            }
            float value = 0.0f, all = 0.0f;
            for (int part = 0; part < count; ++part) {
                const float* partial = args.partials + slot(part) * Shape::PARTIAL;
                const float weight = factor(__ldcg(partial + Shape::ROWS * DV + row), highest);
                value += weight * __ldcg(partial + i);
                all += weight * __ldcg(partial + Shape::ROWS * DV + Shape::ROWS + row);
            }
            write(row, i % DV, value, highest, all);
        }
    }

    /// Counts finished parts of the unit; true in the thread block that finished the last of `count`.
    __device__ bool is_last(int unit, int count) const {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            const bool last = atomicAdd(args.pending + unit, 1) == count - 1;
            if (last) args.pending[unit] = 0;
            *flag = last;
        }
        __syncthreads();
        const bool last = *flag != 0;
        __threadfence();
        __syncthreads();
        return last;
    }
};

}  // namespace pagoda
