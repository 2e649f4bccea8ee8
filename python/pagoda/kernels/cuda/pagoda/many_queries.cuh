// The attention engine for many queries: query rows are the left factors of products, 16 or 32 of them a warp. With 128 query rows a
// team of four warps goes over all stored rows, each warp for its own 32 query rows, so that a fragment of K or V from shared memory
// serves two products.
#pragma once

#include <pagoda/derived.cuh>
#include <pagoda/tensor_cores.cuh>

namespace pagoda {

/// Stored rows of a stage: warps wait for each other at each, and few have no shared memory to spare.
template <class K, class V, int WARPS>
__device__ constexpr int rows_of_many(int elements) {
    const bool plain = K::BITS == 16 && StoredV<K, V>::Format::BITS == 16;
    return plain && elements <= 256 && WARPS >= 4 ? 64 : elements <= 512 ? 32 : 16;
}

/// COLUMNS: warps that share query rows, each for its part of the values, where these do not fit the registers of one. STACK: 16 query
/// rows that a warp has, so many times.
template <class K_, class V_, class Q_, int D_, int DV_, int WARPS_, int COLUMNS_, int STACK_, int STAGES_>
struct ManyShape
    : TensorShape<K_, V_, Q_, D_, DV_, 16 * STACK_ * WARPS_ / COLUMNS_, WARPS_, 1, rows_of_many<K_, V_, WARPS_>(D_ + DV_), STAGES_,
                  (STACK_ > 1 && rows_of_many<K_, V_, WARPS_>(D_ + DV_) > 16)> {
    using Common = typename ManyShape::TensorShape;
    using V = typename Common::V;
    static constexpr int COLUMNS = COLUMNS_, STACK = STACK_;
    static_assert(DV_ % (V::UNIT * COLUMNS) == 0, "a warp has whole units of columns");
    /// Elements of V that a warp accumulates.
    static constexpr int WIDTH = DV_ / COLUMNS;
    /// Stored rows whose scores a warp holds at once: with more of them, what is loaded of queries serves more products. 64 take all
    /// registers. PORTION: of so many the maximum is taken, whatever the stack, so that results are the same.
    static constexpr int MOST = STACK > 1 && !Common::Q_SCALED && !Common::V_IN_K ? 64 : 32;
    static constexpr int KEYS = Common::SCORES < MOST ? Common::SCORES : MOST, PORTION = KEYS < 32 ? KEYS : 32;
    /// What is quantised of a stage is decoded for all warps at once, behind the ring. Results may take that place, too.
    using DecodedK = DecodedRows<K_, typename K_::Keys, D_, Common::SCORES>;
    using DecodedV = DecodedRows<V, typename V::Values, DV_, Common::SCORES>;
    /// Query fragments stay in registers where these hold them beside values and scores, and a part of sums that have a scale.
    static constexpr bool Q_IN_REGISTERS =
        STACK * (Common::Q_SPLITS * Common::DEPTH / 4 + WIDTH / 2 + KEYS / 2 * (1 + DecodedK::SCALED)) < 120;
    /// Keys that are made from values lie there, too: for float queries as two elements that together hold them.
    static constexpr bool FROM_V = K_::BITS == 0;
    static constexpr int KEY_PARTS = FROM_V && Common::Q::BYTES == 4 ? 2 : 1;
    /// Keys and values where products take them: elements of 16 bits.
    using Keys = SharedRows<Common::DEPTH * 2>;
    using Values = SharedRows<(Common::V_IN_K && !V::QUANTISED ? Common::DEPTH : DV_) * 2>;
    static constexpr int KEY_PART_BYTES = Keys::bytes(Common::SCORES);
    static constexpr int KEYS_START = Common::Q_BYTES + Common::RING_BYTES;
    static constexpr int VALUES_START = KEYS_START + (FROM_V ? KEY_PARTS * KEY_PART_BYTES : DecodedK::BYTES);
    static constexpr int DECODED_END = VALUES_START + DecodedV::BYTES + KEPT_BYTES;
    static constexpr int SHARED_BYTES = DECODED_END > Common::SHARED_BYTES ? DECODED_END : Common::SHARED_BYTES;
};

/// The engine.
template <class Shape_>
struct ManyQueries : TensorCores<Shape_, ManyQueries<Shape_>> {
    using Shape = Shape_;
    using Common = typename ManyQueries::TensorCores;
    using K = typename Shape::K;
    using V = typename Shape::V;
    using Unit<Shape>::args;
    using Unit<Shape>::block;
    using Unit<Shape>::rows;
    using Ring<Shape>::lane;
    using Ring<Shape>::warp;
    using Ring<Shape>::stage;
    using Ring<Shape>::note;
    using Common::q_shared;
    using KElement = typename Common::KElement;
    using VElement = typename Common::VElement;
    static constexpr int D = Shape::D, DV = Shape::DV, STACK = Shape::STACK, KEYS = Shape::KEYS, PORTION = Shape::PORTION;
    using Scores = float[STACK][KEYS / 8][4];
    /// Thread blocks of a multiprocessor that registers are sparing for: more would spill.
    static constexpr int BLOCKS = Shape::THREADS > 128 ? 1 : 2;

