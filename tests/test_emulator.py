"""The emulator itself: what it computes, and that it notices what the tests of the kernels rely on.

What a GPU defines is the same both ways, from source and from NVRTC's instructions.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulator
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from emulator import EmulatorError, Guarded, ptx

Array = npt.NDArray[Any]

SEEDS = range(8)
HALVES: dict[str, Any] = {"__half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16}


class Arguments(ctypes.Structure):
    """The arguments of every kernel below."""

    _fields_ = [("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_longlong)]


SOURCE = r"""
#include <pagoda/machine.cuh>
using namespace pagoda;

struct Arguments {
    const void* a;
    const void* b;
    void* out;
    int64 n;
};

__device__ int lane() { return threadIdx.x % WARP; }

template <class T>
__global__ void shuffles(Arguments args) {
    const T mine = static_cast<const T*>(args.a)[lane()];
    T* out = static_cast<T*>(args.out);
    for (int i = 0; i < 5; ++i) out[i * WARP + lane()] = __shfl_xor_sync(~0u, mine, 1 << i);
    out[5 * WARP + lane()] = __shfl_sync(~0u, mine, (lane() * 5 + 3) % WARP);
    out[6 * WARP + lane()] = __shfl_sync(~0u, mine, 7);
}

__global__ void ballots(Arguments args) {
    for (int i = 0; i < WARP; ++i) {
        const unsigned all = __ballot_sync(~0u, static_cast<const int*>(args.a)[i * WARP + lane()]);
        static_cast<unsigned*>(args.out)[i * WARP + lane()] = all;
    }
}

// Warp w makes w + 1 rounds of shuffles. Warps from n on make more, and leave when the others are at the barrier already.
__global__ void uneven(Arguments args) {
    int* sums = reinterpret_cast<int*>(shared_memory());
    const int warp = threadIdx.x / WARP;
    const bool leaves = warp >= args.n;
    int total = 0;
    for (int round = 0; round <= (leaves ? 20 : warp); ++round) {
        int value = threadIdx.x + round;
        for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
        total += value;
    }
    if (leaves) return;
    if (lane() == 0) sums[warp] = total;
    __syncthreads();
    int all = 0;
    for (int i = 0; i < args.n; ++i) all += sums[i];
    static_cast<int*>(args.out)[threadIdx.x] = all;
}

template <bool BARRIER>
__global__ void reduce(Arguments args) {
    float* values = reinterpret_cast<float*>(shared_memory());
    values[threadIdx.x] = static_cast<const float*>(args.a)[blockIdx.x * blockDim.x + threadIdx.x];
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (BARRIER) __syncthreads();
        if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    }
    if (threadIdx.x == 0) static_cast<float*>(args.out)[blockIdx.x] = values[0];
}

// The order in which threads come by.
__global__ void order(Arguments args) {
    for (int i = 0; i < 3; ++i) {
        __syncthreads();
        int* ticket = static_cast<int*>(args.out);
        const int mine = atomicAdd(ticket, 1);
        ticket[1 + mine] = blockIdx.x * blockDim.x + threadIdx.x;
    }
}

// 16 rows of `a` and then of `b`, of 32 bytes.
template <int STRIDE>
__device__ void fill(const Arguments& args) {
    for (int i = lane(); i < 128; i += WARP) {
        uint8* const target = shared_memory() + i / 8 * STRIDE + i % 8 * 4;
        *reinterpret_cast<uint32*>(target) = static_cast<const uint32*>(args.a)[i];
        *reinterpret_cast<uint32*>(target + 16 * STRIDE) = static_cast<const uint32*>(args.b)[i];
    }
    __syncwarp();
}

// Lane l names row l, 16 bytes.
template <bool TRANSPOSED>
__global__ void matrices(Arguments args) {
    fill<32>(args);
    uint32 r[4];
    if (TRANSPOSED) load_matrix_transposed(r, shared_memory() + 16 * lane());
    else load_matrix(r, shared_memory() + 16 * lane());
    for (int i = 0; i < 4; ++i) static_cast<uint32*>(args.out)[i * WARP + lane()] = r[i];
}

