"""Chooses kernel instances for a layer, and computes what they need: the arithmetic of the shapes in cuda/pagoda."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pagoda.errors import BackendUnavailable
from pagoda.formats import FORMATS

NAMES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
"""Types of queries, outputs and new rows, which are also row formats."""

QUANTISED = {
    "fp8_e4m3": "Fp8E4m3",
    "int8": "Int8",
    "q8_0": "Q8_0",
    "q5_0": "Q5_0",
    "q4_0": "Q4_0",
    "mxfp4": "Mxfp4",
    "nvfp4": "Nvfp4",
}
"""The other row formats."""

PART_OF_K = "part of k"
"""In place of the format of V: V is the first elements of the stored K row."""

FROM_V = "from v"
"""In place of the format of K: K is not stored but derived from V."""

FOLDED = ("nvfp4",)
"""Formats that the engine for many queries multiplies by their scales as it decodes: `FOLDS` of quantised.cuh."""

STORED = NAMES | QUANTISED | {PART_OF_K: "PartOfK", FROM_V: "FromV"}
"""The C++ names of everything that stands for a row format."""

SPLITS = {
    ("f32", "f16"): 2,
    ("f32", "bf16"): 3,
    ("f16", "bf16"): 2,
}
"""`Splits` of formats.cuh: how many elements of the second type hold one of the first; 1 for other pairs."""

CODES = "f16"
"""How tensor cores take K rows that are quantised or derived from V: `Keys` of quantised.cuh and formats.cuh."""

STAGES_MAX = 4

TEAMS = 4
"""Teams of a thread block in the engine for few queries: few_queries.cuh."""

FEW_ROWS = 8
"""Query rows that this engine processes at the cost of one."""

PART = 128
"""Elements of a row that a warp holds as four registers: rotation.cuh."""

KEPT_BYTES = 64
"""The constant of the same name in unit.cuh."""

WAY_BYTES = 48
"""Size of `Way` in tensor_cores.cuh."""

WARPS_WANTED = 8
"""From this many warps on a multiprocessor, the engine for many queries gains more from stages than from more warps."""

RESERVED_BYTES = 1 << 10
"""Shared memory that the system reserves for each thread block (CUDA C++ Programming Guide, shared memory)."""


class Kernel(NamedTuple):
    """A kernel instance: its header and the expression that names it."""

    header: str
    expression: str

    @property
    def short(self) -> str:
        """The name without its namespaces, for messages."""
        return self.expression.replace("pagoda::", "")


UNPACK = Kernel("unpack.cuh", "pagoda::unpack")
MOVE = Kernel("move.cuh", "pagoda::move")
READ = Kernel("read.cuh", "pagoda::read")


class Operands(NamedTuple):
    """The operands of attention: formats of K (or FROM_V) and V (or PART_OF_K), the type of queries, and elements of rows."""

    k: str
    v: str
    q: str
    dim: int
    v_dim: int

    @property
    def values(self) -> str:
        """The format of the rows from which V is read."""
        return self.k if self.v == PART_OF_K else self.v

    @property
    def names(self) -> str:
        """The formats by their C++ names. Raises BackendUnavailable for formats that no kernel reads."""
        return _formats((self.k, self.v, self.q))


@dataclass(frozen=True)
class Attention:
    """An instance of `attend`.

    sets: how many units the query heads of a K/V head are cut into, a power of two. rows: the most query rows of a unit.
    shared_bytes, threads: of a thread block. v_dim: elements of a result. most: the most thread blocks of a multiprocessor
    that have registers and are useful. ahead: stages under way to each thread block at a time, if more of these are better
    than more thread blocks; else 1.
    """

    kernel: Kernel
    sets: int
    rows: int
    threads: int
    shared_bytes: int
    v_dim: int
    most: int
    ahead: int = 1

    @property
    def partial(self) -> int:
        """`PARTIAL`: floats of a partial result."""
        return self.rows * self.v_dim + 2 * self.rows

    def resident(self, shared_max: int) -> int:
        """Thread blocks that a multiprocessor runs at a time."""
        return min((shared_max + RESERVED_BYTES) // (self.shared_bytes + RESERVED_BYTES), self.most)

    def merit(self, shared_max: int) -> tuple[int, int]:
        """Ranks instances that differ only in stages: first by stages under way, then by thread blocks."""
        resident = self.resident(shared_max)
        return resident * self.ahead, resident


@cache
def append(k: str, v: str, given: str, dim: int) -> Kernel:
    """The kernel that appends rows of type `given` to pages of formats `k` and `v` (or PART_OF_K): `append`, or `append_rows`
    if one of the formats is quantised. dim: elements of the longer rows. Raises BackendUnavailable."""
    names = _formats((k, k if v == PART_OF_K else v, given))
    if k in QUANTISED or v in QUANTISED:
        return Kernel("append_rows.cuh", f"pagoda::append_rows<{names}, {-(-dim // PART)}>")
    return Kernel("append.cuh", f"pagoda::append<{names}>")


@cache
def center(given: str) -> Kernel:
    """The kernel that computes the centre of rows of type `given`."""
    return Kernel("center.cuh", f"pagoda::center<pagoda::{NAMES[given]}>")


@cache
def attend(k: str, v: str, q: str, dim: int, v_dim: int, group: int, mode: str, shared_max: int) -> Attention:
    """The instance for attention over formats `k` (or FROM_V) and `v` (or PART_OF_K), with queries of type `q` and `group`
    query heads per K/V head.

    mode: "decode" for sequences with one new token or up to FEW_ROWS query rows; "verify" for those with up to 16 query rows;
    "prefill" for others; "decode-deterministic" and "prefill-deterministic"; or "common" for queries of several sequences
    over pages that these share, cut alike for all types of queries. shared_max: the most bytes of shared memory of a thread
    block. Every unit reads all rows of its K/V head, so query heads are cut into as few units as possible.
    Raises BackendUnavailable if no instance fits.
    """
    given = Operands(k, v, q, dim, v_dim)
    check_formats(k, v)
    least: Attention | None = None
    for sets in (1 << n for n in range(group.bit_length()) if group % (1 << n) == 0):
        for stages in _instances(given, mode, sets):
            if group <= sets * stages[0].rows:
                fitting = [one for one in stages if one.shared_bytes <= shared_max]
                if fitting:
                    return max(fitting, key=lambda one: one.merit(shared_max))
                least = min(stages[-1], least or stages[-1], key=lambda one: one.shared_bytes)
    if least is None:
        raise BackendUnavailable(f"num_q_heads = {group} a K/V head: fewer, for {k}/{v} rows of {dim} and {v_dim}")
    raise BackendUnavailable(
        f"head_dim = {dim}, {v_dim}: attention of {q} over {k}/{v} rows needs {least.shared_bytes} bytes of shared memory, "
        f"and a thread block of this device has {shared_max}"
    )


def _instances(given: Operands, mode: str, sets: int) -> Iterator[list[Attention]]:
    """Instances in order of preference, each with all its numbers of stages."""
    if "f32" in (given.k, given.v):
        yield from ([_cores(given, rows, sets)] for rows in (16, 64))
        return
    stages = range(STAGES_MAX, 1, -1)
    # Only the engine for many queries derives keys once per stage for all query rows.
    for queries in () if given.k == FROM_V else _few_queries(given, mode):
        yield [_tensor(_few(given, queries), given, count, sets) for count in stages]
    for cut in _cuts(given, mode):
        yield [_tensor(_many(given, *cut), given, count, sets) for count in stages]


def _few_queries(given: Operands, mode: str) -> Iterator[int]:
    """How many blocks of 8 queries the engine for few queries may have: a warp has all of their values in registers."""
    name, stored = given.values, FORMATS[given.values]
    if not stored.quantised:
        one, two = 256, 256
    elif (given.q, "bf16") in SPLITS:
        # Weights are split into several parts, and nvfp4 converts them again for every 16 columns.
        one, two = (0, 0) if name == "nvfp4" else (128, 128)
    else:
        one, two = 512 if FORMATS[given.k].bits == stored.bits == 8 else 256, 64 if given.v == PART_OF_K else 128
    if mode == "decode" and max(given.dim, given.v_dim) <= one:
        yield 1
    if mode in ("decode", "verify") and given.v_dim <= two:
        yield 2


def _cuts(given: Operands, mode: str) -> list[tuple[int, int, int]]:
    """(warps, columns, stack) of the engine for many queries: the best, then some that need less or take more heads."""
    name, q, v_dim = given.values, given.q, given.v_dim
    columns = 4 if v_dim > 256 else 2 if v_dim > 128 else 1
    while v_dim % (FORMATS[name].unit * columns):
        columns //= 2
    by_rows = [(warps, columns, 1) for warps in (4, 2, 1) if warps >= columns]
    # f32 queries and their weights are split into several parts, which leaves no registers for 32 rows per warp. Neither do
    # weights in two parts with long values.
    split = q == "f32" or (q == "f16" and name in QUANTISED and v_dim > 128)
    stacked = [] if split else [(4, columns, 2)]
    # For many heads: one thread block per multiprocessor.
    wide = [(8, columns, 1 if split else 2)]
    if mode.startswith("prefill"):
        return [*stacked, *by_rows, *wide]
    alone = [(columns, columns, 1)] if mode == "decode-deterministic" and v_dim <= 256 else []
    return [*alone, *by_rows, *stacked, *wide]


@dataclass(frozen=True)
class _Engine:
    """cut: its own template parameters. stage_rows: stored rows in a stage of one team. decoded: bytes for decoded rows.
    parked: whether threads keep their `Way` through the stages in shared memory."""

    name: str
    cut: str
    rows: int
    warps: int
    teams: int
    stage_rows: int
    most: int
    decoded: int = 0
    parked: bool = False


def _many(given: Operands, warps: int, columns: int, stack: int) -> _Engine:
    """`ManyShape` of many_queries.cuh."""
    rows, elements = 16 * stack * warps // columns, given.dim + given.v_dim
    plain = given.k in NAMES and given.values in NAMES
    stage_rows = 64 if plain and elements <= 256 and warps >= 4 else 32 if elements <= 512 else 16
    from_v = _elements(given.dim) * (2 if given.q == "f32" else 1)
    keys = from_v if given.k == FROM_V else _decoded(given.k, given.dim)
    decoded = stage_rows * (keys + _decoded(given.values, given.v_dim))
    most = max(1, WARPS_WANTED // warps)
    parked = stack > 1 and stage_rows > 16
    return _Engine("Many", f"{warps}, {columns}, {stack}", rows, warps, 1, stage_rows, most, decoded, parked)


def _few(given: Operands, queries: int) -> _Engine:
    """`FewShape` of few_queries.cuh."""
    k, v, q, dim, v_dim = given
    row_bytes = FORMATS[k].row_bytes(dim) + (0 if v == PART_OF_K else FORMATS[v].row_bytes(v_dim))
    stage_rows = 32 if row_bytes <= 320 and v_dim <= 128 and q != "f32" else 16
    most = 3 if queries == 1 and q != "f32" and 128 % dim == 128 % v_dim == 0 else 2
    return _Engine("Few", f"{queries}", FEW_ROWS * queries, TEAMS, TEAMS, stage_rows, most)


def _tensor(engine: _Engine, given: Operands, stages: int, sets: int) -> Attention:
    """`TensorShape` of tensor_cores.cuh."""
    k, v, q, dim, v_dim = given
    rows = engine.rows
    keys = CODES if k in QUANTISED or k == FROM_V else k
    q_bytes = SPLITS.get((q, keys), 1) * rows * _elements(dim) + rows * 4
    if k in QUANTISED:
        q_bytes += rows * 4
    row_bytes = 0 if k == FROM_V else _stored(k, dim, _depth(dim))
    row_bytes += 0 if v == PART_OF_K else _stored(v, v_dim, v_dim)
    ring = engine.teams * stages * (engine.stage_rows * row_bytes + 32) + 16
    ring += 32 * engine.warps * engine.teams * WAY_BYTES if engine.parked else 0
    exchange = engine.teams * rows * (v_dim + 4 + 2) * 4
    shape = f"pagoda::{engine.name}Shape<{given.names}, {dim}, {v_dim}, {engine.cut}, {stages}>"
    kernel = Kernel("attend.cuh", f"pagoda::attend<pagoda::{engine.name}Queries<{shape}>>")
    shared_bytes = q_bytes + max(ring + engine.decoded, exchange) + KEPT_BYTES
    # Decoding is bound by memory, so many bytes need to be under way.
    ahead = stages - 1 if engine.name == "Few" else 1
    return Attention(kernel, sets, rows, 32 * engine.warps, shared_bytes, v_dim, engine.most, ahead)


def _depth(dim: int) -> int:
    """`DEPTH`: elements of a K row, padded with zeros to whole steps."""
    return -(-dim // 16) * 16


def _elements(dim: int) -> int:
    """Bytes of a row of 16-bit elements in shared memory."""
    return _depth(dim) * 2


def _stored(name: str, dim: int, depth: int) -> int:
    """Bytes of a stored row and its scales in shared memory. depth: elements with padding."""
    row = FORMATS[name]
    return -(-row.row_bytes(depth) // 16) * 16 + row.scales_bytes(dim)


def _decoded(name: str, dim: int) -> int:
    """Bytes of a row in `DecodedRows` of quantised.cuh."""
    row = FORMATS[name]
    if not row.quantised:
        return 0
    scales = 0 if name in FOLDED else row.scales_bytes(dim) // row.scale_bytes
    return _elements(dim) + 4 * scales


def _cores(given: Operands, rows: int, sets: int) -> Attention:
    """`CoreShape` of cuda_cores.cuh."""
    dim, v_dim = given.dim, given.v_dim
    keys = 16 if dim + v_dim > 512 else 32
    v_floats = 0 if given.v == PART_OF_K else keys * v_dim
    ring = max(keys * (dim + 4) + v_floats, rows * (v_dim + 4 + 2))
    shared = 4 * (rows * dim + rows * keys + 3 * rows + ring) + KEPT_BYTES
    shape = f"pagoda::CoreShape<{given.names}, {dim}, {v_dim}, {rows}>"
    kernel = Kernel("attend.cuh", f"pagoda::attend<pagoda::CudaCores<{shape}>>")
    return Attention(kernel, sets, rows, 128, shared, v_dim, 2)


def _formats(names: tuple[str, ...]) -> str:
    k, v = names[:2]
    check_formats(k, v)
    return ", ".join(f"pagoda::{STORED[name]}" for name in names)


def check_formats(k: str, v: str) -> None:
    """Raises BackendUnavailable for row formats that no kernel reads."""
    if "f32" in (k, v) and (k in QUANTISED or v in QUANTISED):
        raise BackendUnavailable(f"k_dtype, v_dtype = {k}, {v}: on a device f32 goes with {', '.join(NAMES)} only")
