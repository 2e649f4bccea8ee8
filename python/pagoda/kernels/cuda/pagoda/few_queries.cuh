// The attention engine for few queries. Stored rows are the left factors of products, 16 at a time, and queries the right ones, in
// blocks of 8, so that little is wasted with groups of 4 or 8 query heads. Each of four teams of one warp has its own rows; their
// results are merged at the end.
//
// A lane holds scores of the stored row lane / 4, but needs the weights of the query lane / 4: the instruction that transposes
// matrices is in between. Values are [column, query].
#pragma once

#include <pagoda/tensor_cores.cuh>

namespace pagoda {

/// The scales of one row of a quantised format, in pieces of up to 16 bytes. Those of blocks 0, 1, ... are asked for in order.
template <class Format, int DIM>
struct ScalesOfRow {
    static constexpr int SIZE = Format::SCALE_BYTES, ALL = Format::scale_bytes(DIM);
    static constexpr int PIECE = ALL % 16 == 0 ? 16 : ALL % 8 == 0 ? 8 : ALL % 4 == 0 ? 4 : SIZE;
    uint32 words[(PIECE + 3) / 4] = {};

    __device__ float next(const uint8* scales, int block) {
        const int at = block * SIZE % PIECE;
        if (at == 0) load(scales + block * SIZE);
        return Format::scale_of(words[at / 4] >> at % 4 * 8);
    }

    __device__ void load(const uint8* source) {
        if constexpr (PIECE == 16) {
            const uint4 piece = *reinterpret_cast<const uint4*>(source);
            words[0] = piece.x, words[1] = piece.y, words[2] = piece.z, words[3] = piece.w;
        } else if constexpr (PIECE == 8) {
            const uint64 piece = *reinterpret_cast<const uint64*>(source);
            words[0] = static_cast<uint32>(piece), words[1] = static_cast<uint32>(piece >> 32);
        } else if constexpr (PIECE == 4) {
            words[0] = *reinterpret_cast<const uint32*>(source);
        } else if constexpr (PIECE == 2) {
            words[0] = *reinterpret_cast<const unsigned short*>(source);
        } else {
            words[0] = *source;
        }
    }
};

/// Stored rows of a stage: about 8 KB of them, as far as registers go.
template <class K, class V, class Q>
__device__ constexpr int rows_of_stage(int dim, int v_dim) {
    const int bits = dim * K::BITS + (StoredV<K, V>::IN_K ? 0 : v_dim * StoredV<K, V>::Format::BITS);
    return bits <= 2560 && v_dim <= 128 && Q::BYTES == 2 ? 32 : 16;
}

/// QUERIES: blocks of 8 query rows.
template <class K_, class V_, class Q_, int D_, int DV_, int QUERIES_, int STAGES_>
struct FewShape : TensorShape<K_, V_, Q_, D_, DV_, 8 * QUERIES_, 1, 4, rows_of_stage<K_, V_, Q_>(D_, DV_), STAGES_> {
    using Common = typename FewShape::TensorShape;
    static constexpr int QUERIES = QUERIES_;
    /// Steps of 16 elements of K, blocks of 16 stored rows of a stage, and blocks of 16 columns of values.
    static constexpr int STEPS = Common::DEPTH / 16, KEYS = Common::SCORES / 16, VALUES = (DV_ + 15) / 16;
    /// Query fragments stay in registers where these hold them beside values and scores.
    static constexpr bool Q_IN_REGISTERS = QUERIES * (2 * Common::Q_SPLITS * STEPS + 4 * VALUES + 4 * KEYS) < 120;
};

/// The engine.
template <class Shape_>
struct FewQueries : TensorCores<Shape_, FewQueries<Shape_>> {
    using Shape = Shape_;
    using Common = typename FewQueries::TensorCores;
    using K = typename Shape::K;
    using V = typename Shape::V;
    using Unit<Shape>::args;
    using Unit<Shape>::block;
    using Unit<Shape>::rows;
    using Ring<Shape>::lane;
    using Ring<Shape>::team;
    using Ring<Shape>::stage;
    using Ring<Shape>::note;
    using Common::q_shared;
    using KElement = typename Common::KElement;
    using VElement = typename Common::VElement;
    static constexpr int D = Shape::D, DV = Shape::DV, QUERIES = Shape::QUERIES, KEYS = Shape::KEYS;
    /// Of some blocks of queries: stored rows lane / 4 (0, 1) and lane / 4 + 8 (2, 3) of each 16, queries 2 (lane % 4) and the next.
    template <int COUNT>
    using Scores = float[COUNT][KEYS][4];
    /// Weights of 16 stored rows as a right factor.
    using Weights = uint32[Shape::P_SPLITS][2];
    /// As in ManyQueries. No registers are saved for a third where shared memory has no room for it: it is 228 KB at most, of which each
    /// thread block costs one.
    static constexpr bool THREE_FIT = 3 * (Shape::SHARED_BYTES + 1024) <= 228 * 1024;
    static constexpr int BLOCKS = THREE_FIT && QUERIES == 1 && Shape::Q::BYTES == 2 && 128 % D == 0 && 128 % DV == 0 ? 3 : 2;

