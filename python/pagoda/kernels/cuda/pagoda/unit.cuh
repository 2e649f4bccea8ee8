// The work of an attend kernel and its parts: shares, partial results, merging. An engine (tensor_cores.cuh, cuda_cores.cuh)
// computes scores and values.
//
// The work is a list: for each block of queries and each set of query heads of a K/V head, the tiles of 64 stored rows that some
// query sees. It is cut into equal shares, one for each thread block, regardless of unit borders, so that skewed batches stay
// balanced and the grid is the same at every step (a graph may replay it). The part of a unit (block of queries, set) in a share is
// a partial result unless it is the whole unit; the thread block that finishes a unit last merges its parts in order.
//
// A launch may cover only a part of the pages, and leave unnormalised parts of results for the next. Common pages are read once, for
// the queries of all sequences that hold them; the blocks of each sequence begin after those pages, with these parts. Pages that are
// streamed through device memory come a few at a time: each launch continues where the last one stopped.
#pragma once

#include <pagoda/formats.cuh>
#include <pagoda/tables.cuh>

namespace pagoda {

constexpr float LN_2 = 0.693147180559945f, LOG2_E = 1.44269504088896f;

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

/// tanh, to 5e-7 of itself and never beyond 1; NaN for NaN. A minimax polynomial near 0, where 1 - 2 / (1 + e^2x) would cancel: the
/// two ranges of CUDA's tanhf, of which this is the short form. Few numbers are alive at a time: registers are short.
__device__ __forceinline__ float tanh_fast(float x) {
    const float xx = x * x;
    float p = fmaf(xx, 1.57296831e-2f, -5.23029624e-2f);
    p = fmaf(xx, p, 1.33152977e-1f);
    p = fmaf(xx, p, -3.33327681e-1f);
    p = fmaf(xx * x, p, x);
    const float far = 1.0f - divide_fast(2.0f, 1.0f + exp2_fast(2.0f * LOG2_E * x));
    return xx < 0.3f ? p : far;
}

/// Consecutive queries of one sequence, or queries of several that hold pages in common.
struct QueryBlock {
    /// The row of the page table, and the first span of its sequence.
    int sequence, first_span;
    /// The row of the first query in the batch (or in `members`), and how many there are.
    int token, queries;
    /// The place of the first query on the sequence's token axis; for common pages the last place that they hold.
    int position;
    /// What of the axis is gone over: [low, high), and from `from` on what is seen whatever the window.
    int from, low, high;
    /// Parts that results begin with: entries of `part_rows`, which name the part of the first query.
    int first_part, parts;
    /// The part that the results of the first query are to be; below 0 they are results.
    int target;
};

/// How work is counted and cut.
enum Division : int {
    /// In tiles; anywhere.
    TILES,
    /// In runs of RUN_TILES tiles, each with a partial result of its own.
    RUNS,
    /// As RUNS, but a thread block does all runs of a unit, one after the other: the same numbers, in the memory of two.
    UNITS,
};

struct Attend {
    Pages pages;
    Plane k_plane, v_plane;
    Rows q, out;
    /// [tokens, sets * group] or null: natural log-sum-exp.
    float* lse;
    const QueryBlock* blocks;
    /// [blocks + 1]: the tiles (or runs) of the blocks before, for one set.
    const int* prefix;
    /// [2], on the device: how many blocks there are, and the last of `prefix`.
    const int* totals;
    /// The row in the batch of each query that holds common pages; null where blocks are of consecutive queries.
    const int* members;
    const int* part_rows;
    /// [rows, sets * group, V_DIM + 2]: values, maximum and sum.
    float* parts;
    /// A set is `group` query heads, all of a K/V head or, where these have more rows than a unit may, a half of them, a quarter, ...:
    /// set s goes over K/V head s >> set_shift.
    int sets, group, set_shift;
    /// Tokens that a query sees at most, itself included.
    int window;
    Division division;
    /// In tiles: what a team adds up at most before its sums are put aside. Tensor cores cut sums off, a little of them for each row.
    int stretch;
    /// What products q k are multiplied with; above 0. Scores are base-2 logarithms: log2(e) is a factor of `softcap`, or of `scale`
    /// where there is none.
    float scale;
    /// Scores are softcap * tanh(scale * q k); 0 where they are scale * q k.
    float softcap;
    /// [sets * group] or null: natural logarithms that join each sum of weights, and not the log-sum-exp.
    const float* sinks;
    /// [spans and more, rotary_pairs]: cosine and sine of a span's offset, or for one that trails of a query's, to rotate queries
    /// back; null if no span has one. Element 2 i goes with 2 i + 1 if interleaved, else i with i + rotary_pairs.
    const float2* angles;
    int rotary_pairs, interleaved;
    /// What was done to quantised rows before: [K/V heads, head_dim] taken off K, or null; and whether rows were rotated.
    const float* center;
    int rotate_k, rotate_v;
    /// Where keys are made from values: [head_dim], what these are multiplied with, and [rotary_pairs], by how much of a turn a pair turns
    /// with each position, in units of 2^-64.
    const float* key_weight;
    const uint64* turns;
    /// [2 * grid][PARTIAL], or [runs][PARTIAL] where these have one each; and [blocks * sets], 0 before and after.
    float* partials;
    int* pending;
};

/// The tiles of a part of a unit, one after the other, over the spans of the sequence.
struct Walk {
    const Span* span;
    Piece piece;
    int tile, left;

