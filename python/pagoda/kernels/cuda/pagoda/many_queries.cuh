// The engine of attention for many queries: query rows are the left factors of products, 16 or 32 of them a warp. With 128 query
// rows a team of four warps goes over all stored rows, each warp for its own 32 query rows, so that what it loads of K and V from
// shared memory serves two products.
#pragma once

#include <pagoda/tensor_cores.cuh>

namespace pagoda {

/// COLUMNS: warps that share query rows, each for its part of the values, where these do not fit the registers of one. STACK: 16 query
/// rows that a warp has, so many times.
template <class K_, class V_, class Q_, int D_, int DV_, int WARPS_, int COLUMNS_, int STACK_, int STAGES_>
struct ManyShape : TensorShape<K_, V_, Q_, D_, DV_, 16 * STACK_ * WARPS_ / COLUMNS_, WARPS_, 1, D_ + DV_ <= 512 ? 32 : 16, STAGES_> {
    using Common = typename ManyShape::TensorShape;
    using V = typename Common::V;
    static constexpr int COLUMNS = COLUMNS_, STACK = STACK_;
    static_assert(DV_ % (V::UNIT * COLUMNS) == 0, "a warp has whole units of columns");
    /// Columns of V that 16 bytes of its rows hold.
    static constexpr int V_CHUNK = 128 / V::BITS;
    /// Elements of V that a warp accumulates.
    static constexpr int WIDTH = DV_ / COLUMNS;
    /// Query fragments stay in registers where these hold them beside values and scores.
    static constexpr bool Q_IN_REGISTERS = STACK * (Common::Q_SPLITS * Common::DEPTH / 4 + WIDTH / 2 + Common::SCORES / 2) < 120;
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
    static constexpr int D = Shape::D, DV = Shape::DV, STACK = Shape::STACK;
    using Scores = float[STACK][Shape::SCORES / 8][4];
    /// Thread blocks of a multiprocessor that registers are sparing for: more would spill.
    static constexpr int BLOCKS = Shape::THREADS > 128 ? 1 : 2;

    /// Where the warp's query rows begin, and its values.
    const int first_row, first_column;
    /// Of the warp's rows lane / 4 + 8 r: running maximum, this lane's share of the sum, what scores are multiplied with where
    /// queries are scaled.
    float top[2 * STACK], sum[2 * STACK], scale[2 * STACK];
    /// What centring K adds to each score of them.
    float bias[K::QUANTISED ? 2 * STACK : 1];
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

    __device__ void take_queries(const float* factors) {
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) {
            scale[r] = args.scale / factors[row_of(r)];
            if constexpr (K::QUANTISED) bias[r] = factors[Shape::ROWS + row_of(r)];
        }
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

    __device__ void load_query(uint32 (&fragments)[STACK][4], int split, int k) const {
#pragma unroll
        for (int t = 0; t < STACK; ++t) {
            const int row = split * Shape::ROWS + first_row + t * 16 + lane % 16;
            load_matrix(fragments[t], q_shared + (row * Shape::Q_STRIDE + k * 2 + lane / 16) * 16);
        }
    }

    /// Scores, softmax and values of the rows of a stage.
    __device__ void compute_stage(int index) {
        if (first_row >= rows) return;
        Scores scores;
        if constexpr (K::QUANTISED) {
            score_codes(scores, stage(index));
        } else {
            score(scores, stage(index));
        }
        if (args.softcap > 0.0f) cap(scores);
        const bool whole = note(index).whole;
        if (!whole) mask(scores, note(index));
        weigh(scores);
        const uint8* const rows_of_v = stage(index) + Shape::V_START;
        if constexpr (V::QUANTISED) {
            // Care costs next to nothing where a row has one scale.
            if (whole && V::BLOCK != 0) {
                accumulate_codes<false>(scores, rows_of_v);
            } else {
                accumulate_codes<true>(scores, rows_of_v);
            }
        } else if (whole || block().queries == 1) {
            accumulate<false>(scores, rows_of_v + first_column * 2);
        } else {
            accumulate<true>(scores, rows_of_v + first_column * 2);
        }
    }