    /// Of queries 2 (lane % 4) and the next, block by block: running maximum, this lane's share of the sum, what scores are
    /// multiplied with where queries are scaled.
    float top[2 * QUERIES], sum[2 * QUERIES], scale[2 * QUERIES];
    /// What centring K adds to each score of them.
    float bias[K::QUANTISED ? 2 * QUERIES : 1];
    /// Of columns lane / 4 (0, 1) and lane / 4 + 8 (2, 3) of each 16, queries as those of scores.
    float values[QUERIES][Shape::VALUES][4];
    uint32 query[Shape::Q_IN_REGISTERS ? QUERIES : 1][Shape::Q_SPLITS][Shape::STEPS][2];

    __device__ explicit FewQueries(const Attend& args_) : Common(args_) {}

    __device__ void begin() {
#pragma unroll
        for (int r = 0; r < 2 * QUERIES; ++r) top[r] = minus_infinity(), sum[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < QUERIES * Shape::VALUES * 4; ++i) values[i / 4 / Shape::VALUES][i / 4 % Shape::VALUES][i % 4] = 0.0f;
    }

    /// The row of the block that numbers `r` of this thread are of.
    __device__ int row_of(int r) const { return r / 2 * 8 + lane % 4 * 2 + r % 2; }

    __device__ void take_queries() {
#pragma unroll
        for (int r = 0; r < 2 * QUERIES; ++r) {
            scale[r] = this->scale_of_row(row_of(r));
            if constexpr (K::QUANTISED) bias[r] = this->factors()[Shape::ROWS + row_of(r)];
        }
        if constexpr (Shape::Q_IN_REGISTERS) {
#pragma unroll
            for (int q = 0; q < QUERIES; ++q) {
#pragma unroll
                for (int s = 0; s < Shape::Q_SPLITS; ++s) {
#pragma unroll
                    for (int step = 0; step < Shape::STEPS; step += 2) {
                        uint32 b[4];
                        load_query(b, q, s, step);
#pragma unroll
                        for (int i = 0; i < 4 && step + i / 2 < Shape::STEPS; ++i) query[q][s][step + i / 2][i % 2] = b[i];
                    }
                }
            }
        }
    }

    /// Right factors of two steps of a block of queries. Past an odd number of steps lies something else.
    __device__ void load_query(uint32 (&b)[4], int q, int split, int step) const {
        const int row = split * Shape::ROWS + q * 8 + lane % 8;
        load_matrix(b, q_shared + Shape::QRows::place(row, step * 2 + lane / 8));
    }

    /// The right factor of a step; of odd ones from `pair`, which the step before has loaded, if those are not in registers.
    __device__ void query_of(uint32 (&b)[2], uint32 (&pair)[4], int q, int split, int step) const {
        if constexpr (Shape::Q_IN_REGISTERS) {
            b[0] = query[q][split][step][0], b[1] = query[q][split][step][1];
        } else {
            if (step % 2 == 0) load_query(pair, q, split, step);
            b[0] = pair[step % 2 * 2], b[1] = pair[step % 2 * 2 + 1];
        }
    }

