// The page tables of an open step, as the host uploads them, and how a stored row is found.
#pragma once

#include <pagoda/machine.cuh>

namespace pagoda {

/// Stored rows that are worked on together, as in crates/pagoda-cpu.
constexpr int TILE = 64;
/// Tokens of a page at least.
constexpr int PAGE_MIN = 8;
/// Tiles of a fixed run in deterministic mode: 4096 stored rows.
constexpr int RUN_TILES = 64;
constexpr int TIERS = 3;
constexpr int BLOCK_BITS = 30;

/// Rows, or their scales, of one layer inside a block: [kv_head][token][row], in bytes; rows lie side by side.
struct Strip {
    int64 offset, head_stride;
};

/// K or V of one layer inside a block. Scales are of quantised rows only.
struct Plane {
    Strip rows, scales;
};

/// Rows of a caller's array [token, head, element]; strides in bytes.
struct Rows {
    uint8* data;
    int64 token_stride, head_stride;

    __device__ uint8* row(int64 token, int64 head) const { return data + token * token_stride + head * head_stride; }
};

/// Which queries see a span, of those that come after it.
enum Sight : int {
    /// Those whose window it is in.
    IN_WINDOW,
    /// All.
    ALWAYS,
    /// All, each at a distance of its own.
    TRAILING,
};

/// A run of pages whose tokens are contiguous; the stored row `skip` of page `first_page` is token `before` of the sequence.
/// Entries of pages that `skip` leaves behind mean nothing.
struct Span {
    int first_page, skip, count, before;
    /// Positions by which queries are rotated back for this span. Of one that trails: the row of the angles that belongs to row
    /// 0 of the batch.
    int64 offset;
    /// That its first token was stored with.
    int64 position;
    int sight;

    /// Whether queries see it whatever their window.
    __device__ bool always() const { return sight != IN_WINDOW; }

    /// The place on the token axis of stored row 0; below 0 where the span skips rows.
    __device__ int origin() const { return before - skip; }

    /// Whether queries are rotated for both alike.
    __device__ bool turns_as(const Span& other) const {
        return offset == other.offset && (sight == TRAILING) == (other.sight == TRAILING);
    }
};

/// Pages of one layer group.
struct Pages {
    /// [batch, columns]: tier << 30 | block. Entries past a sequence's pages are anything and are never used. Instead of disk,
    /// which no kernel reads, the last tier is what has been brought from the host for this launch: one layer of each block.
    const uint32* table;
    int64 columns;
    uint8* bases[TIERS];
    /// Bytes from block to block.
    int64 pitches[TIERS];
    /// Tokens of a page, as a power of two.
    int page_shift;
    /// Of all sequences, one after the other.
    const Span* spans;

    __device__ const uint8* block(uint32 entry) const {
        const int tier = entry >> BLOCK_BITS;
        return bases[tier] + static_cast<int64>(entry & ((1u << BLOCK_BITS) - 1)) * pitches[tier];
    }
};

/// The part of a span that a range of the token axis touches, or of one that is seen anyway, what lies between `from` and the
/// range's end: stored rows [low, high), tiles [first_tile, last_tile).
struct Piece {
    int low, high;

    __device__ int first_tile() const { return low / TILE; }
    __device__ int last_tile() const { return high > low ? (high + TILE - 1) / TILE : first_tile(); }

    __device__ static Piece of(const Span& span, int from, int low, int high) {
        const int first = max(span.before, span.always() ? from : low), last = min(span.before + span.count, high);
        return {first - span.origin(), max(first, last) - span.origin()};
    }
};

}  // namespace pagoda