    /// Begins at the tile (or run) `from` of what the block goes over, for `count` tiles (or one run).
    __device__ void start(const Pages& pages, const QueryBlock& block, int from, int count, bool by_runs) {
        span = pages.spans + block.first_span;
        while (true) {
            piece = Piece::of(*span, block.from, block.low, block.high);
            const int tiles = piece.last_tile() - piece.first_tile();
            const int first_run = piece.first_tile() / RUN_TILES;
            const int here = !by_runs || tiles == 0 ? tiles : (piece.last_tile() + RUN_TILES - 1) / RUN_TILES - first_run;
            if (from < here) {
                if (by_runs) {
                    const int run = first_run + from;
                    tile = max(run * RUN_TILES, piece.first_tile());
                    left = min((run + 1) * RUN_TILES, piece.last_tile()) - tile;
                } else {
                    tile = piece.first_tile() + from;
                    left = count;
                }
                return;
            }
            from -= here;
            ++span;
        }
    }

    __device__ void next(const QueryBlock& block) {
        ++tile, --left;
        while (left > 0 && tile == piece.last_tile()) {
            piece = Piece::of(*++span, block.from, block.low, block.high);
            tile = piece.first_tile();
        }
    }
};

/// Values of a row that are summed with weights 2^score: relative to 2^top, as is the sum of weights. As many as a thread reads at once.
struct Sum {
    static constexpr int COLUMNS = 4;
    float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
    float top = minus_infinity(), total = 0.0f;

    /// The order of operations is written out: results must not depend on where this is inlined.
    __device__ void add(const Sum& other) {
        const float highest = fmaxf(top, other.top);
        const float keep = factor(top, highest), take = factor(other.top, highest);
        value.x = fmaf(value.x, keep, other.value.x * take);
        value.y = fmaf(value.y, keep, other.value.y * take);
        value.z = fmaf(value.z, keep, other.value.z * take);
        value.w = fmaf(value.w, keep, other.value.w * take);
        total = fmaf(total, keep, other.total * take);
        top = highest;
    }

    __device__ static float factor(float top, float highest) {
        return top == minus_infinity() ? 0.0f : exp2_fast(top - highest);
    }
};

/// Bytes at the end of shared memory for what a thread block has to know when a unit is done.
constexpr int KEPT_BYTES = 64;

/// A unit of work in the hands of a thread block. An engine leaves its result in the exchange, in shared memory: for each of
/// Shape::TEAMS teams that saw other stored rows, values [ROWS][EXCHANGE], maxima [ROWS] and sums [ROWS].
template <class Shape>
struct Unit {
    using Q = typename Shape::Q;
    static constexpr int DV = Shape::DV, TEAMS = Shape::TEAMS;