    __device__ void compute_stage(int index) {
        if (QUERIES > 1 && rows > 8) {
            compute<QUERIES>(index);
        } else {
            compute<1>(index);
        }
    }

    /// Scores, softmax and values of the rows of a stage, for the first COUNT blocks of queries.
    template <int COUNT>
    __device__ void compute(int index) {
        Scores<COUNT> scores;
        if constexpr (K::QUANTISED) {
            score_codes<COUNT>(scores, stage(index));
        } else {
            score<COUNT>(scores, stage(index));
        }
        if (args.softcap > 0.0f) cap<COUNT>(scores);
        const bool whole = note(index).whole;
        if (!whole) mask<COUNT>(scores, note(index));
        weigh<COUNT>(scores);
        const uint8* const rows_of_v = stage(index) + Shape::V_START;
        if constexpr (V::QUANTISED) {
            if (whole) {
                accumulate_codes<COUNT, false>(scores, rows_of_v);
            } else {
                accumulate_codes<COUNT, true>(scores, rows_of_v);
            }
        } else if (whole || block().queries == 1) {
            accumulate<COUNT, false>(scores, rows_of_v);
        } else {
            accumulate<COUNT, true>(scores, rows_of_v);
        }
    }

    template <int COUNT>
    __device__ void score(Scores<COUNT>& scores, const uint8* keys) const {
#pragma unroll
        for (int i = 0; i < COUNT * KEYS * 4; ++i) scores[i / 4 / KEYS][i / 4 % KEYS][i % 4] = 0.0f;
        uint32 pairs[COUNT][Shape::Q_SPLITS][4];
        const int mine = Shape::KRows::place(lane % 16, lane / 16);
#pragma unroll(Shape::Q_IN_REGISTERS ? Shape::STEPS : 4)
        for (int step = 0; step < Shape::STEPS; ++step) {
            uint32 b[COUNT][Shape::Q_SPLITS][2];
#pragma unroll
            for (int i = 0; i < COUNT * Shape::Q_SPLITS; ++i) {
                query_of(b[i / Shape::Q_SPLITS][i % Shape::Q_SPLITS], pairs[i / Shape::Q_SPLITS][i % Shape::Q_SPLITS], i / Shape::Q_SPLITS,
                         i % Shape::Q_SPLITS, step);
            }
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                uint32 a[4];
                load_matrix(a, keys + Shape::KRows::bytes(n * 16) + Shape::KRows::beside(mine, step * 2));
#pragma unroll
                for (int i = 0; i < COUNT * Shape::Q_SPLITS; ++i) {
                    const uint32(&right)[2] = b[i / Shape::Q_SPLITS][i % Shape::Q_SPLITS];
                    multiply_add(scores[i / Shape::Q_SPLITS][n], a, right[0], right[1], KElement());
                }
            }
        }
    }