    __device__ void score(Scores& scores, const uint8* keys) const {
#pragma unroll
        for (int i = 0; i < STACK * Shape::SCORES / 2; ++i) scores[i / (Shape::SCORES / 2)][i / 4 % (Shape::SCORES / 8)][i % 4] = 0.0f;
#pragma unroll(Shape::Q_IN_REGISTERS ? Shape::DEPTH / 16 : 4)
        for (int k = 0; k < Shape::DEPTH / 16; ++k) {
#pragma unroll
            for (int s = 0; s < Shape::Q_SPLITS; ++s) {
                uint32 a[STACK][4];
                if constexpr (Shape::Q_IN_REGISTERS) {
#pragma unroll
                    for (int i = 0; i < 4 * STACK; ++i) a[i / 4][i % 4] = query[s][k][i / 4][i % 4];
                } else {
                    load_query(a, s, k);
                }
#pragma unroll
                for (int n = 0; n < Shape::SCORES / 8; n += 2) {
                    uint32 b[4];
                    const int row = n * 8 + lane / 16 * 8 + lane % 8;
                    load_matrix(b, keys + (row * Shape::K_STRIDE + k * 2 + lane / 8 % 2) * 16);
#pragma unroll
                    for (int t = 0; t < STACK; ++t) {
                        multiply_add(scores[t][n], a[t], b[0], b[1], KElement());
                        multiply_add(scores[t][n + 1], a[t], b[2], b[3], KElement());
                    }
                }
            }
        }
    }

    /// The same for quantised K: products with codes that share a scale, times that scale.
    __device__ void score_codes(Scores& scores, const uint8* keys) const {
        // What is loaded at once, two chunks, has one scale or whole blocks.
        constexpr int CHUNKS = D * K::BITS / 128, STEPS = 8 / K::BITS, BLOCK = K::BLOCK == 0 ? D : K::BLOCK;
        const uint8* const scales = keys + Shape::K_SCALES;
#pragma unroll
        for (int n = 0; n < Shape::SCORES / 8; n += 2) {
            // Of two blocks of 8 stored rows.
            float part[2][STACK][4] = {};
#pragma unroll
            for (int i = 0; i < 2 * STACK * 4; ++i) scores[i / 4 % STACK][n + i / 4 / STACK][i % 4] = bias[i / 4 % STACK * 2 + i % 4 / 2];
#pragma unroll(Shape::Q_IN_REGISTERS ? CHUNKS : 1)
            for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
                uint32 b[4];
                const int row = n * 8 + lane / 16 * 8 + lane % 8;
                load_matrix(b, keys + (row * Shape::K_STRIDE + chunk + lane / 8 % 2) * 16);
#pragma unroll
                for (int i = 0; i < 2 * STEPS; ++i) {
                    // An odd number of chunks: the last load has brought bytes that are not of the row.
                    const int step = chunk * STEPS + i;
                    if (step * STEP >= D) break;
                    multiply_codes(part, b[i / STEPS], b[2 + i / STEPS], step, i % STEPS);
                    if (K::BLOCK != 0 && (i + 1) * STEP % BLOCK == 0) move_scaled(scores, part, n, scales, step * STEP / BLOCK);
                }
            }
            if (K::BLOCK == 0) move_scaled(scores, part, n, scales, 0);
        }
    }

    /// Adds the products of a step of the queries with that of two blocks of stored rows.
    __device__ void multiply_codes(float (&part)[2][STACK][4], uint32 word, uint32 next, int step, int in_chunk) const {
        const typename K::template Decoder<KElement> decoder;
        const uint32 words[2] = {word, next};
        uint32 b[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = decoder.pair(words[i / 2], in_chunk, i % 2);
#pragma unroll
        for (int s = 0; s < Shape::Q_SPLITS; ++s) {
            uint32 a[STACK][4];
            if constexpr (Shape::Q_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4 * STACK; ++i) a[i / 4][i % 4] = query[s][step][i / 4][i % 4];
            } else {
                load_query(a, s, step);
            }
#pragma unroll
            for (int i = 0; i < 2 * STACK; ++i) {
                multiply_add(part[i / STACK][i % STACK], a[i % STACK], b[i / STACK][0], b[i / STACK][1], KElement());
            }
        }
    }