    const Attend& args;
    /// Values that all threads read at once, and where this one begins.
    static constexpr int ROUND = Sum::COLUMNS * Shape::THREADS;
    __device__ static int first_value() { return Sum::COLUMNS * thread_here(); }

    /// Where the exchange is, and one word to tell all threads something.
    float* const exchanged;
    int* const flag;
    /// The place of the block of queries in the list, the set of heads, and query rows.
    int index, set, rows;
    /// Whether some of the unit has been done just before.
    bool begun;

    __device__ Unit(const Attend& args_, void* exchanged_, void* flag_)
        : args(args_), exchanged(static_cast<float*>(exchanged_)), flag(static_cast<int*>(flag_)) {}

    /// Read where it is needed, and not kept: registers are short.
    __device__ const QueryBlock& block() const { return args.blocks[static_cast<uint32>(index)]; }

    /// The pages of the span that the walk is in.
    __device__ const uint32* table_of(const Walk& walk) const {
        return args.pages.table + block().sequence * args.pages.columns + walk.span->first_page;
    }

    __device__ int kv_head() const { return set >> args.set_shift; }

    /// The query row of the batch and the query head of a row of the block.
    __device__ int64 token_of(int row) const {
        const int query = block().token + row / args.group;
        return args.members == nullptr ? query : args.members[query];
    }
    __device__ int head_of(int row) const { return set * args.group + row % args.group; }