    /// The same for quantised K: products with codes that share a scale, times that scale.
    template <int COUNT>
    __device__ void score_codes(Scores<COUNT>& scores, const uint8* keys) const {
        // What is loaded at once, two chunks, has one scale or whole blocks.
        constexpr int PARTS = K::PARTS, CHUNKS = D / STEP / PARTS, BLOCK = K::BLOCK == 0 ? D : K::BLOCK;
        const typename K::template Decoder<KElement> decoder;
        const int mine = Shape::KRows::place(lane % 16, lane / 16);
        uint32 pairs[COUNT][Shape::Q_SPLITS][4];
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
            const uint8* const scales = keys + Shape::K_SCALES + (n * 16 + lane / 4) * K::scale_bytes(D);
            ScalesOfRow<K, D> low, high;
            float part[COUNT][4] = {};
#pragma unroll
            for (int i = 0; i < COUNT * 4; ++i) scores[i / 4][n][i % 4] = bias[i / 4 * 2 + i % 2];
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
                uint32 codes[4];
                load_matrix(codes, keys + Shape::KRows::bytes(n * 16) + Shape::KRows::beside(mine, chunk));
                typename K::Word words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = n * 16 + i % 2 * 8 + lane / 4;
                    words[i] = K::template along<typename Shape::KRows, D>(codes[i], keys, row, chunk + i / 2, lane % 4);
                }
#pragma unroll
                for (int i = 0; i < 2 * PARTS; ++i) {
                    // An odd number of chunks: the last load has brought bytes that are not of the row.
                    const int step = chunk * PARTS + i;
                    if (step * STEP >= D) break;
                    uint32 a[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) a[j] = decoder.pair(words[i / PARTS * 2 + j % 2], i % PARTS, j / 2);
#pragma unroll
                    for (int j = 0; j < COUNT * Shape::Q_SPLITS; ++j) {
                        uint32 b[2];
                        query_of(b, pairs[j / Shape::Q_SPLITS][j % Shape::Q_SPLITS], j / Shape::Q_SPLITS, j % Shape::Q_SPLITS, step);
                        multiply_add(part[j / Shape::Q_SPLITS], a, b[0], b[1], KElement());
                    }
                    if ((step + 1) * STEP % BLOCK != 0) continue;
                    // Or queries of all blocks would be loaded at once, into registers that there are not.
                    if constexpr (!Shape::Q_IN_REGISTERS) __syncwarp();
                    const int block = step * STEP / BLOCK;
                    const float scale[2] = {low.next(scales, block), high.next(scales + 8 * K::scale_bytes(D), block)};
#pragma unroll
                    for (int j = 0; j < COUNT * 4; ++j) {
                        scores[j / 4][n][j % 4] = fmaf(part[j / 4][j % 4], scale[j % 4 / 2], scores[j / 4][n][j % 4]);
                        part[j / 4][j % 4] = 0.0f;
                    }
                }
            }
        }
    }

    /// What scores of numbers `r` are multiplied with.
    __device__ float scale_of(int r) const { return Shape::Q_SCALED ? scale[r] : args.scale; }

    /// Scores become hyperbolic tangents of what they were, scaled; `weigh` multiplies them with `softcap`.
    template <int COUNT>
    __device__ void cap(Scores<COUNT>& scores) const {
#pragma unroll
        for (int i = 0; i < COUNT * KEYS * 4; ++i) {
            float& score = scores[i / 4 / KEYS][i / 4 % KEYS][i % 4];
            score = tanh_fast(score * scale_of(i / 4 / KEYS * 2 + i % 2));
        }
    }

    /// Makes scores of rows that their query does not see -inf.
    template <int COUNT>
    __device__ void mask(Scores<COUNT>& scores, const Note note) const {
        const int position = block().position;
#pragma unroll
        for (int r = 0; r < 2 * COUNT; ++r) {
            const int2 seen = note.seen(position + row_of(r) / args.group, args.window);
#pragma unroll
            for (int i = 0; i < 2 * KEYS; ++i) {
                const int row = i * 8 + lane / 4;
                if (row < seen.x || row >= seen.y) scores[r / 2][i / 2][i % 2 * 2 + r % 2] = minus_infinity();
            }
        }
    }

    /// Online softmax: scores are scaled and become weights relative to the maximum so far.
    template <int COUNT>
    __device__ void weigh(Scores<COUNT>& scores) {
        float highest[2 * COUNT];
        bool higher = false;
#pragma unroll
        for (int r = 0; r < 2 * COUNT; ++r) {
            highest[r] = minus_infinity();
#pragma unroll
            for (int i = 0; i < 2 * KEYS; ++i) highest[r] = fmaxf(highest[r], scores[r / 2][i / 2][i % 2 * 2 + r % 2]);
            // Factors are above 0: the largest stays the largest.
            highest[r] *= factor_of(r);
            higher |= highest[r] > top[r];
        }
        // Maxima settle soon: most stages leave them and the values as they are.
        if (__any_sync(~0u, higher)) raise<COUNT>(highest);
#pragma unroll
        for (int r = 0; r < 2 * COUNT; ++r) {
            const float factor = factor_of(r), base = base_of(r) - Common::LIFT;
#pragma unroll
            for (int i = 0; i < 2 * KEYS; ++i) {
                float& score = scores[r / 2][i / 2][i % 2 * 2 + r % 2];
                score = exp2_fast(fmaf(score, factor, -base));
                sum[r] += score;
            }
        }
    }

    /// What scores, capped or not, are multiplied with to be base-2 logarithms.
    __device__ float factor_of(int r) const { return args.softcap > 0.0f ? args.softcap : scale_of(r); }

    /// Where nothing is seen so far every weight is exp2(-inf - 0) = 0.
    __device__ float base_of(int r) const { return top[r] == minus_infinity() ? 0.0f : top[r]; }

    /// Takes new maxima, from what each lane has found, and scales sums and values to them.
    template <int COUNT>
    __device__ void raise(float (&highest)[2 * COUNT]) {
        float decay[2 * COUNT];
#pragma unroll
        for (int r = 0; r < 2 * COUNT; ++r) {
#pragma unroll
            for (int step = 4; step < WARP; step *= 2) highest[r] = fmaxf(highest[r], __shfl_xor_sync(~0u, highest[r], step));
            const float before = top[r];
            top[r] = fmaxf(before, highest[r]);
            decay[r] = exp2_fast(before - base_of(r));
            sum[r] *= decay[r];
        }
#pragma unroll
        for (int i = 0; i < COUNT * Shape::VALUES * 4; ++i) {
            values[i / 4 / Shape::VALUES][i / 4 % Shape::VALUES][i % 4] *= decay[i / 4 / Shape::VALUES * 2 + i % 2];
        }
    }

    /// Weights of 16 stored rows as a right factor, in as many parts as they have.
    __device__ static void turn(Weights& turned, const float (&weights)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) Common::split_pair(turned, i, weights[2 * i], weights[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < 2 * Shape::P_SPLITS; ++i) turned[i / 2][i % 2] = transpose(turned[i / 2][i % 2]);
    }

    /// Adds the V rows, times their weights, to the values. CAREFUL: some queries do not see some of the rows, and what is infinite or
    /// NaN there, and times a weight of 0 is NaN, must not reach them.
    template <int COUNT, bool CAREFUL>
    __device__ void accumulate(const Scores<COUNT>& weights, const uint8* rows_of_v) {
        const int mine = Shape::VRows::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
            Weights b[COUNT];
            uint32 sees[COUNT][2];
#pragma unroll
            for (int q = 0; q < COUNT; ++q) {
                const float(&mine)[4] = weights[q][n];
                turn(b[q], mine);
                if (!CAREFUL) continue;
#pragma unroll
                for (int i = 0; i < 2; ++i) sees[q][i] = transpose(Pair<VElement>::pack(mine[2 * i] > 0.0f, mine[2 * i + 1] > 0.0f));
            }
#pragma unroll
            for (int column = 0; column < Shape::VALUES; ++column) {
                // 8 columns past the last may be another row's, and their results are nobody's.
                uint32 a[4];
                load_matrix_transposed(a, rows_of_v + Shape::VRows::bytes(n * 16) + Shape::VRows::beside(mine, column * 2));
                if (CAREFUL) take_out<COUNT>(column, sees, a);
#pragma unroll
                for (int i = 0; i < COUNT * Shape::P_SPLITS; ++i) {
                    const uint32(&right)[2] = b[i / Shape::P_SPLITS][i % Shape::P_SPLITS];
                    multiply_add(values[i / Shape::P_SPLITS][column], a, right[0], right[1], VElement());
                }
            }
        }
    }

    /// The same for quantised V: weights take the scales. Codes are finite; CAREFUL: where a weight is 0 the scale may be anything.
    template <int COUNT, bool CAREFUL>
    __device__ void accumulate_codes(const Scores<COUNT>& weights, const uint8* rows_of_v) {
        constexpr int PARTS = V::PARTS, CHUNKS = DV / STEP / PARTS, BLOCK = V::BLOCK == 0 ? DV : V::BLOCK;
        constexpr int SCALED = Shape::V_IN_K ? D : DV, SCALE_BYTES = V::scale_bytes(SCALED);
        const typename V::template Decoder<VElement> decoder;
        const int mine = Shape::VRows::place(lane % 16, lane / 16);
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
            const int start = Shape::V_IN_K ? Shape::K_SCALES : Shape::V_SCALES;
            const uint8* const scales = rows_of_v + start + (n * 16 + lane / 4) * SCALE_BYTES;
            ScalesOfRow<V, SCALED> low, high;
            Weights b[COUNT];
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
                uint32 codes[4];
                load_matrix_transposed(codes, rows_of_v + Shape::VRows::bytes(n * 16) + Shape::VRows::beside(mine, chunk));
                typename V::Word words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = n * 16 + i % 2 * 8 + lane % 4 * 2;
                    words[i] = V::template across<typename Shape::VRows, SCALED>(codes[i], rows_of_v, row, chunk + i / 2, lane / 4);
                }