// out [16, 16] += a [16, 16] b [16, 16]; `TURNED`: b is [n, k].
template <class T, bool TURNED>
__global__ void product(Arguments args) {
    constexpr int STRIDE = 48;
    fill<STRIDE>(args);
    const int matrix = lane() / 8, row = lane() % 8;
    const uint8* left = shared_memory();
    const uint8* right = left + 16 * STRIDE;
    uint32 a[4], b[4];
    load_matrix(a, left + (matrix % 2 * 8 + row) * STRIDE + matrix / 2 * 16);
    if (TURNED) load_matrix(b, right + (matrix / 2 * 8 + row) * STRIDE + matrix % 2 * 16);
    else load_matrix_transposed(b, right + (matrix % 2 * 8 + row) * STRIDE + matrix / 2 * 16);
    float* out = static_cast<float*>(args.out);
    for (int half = 0; half < 2; ++half) {
        float d[4];
        const auto at = [&](int i) { return (lane() / 4 + i / 2 * 8) * 16 + half * 8 + lane() % 4 * 2 + i % 2; };
        for (int i = 0; i < 4; ++i) d[i] = out[at(i)];
        multiply_add(d, a, b[2 * half], b[2 * half + 1], T{});
        for (int i = 0; i < 4; ++i) out[at(i)] = d[i];
    }
}

// Threads copy 16 bytes each, in groups of one copy; the neighbour's bytes come out. The last three are zeros.
template <int PENDING, bool BARRIER>
__global__ void copies(Arguments args) {
    const int groups = static_cast<int>(args.n), threads = blockDim.x;
    const auto valid = [&](int index) { return index < groups * threads - 3; };
    uint8* shared = shared_memory();
    for (int group = 0; group < groups; ++group) {
        const int index = group * threads + threadIdx.x;
        copy_async(shared + 16 * index, static_cast<const uint8*>(args.a) + 16 * index, valid(index));
        copy_commit();
    }
    if (PENDING >= 0) copy_wait<PENDING < 0 ? 0 : PENDING>();
    if (BARRIER) __syncthreads();
    for (int i = threadIdx.x; i < groups * threads; i += threads) {
        const int from = i / threads * threads + (i + 1) % threads;
        static_cast<uint4*>(args.out)[i] = reinterpret_cast<uint4*>(shared)[from];
    }
    __syncthreads();
    copy_wait<0>();
}

__global__ void late_copies(Arguments args) {
    copy_async(shared_memory() + 16 * threadIdx.x, args.a, true);
    copy_commit();
}

__global__ void crooked_copy(Arguments args) {
    copy_async(shared_memory() + args.n, args.a, true);
    copy_wait<0>();
}

__global__ void crooked_row(Arguments args) {
    uint32 r[4];
    load_matrix(r, shared_memory() + args.n);
}

__global__ void crooked_load(Arguments args) {
    const uint8* from = static_cast<const uint8*>(args.a) + args.n;
    static_cast<float4*>(args.out)[threadIdx.x] = *reinterpret_cast<const float4*>(from);
}

__global__ void far_load(Arguments args) { *static_cast<uint8*>(args.out) = static_cast<const uint8*>(args.a)[args.n]; }

__global__ void far_shift(Arguments args) { *static_cast<uint32*>(args.out) = 1u << args.n; }

__global__ void large_cast(Arguments args) {
    *static_cast<int*>(args.out) = static_cast<int>(static_cast<float>(args.n) * 1e9f);
}

__global__ void halves(Arguments args) {
    const unsigned mask = lane() < 16 ? 0xffffu : 0xffff0000u;
    int value = lane();
    for (int step = 8; step > 0; step /= 2) value += __shfl_xor_sync(mask, value, step);
    static_cast<int*>(args.out)[lane()] = value;
}

