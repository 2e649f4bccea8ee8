"""Which instance of a kernel fits a layer, and what it needs: the arithmetic of the shapes in cuda/pagoda, in Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from pagoda.errors import BackendUnavailable
from pagoda.formats import FORMATS

NAMES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
"""Types of queries, outputs and new rows, and formats that rows may have."""

QUANTISED = {"fp8_e4m3": "Fp8E4m3", "int8": "Int8", "q8_0": "Q8_0", "q4_0": "Q4_0", "mxfp4": "Mxfp4", "nvfp4": "Nvfp4"}
"""Other formats of rows."""

PART_OF_K = "part of k"
"""In place of the format of V: V is the first elements of the stored K row."""

SPLITS = {
    ("f32", "f16"): 2,
    ("f32", "bf16"): 3,
    ("f16", "bf16"): 2,
}
"""`Splits` of formats.cuh: elements of the second type that hold one of the first; 1 for other pairs."""

CODES = "f16"
"""What tensor cores take of quantised K rows: `Keys` of quantised.cuh."""

TILE = 64
STAGES_MAX = 4

KEPT_BYTES = 64
"""As in unit.cuh."""

WARPS_WANTED = 8
"""Warps of a multiprocessor from which on more stages are better than more warps."""

RESERVED_BYTES = 1 << 10
"""Shared memory that a multiprocessor keeps of each thread block (CUDA C++ Programming Guide, shared memory)."""


@dataclass(frozen=True)
class Kernel:
    """A kernel instance: the header that it is in and the expression that names it."""

    header: str
    expression: str

    @property
    def short(self) -> str:
        """For people."""
        return self.expression.replace("pagoda::", "")


UNPACK = Kernel("unpack.cuh", "pagoda::unpack")
MOVE = Kernel("move.cuh", "pagoda::move")
READ = Kernel("read.cuh", "pagoda::read")


@dataclass(frozen=True)
class Attention:
    """An instance of `attend`.

    sets: units that the query heads of a K/V head are cut into, a power of two. rows: query rows of a unit at most.
    shared_bytes, threads: of a thread block. v_dim: elements of a result.
    """

    kernel: Kernel
    sets: int
    rows: int
    threads: int
    shared_bytes: int
    v_dim: int

    @property
    def partial(self) -> int:
        """`PARTIAL`: floats of a partial result."""
        return self.rows * self.v_dim + 2 * self.rows

    def resident(self, shared_max: int) -> int:
        """Thread blocks of a multiprocessor at a time, as far as shared memory goes and more are of use."""
        fit = (shared_max + RESERVED_BYTES) // (self.shared_bytes + RESERVED_BYTES)
        return min(fit, max(1, 32 * WARPS_WANTED // self.threads))


@cache
def append(k: str, v: str, given: str) -> Kernel:
    """Appends rows of type `given` to pages of formats `k` and `v` (or PART_OF_K): `append`, or `append_rows` where one of
    them is quantised. Raises BackendUnavailable."""
    names = _formats((k, k if v == PART_OF_K else v, given))
    name = "append_rows" if k in QUANTISED or v in QUANTISED else "append"
    return Kernel(f"{name}.cuh", f"pagoda::{name}<{names}>")


@cache
def center(given: str) -> Kernel:
    """Takes the centre of rows of type `given`."""
    return Kernel("center.cuh", f"pagoda::center<pagoda::{NAMES[given]}>")


@cache
def attend(k: str, v: str, q: str, dim: int, v_dim: int, group: int, mode: str, shared_max: int) -> Attention:
    """Attention over formats `k` and `v` (or PART_OF_K) for queries of type `q`; `group` query heads share a K/V head.

    mode: "decode" for sequences with up to 16 query rows, "prefill", either with "-deterministic", or "common" for
    queries of several sequences over pages that these share, cut alike for all types of queries. shared_max: bytes of
    shared memory that a thread block can have. Each unit reads its rows of K and V, so as few as possible share a K/V head.
    Raises BackendUnavailable for what no instance can do.
    """
    names = (k, v, q)
    _formats(names)
    least: Attention | None = None
    for sets in (1 << n for n in range(group.bit_length()) if group % (1 << n) == 0):
        for stages in _instances(names, dim, v_dim, mode, sets):
            if group <= sets * stages[0].rows:
                fitting = [one for one in stages if one.shared_bytes <= shared_max]
                if fitting:
                    return max(fitting, key=lambda one: one.resident(shared_max))
                least = stages[-1]
    if least is None:
        raise BackendUnavailable(f"num_q_heads = {group} a K/V head: fewer, for {k}/{v} rows of {dim} and {v_dim}")
    raise BackendUnavailable(
        f"head_dim = {dim}, {v_dim}: attention over {k}/{v} rows needs {least.shared_bytes} bytes of shared memory, "
        f"and a thread block of this device has {shared_max}"
    )


def _instances(names: tuple[str, str, str], dim: int, v_dim: int, mode: str, sets: int) -> Iterator[list[Attention]]:
    """Instances by preference, each with more or fewer stages."""
    if "f32" in names[:2]:
        yield from ([_cores(names, dim, v_dim, rows, sets)] for rows in (16, 64))
        return
    for cut in _cuts(names, v_dim, mode):
        yield [_tensor(names, dim, v_dim, *cut, stages, sets) for stages in range(STAGES_MAX, 1, -1)]


def _cuts(names: tuple[str, str, str], v_dim: int, mode: str) -> list[tuple[int, int, int, int]]:
    """(warps, teams, columns, stack) of the engine: the best, then what needs less shared memory or takes more heads."""
    k, v, q = names
    columns = 4 if v_dim > 256 else 2 if v_dim > 128 else 1
    while v_dim % (FORMATS[k if v == PART_OF_K else v].unit * columns):
        columns //= 2
    by_rows = [(warps, 1, columns, 1) for warps in (4, 2, 1) if warps >= columns]
    # Queries and weights of several parts, or codes on their way, leave no registers for 32 rows of a warp.
    split = q == "f32" or (q, k) in SPLITS or k in QUANTISED or v in QUANTISED
    stacked = [] if split else [(4, 1, columns, 2)]
    # For many heads: a thread block has a multiprocessor to itself.
    wide = [(8, 1, columns, 1 if split else 2)]
    if mode.startswith("prefill"):
        return [*stacked, *by_rows, *wide]
    if v_dim > 256 or mode == "common":
        return [*by_rows, *stacked, *wide]
    # One warp has no registers for 256 columns of E2M1, nor of E4M3 beside weights of two parts.
    crowded = v_dim > 128 and (v in ("mxfp4", "nvfp4") or (v == "fp8_e4m3" and (q, "bf16") in SPLITS))
    alone = (columns, 1, columns, 1) if mode.endswith("deterministic") or crowded else (1, 4, 1, 1)
    return [alone, *by_rows, *stacked, *wide]


def _rows(warps: int, _teams: int, columns: int, stack: int) -> int:
    """Query rows of a thread block."""
    return 16 * stack * warps // columns


def _tensor(
    names: tuple[str, str, str],
    dim: int,
    v_dim: int,
    warps: int,
    teams: int,
    columns: int,
    stack: int,
    stages: int,
    sets: int,
) -> Attention:
    """`TensorShape` of tensor_cores.cuh."""
    k, v, q = names
    rows, slice_rows = _rows(warps, teams, columns, stack), TILE // teams
    depth = -(-dim // 16) * 16
    keys = CODES if k in QUANTISED else k
    q_bytes = SPLITS.get((q, keys), 1) * rows * (depth // 8 | 1) * 16 + rows * 4
    if k in QUANTISED:
        q_bytes += rows * 4 + warps * teams * dim * 4
    stage_rows = min(slice_rows, 16 if dim + v_dim > 512 else 32)
    row_bytes = _stored(k, dim, depth) + (0 if v == PART_OF_K else _stored(v, v_dim, v_dim))
    ring = teams * stages * (stage_rows * row_bytes + 32) + 16
    exchange = teams * rows * (v_dim + 4 + 2) * 4
    shape = f"pagoda::TensorShape<{_formats(names)}, {dim}, {v_dim}, {warps}, {teams}, {columns}, {stack}, {stages}>"
    kernel = Kernel("attend.cuh", f"pagoda::attend<pagoda::TensorCores<{shape}>>")
    return Attention(kernel, sets, rows, 32 * warps * teams, q_bytes + max(ring, exchange) + KEPT_BYTES, v_dim)


def _stored(name: str, dim: int, depth: int) -> int:
    """Bytes of a stored row and its scales in shared memory; `depth`: elements with zeros behind them."""
    row = FORMATS[name]
    return (row.row_bytes(depth) // 16 | 1) * 16 + row.bytes(dim) - row.row_bytes(dim)


def _cores(names: tuple[str, str, str], dim: int, v_dim: int, rows: int, sets: int) -> Attention:
    """`CoreShape` of cuda_cores.cuh."""
    keys = 16 if dim + v_dim > 512 else 32
    v_floats = 0 if names[1] == PART_OF_K else keys * v_dim
    ring = max(keys * (dim + 4) + v_floats, rows * (v_dim + 4 + 2))
    shared = 4 * (rows * dim + rows * keys + 3 * rows + ring) + KEPT_BYTES
    shape = f"pagoda::CoreShape<{_formats(names)}, {dim}, {v_dim}, {rows}>"
    kernel = Kernel("attend.cuh", f"pagoda::attend<pagoda::CudaCores<{shape}>>")
    return Attention(kernel, sets, rows, 128, shared, v_dim)


def _formats(names: tuple[str, ...]) -> str:
    k, v = names[:2]
    known = NAMES | QUANTISED | {PART_OF_K: "PartOfK"}
    if k not in known or v not in known:
        raise BackendUnavailable(f"k_dtype, v_dtype = {k}, {v}: a device stores {', '.join(NAMES | QUANTISED)} so far")
    if "f32" in (k, v) and (k in QUANTISED or v in QUANTISED):
        raise BackendUnavailable(f"k_dtype, v_dtype = {k}, {v}: on a device f32 goes with {', '.join(NAMES)} only")
    return ", ".join(f"pagoda::{known[name]}" for name in names)
