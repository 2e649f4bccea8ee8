"""PTX instructions in the emulator, compared with NumPy, and that threads which meet in shared memory are noticed.

tests/test_emulator.py has the collectives, tensor cores and copies among them, as compiled by NVRTC.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import emulator
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from emulator import EmulatorError, Guarded, ptx

Array = npt.NDArray[Any]

THREADS = 512
NAN = 0x7FFFFFFF


def f32(bits: Array) -> Array:
    return bits.astype(np.uint32).view(np.float32)


def flushed(x: Array) -> Array:
    """Numbers below 2^-126 flushed to zeros of their sign."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def bits(x: Array) -> Array:
    """The bits of floats, with the canonical NaN of arithmetic."""
    return np.where(np.isnan(x), NAN, x.astype(np.float32).view(np.uint32))


def signed(x: Array, count: int = 32) -> Array:
    """The lowest `count` bits as a signed integer."""
    sign = 1 << count - 1
    return (x + sign & 2 * sign - 1) - sign


def high(a: Array, b: Array) -> Array:
    """The upper half of a product."""
    return (a.astype(np.uint64) * b.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def differ(a: Array, b: Array) -> Array:
    return np.not_equal(flushed(f32(a)), flushed(f32(b)))


def unordered(a: Array, b: Array) -> Array:
    return np.isnan(f32(a)) | np.isnan(f32(b))


def towards_0(a: Array, b: Array) -> Array:
    """Sums of floats, rounded towards zero."""
    result = []
    for x, y in zip(flushed(f32(a)), flushed(f32(b)), strict=True):
        if not np.isfinite(x) or not np.isfinite(y):
            result.append(np.float32(x + y))
            continue
        exact = Fraction(float(x)) + Fraction(float(y))
        near = np.float32(x + y)
        if not np.isfinite(near) or abs(Fraction(float(near))) > abs(exact):
            near = np.nextafter(near, np.float32(0))
        result.append(near)
    return bits(flushed(np.array(result, np.float32)))


def permuted(a: Array, b: Array, selectors: Array) -> Array:
    eight = np.concatenate([x.astype("<u4")[:, None].view(np.uint8) for x in (a, b)], 1)
    result = np.zeros((len(a), 4), np.uint8)
    for i in range(4):
        selector = selectors >> 4 * i & 15
        byte = eight[np.arange(len(a)), selector & 7]
        result[:, i] = np.where(selector & 8, np.where(byte & 128, 255, 0), byte)
    return result.view("<u4")[:, 0]


def pairs(of: Any) -> Callable[[Array, Array, Array], Array]:
    """a b + c of two packed 16-bit numbers, each rounded once."""

    def fused(a: Array, b: Array, c: Array) -> Array:
        x, y, z = (part.astype("<u4")[:, None].view(np.uint16).view(of).astype(np.float64) for part in (a, b, c))
        rounded = (x * y + z).astype(of)
        return np.where(np.isnan(rounded), np.uint16(0x7FFF), rounded.view(np.uint16)).view("<u4")[:, 0]

    return fused


def half(of: Any, x: Array) -> Array:
    """A float as a 16-bit number."""
    return np.where(np.isnan(f32(x)), np.uint16(0x7FFF), f32(x).astype(of).view(np.uint16)).astype(np.uint32)


def inserted(a: Array, b: Array) -> Array:
    """b with its bits 5 to 15 replaced by the lowest bits of a."""
    mask = (1 << 11) - 1
    return (b & ~(mask << 5)) | (a & mask) << 5


def cut_off(a: Array, least: int, most: int) -> Array:
    x = flushed(f32(a)).astype(np.float64)
    return np.clip(np.trunc(np.where(np.isnan(x), 0, x)), least, most).astype(np.int64) & 0xFFFFFFFF


def larger(a: Array, b: Array) -> Array:
    x, y = flushed(f32(a)), flushed(f32(b))
    return bits(
        np.where(
            (x == 0) & (y == 0),
            np.copysign(np.float32(0), np.maximum(np.copysign(1, x), np.copysign(1, y))),
            np.fmax(x, y),
        )
    )


@dataclass
class Case:
    """An instruction from %ra, %rb and %rc to %rd, and its expected result."""

    text: str
    expected: Callable[[Array, Array, Array], Array]


CASES = [
    Case("shl.b32 %rd, %ra, %rc;", lambda a, b, c: np.where(c < 32, a << np.minimum(c, 31), 0)),
    Case("shr.u32 %rd, %ra, %rc;", lambda a, b, c: np.where(c < 32, a >> np.minimum(c, 31), 0)),
    Case("shr.s32 %rd, %ra, %rc;", lambda a, b, c: signed(a) >> np.minimum(c, 31)),
    Case("mul.hi.s32 %rd, %ra, %rb;", lambda a, b, c: signed(a) * signed(b) >> 32),
    Case("mul.hi.u32 %rd, %ra, %rb;", lambda a, b, c: high(a, b)),
    Case(
        "dp2a.lo.u32.u32 %rd, %ra, %rb, %rc;", lambda a, b, c: (a & 0xFFFF) * (b & 255) + (a >> 16) * (b >> 8 & 255) + c
    ),
    Case("mad.lo.s32 %rd, %ra, %rb, %rc;", lambda a, b, c: (signed(a) * signed(b) & 0xFFFFFFFF) + c),
    Case("max.s32 %rd, %ra, %rb;", lambda a, b, c: np.maximum(signed(a), signed(b))),
    Case("brev.b32 %rd, %ra;", lambda a, b, c: np.array([int(f"{x:032b}"[::-1], 2) for x in a])),
    Case("bfind.shiftamt.u32 %rd, %ra;", lambda a, b, c: np.array([32 - int(x).bit_length() if x else -1 for x in a])),
    Case("bfi.b32 %rd, %ra, %rb, 5, 11;", lambda a, b, c: inserted(a, b)),
    Case("prmt.b32 %rd, %ra, %rb, %re;", lambda a, b, c: permuted(a, b, a ^ b)),
    Case("copysign.f32 %rd, %ra, %rb;", lambda a, b, c: (a & 1 << 31) | (b & 0x7FFFFFFF)),
    Case("add.ftz.f32 %rd, %ra, %rb;", lambda a, b, c: bits(flushed(flushed(f32(a)) + flushed(f32(b))))),
    Case("add.rn.f32 %rd, %ra, %rb;", lambda a, b, c: bits(f32(a) + f32(b))),
    Case("mul.rn.f32 %rd, %ra, %rb;", lambda a, b, c: bits(f32(a) * f32(b))),
    Case("div.rn.f32 %rd, %ra, %rb;", lambda a, b, c: bits(f32(a) / f32(b))),
    Case("add.rz.ftz.f32 %rd, %ra, %rb;", lambda a, b, c: towards_0(a, b)),
    Case("max.ftz.f32 %rd, %ra, %rb;", lambda a, b, c: larger(a, b)),
    Case("cvt.rzi.ftz.s32.f32 %rd, %ra;", lambda a, b, c: cut_off(a, -(1 << 31), (1 << 31) - 1)),
    Case("cvt.rzi.ftz.u32.f32 %rd, %ra;", lambda a, b, c: cut_off(a, 0, (1 << 32) - 1)),
    Case("fma.rn.f16x2 %rd, %ra, %rb, %re;", lambda a, b, c: pairs(np.float16)(a, b, a ^ b)),
    Case("fma.rn.bf16x2 %rd, %ra, %rb, %rf;", lambda a, b, c: pairs(ml_dtypes.bfloat16)(a, b, a * 0)),
    Case("cvt.rn.f16x2.f32 %rd, %ra, %rb;", lambda a, b, c: half(np.float16, a) << 16 | half(np.float16, b)),
    Case(
        "cvt.rn.bf16x2.f32 %rd, %ra, %rb;",
        lambda a, b, c: half(ml_dtypes.bfloat16, a) << 16 | half(ml_dtypes.bfloat16, b),
    ),
    *(
        Case(f"cvt.u16.u32 %ha, %ra; cvt.u16.u32 %hb, %rb; {text}", expected)
        for text, expected in {
            "mul.hi.s16 %hd, %ha, %hb; cvt.s32.s16 %rd, %hd;": lambda a, b, c: signed(a, 16) * signed(b, 16) >> 16,
            "mul.hi.u16 %hd, %ha, %hb; cvt.u32.u16 %rd, %hd;": lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) >> 16,
            "mul.wide.s16 %rd, %ha, %hb;": lambda a, b, c: signed(a, 16) * signed(b, 16),
            "sub.s16 %hd, %ha, %hb; shr.s16 %hd, %hd, 3; cvt.s32.s16 %rd, %hd;": lambda a, b, c: signed(a - b, 16) >> 3,
            "add.s16 %hd, %ha, %hb; shr.u16 %hd, %hd, 3; cvt.s32.s16 %rd, %hd;": lambda a, b, c: (a + b & 0xFFFF) >> 3,
            "cvt.s16.s8 %hd, %ha; cvt.s32.s16 %rd, %hd;": lambda a, b, c: signed(a, 8),
            "setp.ne.b16 %p, %ha, 0; selp.b32 %rd, 1, 0, %p;": lambda a, b, c: signed(a, 16) != 0,
        }.items()
    ),
    Case("cvt.s8.s32 %rd, %ra;", lambda a, b, c: signed(a, 8)),
    Case("mul.wide.u32 %d, %ra, %rb; mov.b64 {_, %rd}, %d;", lambda a, b, c: high(a, b)),
    Case("mul.wide.u32 %d, %ra, %rb; mov.b64 {%rd, _}, %d;", lambda a, b, c: a * b),
    Case("setp.ne.ftz.f32 %p, %ra, %rb; selp.u32 %rd, 1, 0, %p;", lambda a, b, c: differ(a, b) & ~unordered(a, b)),
    Case("setp.neu.ftz.f32 %p, %ra, %rb; selp.u32 %rd, 1, 0, %p;", lambda a, b, c: differ(a, b)),
    Case(
        "setp.leu.ftz.f32 %p, %ra, %rb; selp.u32 %rd, 1, 0, %p;", lambda a, b, c: ~(flushed(f32(a)) > flushed(f32(b)))
    ),
    Case(
        "setp.lt.s32 %p, %ra, %rb; @!%p mov.u32 %rd, 7; @%p mov.u32 %rd, 9;",
        lambda a, b, c: np.where(signed(a) < signed(b), 9, 7),
    ),
]