// Some lanes go on alone while others may not have looked yet at what the first shuffle brought them.
__global__ void ahead(Arguments args) {
    const int value = __shfl_xor_sync(~0u, lane(), 16);
    if (lane() < 16) {
        for (int i = 0; i < 4; ++i) __shfl_xor_sync(0xffffu, 1000, 1);
    }
    static_cast<int*>(args.out)[lane()] = value;
}

__global__ void different_collectives(Arguments) {
    if (lane() < 16) __shfl_xor_sync(~0u, 1, 1);
    else __ballot_sync(~0u, 1);
}

__global__ void different_masks(Arguments) { __syncwarp(lane() < 31 ? ~0u : ~1u); }

__global__ void not_in_its_mask(Arguments) { __syncwarp(~1u); }

__global__ void lanes_missing(Arguments) {
    if (lane() < 16) __syncwarp();
}

__global__ void a_warp_waits_for_the_block(Arguments args) {
    __shfl_xor_sync(~0u, 1, 1);
    if (threadIdx.x / WARP == 1 && lane() >= args.n) __shfl_xor_sync(~0u, 1, 1);
    __syncthreads();
}

__global__ void poison(Arguments args) {
    static_cast<uint8*>(args.out)[threadIdx.x] = shared_memory()[threadIdx.x];
    shared_memory()[threadIdx.x] = 1;
}

__global__ void past_shared(Arguments args) {
    if (threadIdx.x == 0) shared_memory()[args.n] ^= 1;
}

__global__ void past_array(Arguments args) {
    if (threadIdx.x == 0) static_cast<uint8*>(args.out)[args.n] ^= 1;
}

__global__ void widen(Arguments args) {
    for (int i = threadIdx.x; i < 65536; i += blockDim.x) {
        float* out = static_cast<float*>(args.out);
        out[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(i)));
        out[65536 + i] = __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(i)));
    }
}

