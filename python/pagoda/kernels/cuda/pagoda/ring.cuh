// How stored rows come to shared memory: a ring of stages, which asynchronous copies fill ahead. Each team of warps has its own.
#pragma once

#include <pagoda/unit.cuh>

namespace pagoda {

/// What a stage holds: of its rows [low, high) are real, row 0 is at `place` of the token axis, and all are of one span. `whole`:
/// every query sees all of them; `always`: whatever the window.
struct Note {
    int low, high, place, span, whole, always;
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

    /// The first stored row of a part of the team's slice of a tile.
    __device__ int first_of(const Walk& walk, int sub) const {
        return walk.tile * TILE + team * Shape::SLICE + sub * Shape::SCORES;
    }

    /// Starts copying the rows of a stage of one plane from `first` on.
    template <int ROW_BYTES, int STRIDE>
    __device__ void copy_rows(uint8* target, const Strip& plane, const Walk& walk, int first, const PageWindow& window) const {
        constexpr int CHUNKS = ROW_BYTES / 16, ALL = Shape::SCORES * CHUNKS;
        const int shift = args.pages.page_shift, thread = warp * WARP + lane;
        const int64 in_block = plane.offset + this->kv_head() * plane.head_stride;
        if (Shape::SCORES <= 1 << shift) {
            // All in one page: one stretch of bytes.
            const uint32 entry = __shfl_sync(~0u, window.now, (first >> shift) % WARP);
            const uint8* source = args.pages.block(entry) + in_block;
            source += static_cast<int64>(first & ((1 << shift) - 1)) * ROW_BYTES + thread * 16;
            const int low = walk.piece.low - first, high = walk.piece.high - first;
#pragma unroll(Shape::STACK == 1 ? 4 : Shape::TEAM % CHUNKS == 0 ? 2 : 1)
            for (int start = 0; start < ALL; start += Shape::TEAM) {
                const int row = copied_row<CHUNKS>(start, thread), chunk = copied_chunk<CHUNKS>(start, thread);
                const bool valid = row >= low && row < high;
                if (ALL % Shape::TEAM == 0 || start + thread < ALL) {
                    copy_async(target + (row * STRIDE + chunk) * 16, source + start * 16, valid);
                }
            }
            return;
        }
#pragma unroll(Shape::STACK == 1 ? 4 : Shape::TEAM % CHUNKS == 0 ? 2 : 1)
        for (int start = 0; start < ALL; start += Shape::TEAM) {
            const int row = copied_row<CHUNKS>(start, thread), chunk = copied_chunk<CHUNKS>(start, thread), stored = first + row;
            const uint32 entry = __shfl_sync(~0u, window.now, (stored >> shift) % WARP);
            const bool valid = stored >= walk.piece.low && stored < walk.piece.high;
            const int64 in_page = stored & ((1 << shift) - 1);
            const uint8* source = args.pages.block(entry) + in_block + in_page * ROW_BYTES + chunk * 16;
            if (ALL % Shape::TEAM == 0 || start + thread < ALL) copy_async(target + (row * STRIDE + chunk) * 16, source, valid);
        }
    }

    /// The row of a stage, and the 16 bytes of it, that a thread copies in a round which begins at `start`.
    template <int CHUNKS>
    __device__ static int copied_row(int start, int thread) {
        return Shape::TEAM % CHUNKS == 0 ? start / CHUNKS + thread / CHUNKS : (start + thread) / CHUNKS;
    }
    template <int CHUNKS>
    __device__ static int copied_chunk(int start, int thread) {
        return Shape::TEAM % CHUNKS == 0 ? thread % CHUNKS : (start + thread) % CHUNKS;
    }

    /// Starts copying their scales, which lie as they do in the page: of 8 stored rows at a time, which are in one page. Where
    /// none of the 8 is real there are zeros.
    template <int SCALE_BYTES>
    __device__ void copy_scales(uint8* target, const Strip& plane, const Walk& walk, int first, const PageWindow& window) const {
        constexpr int BYTES = SCALE_BYTES % 2 == 0 ? 16 : 8, CHUNKS = 8 * SCALE_BYTES / BYTES, ALL = Shape::SCORES / 8 * CHUNKS;
        const int shift = args.pages.page_shift;
        const int64 in_block = plane.offset + this->kv_head() * plane.head_stride;
        for (int start = 0; start < ALL; start += Shape::TEAM) {
            const int chunk = start + warp * WARP + lane, stored = first + chunk / CHUNKS * 8;
            const uint32 entry = __shfl_sync(~0u, window.now, (stored >> shift) % WARP);
            const bool valid = stored + 8 > walk.piece.low && stored < walk.piece.high;
            const int64 in_page = stored & ((1 << shift) - 1);
            const uint8* source = args.pages.block(entry) + in_block + in_page * SCALE_BYTES + chunk % CHUNKS * BYTES;
            if (chunk < ALL) copy_async<BYTES>(target + chunk * BYTES, source, valid);
        }
    }

    __device__ Note& note(int index) const { return *reinterpret_cast<Note*>(stage(index) + Shape::NOTE_START); }

    template <class Format, int DIM, int STRIDE>
    __device__ void copy_plane(uint8* target, const Plane& plane, const Walk& walk, int first, const PageWindow& window) const {
        copy_rows<DIM * Format::BITS / 8, STRIDE>(target, plane.rows, walk, first, window);
        if constexpr (Format::QUANTISED) {
            uint8* const scales = target + Shape::SCORES * STRIDE * 16;
            copy_scales<Format::scale_bytes(DIM)>(scales, plane.scales, walk, first, window);
        }
    }

    __device__ void copy_stage(int index, const Walk& walk, int first, PageWindow& window) const {
        window.seek(first >> args.pages.page_shift, lane);
        copy_plane<typename Shape::K, Shape::D, Shape::K_STRIDE>(stage(index), args.k_plane, walk, first, window);
        if constexpr (!Shape::V_IN_K) {
            uint8* const values = stage(index) + Shape::V_START;
            copy_plane<typename Shape::V, Shape::DV, Shape::V_STRIDE>(values, args.v_plane, walk, first, window);
        }
        if (threadIdx.x % Shape::TEAM == 0) {
            const QueryBlock& queries = block();
            const int low = walk.piece.low - first, high = walk.piece.high - first, place = walk.piece.origin + first;
            const bool whole = low <= 0 && high >= Shape::SCORES && place + Shape::SCORES - 1 <= queries.position &&
                               (walk.piece.always || place > queries.position + queries.queries - 1 - args.window);
            note(index) = {low, high, place, static_cast<int>(walk.span - args.pages.spans), whole, walk.piece.always};
        }
    }

    __device__ void open_window(PageWindow& window, const Walk& walk) const {
        const int64 row = block().sequence * args.pages.columns + walk.piece.first_page;
        window.open(args.pages.table + row, ((walk.piece.high - 1) >> args.pages.page_shift) + 1);
    }
};

}  // namespace pagoda
