// How stored rows reach shared memory: a ring of stages, which asynchronous copies fill ahead. Each team of warps has its own.
#pragma once

#include <pagoda/shared_rows.cuh>
#include <pagoda/unit.cuh>

namespace pagoda {

/// What a stage holds: of its rows [low, high) are real, row 0 is at `place` of the token axis, and all are of one span. `whole`:
/// every query sees all of them; `always`: whatever the window.
struct Note {
    int low, high, place, span, whole, always;

    /// The rows that a query sees, [first, second), of which `last` is the last place that it sees. Nothing overflows where a window has no
    /// end.
    __device__ int2 seen(int last, int window) const {
        const int hidden = always ? 0 : max(last - window, place - 1) - (place - 1);
        return {max(low, hidden), min(high, last - place + 1)};
    }
};

/// Table entries of 64 pages of a span: a lane holds one of the 32 from `base` on and one of the next. Below 0 there are none yet.
struct PageWindow {
    int base = -1;
    uint32 now, then;
};

/// Stored rows from `first` on, of which [low, high) are real, counted from there.
struct Extent {
    int first, low, high;

    __device__ bool whole(int rows) const { return low <= 0 && high >= rows; }
};

/// A unit in the hands of a team that has a ring.
template <class Shape_>
struct Ring : Unit<Shape_> {
    using Shape = Shape_;
    using Unit<Shape>::args;
    using Unit<Shape>::block;

    /// `warp` is its place in the team.
    const int lane, warp, team;
    uint8* const ring;

    /// The ring, and after it what a result leaves in its place, begin at `start` of shared memory.
    __device__ Ring(const Attend& args_, int start)
        : Unit<Shape>(args_, shared_memory() + start, shared_memory()),
          lane(threadIdx.x % WARP),
          warp(threadIdx.x / WARP % Shape::WARPS),
          team(threadIdx.x / Shape::TEAM),
          ring(shared_memory() + start) {}

    __device__ uint8* stage(int index) const { return ring + (team * Shape::STAGES + index) * Shape::STAGE_BYTES; }

    /// Tiles that the teams go over at once, from the one that the walk is at: of one span, and of this share.
    __device__ static int tiles_of(const Walk& walk) {
        return Shape::TILES == 1 ? 1 : min(Shape::TILES, min(walk.left, walk.piece.last_tile() - walk.tile));
    }

    __device__ Note& note(int index) const { return *reinterpret_cast<Note*>(stage(index) + Shape::NOTE_START); }

    /// Starts copying a part of the team's rows of `tiles` tiles; rows of tiles beyond are not real.
    __device__ void copy_stage(int index, const Walk& walk, int tiles, int sub, PageWindow& window) const {
        const int first = walk.tile * TILE + team * Shape::SLICE + sub * Shape::SCORES;
        const int end = Shape::TILES == 1 ? walk.piece.high : min(walk.piece.high, (walk.tile + tiles) * TILE);
        const Extent wanted{first, walk.piece.low - first, end - first};
        seek(window, walk, first >> args.pages.page_shift);
        copy_rows<Shape::SCORES>(stage(index), wanted, window);
        if (threadIdx.x % Shape::TEAM == 0) {
            const QueryBlock& queries = block();
            const Span& span = *walk.span;
            const int place = span.origin() + first;
            const bool whole = wanted.whole(Shape::SCORES) && place + Shape::SCORES - 1 <= queries.position &&
                               (span.always() || place > queries.position + queries.queries - 1 - args.window);
            note(index) = {wanted.low, wanted.high, place, static_cast<int>(&span - args.pages.spans), whole, span.always()};
        }
    }

    /// Makes `page` of the walk's span one of the first 32.
    __device__ void seek(PageWindow& window, const Walk& walk, int page) const {
        const int wanted = page & ~(WARP - 1);
        if (wanted == window.base) return;
        // Worked out anew each time: registers are short, and this is rare.
        const uint32* const table = this->table_of(walk);
        const int mine = wanted + lane, pages = ((walk.piece.high - 1) >> args.pages.page_shift) + 1;
        window.now = window.base >= 0 && wanted == window.base + WARP ? window.then : mine < pages ? table[mine] : 0;
        window.then = mine + WARP < pages ? table[mine + WARP] : 0;
        window.base = wanted;
    }

    /// Starts copying the rows of a stage in runs of ROWS, or as many fewer as are in one page.
    template <int ROWS>
    __device__ void copy_rows(uint8* target, const Extent& wanted, const PageWindow& window) const {
        if constexpr (ROWS > PAGE_MIN) {
            if (ROWS > 1 << args.pages.page_shift) return copy_rows<ROWS / 2>(target, wanted, window);
        }
        copy_runs<ROWS>(target, wanted, window);
    }