    /// Where the warp's query rows begin, and its values.
    const int first_row, first_column;
    /// Of the warp's rows lane / 4 + 8 r: running maximum, this lane's share of the sum.
    float top[2 * STACK], sum[2 * STACK];
    /// Of rows lane / 4 (0, 1) and lane / 4 + 8 (2, 3) of each 16.
    float values[STACK][Shape::WIDTH / 8][4];
    uint32 query[Shape::Q_IN_REGISTERS ? Shape::Q_SPLITS : 1][Shape::DEPTH / 16][STACK][4];

    __device__ explicit ManyQueries(const Attend& args_)
        : Common(args_), first_row(warp / Shape::COLUMNS * (16 * STACK)), first_column(warp % Shape::COLUMNS * Shape::WIDTH) {}

    __device__ void begin() {
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) top[r] = minus_infinity(), sum[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < STACK * Shape::WIDTH / 2; ++i) values[i / (Shape::WIDTH / 2)][i / 4 % (Shape::WIDTH / 8)][i % 4] = 0.0f;
    }

    __device__ void take_queries() {
        if constexpr (Shape::Q_IN_REGISTERS) {
#pragma unroll
            for (int s = 0; s < Shape::Q_SPLITS; ++s) {
#pragma unroll
                for (int k = 0; k < Shape::DEPTH / 16; ++k) load_query(query[s][k], s, k);
            }
        }
    }

    /// The row of the block that numbers `r` of this thread are of.
    __device__ int row_of(int r) const { return first_row + lane / 4 + 8 * r; }