    /// Moves products with codes, times their scale, to the scores of the blocks `n` and `n + 1` of stored rows.
    __device__ void move_scaled(Scores& scores, float (&part)[2][STACK][4], int n, const uint8* scales, int index) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = (n + i / 2) * 8 + lane % 4 * 2 + i % 2;
            const float scale = scale_at<K>(scales + row * K::scale_bytes(D), index);
#pragma unroll
            for (int j = 0; j < 2 * STACK; ++j) {
                float &sum = part[i / 2][j / 2][j % 2 * 2 + i % 2], &score = scores[j / 2][n + i / 2][j % 2 * 2 + i % 2];
                score = fmaf(sum, scale, score);
                sum = 0.0f;
            }
        }
    }

    /// What numbers `r` of scores are multiplied with.
    __device__ float scale_of(int r) const { return Shape::Q_SCALED ? scale[r] : args.scale; }

    /// Scores become hyperbolic tangents of what they were, scaled; `weigh` multiplies them with `softcap`.
    __device__ void cap(Scores& scores) const {
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) {
#pragma unroll
            for (int i = 0; i < Shape::SCORES / 4; ++i) {
                float& score = scores[r / 2][i / 2][r % 2 * 2 + i % 2];
                score = tanh_fast(score * scale_of(r));
            }
        }
    }

    /// Makes scores of rows that their query does not see -inf.
    __device__ void mask(Scores& scores, const Note note) const {
        const int position = block().position;
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) {
            const int last = position + row_of(r) / args.group;
#pragma unroll
            for (int i = 0; i < Shape::SCORES / 4; ++i) {
                const int column = i / 2 * 8 + lane % 4 * 2 + i % 2, place = note.place + column;
                const bool near = note.always || place > last - args.window;
                const bool seen = column >= note.low && column < note.high && place <= last && near;
                if (!seen) scores[r / 2][i / 2][r % 2 * 2 + i % 2] = minus_infinity();
            }
        }
    }

    /// Online softmax: scores are scaled and become weights relative to the new maximum, and the values so far are scaled to it.
    __device__ void weigh(Scores& scores) {
        float decay[2 * STACK];
        bool same = true;
#pragma unroll
        for (int r = 0; r < 2 * STACK; ++r) {
            float(&mine)[Shape::SCORES / 8][4] = scores[r / 2];
            const int i = r % 2 * 2;
            const float factor = args.softcap > 0.0f ? args.softcap : scale_of(r);
            float highest = minus_infinity();
#pragma unroll
            for (int n = 0; n < Shape::SCORES / 8; ++n) highest = fmaxf(highest, fmaxf(mine[n][i], mine[n][i + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
            // Factors are above 0: the largest stays the largest.
            highest = fmaxf(highest * factor, top[r]);
            // Where nothing is seen so far every weight is exp2(-inf - 0) = 0.
            const float base = highest == minus_infinity() ? 0.0f : highest;
            decay[r] = exp2_fast(top[r] - base);
            same &= decay[r] == 1.0f;
            top[r] = highest;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < Shape::SCORES / 8; ++n) {
                mine[n][i] = exp2_fast(fmaf(mine[n][i], factor, -base));
                mine[n][i + 1] = exp2_fast(fmaf(mine[n][i + 1], factor, -base));
                total += mine[n][i];
                total += mine[n][i + 1];
            }
            sum[r] = sum[r] * decay[r] + total;
        }
        // Maxima settle soon: most stages leave the values as they are.
        if (__all_sync(~0u, same)) return;
#pragma unroll
        for (int t = 0; t < STACK; ++t) {
#pragma unroll
            for (int n = 0; n < Shape::WIDTH / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) values[t][n][i] *= decay[2 * t + i / 2];
            }
        }
    }

    /// Adds the V rows, times their weights, to the warp's values. CAREFUL: some queries do not see some of the rows, and what
    /// is infinite or NaN there, and times a weight of 0 is NaN, must not reach them.
    template <bool CAREFUL>
    __device__ void accumulate(const Scores& weights, const uint8* rows_of_v) {
#pragma unroll
        for (int k = 0; k < Shape::SCORES / 16; ++k) {
            uint32 a[STACK][Shape::P_SPLITS][4], sees[STACK][4];
#pragma unroll
            for (int t = 0; t < STACK; ++t) split_weights(a[t], sees[t], weights[t][2 * k], weights[t][2 * k + 1]);
#pragma unroll
            for (int n = 0; n < Shape::WIDTH / 8; n += 2) {
                uint32 b[4];
                load_matrix_transposed(b, rows_of_v + ((k * 16 + lane % 16) * Shape::V_STRIDE + n + lane / 16) * 16);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    // An odd number of blocks: the last load has brought 8 elements of another row.
                    if (n + half == Shape::WIDTH / 8) break;
                    uint32 &b0 = b[2 * half], &b1 = b[2 * half + 1];
                    if (CAREFUL) take_out(n + half, sees, b0, b1);
#pragma unroll
                    for (int t = 0; t < STACK; ++t) {
#pragma unroll
                        for (int s = 0; s < Shape::P_SPLITS; ++s) multiply_add(values[t][n + half], a[t][s], b0, b1, VElement());
                    }
                }
            }
        }
    }

    /// The same for quantised V: weights take the scales. Codes are finite; CAREFUL: where a weight is 0 the scale may be anything.
    template <bool CAREFUL>
    __device__ void accumulate_codes(const Scores& weights, const uint8* rows_of_v) {
        constexpr int CHUNKS = Shape::WIDTH / Shape::V_CHUNK, STEPS = 8 / V::BITS, BLOCK = V::BLOCK == 0 ? Shape::WIDTH : V::BLOCK;
        constexpr int SCALE_BYTES = V::scale_bytes(Shape::V_IN_K ? D : DV);
        const int first_chunk = first_column / Shape::V_CHUNK, first_scale = V::BLOCK == 0 ? 0 : first_column / BLOCK;
        const uint8* const scales = rows_of_v + (Shape::V_IN_K ? Shape::K_SCALES : Shape::V_SCALES) + lane % 4 * 2 * SCALE_BYTES;
#pragma unroll
        for (int k = 0; k < Shape::SCORES / 16; ++k) {
            uint32 a[STACK][Shape::P_SPLITS][4];
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
                uint32 b[4];
                const int row = k * 16 + lane % 16;
                load_matrix_transposed(b, rows_of_v + (row * Shape::V_STRIDE + first_chunk + chunk + lane / 16) * 16);
#pragma unroll
                for (int i = 0; i < 2 * STEPS; ++i) {
                    // As in score_codes.
                    const int step = chunk * STEPS + i;
                    if (step * STEP >= Shape::WIDTH) break;
                    if (step * STEP % BLOCK == 0) {
                        float scale[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const uint8* const of_row = scales + (k * 16 + j / 2 * 8 + j % 2) * SCALE_BYTES;
                            scale[j] = scale_at<V>(of_row, first_scale + step * STEP / BLOCK);
                        }
#pragma unroll
                        for (int t = 0; t < STACK; ++t) scale_weights<CAREFUL>(a[t], scale, weights[t][2 * k], weights[t][2 * k + 1]);
                    }
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd) {
                        const typename V::template Decoder<VElement> decoder;
                        const uint32 b0 = decoder.pair(b[i / STEPS * 2], i % STEPS, odd), b1 = decoder.pair(b[i / STEPS * 2 + 1], i % STEPS, odd);
#pragma unroll
                        for (int j = 0; j < STACK * Shape::P_SPLITS; ++j) {
                            multiply_add(values[j / Shape::P_SPLITS][2 * step + odd], a[j / Shape::P_SPLITS][j % Shape::P_SPLITS], b0, b1, VElement());
                        }
                    }
                }
            }
        }
    }

    /// Weights of 16 rows, times the scales of stored rows 2 (lane % 4), the next, and those 8 further, as left factors.
    template <bool CAREFUL>
    __device__ static void scale_weights(uint32 (&a)[Shape::P_SPLITS][4], const float (&scale)[4], const float (&left)[4], const float (&right)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&half)[4] = i < 2 ? left : right;
            float x = half[i % 2 * 2], y = half[i % 2 * 2 + 1];
            if (!CAREFUL || x != 0.0f) x = __fmul_rn(x, scale[i / 2 * 2]);
            if (!CAREFUL || y != 0.0f) y = __fmul_rn(y, scale[i / 2 * 2 + 1]);
            Common::split_pair(a, i, x, y);
        }
    }

    /// Weights of 16 rows as left factors, which together hold them, and ones where they are above 0. What an accumulator
    /// holds of two column blocks is what a fragment of the left factor holds.
    __device__ static void split_weights(uint32 (&a)[Shape::P_SPLITS][4], uint32 (&sees)[4], const float (&left)[4],
                                         const float (&right)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&half)[4] = i < 2 ? left : right;
            const float x = half[i % 2 * 2], y = half[i % 2 * 2 + 1];
            sees[i] = Pair<VElement>::pack(x > 0.0f, y > 0.0f);
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
                out[Shape::ROWS * Shape::EXCHANGE + Shape::ROWS + row] = sum[r];
            }
#pragma unroll
            for (int i = 0; i < Shape::WIDTH / 4; ++i) {
                const int place = i / 2 * 8 + lane % 4 * 2 + i % 2, column = V::QUANTISED ? column_at(place) : place;
                out[row * Shape::EXCHANGE + first_column + column] = values[r / 2][i / 2][r % 2 * 2 + i % 2];
            }
        }
    }

};

}  // namespace pagoda