#pragma unroll
                for (int i = 0; i < 2 * PARTS; ++i) {
                    // As in score_codes.
                    const int step = chunk * PARTS + i;
                    if (step * STEP >= DV) break;
                    if (step * STEP % BLOCK == 0) {
                        const int block = step * STEP / BLOCK;
                        const float scale[2] = {low.next(scales, block), high.next(scales + 8 * SCALE_BYTES, block)};
#pragma unroll
                        for (int q = 0; q < COUNT; ++q) {
                            float scaled[4];
#pragma unroll
                            for (int j = 0; j < 4; ++j) {
                                scaled[j] = weights[q][n][j];
                                if (!CAREFUL || scaled[j] != 0.0f) scaled[j] = __fmul_rn(scaled[j], scale[j / 2]);
                            }
                            turn(b[q], scaled);
                        }
                    }
                    uint32 a[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) a[j] = decoder.pair(words[i / PARTS * 2 + j / 2], i % PARTS, j % 2);
#pragma unroll
                    for (int j = 0; j < COUNT * Shape::P_SPLITS; ++j) {
                        const uint32(&right)[2] = b[j / Shape::P_SPLITS][j % Shape::P_SPLITS];
                        multiply_add(values[j / Shape::P_SPLITS][step], a, right[0], right[1], VElement());
                    }
                }
            }
        }
    }

    /// Makes what is infinite or NaN in a fragment 0, and the values of queries that see it NaN.
    template <int COUNT>
    __device__ void take_out(int column, const uint32 (&sees)[COUNT][2], uint32 (&a)[4]) {
        uint32 marks[4], any = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) any |= marks[i] = Common::take_out_pair(a[i]);
        if (!__any_sync(~0u, any != 0)) return;
#pragma unroll
        for (int q = 0; q < COUNT; ++q) {
            float hits[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            multiply_add(hits, marks, sees[q][0], sees[q][1], VElement());
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (hits[i] > 0.0f) values[q][column][i] = __uint_as_float(0x7fc00000u);
            }
        }
    }

    /// Writes this thread's share of the result to the exchange.
    __device__ void give() {
        float* out = this->exchange(team);
#pragma unroll
        for (int r = 0; r < 2 * QUERIES; ++r) {
            const int row = row_of(r);
#pragma unroll
            for (int step = 4; step < WARP; step *= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], step);
            if (lane < 4) {
                out[Shape::ROWS * Shape::EXCHANGE + row] = top[r];
                out[Shape::ROWS * Shape::EXCHANGE + Shape::ROWS + row] = sum[r] / (1 << Common::LIFT);
            }
#pragma unroll
            for (int i = 0; i < 2 * Shape::VALUES; ++i) {
                const int place = i * 8 + lane / 4, column = V::QUANTISED ? column_at(place) : place;
                if (place < DV) out[row * Shape::EXCHANGE + column] = values[r / 2][i / 2][i % 2 * 2 + r % 2] / unit_of_values<V>();
            }
        }
    }
};

}  // namespace pagoda
