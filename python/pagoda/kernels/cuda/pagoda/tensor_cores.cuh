// What the tensor-core engines of attention have in common, over 16-bit and quantised rows: queries in shared memory, and the loop
// over the stages of a unit. An engine computes scores and values: few_queries.cuh for decode, many_queries.cuh for the rest.
#pragma once

#include <pagoda/quantised.cuh>
#include <pagoda/ring.cuh>
#include <pagoda/rotation.cuh>

namespace pagoda {

/// Where a thread is on its way through the stages of a unit. prepared: the span that queries are prepared for. sub: the part of the tiles
/// that the next stage is. ahead: stages whose copies have been started and that are yet to be computed.
struct Way {
    Walk walk;
    PageWindow window;
    int prepared, sub, ahead;
};

/// The parameters of a kernel and what they imply. K, V: row formats of 16 bits or less, or FromV for K, or PartOfK for V. Q: the format
/// of queries and outputs. D, DV: head_dim and v_head_dim, multiples of 8, or of what formats ask for. ROWS: query rows of a unit at most.
/// WARPS: of a team. TEAMS: that have a ring of STAGES each. LONG: stored rows of a stage at most. PARKED: the way through the stages is put
/// into shared memory while one is computed, for want of registers.
template <class K_, class V_, class Q_, int D_, int DV_, int ROWS_, int WARPS_, int TEAMS_, int LONG, int STAGES_, bool PARKED_ = false>
struct TensorShape {
    using K = K_;
    using V = typename StoredV<K_, V_>::Format;
    using Q = Q_;
    static constexpr bool V_IN_K = StoredV<K_, V_>::IN_K;
    static constexpr int D = D_, DV = DV_, ROWS = ROWS_, WARPS = WARPS_, TEAMS = TEAMS_, STAGES = STAGES_;
    static constexpr bool PARKED = PARKED_;
    static_assert(WARPS == 1 || TEAMS == 1, "a team of several warps uses the barrier of the thread block");
    static_assert(D % K::UNIT == 0 && DV % V::UNIT == 0, "rows are whole units");
    static_assert(STAGES >= 2, "a stage to fill beside the one that is read");
    static constexpr int TEAM = WARP * WARPS, THREADS = TEAM * TEAMS;
    /// Tiles that teams work on at once, the stored rows of a team among them, those of a stage, whose scores a warp holds at once,
    /// and how many stages a team's rows are.
    static constexpr int TILES = TEAMS * LONG > TILE ? TEAMS * LONG / TILE : 1, SLICE = TILE * TILES / TEAMS;
    static constexpr int SCORES = SLICE < LONG ? SLICE : LONG, SUBS = SLICE / SCORES;
    /// Elements of a K row with zeros behind it, for whole steps of 16.
    static constexpr int DEPTH = (D + 15) / 16 * 16;
    /// Queries as products take them, and rows of a stage as they are stored.
    using QRows = SharedRows<DEPTH * 2>;
    using KRows = SharedRows<DEPTH * K::BITS / 8>;
    using VRows = SharedRows<(V_IN_K ? DEPTH : DV) * V::BITS / 8>;
    static constexpr int Q_SPLITS = Splits<Q, typename K::Keys>::COUNT;
    /// Weights are as exact as queries are: 16-bit queries are content with 16-bit weights.
    static constexpr int P_SPLITS = Q::BYTES == 4 || V::QUANTISED ? Splits<Q, typename V::Values>::COUNT : 1;
    /// Query rows are brought to a range in which small elements are not lost where f16 has to hold another type, or what a
    /// rotation makes of them.
    static constexpr bool Q_SCALED = K::QUANTISED || K::Keys::MIN_EXPONENT > Q::MIN_EXPONENT;
    static constexpr int Q_SPLIT_BYTES = QRows::bytes(Q_SPLITS * ROWS);
    /// Of each row a factor, and where K may be centred what that adds to its scores.
    static constexpr int Q_BYTES = Q_SPLIT_BYTES + ROWS * 4 * (K::QUANTISED ? 2 : 1);
    static constexpr int K_SCALES = KRows::bytes(SCORES), K_BYTES = K_SCALES + SCORES * K::scale_bytes(D);
    static constexpr int V_SCALES = VRows::bytes(SCORES), V_BYTES = V_SCALES + SCORES * V::scale_bytes(DV);
    static constexpr int V_START = V_IN_K ? 0 : K_BYTES, NOTE_START = V_IN_K ? K_BYTES : K_BYTES + V_BYTES;
    static constexpr int STAGE_BYTES = NOTE_START + 32;
    /// Floats of a row of values on their way between teams.
    static constexpr int EXCHANGE = DV + 4;
    static constexpr int EXCHANGE_BYTES = TEAMS * ROWS * (EXCHANGE + 2) * 4;
    static constexpr int WAYS_START = TEAMS * STAGES * STAGE_BYTES;
    static constexpr int RING_BYTES = WAYS_START + (PARKED ? THREADS * static_cast<int>(sizeof(Way)) : 0) + 16;
    static constexpr int SHARED_BYTES = Q_BYTES + (RING_BYTES > EXCHANGE_BYTES ? RING_BYTES : EXCHANGE_BYTES) + KEPT_BYTES;
    /// Floats of a partial result: values, then maxima, then sums.
    static constexpr int PARTIAL = ROWS * DV + 2 * ROWS;
};

template <int WARPS>
__device__ void team_barrier() {
    if (WARPS == 1) {
        __syncwarp();
    } else {
        __syncthreads();
    }
}

/// Everything of one thread while it works on a unit, but for what is the engine's: `begin` (nothing is summed), `take_queries` (from
/// shared memory, with what was made of them), `compute_stage` and `give` (this thread's share of the result to the exchange).
template <class Shape_, class Engine>
struct TensorCores : Ring<Shape_> {
    using Shape = Shape_;
    using Q = typename Shape::Q;
    using K = typename Shape::K;
    using V = typename Shape::V;
    using Unit<Shape>::args;
    using Unit<Shape>::block;
    using Unit<Shape>::rows;
    using Ring<Shape>::lane;
    using Ring<Shape>::warp;
    using Ring<Shape>::ring;
    using Ring<Shape>::note;
    using KElement = typename K::Keys::Element;
    using VElement = typename V::Values::Element;
    /// Weights are relative to so much less than the maximum: until `give` sums are 2^LIFT times too large.
    static constexpr int LIFT = V::Values::LIFT;
    static constexpr int D = Shape::D, DV = Shape::DV, STAGES = Shape::STAGES, TEAMS = Shape::TEAMS;