    template <int ROWS>
    __device__ void copy_runs(uint8* target, const Extent& wanted, const PageWindow& window) const {
        const int shift = args.pages.page_shift;
#pragma unroll
        for (int run = 0; run < Shape::SCORES; run += ROWS) {
            const int first = wanted.first + run;
            const uint8* const page = args.pages.block(__shfl_sync(~0u, window.now, (first >> shift) % WARP));
            const Extent here{first & ((1 << shift) - 1), wanted.low - run, wanted.high - run};
            if constexpr (Shape::K::BITS > 0) {
                copy_plane<ROWS, typename Shape::K, Shape::D, typename Shape::KRows>(target, run, page, args.k_plane, here);
            }
            if constexpr (!Shape::V_IN_K) {
                uint8* const values = target + Shape::V_START;
                copy_plane<ROWS, typename Shape::V, Shape::DV, typename Shape::VRows>(values, run, page, args.v_plane, here);
            }
        }
    }

    /// Rows of a plane, and their scales. `page`: the block that they are in.
    template <int ROWS, class Format, int DIM, class Target>
    __device__ void copy_plane(uint8* target, int run, const uint8* page, const Plane& plane, const Extent& here) const {
        copy_strip<ROWS, DIM * Format::BITS / 8, Target>(target + Target::bytes(run), page, plane.rows, here);
        if constexpr (Format::QUANTISED) {
            constexpr int BYTES = Format::scale_bytes(DIM);
            copy_strip<ROWS, BYTES, SideBySide>(target + Target::bytes(Shape::SCORES) + run * BYTES, page, plane.scales, here);
        }
    }

    /// ROWS rows of ROW_BYTES, which lie side by side in the page, and in shared memory as Target has them. What is copied at once is zeros
    /// where none of its rows is real.
    template <int ROWS, int ROW_BYTES, class Target>
    __device__ void copy_strip(uint8* target, const uint8* page, const Strip& strip, const Extent& here) const {
        // What is copied at once stays together.
        constexpr int ALL = ROWS * ROW_BYTES, WHOLE = Target::SIDE_BY_SIDE ? ALL : ROW_BYTES;
        constexpr int BYTES = WHOLE % 16 == 0 ? 16 : WHOLE % 8 == 0 ? 8 : 4, ROUND = Shape::TEAM * BYTES;
        const uint8* const source = page + strip.offset + this->kv_head() * strip.head_stride + static_cast<int64>(here.first) * ROW_BYTES;
        // What follows from the thread is kept only where it is little and used often.
        if (here.whole(ROWS)) {
            const int mine = (ROUND % ROW_BYTES == 0 ? warp * WARP + lane : thread_here() % Shape::TEAM) * BYTES;
#pragma unroll(ROUND % ROW_BYTES == 0 ? ALL / ROUND + 1 : Shape::WARPS > 1 ? 1 : 2)
            for (int start = 0; start < ALL; start += ROUND) {
                if (start + ROUND > ALL && start + mine >= ALL) break;
                copy_async<BYTES>(target + place_of<Target, ROW_BYTES, ROUND>(start, mine), source + mine + start, true);
            }
        } else {
            const int mine = thread_here() % Shape::TEAM * BYTES;
#pragma unroll 1
            for (int start = 0; start + mine < ALL; start += ROUND) {
                const int byte = start + mine;
                const bool valid = (byte + BYTES - 1) / ROW_BYTES >= here.low && byte / ROW_BYTES < here.high;
                copy_async<BYTES>(target + place_of<Target, ROW_BYTES, ROUND>(start, mine), source + byte, valid);
            }
        }
    }

    /// Where byte `start + mine` of the rows goes, in the round of copies that begins at `start`. What depends on the thread is apart
    /// from constants where it can be.
    template <class Target, int ROW_BYTES, int ROUND>
    __device__ static int place_of(int start, int mine) {
        if constexpr (Target::SIDE_BY_SIDE) {
            return start + mine;
        } else if constexpr (ROUND % ROW_BYTES == 0) {
            // Both are powers of two: rows of a round have bits that no first row of a round has.
            const int first = start / ROW_BYTES, place = Target::place_of_byte(mine / ROW_BYTES, mine % ROW_BYTES);
            return Target::bytes(first) + (place ^ Target::turn(first) * 16);
        } else {
            return Target::place_of_byte((start + mine) / ROW_BYTES, (start + mine) % ROW_BYTES);
        }
    }
};

}  // namespace pagoda