__global__ void narrow(Arguments args) {
    unsigned short* out = static_cast<unsigned short*>(args.out);
    for (int i = threadIdx.x; i < args.n; i += blockDim.x) {
        const float x = static_cast<const float*>(args.a)[i];
        out[i] = static_cast<unsigned short>(round_pair(x, 1, __half()));
        out[args.n + i] = static_cast<unsigned short>(round_pair(1, x, __nv_bfloat16()) >> 16);
    }
}
"""

KERNELS = {
    "shuffles_int": "shuffles<int>",
    "shuffles_float": "shuffles<float>",
    "shuffles_long": "shuffles<int64>",
    "reduce": "reduce<true>",
    "reduce_without_barrier": "reduce<false>",
    "matrices": "matrices<false>",
    "matrices_transposed": "matrices<true>",
    "copies": "copies<0, true>",
    "copies_pending": "copies<2, true>",
    "copies_without_wait": "copies<-1, true>",
    "copies_without_barrier": "copies<0, false>",
}
KERNELS |= {f"product{kind}": f"product<{kind}, false>" for kind in HALVES}
KERNELS |= {f"turned{kind}": f"product<{kind}, true>" for kind in HALVES}
PLAIN = ["ballots", "uneven", "order", "late_copies", "crooked_copy", "crooked_row", "different_collectives"]
PLAIN += ["different_masks", "not_in_its_mask", "lanes_missing", "a_warp_waits_for_the_block", "poison"]
PLAIN += ["halves", "ahead", "past_shared", "past_array", "widen", "narrow", "crooked_load", "far_load", "far_shift"]
PLAIN += ["large_cast"]
KERNELS |= {name: name for name in PLAIN}


@pytest.fixture(scope="module")
def library() -> emulator.Library:
    return emulator.compile(SOURCE, KERNELS)


@pytest.fixture(scope="module", params=[emulator, ptx], ids=["sources", "ptx"])
def either(request: pytest.FixtureRequest) -> emulator.Library:
    compiled: emulator.Library = request.param.compile(SOURCE, KERNELS)
    return compiled


def filled(values: Array) -> Guarded:
    array = Guarded(values.shape, values.dtype)
    array.array[...] = values
    return array


def arguments(
    *, a: Guarded | None = None, b: Guarded | None = None, out: Guarded | None = None, n: int = 0
) -> Arguments:
    return Arguments(*(array.address if array else None for array in (a, b, out)), n)


@pytest.mark.parametrize(("name", "dtype"), [("int", np.int32), ("float", np.float32), ("long", np.int64)])
def test_shuffles(name: str, dtype: Any, either: emulator.Library) -> None:
    lanes = np.arange(32)
    a = filled((lanes * 1000003 - 77).astype(dtype) * np.asarray(4294967297 if name == "long" else 1, dtype))
    right = [a.array[lanes ^ step] for step in (1, 2, 4, 8, 16)] + [a.array[(lanes * 5 + 3) % 32], a.array[[7] * 32]]
    for seed in SEEDS:
        out = Guarded((7, 32), dtype)
        either.launch(f"shuffles_{name}", 1, 32, arguments(a=a, out=out), seed=seed)
        np.testing.assert_array_equal(out.array, right)
        out.check()


def test_ballots(either: emulator.Library) -> None:
    a = filled(np.random.default_rng(0).integers(0, 3, (32, 32)).astype(np.int32))
    right = ((a.array != 0) @ (1 << np.arange(32, dtype=np.uint64))).astype(np.uint32)
    for seed in SEEDS:
        out = Guarded((32, 32), np.uint32)
        either.launch("ballots", 1, 32, arguments(a=a, out=out), seed=seed)
        np.testing.assert_array_equal(out.array, np.repeat(right[:, None], 32, 1))


@pytest.mark.parametrize("staying", [4, 3, 1])
def test_barriers_are_counted(staying: int, either: emulator.Library) -> None:
    """Warps do different numbers of shuffles, and exited warps are not waited for."""
    right = sum(
        sum(range(warp * 32, warp * 32 + 32)) + 32 * round for warp in range(staying) for round in range(warp + 1)
    )
    for seed in SEEDS:
        out = Guarded(128, np.int32)
        out.array[:] = -1
        either.launch("uneven", 1, 128, arguments(out=out, n=staying), shared_bytes=16, seed=seed)
        np.testing.assert_array_equal(out.array, [right] * (staying * 32) + [-1] * (128 - staying * 32))


def reduced(library: emulator.Library, name: str, seed: int) -> bool:
    a, out = filled(np.arange(5 * 128, dtype=np.float32)), Guarded(5, np.float32)
    library.launch(name, 5, 128, arguments(a=a, out=out), shared_bytes=512, seed=seed)
    out.check()
    return bool(np.array_equal(out.array, a.array.reshape(5, 128).sum(1)))


def test_block_reduction(either: emulator.Library) -> None:
    assert all(reduced(either, "reduce", seed) for seed in SEEDS)


def test_a_missing_barrier_is_noticed(library: emulator.Library) -> None:
    assert not all(reduced(library, "reduce_without_barrier", seed) for seed in SEEDS)


def test_the_seed_decides_the_order(library: emulator.Library) -> None:
    def order(seed: int) -> tuple[int, ...]:
        out = Guarded(1 + 3 * 4 * 64, np.int32)
        out.array[:] = 0
        library.launch("order", 4, 64, arguments(out=out), seed=seed)
        return tuple(out.array[1:])

    assert all(order(seed) == order(seed) for seed in SEEDS)
    orders = [order(seed) for seed in SEEDS]
    assert len(set(orders)) == len(orders)
    # Blocks run one after the other, in varying order; between two barriers each thread runs once.
    assert len({tuple(thread // 64 for thread in threads[:: 3 * 64]) for threads in orders}) > 1
    for threads in orders:
        for round in np.split(np.array(threads), 12):
            assert sorted(round % 64) == list(range(64))
            assert len(set(round // 64)) == 1


@pytest.mark.parametrize("transposed", [False, True])
def test_load_matrix(transposed: bool, either: emulator.Library) -> None:
    a = filled(np.random.default_rng(0).integers(0, 65536, (4, 8, 8)).astype(np.uint16))
    b, out = Guarded((4, 8, 8), np.uint16), Guarded((4, 32, 2), np.uint16)
    # PTX manual, ldmatrix: thread t of 32 holds row t / 4, elements 2 (t % 4) and the next.
    right = (a.array.transpose(0, 2, 1) if transposed else a.array).reshape(4, 32, 2)
    for seed in SEEDS:
        name = "matrices_transposed" if transposed else "matrices"
        either.launch(name, 1, 32, arguments(a=a, b=b, out=out), shared_bytes=1024, seed=seed)
        np.testing.assert_array_equal(out.array, right)


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("turned", [False, True])
def test_multiply_add(kind: str, turned: bool, either: emulator.Library) -> None:
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((16, 16)).astype(HALVES[kind]) for _ in range(2))
    start = rng.standard_normal((16, 16)).astype(np.float32)
    a, b = filled(left.view(np.uint16)), filled((right.T.copy() if turned else right).view(np.uint16))
    expected = left.astype(np.float64) @ right.astype(np.float64) + start
    for seed in SEEDS:
        out = filled(start)
        name = f"turned{kind}" if turned else f"product{kind}"
        either.launch(name, 1, 32, arguments(a=a, b=b, out=out), shared_bytes=1536, seed=seed)
        np.testing.assert_allclose(out.array, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize(
    ("start", "products", "sum_"),
    [
        (1.0, [1.5 * 2**-23], 1 + 2**-23),
        (-1.0, [-1.5 * 2**-23], -1 - 2**-23),
        (1.0, [2**-25] * 16, 1.0),
        (1.0, [2**-24] * 16, 1 + 2**-20),
        (2.0**-20, [1.0, -1.0], 2.0**-20),
        (2.0**-25, [1.0, -1.0], 0.0),
        (np.inf, [1.0], np.inf),
        (np.nan, [1.0], np.nan),
    ],
)
def test_sums_of_products_are_cut_off(
    kind: str, start: float, products: list[float], sum_: float, library: emulator.Library
) -> None:
    """Addends are cut off one bit below the last of a float as large as the largest of 8, sums below a float's last bit."""
    left, right = (np.zeros((16, 16)).astype(HALVES[kind]) for _ in range(2))
    # Both types represent these exactly.
    left[3, : len(products)] = [product * 2**10 for product in products]
    right[: len(products), 5] = 2**-10
    expected = np.full((16, 16), start, np.float32)
    expected[3, 5] = sum_
    a, b, out = (filled(x) for x in (left.view(np.uint16), right.view(np.uint16), np.full_like(expected, start)))
    library.launch(f"product{kind}", 1, 32, arguments(a=a, b=b, out=out), shared_bytes=1536, seed=0)
    np.testing.assert_array_equal(out.array, expected)


