// Exact attention of the new tokens of a step over pages, on tensor cores: decode, speculative verify and prefill.
//
// The work is a list: for each block of queries and each K/V head, the tiles of 64 stored rows that some query sees. It is
// cut into equal shares, one for each thread block, whatever borders that crosses, so that skewed batches stay balanced and
// the grid is the same at every step (a graph may replay it). What a share holds of a unit (block of queries, head) is a
// partial result unless it is all of it; the thread block that finishes a unit last merges its parts in order.
//
// Inside a thread block teams of warps share a tile: with one query row block of 16 (decode) four teams of one warp take 16
// stored rows each and meet at the end; with 64 query rows (prefill) one team of four warps takes them all, each warp for
// its own 16 query rows. A team has its own ring of stages in shared memory, which asynchronous copies fill ahead.
#pragma once

#include <pagoda/append.cuh>
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

/// The parameters of a kernel and what they imply. K, V: row formats of 16 bits. Q: the format of queries and outputs.
/// D, DV: head_dim and v_head_dim, multiples of 8. WARPS: of a team. TEAMS: that share a tile. COLUMNS: warps of a team that
/// share 16 query rows, each for its part of the values, where these do not fit the registers of one. STAGES: of a ring.
template <class K_, class V_, class Q_, int D_, int DV_, int WARPS_, int TEAMS_, int COLUMNS_, int STAGES_>
struct AttendShape {
    using K = K_;
    using V = V_;
    using Q = Q_;
    static constexpr int D = D_, DV = DV_, WARPS = WARPS_, TEAMS = TEAMS_, COLUMNS = COLUMNS_, STAGES = STAGES_;
    static_assert(WARPS == 1 || TEAMS == 1, "a team of several warps uses the barrier of the thread block");
    static_assert(DV % (8 * COLUMNS) == 0 && STAGES >= 2, "a warp has whole columns of 8, and a stage to fill");
    static constexpr int ROWS = 16 * WARPS / COLUMNS, SLICE = TILE / TEAMS;
    static constexpr int TEAM = WARP * WARPS, THREADS = TEAM * TEAMS;
    /// Elements of V that a warp accumulates, and stored rows whose scores it holds at once.
    static constexpr int WIDTH = DV / COLUMNS, SCORES = SLICE < 32 ? SLICE : 32;
    /// Elements of a K row with zeros behind it, for whole steps of 16.
    static constexpr int DEPTH = (D + 15) / 16 * 16;
    /// In pieces of 16 bytes. Odd, so that eight rows lie in different banks.
    static constexpr int K_STRIDE = (DEPTH / 8) | 1, V_STRIDE = (DV / 8) | 1;
    static constexpr int Q_SPLITS = Splits<Q, K>::COUNT;
    /// Weights are as exact as queries are: 16-bit queries are content with 16-bit weights.
    static constexpr int P_SPLITS = Q::BYTES == 4 ? Splits<F32, V>::COUNT : 1;
    static constexpr int Q_BYTES = Q_SPLITS * ROWS * K_STRIDE * 16;
    static constexpr int K_BYTES = SLICE * K_STRIDE * 16, V_BYTES = SLICE * V_STRIDE * 16;
    static constexpr int STAGE_BYTES = K_BYTES + V_BYTES;
    /// Floats of a row of values on their way between teams.
    static constexpr int EXCHANGE = DV + 4;
    static constexpr int EXCHANGE_BYTES = TEAMS * ROWS * (EXCHANGE + 2) * 4;
    static constexpr int RING_BYTES = TEAMS * STAGES * STAGE_BYTES + 16;
    static constexpr int SHARED_BYTES = Q_BYTES + (RING_BYTES > EXCHANGE_BYTES ? RING_BYTES : EXCHANGE_BYTES);
    /// Floats of a partial result: values, then maxima, then sums.
    static constexpr int PARTIAL = ROWS * DV + 2 * ROWS;
    /// Query fragments stay in registers where these hold them beside values and scores.
    static constexpr bool Q_IN_REGISTERS = Q_SPLITS * DEPTH / 4 + WIDTH / 2 + SCORES / 2 <= 136;
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

/// Table entries of 64 pages around the current one: a lane holds one of the current 32 and one of the next.
struct PageWindow {
    const uint32* row;
    int pages, base;
    uint32 now, then;