class Arguments(ctypes.Structure):
    _fields_ = [("given", ctypes.c_void_p), ("out", ctypes.c_void_p)]


def test_instructions() -> None:
    """On random bits and on edge cases."""
    ptx.require()
    lines = ["ld.param.u64 %from, [given];", "ld.param.u64 %to, [given+8];", "mov.u32 %rd, %tid.x;"]
    lines += [
        "mul.wide.u32 %at, %rd, 12;",
        "add.s64 %from, %from, %at;",
        "mul.wide.u32 %at, %rd, 4;",
        "add.s64 %to, %to, %at;",
    ]
    lines += [f"ld.global.u32 %r{name}, [%from+{4 * i}];" for i, name in enumerate("abc")]
    lines += ["xor.b32 %re, %ra, %rb;", "mov.u32 %rf, 0;"]
    for i, case in enumerate(CASES):
        lines += [case.text, f"st.global.u32 [%to+{4 * THREADS * i}], %rd;"]
    registers = [f".reg .b32 %r{name};" for name in "abcdef"]
    registers += [f".reg .b64 %{name};" for name in ("from", "to", "at", "d")]
    registers += [*(f".reg .b16 %h{name};" for name in "abd"), ".reg .pred %p;"]
    text = ".entry all(\n.param .align 8 .b8 given[16]\n)\n{\n" + "\n".join([*registers, *lines, "ret;"]) + "\n}"
    library = emulator.Library(emulator.program(ptx.translated(text, {"all": "all"}), [], [], "-O1"))

    rng = np.random.default_rng(0)
    given, out = Guarded((THREADS, 3), np.uint32), Guarded((len(CASES), THREADS), np.uint32)
    edges = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF], np.uint32)
    edges = np.concatenate(
        [edges, np.array([1, -1, 2**31, -(2**31), 2**32, 1e10, 0.5, 3e-39], np.float32).view(np.uint32)]
    )
    given.array[...] = rng.integers(0, 1 << 32, given.array.shape, np.uint64)
    given.array[: len(edges) ** 2, :2] = np.stack(np.meshgrid(edges, edges), -1).reshape(-1, 2)
    # Numbers of similar size, so that neither is lost in a sum.
    near = slice(len(edges) ** 2, THREADS)
    given.array[near, :2] = rng.standard_normal((THREADS - len(edges) ** 2, 2)).astype(np.float32).view(np.uint32)
    given.array[:, 2] = rng.integers(0, 40, THREADS)
    library.launch("all", 1, THREADS, Arguments(given.address, out.address))
    a, b, c = given.array.T.astype(np.int64)
    for case, results in zip(CASES, out.array, strict=True):
        with np.errstate(all="ignore"):
            right = case.expected(a, b, c).astype(np.int64) & 0xFFFFFFFF
        np.testing.assert_array_equal(results, right, case.text)