def copied(library: emulator.Library, name: str, seed: int, groups: int = 4) -> tuple[Array, Array]:
    """The bytes that threads saw of their neighbours' copies, and those that they must see."""
    a = filled(np.random.default_rng(seed).integers(0, 255, (groups, 64, 16)).astype(np.uint8))
    out = Guarded((groups, 64, 16), np.uint8)
    library.launch(name, 1, 64, arguments(a=a, out=out, n=groups), shared_bytes=groups * 1024, seed=seed)
    right = a.array.copy()
    right.reshape(-1, 16)[-3:] = 0
    return out.array, np.roll(right, -1, 1)


def test_copies_arrive(either: emulator.Library) -> None:
    for seed in SEEDS:
        out, right = copied(either, "copies", seed)
        np.testing.assert_array_equal(out, right)
        out, right = copied(either, "copies_pending", seed)
        np.testing.assert_array_equal(out[:2], right[:2])
        assert (out[2:] == emulator.POISON).all()


def test_copies_arrive_no_earlier(either: emulator.Library) -> None:
    for seed in SEEDS:
        assert (copied(either, "copies_without_wait", seed)[0] == emulator.POISON).all()


def test_a_missing_barrier_after_copies_is_noticed(library: emulator.Library) -> None:
    assert any((out != right).any() for out, right in (copied(library, "copies_without_barrier", s) for s in SEEDS))