    __device__ void open(const uint32* row_, int pages_) { row = row_, pages = pages_, base = -1; }

    __device__ uint32 entry(int first, int lane) const { return first + lane < pages ? row[first + lane] : 0; }

    /// Makes `page` one of the current pages.
    __device__ void seek(int page, int lane) {
        const int wanted = page & ~(WARP - 1);
        if (wanted == base) return;
        now = base >= 0 && wanted == base + WARP ? then : entry(wanted, lane);
        then = entry(wanted + WARP, lane);
        base = wanted;
    }
};

template <int WARPS>
__device__ void team_barrier() {
    if (WARPS == 1) {
        __syncwarp();
    } else {
        __syncthreads();
    }
}

/// Everything of one thread while it works on a unit.
template <class Shape>
struct Attention {
    using Q = typename Shape::Q;
    using KElement = typename Shape::K::Element;
    using VElement = typename Shape::V::Element;
    static constexpr int D = Shape::D, DV = Shape::DV, STAGES = Shape::STAGES, TEAMS = Shape::TEAMS;

    const Attend& args;
    /// `warp` is its place in the team; its query rows begin at `first_row`, its values at `first_column`.
    const int lane, warp, team, first_row, first_column;
    uint8 *const q_shared, *const ring;
    QueryBlock block;
    int head, rows;
    /// Of rows lane / 4 and lane / 4 + 8 of the warp's 16: running maximum, this lane's share of the sum, values.
    float top[2], sum[2], values[Shape::WIDTH / 8][4];
    uint32 query[Shape::Q_IN_REGISTERS ? Shape::Q_SPLITS : 1][Shape::DEPTH / 16][4];

    __device__ Attention(const Attend& args_)
        : args(args_),
          lane(threadIdx.x % WARP),
          warp(threadIdx.x / WARP % Shape::WARPS),
          team(threadIdx.x / Shape::TEAM),
          first_row(warp / Shape::COLUMNS * 16),
          first_column(warp % Shape::COLUMNS * Shape::WIDTH),
          q_shared(shared_memory()),
          ring(shared_memory() + Shape::Q_BYTES) {}

    /// Writes the zeros behind K rows, which copies never touch and the exchange may have overwritten.
    __device__ void pad_keys() const {
        if constexpr (D < Shape::DEPTH) {
            for (int i = threadIdx.x; i < TEAMS * STAGES * Shape::SLICE; i += Shape::THREADS) {
                uint8* row = ring + i / Shape::SLICE * Shape::STAGE_BYTES + i % Shape::SLICE * Shape::K_STRIDE * 16;
                *reinterpret_cast<uint4*>(row + D * 2) = make_uint4(0, 0, 0, 0);
            }
        }
    }

    __device__ uint8* stage(int index) const { return ring + (team * STAGES + index) * Shape::STAGE_BYTES; }

    /// The query row of the batch and the query head of a row of the block.
    __device__ int64 token_of(int row) const { return block.token + row / args.group; }
    __device__ int head_of(int row) const { return head * args.group + row % args.group; }

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

    /// Brings the queries of the unit to shared memory as 16-bit elements, and the rests of what those cannot hold.
    __device__ void load_queries(const Walk& walk) {
        const int64 span = walk.span - args.pages.spans;
        const float2* angles = walk.piece.offset == 0 ? nullptr : args.angles + span * args.rotary_pairs;
        __syncthreads();
        for (int i = threadIdx.x; i < Shape::ROWS * Shape::DEPTH / 2; i += Shape::THREADS) {
            const int row = i / (Shape::DEPTH / 2), e = i % (Shape::DEPTH / 2) * 2;
            float x = 0.0f, y = 0.0f;
            if (row < rows && e < D) {
                const uint8* source = args.q.row(token_of(row), head_of(row));
                x = query_element(source, e, angles);
                y = query_element(source, e + 1, angles);
            }
#pragma unroll
            for (int s = 0; s < Shape::Q_SPLITS; ++s) {
                const uint32 pair = Pair<KElement>::pack(x, y);
                x -= Pair<KElement>::low(pair);
                y -= Pair<KElement>::high(pair);
                *reinterpret_cast<uint32*>(q_shared + ((s * Shape::ROWS + row) * Shape::K_STRIDE * 16 + e * 2)) = pair;
            }
        }
        __syncthreads();
        if constexpr (Shape::Q_IN_REGISTERS) {
#pragma unroll
            for (int s = 0; s < Shape::Q_SPLITS; ++s) {
#pragma unroll
                for (int k = 0; k < Shape::DEPTH / 16; ++k) load_query(query[s][k], s, k);
            }
        }
    }

