// The engine of attention over rows of any format: float arithmetic on CUDA cores. Rows of 32 bits have no other.
#pragma once

#include <pagoda/derived.cuh>

namespace pagoda {

/// The parameters of a kernel and what they imply, as in TensorShape. ROWS: query rows of a unit at most.
template <class K_, class V_, class Q_, int D_, int DV_, int ROWS_>
struct CoreShape {
    using K = K_;
    using V = typename StoredV<K_, V_>::Format;
    using Q = Q_;
    static constexpr int D = D_, DV = DV_, ROWS = ROWS_, TEAMS = 1, THREADS = 128;
    /// Stored rows that are in shared memory at once.
    static constexpr int KEYS = D + DV > 512 ? 16 : 32;
    /// Values of a row that a thread holds.
    static constexpr int COLUMNS = (DV + THREADS - 1) / THREADS;
    /// Floats of a row: lanes that read one row each meet in few banks.
    static constexpr int DEPTH = D + 4, EXCHANGE = DV + 4;
    static constexpr bool V_IN_K = StoredV<K_, V_>::IN_K, FROM_V = K::BITS == 0;
    static constexpr int V_DEPTH = V_IN_K ? DEPTH : DV;
    static constexpr int Q_FLOATS = ROWS * D, K_FLOATS = KEYS * DEPTH, V_FLOATS = V_IN_K ? 0 : KEYS * DV;
    static constexpr int SCORE_FLOATS = ROWS * KEYS + 3 * ROWS;
    static constexpr int EXCHANGE_FLOATS = ROWS * (EXCHANGE + 2);
    static constexpr int RING_FLOATS = K_FLOATS + V_FLOATS > EXCHANGE_FLOATS ? K_FLOATS + V_FLOATS : EXCHANGE_FLOATS;
    static constexpr int SHARED_BYTES = 4 * (Q_FLOATS + SCORE_FLOATS + RING_FLOATS) + KEPT_BYTES;
    static constexpr int PARTIAL = ROWS * DV + 2 * ROWS;
};

template <class Shape_>
struct CudaCores : Unit<Shape_> {
    using Shape = Shape_;
    using Unit<Shape>::args;
    using Unit<Shape>::block;
    using Unit<Shape>::rows;
    static constexpr int D = Shape::D, DV = Shape::DV, ROWS = Shape::ROWS, KEYS = Shape::KEYS;
    /// As in TensorCores.
    static constexpr int BLOCKS = 2;

    float *const query, *const scores, *const tops, *const sums, *const decays, *const keys, *const values_of_keys;
    /// Columns threadIdx.x, threadIdx.x + THREADS, ... of every row.
    float values[ROWS][Shape::COLUMNS];

    __device__ explicit CudaCores(const Attend& args_)
        : Unit<Shape>(args_, floats() + Shape::Q_FLOATS + Shape::SCORE_FLOATS, floats()),
          query(floats()),
          scores(query + Shape::Q_FLOATS),
          tops(scores + ROWS * KEYS),
          sums(tops + ROWS),
          decays(sums + ROWS),
          keys(query + Shape::Q_FLOATS + Shape::SCORE_FLOATS),
          values_of_keys(Shape::V_IN_K ? keys : keys + Shape::K_FLOATS) {}

    __device__ static float* floats() { return reinterpret_cast<float*>(shared_memory()); }

    __device__ void load_queries(const Span* span) {
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * D; i += Shape::THREADS) {
            const int row = i / D;
            const bool real = row < rows;
            float x = 0.0f;
            if (real) {
                const uint8* source = args.q.row(this->token_of(row), this->head_of(row));
                x = this->query_element(source, i % D, this->angles_of(span, row));
            }
            query[i] = x;
        }
        __syncthreads();
    }

    /// Brings KEYS rows of one plane from `first` on to shared memory; zeros where the piece has none.
    template <class Format, int DIM, int STRIDE>
    __device__ void load_rows(float* target, const Strip& plane, const Walk& walk, int first) const {
        const int shift = args.pages.page_shift;
        const uint32* const table = this->table_of(walk);
        for (int i = threadIdx.x; i < KEYS * DIM / 8; i += Shape::THREADS) {
            const int row = i / (DIM / 8), chunk = i % (DIM / 8), stored = first + row;
            float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            if (stored >= walk.piece.low && stored < walk.piece.high) {
                const uint8* page = args.pages.block(table[stored >> shift]) + plane.offset + this->kv_head() * plane.head_stride;
                Format::load(page + (static_cast<int64>(stored & ((1 << shift) - 1)) * DIM + chunk * 8) * Format::BYTES, x);
            }
            for (int e = 0; e < 8; ++e) target[row * STRIDE + chunk * 8 + e] = x[e];
        }
    }