SHARING = r"""
enum Barrier { NONE, WARP_ALONE, BLOCK };

template <Barrier BARRIER>
__device__ void meet() {
    if (BARRIER == WARP_ALONE) __syncwarp();
    if (BARRIER == BLOCK) __syncthreads();
}

struct Arguments {
    unsigned* out;
};
extern __shared__ unsigned shared[];

// The neighbour's word comes out.
template <Barrier BARRIER>
__global__ void read_behind(Arguments args) {
    shared[threadIdx.x] = threadIdx.x;
    meet<BARRIER>();
    args.out[threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
}

// And it is written anew.
template <Barrier BARRIER>
__global__ void write_behind(Arguments args) {
    shared[threadIdx.x] = threadIdx.x;
    __syncthreads();
    args.out[threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
    meet<BARRIER>();
    shared[threadIdx.x] = 0;
}

// All write one word.
__global__ void write_twice(Arguments args) {
    shared[0] = threadIdx.x;
    args.out[threadIdx.x] = threadIdx.x;
}

__global__ void reverse_bits(Arguments args) { args.out[threadIdx.x] = __brevll(threadIdx.x) >> 32; }

__global__ void read_what_stays(Arguments args) { args.out[threadIdx.x] = __ldg(args.out + threadIdx.x + 1); }
"""