    __device__ void load_query(uint32 (&fragment)[4], int split, int k) const {
        const int row = split * Shape::ROWS + first_row + lane % 16;
        load_matrix(fragment, q_shared + (row * Shape::K_STRIDE + k * 2 + lane / 16) * 16);
    }

    /// Starts copying rows of one plane: the team's slice of a tile.
    template <int DIM, int STRIDE>
    __device__ void copy_rows(uint8* target, const Plane& plane, const Walk& walk, const PageWindow& window) const {
        constexpr int CHUNKS = DIM / 8, ALL = Shape::SLICE * CHUNKS;
        const int first = walk.tile * TILE + team * Shape::SLICE, shift = args.pages.page_shift;
        const int64 in_block = plane.offset + head * plane.head_stride;
#pragma unroll 4
        for (int start = 0; start < ALL; start += Shape::TEAM) {
            const int i = start + warp * WARP + lane, row = i / CHUNKS, chunk = i % CHUNKS, stored = first + row;
            const uint32 entry = __shfl_sync(~0u, window.now, (stored >> shift) % WARP);
            const bool valid = stored >= walk.piece.low && stored < walk.piece.high;
            const int64 in_page = stored & ((1 << shift) - 1);
            const uint8* source = args.pages.block(entry) + in_block + in_page * plane.row_stride + chunk * 16;
            if (ALL % Shape::TEAM == 0 || i < ALL) copy_async(target + (row * STRIDE + chunk) * 16, source, valid);
        }
    }

    __device__ void copy_slice(int index, const Walk& walk, PageWindow& window) const {
        window.seek((walk.tile * TILE + team * Shape::SLICE) >> args.pages.page_shift, lane);
        copy_rows<D, Shape::K_STRIDE>(stage(index), args.k_plane, walk, window);
        copy_rows<DV, Shape::V_STRIDE>(stage(index) + Shape::K_BYTES, args.v_plane, walk, window);
    }

    __device__ void open_window(PageWindow& window, const Walk& walk) const {
        const int64 row = block.sequence * args.pages.columns + walk.piece.first_page;
        window.open(args.pages.table + row, ((walk.piece.high - 1) >> args.pages.page_shift) + 1);
    }

    /// Scores, softmax and values of the team's slice of a tile.
    __device__ void compute_slice(int index, const Walk& walk) {
        for (int first = 0; first < Shape::SLICE; first += Shape::SCORES) {
            float scores[Shape::SCORES / 8][4];
            score(scores, stage(index) + first * Shape::K_STRIDE * 16);
            mask(scores, walk, walk.tile * TILE + team * Shape::SLICE + first);
            weigh(scores);
            accumulate(scores, stage(index) + Shape::K_BYTES + first * Shape::V_STRIDE * 16 + first_column * 2);
        }
    }

    __device__ void score(float (&scores)[Shape::SCORES / 8][4], const uint8* keys) const {
#pragma unroll
        for (int n = 0; n < Shape::SCORES / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < Shape::DEPTH / 16; ++k) {
#pragma unroll
            for (int s = 0; s < Shape::Q_SPLITS; ++s) {
                uint32 a[4];
                if constexpr (Shape::Q_IN_REGISTERS) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[i] = query[s][k][i];
                } else {
                    load_query(a, s, k);
                }
#pragma unroll
                for (int n = 0; n < Shape::SCORES / 8; n += 2) {
                    uint32 b[4];
                    const int row = n * 8 + lane / 16 * 8 + lane % 8;
                    load_matrix(b, keys + (row * Shape::K_STRIDE + k * 2 + lane / 8 % 2) * 16);
                    multiply_add(scores[n], a, b[0], b[1], KElement());
                    multiply_add(scores[n + 1], a, b[2], b[3], KElement());
                }
            }
        }
    }