def test_lanes_of_different_masks(either: emulator.Library) -> None:
    lanes = np.arange(32)
    for seed in SEEDS:
        out = Guarded(32, np.int32)
        either.launch("halves", 1, 32, arguments(out=out), seed=seed)
        np.testing.assert_array_equal(out.array, np.where(lanes < 16, 120, 376))
        either.launch("ahead", 1, 32, arguments(out=out), seed=seed)
        np.testing.assert_array_equal(out.array, lanes ^ 16)


@pytest.mark.parametrize("name", ["crooked_copy", "crooked_row"])
@pytest.mark.parametrize("at", [-16, 512, 512 + 4096])
def test_rows_outside_shared_memory(name: str, at: int, either: emulator.Library) -> None:
    with pytest.raises(EmulatorError, match=f"byte {at} is outside the 512 of shared memory"):
        either.launch(name, 1, 32, arguments(a=Guarded(16, np.uint8), n=at), shared_bytes=512)


FAILURES = {
    "late_copies": (0, "did not wait for"),
    "different_collectives": (0, r"_sync meets __.*_sync of lane"),
    "different_masks": (0, "__syncwarp meets __syncwarp of lane"),
    "not_in_its_mask": (0, "not in its own mask"),
    "lanes_missing": (0, "16 threads wait at .*; in warp 0 lanes 0000ffff at __syncwarp for lanes ffff0000"),
    "crooked_copy": (8, "not aligned"),
    "crooked_row": (8, "not aligned"),
    "crooked_load": (8, r"kernel.cpp:\d+: an address is not aligned"),
    "far_load": (-(1 << 46), "no memory is where it reads or writes"),
    "far_shift": (32, r"kernel.cpp:\d+: a shift is too far"),
    "large_cast": (3, r"kernel.cpp:\d+: a number becomes an integer that it does not fit"),
    "past_shared": (512, "past its shared memory"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_a_kernel_does_wrong_is_said(name: str, library: emulator.Library) -> None:
    n, message = FAILURES[name]
    a, out = Guarded(64, np.uint8), Guarded(512, np.uint8)
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=message) as error:
            library.launch(name, 3, 32, arguments(a=a, out=out, n=n), shared_bytes=512, seed=seed)
        assert "block" in str(error.value)


def test_the_emulator_works_after_a_failure(library: emulator.Library) -> None:
    with pytest.raises(EmulatorError):
        library.launch("lanes_missing", 1, 32, arguments())
    assert reduced(library, "reduce", 0)


def test_a_barrier_that_half_a_warp_misses(either: emulator.Library) -> None:
    for seed in SEEDS:
        for missing in (1, 31):
            with pytest.raises(EmulatorError, match="wait at barriers that others do not reach"):
                either.launch("a_warp_waits_for_the_block", 1, 64, arguments(n=missing), seed=seed)
        either.launch("a_warp_waits_for_the_block", 1, 64, arguments(n=0), seed=seed)


def test_shared_memory_is_poisoned_for_every_block(either: emulator.Library) -> None:
    out = Guarded(32, np.uint8)
    out.array[:] = 0
    either.launch("poison", 5, 32, arguments(out=out), shared_bytes=32)
    assert (out.array == emulator.POISON).all()


@pytest.mark.parametrize("at", [-1, -emulator.CANARY, 100, 100 + emulator.CANARY - 1])
def test_canaries(at: int, either: emulator.Library) -> None:
    out = Guarded(100, np.uint8)
    either.launch("past_array", 1, 32, arguments(out=out, n=50))
    out.check()
    either.launch("past_array", 1, 32, arguments(out=out, n=at))
    with pytest.raises(EmulatorError, match=f"wrote {at} bytes"):
        out.check()


READS = """
import sys, test_emulator as tests
library = tests.emulator.compile(tests.SOURCE, {"crooked_load": "crooked_load"})
a, out = (tests.Guarded(64, "u1") for _ in range(2))
library.launch("crooked_load", 1, 1, tests.arguments(a=a, out=out, n=int(sys.argv[1])))
"""


@pytest.mark.parametrize(("at", "outside"), [(0, False), (48, False), (-16, True), (64, True)])
def test_address_sanitizer_finds_reads_outside_of_arrays(at: int, outside: bool) -> None:
    emulator.require()
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip("g++ came without libasan.so")
    environment = os.environ | {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    run = [sys.executable, "-c", READS, str(at)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment, cwd=Path(__file__).parent)
    assert bool(done.returncode) == outside, done.stderr
    assert ("AddressSanitizer: use-after-poison" in done.stderr) == outside, done.stderr


def test_arguments_of_another_size(either: emulator.Library) -> None:
    with pytest.raises(EmulatorError, match="4 bytes, not 32"):
        either.launch("poison", 1, 32, type("Other", (ctypes.Structure,), {"_fields_": [("x", ctypes.c_int)]})())


def test_what_does_not_compile_is_said() -> None:
    with pytest.raises(EmulatorError, match="no_such_kernel"):
        emulator.compile("struct Arguments {};", {"kernel": "no_such_kernel"})


def test_widening(either: emulator.Library) -> None:
    """All 16-bit numbers, of both formats."""
    out = Guarded((2, 65536), np.float32)
    either.launch("widen", 1, 128, arguments(out=out))
    bits = np.arange(65536, dtype=np.uint16)
    for values, dtype in zip(out.array, HALVES.values(), strict=True):
        right = bits.view(dtype).astype(np.float32)
        np.testing.assert_array_equal(np.isnan(values), np.isnan(right))
        numbers = ~np.isnan(right)
        np.testing.assert_array_equal(values.view(np.uint32)[numbers], right.view(np.uint32)[numbers])


def test_narrowing(either: emulator.Library) -> None:
    """Ties, overflows, subnormal numbers and random bits."""
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 1 << 32, 200_000, np.uint64).astype(np.uint32).view(np.float32)]
    with np.errstate(over="ignore", invalid="ignore"):
        for dtype in HALVES.values():
            # Every number of the format, the midpoint to its neighbour, and the floats next to these.
            exact = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
            exact = exact[np.isfinite(exact)]
            ties = ((exact.astype(np.float64) + np.roll(exact, -1)) / 2).astype(np.float32)
            parts += [exact, *(np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)), ties]
        parts.append(np.array([0, -0.0, np.inf, -np.inf, np.nan, 65519.996, 65520, 3.4e38, 1e-45], np.float32))
        a = filled(np.concatenate(parts))
        out = Guarded((2, len(a.array)), np.uint16)
        either.launch("narrow", 1, 128, arguments(a=a, out=out, n=len(a.array)))
        for bits, dtype in zip(out.array, HALVES.values(), strict=True):
            right = a.array.astype(dtype)
            nan = np.isnan(a.array)
            assert np.isnan(bits.view(dtype)[nan].astype(np.float32)).all()
            np.testing.assert_array_equal(bits[~nan], right.view(np.uint16)[~nan])
