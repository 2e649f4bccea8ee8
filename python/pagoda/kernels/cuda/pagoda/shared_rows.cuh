// The layout of rows in shared memory.
#pragma once

#include <pagoda/machine.cuh>

namespace pagoda {

/// Rows of BYTES, in pieces of 16 bytes, one after the other and without gaps. Pieces of a row change places so that the same piece of
/// eight rows in line, as ldmatrix reads it, lies in different banks. Pairs of pieces stay together: an asynchronous copy asks for a
/// sector of 32 bytes once where both of its halves go to such a pair, and else twice.
template <int BYTES>
struct SharedRows {
    static constexpr int PIECES = (BYTES + 15) / 16;
    /// Places that a piece may have: as many as leave it in its own row. An odd number of pieces leads to other banks by itself.
    static constexpr int TURNS = PIECES % 8 == 0 ? 8 : PIECES % 4 == 0 ? 4 : PIECES % 2 == 0 ? 2 : 1;
    /// Whether a row is followed by the next, byte for byte.
    static constexpr bool SIDE_BY_SIDE = TURNS == 1 && BYTES % 16 == 0;

    /// What so many rows take.
    __device__ static constexpr int bytes(int rows) { return rows * PIECES * 16; }

    /// What the numbers of a row's pieces are combined with, by exclusive or, to be their places.
    __device__ static int turn(int row) { return row / (8 / TURNS) % TURNS; }

    /// Where a piece lies, in bytes.
    __device__ static int place(int row, int piece) { return (row * PIECES + (piece ^ turn(row))) * 16; }

    /// Where piece `piece + by` of the row lies whose piece `piece` is at `place`, if `piece` and `by` have no bit in common.
    __device__ static int beside(int place, int by) { return (place ^ by % TURNS * 16) + by / TURNS * TURNS * 16; }

    /// Where a byte of a row lies.
    __device__ static int place_of_byte(int row, int byte) { return place(row, byte / 16) + byte % 16; }
};

/// Rows, or scales, that lie byte for byte as they do in their page.
struct SideBySide {
    static constexpr bool SIDE_BY_SIDE = true;
};

}  // namespace pagoda