    /// Scales scores of the stored rows from `first` on; those that their query does not see become -inf.
    __device__ void mask(float (&scores)[Shape::SCORES / 8][4], const Walk& walk, int first) const {
        const int place = walk.piece.origin + first;
        const bool whole = first >= walk.piece.low && first + Shape::SCORES <= walk.piece.high &&
                           place + Shape::SCORES - 1 <= block.position &&
                           place > block.position + block.queries - 1 - args.window;
        const int last[2] = {block.position + (first_row + lane / 4) / args.group,
                             block.position + (first_row + lane / 4 + 8) / args.group};
#pragma unroll
        for (int n = 0; n < Shape::SCORES / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = n * 8 + lane % 4 * 2 + i % 2;
                const bool seen = whole || (first + column >= walk.piece.low && first + column < walk.piece.high &&
                                            place + column <= last[i / 2] && place + column > last[i / 2] - args.window);
                scores[n][i] = seen ? scores[n][i] * args.scale : minus_infinity();
            }
        }
    }

    /// Online softmax: scores become weights relative to the new maximum, and the values so far are scaled to it.
    __device__ void weigh(float (&scores)[Shape::SCORES / 8][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float highest = top[r];
#pragma unroll
            for (int n = 0; n < Shape::SCORES / 8; ++n) highest = fmaxf(highest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
            // Where nothing is seen so far every weight is exp2(-inf - 0) = 0.
            const float base = highest == minus_infinity() ? 0.0f : highest;
            const float decay = exp2_fast(top[r] - base);
            top[r] = highest;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < Shape::SCORES / 8; ++n) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    scores[n][i] = exp2_fast(scores[n][i] - base);
                    total += scores[n][i];
                }
            }
            sum[r] = sum[r] * decay + total;