class Out(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p)]


def test_threads_that_meet_in_shared_memory() -> None:
    kernels = {
        f"{verb}_{i}": f"{verb}_behind<{b}>"
        for verb in ("read", "write")
        for i, b in enumerate(("NONE", "WARP_ALONE", "BLOCK"))
    }
    library = ptx.compile(SHARING, kernels | {"twice": "write_twice"})

    def run(name: str, threads: int, seed: int) -> None:
        out = Guarded(threads, np.uint32)
        library.launch(name, 2, threads, Out(out.address), shared_bytes=4 * threads, seed=seed)
        np.testing.assert_array_equal(out.array, (np.arange(threads) + 1) % threads)

    for seed in range(4):
        for verb in ("read", "write"):
            run(f"{verb}_1", 32, seed)
            run(f"{verb}_2", 32, seed)
            run(f"{verb}_2", 96, seed)
            for name, threads in ((f"{verb}_0", 32), (f"{verb}_0", 64), (f"{verb}_1", 64)):
                with pytest.raises(EmulatorError, match=r"with no barrier behind (what thread|those that read it)"):
                    run(name, threads, seed)
        with pytest.raises(EmulatorError, match="is written with no barrier behind what thread"):
            run("twice", 32, seed)


@pytest.mark.parametrize(
    ("kernel", "instruction"), [("reverse_bits", "brev_b64"), ("read_what_stays", "ld_global_nc_u32")]
)
def test_instructions_that_are_not_there(kernel: str, instruction: str) -> None:
    with pytest.raises(EmulatorError, match=rf"{instruction}.* was not declared"):
        ptx.compile(SHARING, {"kernel": kernel})


PARTED = r"""
#include <pagoda/machine.cuh>
using namespace pagoda;

struct Arguments {
    unsigned* out;
    int first;
};

// Some lanes load matrices here and others there.
__global__ void parted(Arguments args) {
    const int lane = threadIdx.x;
    uint32 r[4];
    if (lane < args.first) {
        load_matrix(r, shared_memory() + 16 * lane);
        args.out[lane] = r[0];
    } else {
        load_matrix(r, shared_memory() + 16 * lane);
        args.out[lane] = ~r[0];
    }
}
"""


class Parted(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), ("first", ctypes.c_int)]


def test_aligned_instructions_that_lanes_come_to_from_elsewhere() -> None:
    """All lanes must execute the same instruction; otherwise their results are undefined."""
    library, out = ptx.compile(PARTED, {"kernel": "parted"}), Guarded(32, np.uint32)
    for seed in range(4):
        for first in (0, 32):
            library.launch("kernel", 1, 32, Parted(out.address, first), shared_bytes=512, seed=seed)
        with pytest.raises(EmulatorError, match="ldmatrix meets ldmatrix of lane"):
            library.launch("kernel", 1, 32, Parted(out.address, 16), shared_bytes=512, seed=seed)


def test_registers_of_their_own_and_guards() -> None:
    """As they come with inline assembly."""
    body = "{ .reg .pred %p<2>; { .reg .u32 one; mov.u32 one, 3; @!%p1 bra $L__1; } $L__1: @%p1 ret; ret; }"
    text = f".entry kernel(.param .align 8 .b8 given[8]) {body}"
    lines = ptx.translated(text, {"kernel": "kernel"}).splitlines()
    assert [line for line in lines if "_p1" in line][1:] == ["if (!_p1) goto _L__1;", "if (_p1) return;"]
    assert re.search(r"\{\n\[\[maybe_unused\]\] u32 one = .*\nmov\(one, 3ll\);", "\n".join(lines))