    uint8* const q_shared;

    __device__ explicit TensorCores(const Attend& args_) : Ring<Shape>(args_, Shape::Q_BYTES), q_shared(shared_memory()) {}

    __device__ Engine& engine() { return static_cast<Engine&>(*this); }

    /// Writes the zeros behind K rows, which copies never touch and the exchange may have overwritten.
    __device__ void pad_keys() const {
        if constexpr (D < Shape::DEPTH && K::BITS > 0) {
            // A team does so in its own stages: there may be no barrier between what other teams write and this one reads.
            for (int i = thread_here() % Shape::TEAM; i < STAGES * Shape::SCORES; i += Shape::TEAM) {
                uint8* const keys = this->stage(i / Shape::SCORES);
                *reinterpret_cast<uint4*>(keys + Shape::KRows::place(i % Shape::SCORES, D / 8)) = make_uint4(0, 0, 0, 0);
            }
        }
    }

    /// Brings the queries of the unit to shared memory as 16-bit elements, and the rests of what those cannot hold.
    __device__ void load_queries(const Span* span) {
        __syncthreads();
        if constexpr (K::QUANTISED) {
            for (int row = thread_here() / WARP; row < Shape::ROWS; row += Shape::THREADS / WARP) prepare_query(row, span);
        } else {
            copy_queries(span);
        }
        __syncthreads();
        engine().take_queries();
    }

    /// By how much each query row has been multiplied, a power of two; behind that what centring K adds to its scores.
    __device__ float* factors() const { return reinterpret_cast<float*>(q_shared + Shape::Q_SPLIT_BYTES); }

    /// What scores of a row are multiplied with.
    __device__ float scale_of_row(int row) const { return args.scale * __uint_as_float((254u << 23) - __float_as_uint(factors()[row])); }