    /// Left factors of a step.
    __device__ void query_of(uint32 (&a)[STACK][4], int split, int step) const {
        if constexpr (Shape::Q_IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < STACK * 4; ++i) a[i / 4][i % 4] = query[split][step][i / 4][i % 4];
        } else {
            load_query(a, split, step);
        }
    }

    __device__ void load_query(uint32 (&a)[STACK][4], int split, int step) const {
        const uint8* const mine = q_shared + Shape::QRows::beside(Shape::QRows::place(first_row + lane % 16, lane / 16), step * 2);
#pragma unroll
        for (int t = 0; t < STACK; ++t) load_matrix(a[t], mine + Shape::QRows::bytes(split * Shape::ROWS + t * 16));
    }

    /// What centring K adds to scores of numbers `r`.
    __device__ float bias_of(int r) const { return this->factors()[Shape::ROWS + row_of(r)]; }

    __device__ void compute_stage(int index) {
        const uint8 *keys = stage(index), *rows_of_v = keys + Shape::V_START;
        if constexpr (K::QUANTISED || V::QUANTISED) {
            decode(keys, rows_of_v);
            if (K::QUANTISED) keys = shared_memory() + Shape::KEYS_START;
            if (V::QUANTISED) rows_of_v = shared_memory() + Shape::VALUES_START;
            team_barrier<Shape::WARPS>();
        }
        if constexpr (Shape::FROM_V) {
            derive(note(index), rows_of_v);
            keys = shared_memory() + Shape::KEYS_START;
            team_barrier<Shape::WARPS>();
        }
        if (first_row >= rows) return;
#pragma unroll 1
        for (int first = 0; first < Shape::SCORES; first += KEYS) compute(note(index), first, keys, rows_of_v);
    }

    /// Scores, softmax and values of KEYS rows of a stage, from `first` on.
    __device__ void compute(const Note& note, int first, const uint8* keys, const uint8* rows_of_v) {
        Scores scores;
        score(scores, keys, first);
        if (args.softcap > 0.0f) cap(scores);
        const bool whole = note.whole;
        if (!whole) mask(scores, note, first);
        if (whole || (!V::QUANTISED && block().queries == 1)) {
            add<false>(scores, rows_of_v, first);
        } else {
            add<true>(scores, rows_of_v, first);
        }
    }

    /// Softmax and values of rows with scores.
    template <bool CAREFUL>
    __device__ void add(Scores& scores, const uint8* rows_of_v, int first) {
#pragma unroll
        for (int portion = 0; portion < KEYS; portion += PORTION) {
            weigh(scores, portion);
            accumulate<CAREFUL>(scores, rows_of_v, first, portion);
        }
    }

    /// Decodes what is quantised of the rows of a stage.
    __device__ void decode(const uint8* keys, const uint8* rows_of_v) const {
        if constexpr (K::QUANTISED) {
            const uint8* const scales = keys + Shape::K_SCALES;
            Shape::DecodedK::template decode<Shape::TEAM, typename Shape::KRows, D>(shared_memory() + Shape::KEYS_START, keys, scales);
        }
        if constexpr (V::QUANTISED) {
            constexpr int DIM = Shape::V_IN_K ? D : DV;
            const uint8* const scales = rows_of_v + (Shape::V_IN_K ? Shape::K_SCALES : Shape::V_SCALES);
            Shape::DecodedV::template decode<Shape::TEAM, typename Shape::VRows, DIM>(shared_memory() + Shape::VALUES_START, rows_of_v, scales);
        }
    }

    /// Makes the keys of a stage from its values, as products take these.
    __device__ void derive(const Note& note, const uint8* rows_of_v) const {
        const auto value = [=](int row, int e) {
            if constexpr (V::QUANTISED) {
                constexpr int BLOCK = DV / Shape::DecodedV::BLOCKS;
                const float code = V::Values::load_one(rows_of_v + Shape::Values::place_of_byte(row, place_of(e) * 2));
                return code * Shape::DecodedV::scale(rows_of_v, e / BLOCK, row) / unit_of_values<V>();
            } else {
                return V::load_one(rows_of_v + Shape::Values::place_of_byte(row, e * 2));
            }
        };
        const auto keep = [=](int row, int e, float x) {
            uint8* target = shared_memory() + Shape::KEYS_START + Shape::Keys::place_of_byte(row, e * 2);
#pragma unroll
            for (int part = 0; part < Shape::KEY_PARTS; ++part, target += Shape::KEY_PART_BYTES) {
                const uint32 element = Pair<KElement>::pack(x, 0.0f);
                *reinterpret_cast<unsigned short*>(target) = static_cast<unsigned short>(element);
                x -= Pair<KElement>::low(element);
            }
        };
        derive_keys<D, Shape::DEPTH, Shape::SCORES, Shape::TEAM>(args, note.span, note.place, value, keep);
    }

    /// Products of queries and K rows. Those with codes that share a scale are summed by themselves, and multiplied with it.
    __device__ void score(Scores& scores, const uint8* keys, int first) const {
        constexpr int BLOCKS = Shape::DecodedK::BLOCKS, STEPS = Shape::DEPTH / 16 / BLOCKS;
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) {
            const float start = K::QUANTISED ? bias_of(r) : 0.0f;
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) scores[r / 2][i / 2][r % 2 * 2 + i % 2] = start;
        }
        if constexpr (Shape::DecodedK::SCALED) {
#pragma unroll(Shape::Q_IN_REGISTERS || BLOCKS <= 2 ? BLOCKS : 1)
            for (int block = 0; block < BLOCKS; ++block) {
                // Keeps loads of later blocks from being begun: registers are short.
                __syncwarp();
                Scores sums = {};
                multiply_keys<STEPS>(sums, keys, first, block * STEPS);
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n) {
                    const float2 scale = Shape::DecodedK::scales(keys, block, first + n * 8 + lane % 4 * 2);
#pragma unroll
                    for (int i = 0; i < 4 * STACK; ++i) {
                        float& score = scores[i / 4][n][i % 4];
                        score = fmaf(sums[i / 4][n][i % 4], i % 2 == 0 ? scale.x : scale.y, score);
                    }
                }
            }
        } else {
            multiply_keys<STEPS>(scores, keys, first, 0);
        }
    }

    /// Adds products of STEPS times 16 elements.
    template <int STEPS>
    __device__ void multiply_keys(Scores& sums, const uint8* keys, int first, int step) const {
        using Rows = typename Shape::Keys;
        const int mine = Rows::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
        keys += Rows::bytes(first);
#pragma unroll(Shape::Q_IN_REGISTERS ? STEPS : STEPS > 8 ? 4 : Shape::DecodedK::SCALED ? 2 : STEPS)
        for (int k = step; k < step + STEPS; ++k) {
            const uint8* const pieces = keys + Rows::beside(mine, k * 2);
#pragma unroll
            for (int s = 0; s < Shape::Q_SPLITS; ++s) {
                uint32 a[STACK][4];
                query_of(a, s, k);
                // Rests of queries times rests of keys are beyond what floats hold.
#pragma unroll
                for (int part = 0; part < (s == 0 ? Shape::KEY_PARTS : 1); ++part) {
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n += 2) {
                        uint32 b[4];
                        load_matrix(b, pieces + part * Shape::KEY_PART_BYTES + Rows::bytes(n * 8));
#pragma unroll
                        for (int t = 0; t < STACK; ++t) {
                            multiply_add(sums[t][n], a[t], b[0], b[1], KElement());
                            multiply_add(sums[t][n + 1], a[t], b[2], b[3], KElement());
                        }
                    }
                }
            }
        }
    }

    /// What numbers `r` of scores are multiplied with.
    __device__ float scale_of(int r) const { return Shape::Q_SCALED ? this->scale_of_row(row_of(r)) : args.scale; }

    /// Scores become hyperbolic tangents of what they were, scaled; `weigh` multiplies them with `softcap`.
    __device__ void cap(Scores& scores) const {
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) {
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) {
                float& score = scores[r / 2][i / 2][r % 2 * 2 + i % 2];
                score = tanh_fast(score * scale_of(r));
            }
        }
    }

    /// Makes scores of rows that their query does not see -inf.
    __device__ void mask(Scores& scores, const Note& note, int first) const {
        const int position = block().position;
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) {
            const int2 seen = note.seen(position + row_of(r) / args.group, args.window);
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) {
                const int row = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
                if (row < seen.x || row >= seen.y) scores[r / 2][i / 2][r % 2 * 2 + i % 2] = minus_infinity();
            }
        }
    }

    /// Online softmax: scores from `portion` on are scaled and become weights relative to the new maximum, and the values so far are scaled
    /// to it.
    __device__ void weigh(Scores& scores, int portion) {
        float decay[2 * STACK];
        bool same = true;
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) {
            const float(*const mine)[4] = scores[r / 2] + portion / 8;
            const int i = r % 2 * 2;
            float highest = minus_infinity();
#pragma unroll
            for (int n = 0; n < PORTION / 8; ++n) highest = fmaxf(highest, fmaxf(mine[n][i], mine[n][i + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
            // Factors are above 0: the largest stays the largest.
            highest = fmaxf(highest * factor_of(r), top[r]);
            decay[r] = exp2_fast(top[r] - base_of(highest));
            same &= decay[r] == 1.0f;
            top[r] = highest;
        }
        // Maxima settle soon: most stages leave the values as they are.
        if (!__all_sync(~0u, same)) scale_values(decay);
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) {
            float(*const mine)[4] = scores[r / 2] + portion / 8;
            const int i = r % 2 * 2;
            // Keeps weights of later rows from being begun: registers are short.
            if (K::QUANTISED || V::QUANTISED) __syncwarp();
            const float factor = factor_of(r), shift = Common::LIFT - base_of(top[r]);
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < PORTION / 8; ++n) {
                mine[n][i] = exp2_fast(fmaf(mine[n][i], factor, shift));
                mine[n][i + 1] = exp2_fast(fmaf(mine[n][i + 1], factor, shift));
                total += mine[n][i];
                total += mine[n][i + 1];
            }
            sum[r] += total;
        }
    }

    __device__ float factor_of(int r) const { return args.softcap > 0.0f ? args.softcap : scale_of(r); }

    /// Where nothing is seen so far every weight is exp2(-inf - 0) = 0.
    __device__ static float base_of(float top) { return top == minus_infinity() ? 0.0f : top; }

    /// Scales values and sums to a new maximum.
    __device__ void scale_values(const float (&decay)[2 * STACK]) {
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) {
            sum[r] *= decay[r];
#pragma unroll
            for (int n = 0; n < Shape::WIDTH / 8; ++n) {
                values[r / 2][n][r % 2 * 2] *= decay[r];
                values[r / 2][n][r % 2 * 2 + 1] *= decay[r];
            }
        }
    }

    /// Adds the V rows from `portion` on, times their weights, to the warp's values. CAREFUL: some queries do not see some of the rows, and what
    /// is infinite or NaN there, and times a weight of 0 is NaN, must not reach them. Codes are finite; scales are not looked at where
    /// the weight is 0.
    template <bool CAREFUL>
    __device__ void accumulate(const Scores& weights, const uint8* rows_of_v, int first, int portion) {
        // Columns for which weights are the same.
        constexpr int BLOCK = DV / Shape::DecodedV::BLOCKS;
        using Rows = typename Shape::Values;
        // Whether numbers of columns of a warp have no bit in common with the first one's.
        constexpr bool APART = Shape::WIDTH / 8 % Rows::TURNS == 0;
        const int mine = Rows::place(lane % 16, first_column / 8 + lane / 16);
#pragma unroll
        for (int k = portion / 16; k < (portion + PORTION) / 16; ++k) {
            // Keeps loads of later rows from being begun: registers are short.
            if (V::QUANTISED) __syncwarp();
            const uint8* const sixteen = rows_of_v + Rows::bytes(first + k * 16);
            uint32 a[STACK][Shape::P_SPLITS][4], sees[STACK][4];
#pragma unroll
            for (int n = 0; n < Shape::WIDTH / 8; n += 2) {
                if (n * 8 % BLOCK == 0) {
                    const int block = (first_column + n * 8) / BLOCK, row = first + k * 16 + lane % 4 * 2;
                    const float2 scale[2] = {Shape::DecodedV::scales(rows_of_v, block, row), Shape::DecodedV::scales(rows_of_v, block, row + 8)};
#pragma unroll
                    for (int t = 0; t < STACK; ++t) take_weights<CAREFUL>(a[t], sees[t], scale, weights[t][2 * k], weights[t][2 * k + 1]);
                }
                uint32 b[4];
                // Of an odd number of blocks the last is loaded twice where what lies behind it may be under way.
                const int block = first_column / 8 + n + (n + 1 < Shape::WIDTH / 8 ? lane / 16 : 0);
                load_matrix_transposed(b, sixteen + (APART ? Rows::beside(mine, n) : Rows::place(lane % 16, block)));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (n + half == Shape::WIDTH / 8) break;
                    uint32 &b0 = b[2 * half], &b1 = b[2 * half + 1];
                    if (CAREFUL && !Shape::DecodedV::SCALED) take_out(n + half, sees, b0, b1);
#pragma unroll
                    for (int t = 0; t < STACK; ++t) {
#pragma unroll
                        for (int s = 0; s < Shape::P_SPLITS; ++s) multiply_add(values[t][n + half], a[t][s], b0, b1, VElement());
                    }
                }
            }
        }
    }

    /// Weights of 16 rows, times the scales of stored rows 2 (lane % 4), the next, and those 8 further, as left factors which together
    /// hold them, and ones where they are above 0. What an accumulator holds of two column blocks is what a fragment of the left factor
    /// holds.
    template <bool CAREFUL>
    __device__ static void take_weights(uint32 (&a)[Shape::P_SPLITS][4], uint32 (&sees)[4], const float2 (&scale)[2], const float (&left)[4],
                                        const float (&right)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&half)[4] = i < 2 ? left : right;
            float x = half[i % 2 * 2], y = half[i % 2 * 2 + 1];
            sees[i] = Pair<VElement>::pack(x > 0.0f, y > 0.0f);
            if (Shape::DecodedV::SCALED && (!CAREFUL || x != 0.0f)) x = __fmul_rn(x, scale[i / 2].x);
            if (Shape::DecodedV::SCALED && (!CAREFUL || y != 0.0f)) y = __fmul_rn(y, scale[i / 2].y);
            Common::split_pair(a, i, x, y);
        }
    }

    /// Makes what is infinite or NaN in a fragment 0, and the values of queries that see it NaN.
    __device__ void take_out(int column, const uint32 (&sees)[STACK][4], uint32& b0, uint32& b1) {
        const uint32 marks[2] = {Common::take_out_pair(b0), Common::take_out_pair(b1)};
        if (!__any_sync(~0u, (marks[0] | marks[1]) != 0)) return;
#pragma unroll
        for (int t = 0; t < STACK; ++t) {
            float hits[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            multiply_add(hits, sees[t], marks[0], marks[1], VElement());
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (hits[i] > 0.0f) values[t][column][i] = __uint_as_float(0x7fc00000u);
            }
        }
    }

    /// Writes this thread's share of the result to the exchange.
    __device__ void give() {
        float* out = this->exchange(0);
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) {
            const int row = row_of(r);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            if (lane % 4 == 0 && first_column == 0) {
                out[Shape::ROWS * Shape::EXCHANGE + row] = top[r];
                out[Shape::ROWS * Shape::EXCHANGE + Shape::ROWS + row] = sum[r] / (1 << Common::LIFT);
            }
#pragma unroll
            for (int i = 0; i < Shape::WIDTH / 4; ++i) {
                const int place = i / 2 * 8 + lane % 4 * 2 + i % 2, column = V::QUANTISED ? element_at(place) : place;
                out[row * Shape::EXCHANGE + first_column + column] = values[r / 2][i / 2][r % 2 * 2 + i % 2] / unit_of_values<V>();
            }
        }
    }

};

}  // namespace pagoda