    /// Makes keys from the loaded values.
    __device__ void derive(const Walk& walk, int first) const {
        const auto value = [=](int row, int e) { return values_of_keys[row * Shape::V_DEPTH + e]; };
        const auto keep = [=](int row, int e, float x) { keys[row * Shape::DEPTH + e] = x; };
        const int span = static_cast<int>(walk.span - args.pages.spans);
        derive_keys<D, D, KEYS, Shape::THREADS>(args, span, walk.span->origin() + first, value, keep);
    }

    /// Scores of all query rows with the loaded keys: base-2 logarithms, -inf where the query does not see the key.
    __device__ void score(const Walk& walk, int first) const {
        for (int i = threadIdx.x; i < ROWS * KEYS; i += Shape::THREADS) {
            const int row = i / KEYS, key = i % KEYS, stored = first + key, place = walk.span->origin() + stored;
            const int last = block().position + row / args.group;
            float score = minus_infinity();
            const bool near = walk.span->always() || place > last - args.window;
            if (stored >= walk.piece.low && stored < walk.piece.high && place <= last && near) {
                float sum = 0.0f;
                for (int d = 0; d < D; ++d) sum = fmaf(query[row * D + d], keys[key * Shape::DEPTH + d], sum);
                score = sum * args.scale;
                if (args.softcap > 0.0f) score = args.softcap * tanh_fast(score);
            }
            scores[i] = score;
        }
    }

    /// Online softmax of the scores, one warp a row.
    __device__ void weigh() const {
        const int lane = threadIdx.x % WARP;
        for (int row = threadIdx.x / WARP; row < ROWS; row += Shape::THREADS / WARP) {
            const float mine = lane < KEYS ? scores[row * KEYS + lane] : minus_infinity();
            float highest = mine;
            for (int step = WARP / 2; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
            const float before = tops[row];
            highest = fmaxf(highest, before);
            const float base = highest == minus_infinity() ? 0.0f : highest;
            const float weight = exp2f(mine - base);
            float total = weight;
            for (int step = WARP / 2; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
            __syncwarp();
            if (lane < KEYS) scores[row * KEYS + lane] = weight;
            if (lane == 0) {
                decays[row] = exp2f(before - base);
                tops[row] = highest;
                sums[row] = sums[row] * decays[row] + total;
            }
        }
    }

    __device__ void accumulate() {
#pragma unroll
        for (int c = 0; c < Shape::COLUMNS; ++c) {
            const int column = threadIdx.x + c * Shape::THREADS;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) values[row][c] *= decays[row];
            for (int key = 0; key < KEYS; ++key) {
                const float x = column < DV ? values_of_keys[key * Shape::V_DEPTH + column] : 0.0f;
#pragma unroll
                for (int row = 0; row < ROWS; ++row) {
                    const float weight = scores[row * KEYS + key];
                    // What a query does not see may be NaN.
                    if (weight > 0.0f) values[row][c] = fmaf(weight, x, values[row][c]);
                }
            }
        }
    }

    /// As TensorCores::work.
    __device__ void work(int from, int count) {
        Walk walk;
        walk.start(args.pages, block(), from, count, args.division != TILES);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int c = 0; c < Shape::COLUMNS; ++c) values[row][c] = 0.0f;
        }
        for (int row = threadIdx.x; row < ROWS; row += Shape::THREADS) {
            tops[row] = minus_infinity();
            sums[row] = 0.0f;
        }
        const Span* prepared = walk.span;
        load_queries(prepared);
        for (; walk.left > 0; walk.next(block())) {
            if (!walk.span->turns_as(*prepared)) {
                prepared = walk.span;
                load_queries(prepared);
            }
            for (int first = walk.tile * TILE; first < (walk.tile + 1) * TILE; first += KEYS) {
                if constexpr (!Shape::FROM_V) load_rows<typename Shape::K, D, Shape::DEPTH>(keys, args.k_plane.rows, walk, first);
                if constexpr (!Shape::V_IN_K) load_rows<typename Shape::V, DV, DV>(values_of_keys, args.v_plane.rows, walk, first);
                __syncthreads();
                if constexpr (Shape::FROM_V) {
                    derive(walk, first);
                    __syncthreads();
                }
                score(walk, first);
                __syncthreads();
                weigh();
                __syncthreads();
                accumulate();
                __syncthreads();
            }
        }
        float* out = this->exchange(0);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int c = 0; c < Shape::COLUMNS; ++c) {
                const int column = threadIdx.x + c * Shape::THREADS;
                if (column < DV) out[row * Shape::EXCHANGE + column] = values[row][c];
            }
        }
        for (int row = threadIdx.x; row < ROWS; row += Shape::THREADS) {
            out[ROWS * Shape::EXCHANGE + row] = tops[row];
            out[ROWS * Shape::EXCHANGE + ROWS + row] = sums[row];
        }
        __syncthreads();
    }
};

}  // namespace pagoda