    /// Query rows for K that is not quantised: a warp a row, two elements a lane. Some rows are asked for at once.
    __device__ void copy_queries(const Span* span) const {
        constexpr int WARPS = Shape::THREADS / WARP, PAIRS = (Shape::DEPTH / 2 + WARP - 1) / WARP, MANY = PAIRS < 4 ? 8 / PAIRS : 2;
        constexpr int COUNT = MANY < Shape::ROWS / WARPS ? MANY : Shape::ROWS / WARPS;
        static_assert(Shape::ROWS % (COUNT * WARPS) == 0, "all warps have as many rows");
#pragma unroll 1
        for (int first = thread_here() / WARP; first < Shape::ROWS; first += COUNT * WARPS) {
            float2 x[COUNT][PAIRS];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) load_query_row(x[i], first + i * WARPS, span);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int row = first + i * WARPS;
                float factor = 1.0f;
                if (Shape::Q_SCALED && row < rows) {
                    float largest = 0.0f;
#pragma unroll
                    for (int k = 0; k < PAIRS; ++k) largest = fmaxf(largest, fmaxf(fabsf(x[i][k].x), fabsf(x[i][k].y)));
                    factor = factor_for(largest);
                }
                if (lane_of_warp() == 0) factors()[row] = factor;
#pragma unroll
                for (int k = 0; k < PAIRS; ++k) {
                    const int e = 2 * (lane_of_warp() + k * WARP);
                    if (e < Shape::DEPTH) store_query(row, e, x[i][k].x * factor, x[i][k].y * factor);
                }
            }
        }
    }

    /// This lane's elements of a query row; zeros where there are none.
    template <int PAIRS>
    __device__ void load_query_row(float2 (&x)[PAIRS], int row, const Span* span) const {
        const bool real = row < rows;
        const uint8* const source = real ? args.q.row(this->token_of(row), this->head_of(row)) : nullptr;
        const float2* const angles = real ? this->angles_of(span, row) : nullptr;
#pragma unroll
        for (int k = 0; k < PAIRS; ++k) {
            const int e = 2 * (lane_of_warp() + k * WARP);
            x[k] = {0.0f, 0.0f};
            if (real && e < D) x[k] = {this->query_element(source, e, angles), this->query_element(source, e + 1, angles)};
        }
    }

    /// The power of two that brings the largest element that lanes have seen to about 2^8. At most 2^66: a scale of 1e-18 divided by that
    /// is not below 2^-126, where -ftz makes it 0, which times the -inf of what is masked would be NaN.
    __device__ static float factor_for(float largest) {
        for (int step = WARP / 2; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        const int exponent = 127 + 8 + 127 - static_cast<int>(__float_as_uint(largest) >> 23);
        return __uint_as_float(static_cast<uint32>(min(exponent, 127 + 66)) << 23);
    }

    /// A query row for quantised K: rotated as K rows were, in the order of their elements. For a whole warp. With its factor
    /// goes what centring K adds to its scores.
    __device__ void prepare_query(int row, const Span* span) const {
        constexpr int PARTS = parts_of(D);
        const int lane = lane_of_warp();
        float x[PARTS][4] = {};
        float factor = 1.0f, bias = 0.0f;
        if (row < rows) {
            const uint8* source = args.q.row(this->token_of(row), this->head_of(row));
            const float2* angles = this->angles_of(span, row);
            const float* center = args.center == nullptr ? nullptr : args.center + this->kv_head() * D;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const int first = first_of(p, lane);
                if (first >= D) continue;
                for (int i = 0; i < 4; ++i) {
                    x[p][i] = this->query_element(source, first + i, angles);
                    if (center != nullptr) bias = fmaf(x[p][i], center[first + i], bias);
                }
            }
            if (center != nullptr) {
                for (int step = WARP / 2; step > 0; step /= 2) bias += __shfl_xor_sync(~0u, bias, step);
            }
            if (args.rotate_k) Rotation<PARTS>(D, lane).rotate(x);
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < 4 * PARTS; ++i) largest = fmaxf(largest, fabsf(x[i / 4][i % 4]));
            factor = factor_for(largest);
        }
        if (lane == 0) {
            const float in_units = factor * K::template Decoder<KElement>::unit();
            factors()[row] = in_units;
            factors()[Shape::ROWS + row] = bias * in_units;
        }
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const int first = first_of(p, lane);
            if (first >= D) continue;
            // Elements at a place and the next of the order are two apart.
            for (int i = 0; i < 2; ++i) store_query(row, place_of(first + i), x[p][i] * factor, x[p][i + 2] * factor);
        }
    }

    /// Writes two elements of a query row, in as many parts as they have.
    __device__ void store_query(int row, int place, float x, float y) const {
#pragma unroll
        for (int s = 0; s < Shape::Q_SPLITS; ++s) {
            const uint32 pair = Pair<KElement>::pack(x, y);
            x -= Pair<KElement>::low(pair);
            y -= Pair<KElement>::high(pair);
            *reinterpret_cast<uint32*>(q_shared + Shape::QRows::place_of_byte(s * Shape::ROWS + row, place * 2)) = pair;
        }
    }

    /// Two numbers as number `i` of so many fragments, which together hold them.
    template <int SPLITS, int COUNT>
    __device__ static void split_pair(uint32 (&parts)[SPLITS][COUNT], int i, float x, float y) {
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
            parts[s][i] = Pair<VElement>::pack(x, y);
            x -= Pair<VElement>::low(parts[s][i]);
            y -= Pair<VElement>::high(parts[s][i]);
        }
    }

    /// Makes what is infinite or NaN of two values 0, and returns ones where it found something.
    __device__ static uint32 take_out_pair(uint32& pair) {
        constexpr uint32 EXPONENT = Pair<VElement>::EXPONENT;
        const bool low = (pair & EXPONENT) == EXPONENT, high = (pair >> 16 & EXPONENT) == EXPONENT;
        pair &= (low ? 0xffff0000u : ~0u) & (high ? 0x0000ffffu : ~0u);
        return Pair<VElement>::pack(low, high);
    }

    /// Starts copying the next stage, if there is one, to number `index` of the ring.
    __device__ void advance(Way& way, int index) const {
        if (way.walk.left > 0) {
            const int tiles = this->tiles_of(way.walk);
            this->copy_stage(index, way.walk, tiles, way.sub, way.window);
            ++way.ahead;
            if (++way.sub == Shape::SUBS) {
                const Span* span = way.walk.span;
                way.sub = 0;
                for (int i = 0; i < tiles; ++i) way.walk.next(block());
                if (way.walk.span != span) way.window.base = -1;
            }
        }
        copy_commit();
    }

    __device__ Way& parked() const { return reinterpret_cast<Way*>(ring + Shape::WAYS_START)[thread_here()]; }

    /// Goes over the tiles (or the run) from `from` on. Leaves maxima, sums and values of all teams in the exchange.
    __device__ void work(int from, int count) {
        Way way;
        way.walk.start(args.pages, block(), from, count, args.division != TILES);
        way.prepared = static_cast<int>(way.walk.span - args.pages.spans);
        way.sub = way.ahead = 0;
        // Queries are there from before where the unit goes on in the middle of a span.
        const bool queries_are_there = this->begun && way.walk.tile > way.walk.piece.first_tile();
        pad_keys();
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) advance(way, i);
        engine().begin();
        if (queries_are_there) {
            engine().take_queries();
        } else {
            load_queries(args.pages.spans + way.prepared);
        }
        if (Shape::PARKED) parked() = way;
        // All teams have as many stages, of the same spans.
        for (int at = 0;; at = at + 1 == STAGES ? 0 : at + 1) {
            copy_wait<STAGES - 2>();
            // The stage has arrived for all, and all are done with the one before, whose place is filled next.
            team_barrier<Shape::WARPS>();
            if (Shape::PARKED) way = parked();
            if (way.ahead == 0) break;
            advance(way, at == 0 ? STAGES - 1 : at - 1);
            --way.ahead;
            const int span = note(at).span;
            if (span != way.prepared) {
                if (!args.pages.spans[span].turns_as(args.pages.spans[way.prepared])) load_queries(args.pages.spans + span);
                way.prepared = span;
            }
            if (Shape::PARKED) parked() = way;
            engine().compute_stage(at);
        }
        copy_wait<0>();
        __syncthreads();
        engine().give();
        __syncthreads();
        if constexpr (V::QUANTISED && !Shape::V_IN_K) {
            if (args.rotate_v) rotate_results();
        }
    }

    /// Rotates the results of all teams back, one warp a row: what is linear may be done before they are merged.
    __device__ void rotate_results() const {
        const int lane = lane_of_warp();
        for (int i = thread_here() / WARP; i < TEAMS * Shape::ROWS; i += Shape::THREADS / WARP) {
            const int row = i % Shape::ROWS;
            if (row >= rows) continue;
            constexpr int PARTS = parts_of(DV);
            float* const values = this->exchange(i / Shape::ROWS) + row * Shape::EXCHANGE;
            float x[PARTS][4] = {};
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if (first_of(p, lane) < DV) F32::load_four(values + first_of(p, lane), x[p]);
            }
            Rotation<PARTS>(DV, lane).rotate_back(x);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if (first_of(p, lane) < DV) F32::store_four(values + first_of(p, lane), x[p]);
            }
        }
        __syncthreads();
    }
};

}  // namespace pagoda