#pragma unroll
            for (int n = 0; n < Shape::WIDTH / 8; ++n) {
                values[n][2 * r] *= decay;
                values[n][2 * r + 1] *= decay;
            }
        }
    }

    /// Adds the V rows, times their weights, to the warp's values.
    __device__ void accumulate(const float (&weights)[Shape::SCORES / 8][4], const uint8* rows_of_v) {
#pragma unroll
        for (int k = 0; k < Shape::SCORES / 16; ++k) {
            // What an accumulator holds of two column blocks is what a fragment of the left factor holds.
            float p[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) p[i] = weights[2 * k + i / 4][i % 4];
#pragma unroll
            for (int s = 0; s < Shape::P_SPLITS; ++s) {
                uint32 a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    a[i] = Pair<VElement>::pack(p[2 * i], p[2 * i + 1]);
                    p[2 * i] -= Pair<VElement>::low(a[i]);
                    p[2 * i + 1] -= Pair<VElement>::high(a[i]);
                }
#pragma unroll
                for (int n = 0; n < Shape::WIDTH / 8; n += 2) {
                    uint32 b[4];
                    load_matrix_transposed(b, rows_of_v + ((k * 16 + lane % 16) * Shape::V_STRIDE + n + lane / 16) * 16);
                    multiply_add(values[n], a, b[0], b[1], VElement());
                    // An odd number of blocks: the last load has brought 8 elements of another row.
                    if (n + 1 < Shape::WIDTH / 8) multiply_add(values[n + 1], a, b[2], b[3], VElement());
                }
            }
        }
    }

    /// Goes over the tiles (or the run) from `from` on. Leaves maxima, sums and values of all teams in the exchange.
    __device__ void work(int from, int count) {
        const Span* spans = args.pages.spans + args.pages.span_starts[block.sequence];
        Walk compute;
        compute.start(spans, block.low, block.position + block.queries, from, count, args.by_runs);
        Walk load = compute;
        PageWindow window;
        open_window(window, load);
        pad_keys();
        int index = 0;
        auto advance = [&] {
            if (load.left > 0) {
                const Span* span = load.span;
                copy_slice(index, load, window);
                load.next();
                if (load.left > 0 && load.span != span) open_window(window, load);
            }
            copy_commit();
            index = index + 1 == STAGES ? 0 : index + 1;
        };
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) advance();
        top[0] = top[1] = minus_infinity();
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < Shape::WIDTH / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) values[n][i] = 0.0f;
        }
        int64 prepared = compute.piece.offset;
        load_queries(compute);
        for (int at = 0; compute.left > 0; at = at + 1 == STAGES ? 0 : at + 1) {
            if (compute.piece.offset != prepared) {
                prepared = compute.piece.offset;
                load_queries(compute);
            }
            copy_wait<STAGES - 2>();
            // The slice has arrived for all, and all are done with the one before, whose place is filled next.
            team_barrier<Shape::WARPS>();
            advance();
            compute_slice(at, compute);
            compute.next();
        }
        copy_wait<0>();
        __syncthreads();
        give();
        __syncthreads();
    }

    __device__ float* exchange(int of_team) const {
        return reinterpret_cast<float*>(ring) + of_team * Shape::ROWS * (Shape::EXCHANGE + 2);
    }

    /// Writes this thread's share of the result to the exchange.
    __device__ void give() {
        float* out = exchange(team);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + lane / 4 + 8 * r;
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            if (lane % 4 == 0 && first_column == 0) {
                out[Shape::ROWS * Shape::EXCHANGE + row] = top[r];
                out[Shape::ROWS * Shape::EXCHANGE + Shape::ROWS + row] = sum[r];
            }
#pragma unroll
            for (int n = 0; n < Shape::WIDTH / 8; ++n) {
                float* pair = out + row * Shape::EXCHANGE + first_column + n * 8 + lane % 4 * 2;
                pair[0] = values[n][2 * r];
                pair[1] = values[n][2 * r + 1];
            }
        }
    }

    __device__ float top_of(int of_team, int row) const { return exchange(of_team)[Shape::ROWS * Shape::EXCHANGE + row]; }
    __device__ float sum_of(int of_team, int row) const {
        return exchange(of_team)[Shape::ROWS * Shape::EXCHANGE + Shape::ROWS + row];
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
        int* flag = reinterpret_cast<int*>(q_shared);
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

/// Grid: any number of thread blocks, in one dimension, with Shape::THREADS threads and Shape::SHARED_BYTES of memory.
template <class Shape>
__global__ void __launch_bounds__(Shape::THREADS) attend(const Attend args) {
    const int blocks = *args.block_count;
    const int64 all = static_cast<int64>(args.prefix[blocks]) * args.kv_heads, grid = gridDim.x;
    int64 at = all * blockIdx.x / grid;
    const int64 end = all * (blockIdx.x + 1) / grid;
    if (at == end) return;
    Attention<Shape> attention(args);
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
        attention.block = args.blocks[low];
        attention.head = head;
        attention.rows = attention.block.queries * args.group;
        attention.work(first, count);
        const int unit = low * args.kv_heads + head;
        if (count == work) {
            attention.write_all();
        } else if (args.by_runs) {
            attention.write_partial(at);
            if (attention.is_last(unit, work)) attention.merge(work, [=](int part) { return start + part; });
        } else {
            // The thread block whose share holds `x` is the last that begins at or before it.
            const auto owner = [=](int64 x) { return ((x + 1) * grid - 1) / all; };
            const int64 first_owner = owner(start), last_owner = owner(start + work - 1);
            attention.write_partial(2 * static_cast<int64>(blockIdx.x) + (first == 0));
            if (attention.is_last(unit, static_cast<int>(last_owner - first_owner + 1))) {
                attention.merge(static_cast<int>(last_owner - first_owner + 1),
                                [=](int part) { return 2 * (first_owner + part) + (part == 0); });
            }
        }
        __syncthreads();
        at += count;
    }
}

}  // namespace pagoda