    /// The angles of a span for a query row, if it has moved.
    __device__ const float2* angles_of(const Span* span, int row) const {
        if (span->sight == TRAILING) return args.angles + (span->offset + token_of(row)) * args.rotary_pairs;
        return span->offset == 0 ? nullptr : args.angles + (span - args.pages.spans) * args.rotary_pairs;
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

    /// Values of the unit's result from `column` on, over all teams.
    __device__ Sum result(int row, int column) const {
        Sum sum;
        for (int t = 0; t < TEAMS; ++t) {
            const float *values = exchange(t), *tops = values + Shape::ROWS * Shape::EXCHANGE;
            const float4 four = *reinterpret_cast<const float4*>(values + row * Shape::EXCHANGE + column);
            sum.add({four, tops[row], tops[Shape::ROWS + row]});
        }
        return sum;
    }

    /// A row of the block in the part that belongs to row `first` of `parts`.
    __device__ float* part_of(int64 first, int row) const {
        return args.parts + ((first + row / args.group) * args.sets * args.group + head_of(row)) * (DV + 2);
    }

    /// What values of the result begin with. A single part is taken as it is, so that it makes no difference where a launch
    /// has stopped.
    __device__ Sum before(int row, int column) const {
        Sum sum;
        for (int i = 0; i < block().parts; ++i) {
            const float *part = part_of(args.part_rows[block().first_part + i], row), *four = part + column;
            const Sum other = {{four[0], four[1], four[2], four[3]}, part[DV], part[DV + 1]};
            if (i == 0) {
                sum = other;
            } else {
                sum.add(other);
            }
        }
        return sum;
    }

    /// Writes values of a part, or of the output: with the first its row's log-sum-exp, and 0 and -inf where the row saw nothing.
    __device__ void write(int row, int column, const Sum& sum) const {
        const float values[Sum::COLUMNS] = {sum.value.x, sum.value.y, sum.value.z, sum.value.w};
        if (block().target >= 0) {
            float* part = part_of(block().target, row);
#pragma unroll
            for (int i = 0; i < Sum::COLUMNS; ++i) part[column + i] = values[i];
            if (column == 0) part[DV] = sum.top, part[DV + 1] = sum.total;
            return;
        }
        const int query_head = head_of(row);
        const int64 token = token_of(row);
        const bool nothing = sum.total == 0.0f;
        float total = sum.total;
        if (args.sinks != nullptr) total += exp2_fast(fmaf(args.sinks[query_head], LOG2_E, -sum.top));
        uint8* const target = args.out.row(token, query_head) + column * Q::BYTES;
#pragma unroll
        for (int i = 0; i < Sum::COLUMNS; ++i) store_one(target + i * Q::BYTES, nothing ? 0.0f : values[i] / total);
        if (column == 0 && args.lse != nullptr) {
            const float lse = nothing ? minus_infinity() : (sum.top + log2f(sum.total)) * LN_2;
            args.lse[token * args.sets * args.group + query_head] = lse;
        }
    }

    __device__ static void store_one(uint8* target, float x) {
        if constexpr (Q::BYTES == 4) {
            *reinterpret_cast<float*>(target) = x;
        } else {
            *reinterpret_cast<unsigned short*>(target) = static_cast<unsigned short>(Pair<typename Q::Element>::pack(Q::saturated(x), 0.0f));
        }
    }

    __device__ float* slot(int64 index) const { return args.partials + index * Shape::PARTIAL; }

    /// Values of the partial result in a slot, from L2: other thread blocks may have written it.
    __device__ static Sum kept(const float* slot, int i) {
        const float* const tops = slot + Shape::ROWS * DV + i / DV;
        return {__ldcg(reinterpret_cast<const float4*>(slot + i)), __ldcg(tops), __ldcg(tops + Shape::ROWS)};
    }

    /// What has just been done, behind what has been put aside in a slot, if anything has, or else behind what the unit begins with, if
    /// the thread block does all of it.
    __device__ Sum so_far(const float* slot, bool whole, bool begun, int i) const {
        const int row = i / DV, column = i % DV;
        Sum sum;
        if (begun) {
            sum = kept(slot, i);
        } else if (whole) {
            sum = before(row, column);
        }
        sum.add(result(row, column));
        return sum;
    }

    /// Takes in what has just been done: writes the output if the unit is done, by this thread block alone, or else puts everything so far
    /// aside in a slot.
    __device__ void take_in(float* slot, bool whole, bool begun, bool done) const {
        const auto put_top = [&](int row, const Sum& sum) {
            float* const tops = slot + Shape::ROWS * DV + row;
            tops[0] = sum.top, tops[Shape::ROWS] = sum.total;
        };
        for (int i = first_value(); i < rows * DV; i += ROUND) {
            const Sum sum = so_far(slot, whole, begun, i);
            if (whole && done) {
                write(i / DV, i % DV, sum);
            } else {
                *reinterpret_cast<float4*>(slot + i) = sum.value;
                if (!begun && i % DV == 0) put_top(i / DV, sum);
            }
        }
        if (!begun || (whole && done)) return;
        // Not before all threads have read what sums of a row were relative to.
        __syncthreads();
        for (int row = thread_here(); row < rows; row += Shape::THREADS) put_top(row, so_far(slot, whole, begun, row * DV));
    }

    /// Merges `count` partial results in order. Each is the first of so many `slots`, from `start` on, but the one that begins the unit the
    /// last. Some are asked for at once: each takes the way to L2 and back. There are 33, for example, where 264 thread blocks have one
    /// sequence's 8 K/V heads.
    __device__ void merge(int count, int64 start, int slots) const {
        constexpr int AHEAD = 17;
        for (int i = first_value(); i < rows * DV; i += ROUND) {
            Sum sum = before(i / DV, i % DV);
            for (int first = 0; first < count; first += AHEAD) {
                Sum parts[AHEAD];
#pragma unroll
                for (int k = 0; k < AHEAD; ++k) {
                    // Past the last there is nothing, and nothing is added.
                    if (first + k >= count) continue;
                    parts[k] = kept(slot(start + (first + k == 0 ? slots - 1 : (first + k) * slots)), i);
                }
#pragma unroll
                for (int k = 0; k < AHEAD; ++k) sum.add(parts[k]);
            }
            write(i / DV, i % DV, sum);
        }
    }

    /// Counts finished parts of the unit; true in the thread block that finished the last of `count`. One thread counts for all: barriers
    /// are before and behind that.
    __device__ bool is_last(int unit, int count) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            const bool last = count_up(args.pending + unit) == count - 1;
            if (last) args.pending[unit] = 0;
            *flag = last;
        }
        __syncthreads();
        return *flag != 0;
    }
};

}  // namespace pagoda
