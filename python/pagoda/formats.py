"""Row formats: how one K or V row (one token, one head) is stored. The one table of them, and their bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda.checks import check_choice, check_list, floats, natural
from pagoda.errors import InvalidArgument

VARIABLE = "PAGODA_KV_DTYPE"
"""Of the environment: formats for every cache, whatever it asks for, to find out whether a format is at fault. One for K and
V, or two with a comma. What measures formats that it names refuses to."""

ROW_MAX = 1024
"""Elements of a row at most."""

BLOCK = 32
"""Elements of a block with a scale of its own, in most formats."""


@dataclass(frozen=True)
class RowFormat:
    """Bits of an element, and the bytes of scales: so many for each block of elements, or for a row.

    unit: a row has a multiple of so many elements. rotate: whether rows are rotated by default (`pagoda.outliers`).
    """

    bits: float
    unit: int
    scale_bytes: int = 0
    block: int | None = None
    rotate: bool = False

    @property
    def quantised(self) -> bool:
        """Whether elements share a scale."""
        return self.scale_bytes > 0

    def row_bytes(self, dim: int) -> int:
        """Bytes of the elements of a row."""
        return int(dim * self.bits // 8)

    def bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` elements."""
        return self.row_bytes(dim) + self.scale_bytes * (-(-dim // self.block) if self.block else 1)


FORMATS = {
    "f32": RowFormat(32, 8),
    "f16": RowFormat(16, 8),
    "bf16": RowFormat(16, 8),
    "fp8_e4m3": RowFormat(8, 16, 4),
    "int8": RowFormat(8, 16, 4, rotate=True),
    "q8_0": RowFormat(8, 32, 2, BLOCK, rotate=True),
    "q5_0": RowFormat(5, 32, 2, BLOCK, rotate=True),
    "q4_0": RowFormat(4, 32, 2, BLOCK, rotate=True),
    "mxfp4": RowFormat(4, 32, 1, BLOCK),
    "nvfp4": RowFormat(4, 32, 1, 16),
}
"""fp8_e4m3 and int8: one float32 scale a row. q8_0, q5_0, q4_0: ggml's blocks of 32 elements with a float16 scale
(ggml-common.h). mxfp4: OCP's blocks of 32 E2M1 with an E8M0 scale. nvfp4: blocks of 16 E2M1 with an E4M3 scale.
docs/layout.md says how values become them.

CPUs that can multiply quantised rows as integers, and fp8_e4m3 as bfloat16: attention is then as near to float64 over the
stored rows as 1e-4 (int8, q8_0), and some 1e-2 for the others. PAGODA_CPU_ISA=avx512, avx2, neon or scalar in the
environment keeps to floats, and 1e-6; docs/adr/0013 has the figures."""


def row_format(name: str, argument: str) -> RowFormat:
    """The format of a name. Raises InvalidArgument."""
    check_choice(argument, name, tuple(FORMATS))
    return FORMATS[name]


def check_not_forced() -> None:
    """Raises InvalidArgument while the environment has its own for every cache: what measures a format would measure them."""
    if forced := os.environ.get(VARIABLE):
        raise InvalidArgument(f"{VARIABLE} = {forced!r}: unset, for what measures formats that it names")


def formats_by_layer(k_dtype: str | Sequence[str], v_dtype: str | Sequence[str], layers: int) -> list[tuple[str, str]]:
    """The formats of K and V of each layer, from one for all or one for each. Raises InvalidArgument."""
    forced = os.environ.get(VARIABLE)
    if forced:
        names = [name.strip() for name in forced.split(",")]
        if len(names) > 2:
            raise InvalidArgument(f"{VARIABLE} = {forced!r}: one format, or two with a comma")
        k_dtype, v_dtype = names[0], names[-1]
    pair = []
    for argument, given in (("k_dtype", k_dtype), ("v_dtype", v_dtype)):
        if not isinstance(given, Sequence):
            raise InvalidArgument(f"{argument} = {given!r}: a format, or {layers}, one for each layer")
        names = [given] * layers if isinstance(given, str) else list(given)
        if len(names) != layers:
            raise InvalidArgument(f"{argument} = {len(names)} formats: one, or {layers}, one for each layer")
        for name in names:
            row_format(name, VARIABLE if forced else argument)
        pair.append(names)
    return list(zip(*pair, strict=True))


def encode(x: npt.ArrayLike, name: str) -> npt.NDArray[np.uint8]:
    """Rows of numbers as a format stores them.

    x: [..., dim]; dim is a multiple of the format's unit. Returns uint8 [..., bytes]: blocks as ggml lays them out (scale,
    then fifth bits, then quants; ggml-common.h) for formats that ggml has, nvfp4 in its blocks of 64, so dim is a multiple of
    64; elements and then the float32 scale for fp8_e4m3 and int8. Raises InvalidArgument.
    """
    numbers = floats("x", x)
    dim = _row(name, numbers.shape, f"x = shape {list(numbers.shape)}")
    shape = (*numbers.shape[:-1], FORMATS[name].bytes(dim))
    if not numbers.size:
        return np.zeros(shape, np.uint8)
    rows, scales = _core.encode_rows(numbers.reshape(-1, dim), name)
    return np.concatenate(_blocks(name, rows, scales, dim), axis=-1).reshape(shape)


def decode(rows: npt.NDArray[np.uint8], name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """float32 [*shape]: the numbers that `encode` has stored as rows, uint8 [*shape[:-1], bytes]. Raises InvalidArgument."""
    check_list("shape", shape, "sizes")
    shape = tuple(natural("shape", size) for size in shape)
    dim = _row(name, shape, f"shape = {list(shape)}")
    size = FORMATS[name].bytes(dim)
    if not isinstance(rows, np.ndarray):
        raise InvalidArgument(f"rows = {type(rows).__name__}: an array of uint8")
    if rows.dtype != np.uint8 or rows.shape != (*shape[:-1], size):
        raise InvalidArgument(f"rows = {rows.dtype} {list(rows.shape)}: uint8 {[*shape[:-1], size]}")
    if not rows.size:
        return np.zeros(shape, np.float32)
    data, scales = _unpacked(name, rows.reshape(-1, size), dim)
    return _core.decode_rows(data, scales, name, dim).reshape(shape)


def _row(name: str, shape: tuple[int, ...], given: str) -> int:
    """The elements of a row of an array of a shape. given: what the message says that it was."""
    form = row_format(name, "name")
    unit = 64 if name == "nvfp4" else form.unit
    if not shape or not 1 <= shape[-1] <= ROW_MAX or shape[-1] % unit:
        raise InvalidArgument(f"{given}: rows of a multiple of {unit} elements up to {ROW_MAX}, for {name}")
    return shape[-1]


Bytes = npt.NDArray[np.uint8]


def _blocks(name: str, rows: Bytes, scales: Bytes, dim: int) -> list[Any]:
    """The parts of packed rows, in order: whole rows, or [rows, all of a block] flattened."""
    form = FORMATS[name]
    if form.block is None:
        return [rows, scales]
    count, blocks = len(rows), dim // BLOCK
    if name == "nvfp4":
        # ggml's sub-blocks of 16 hold element j below and j + 8 above; ours of 32 j and j + 16.
        halves = rows.reshape(count, blocks, 1, 16)
        codes = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(count, blocks * 2, 2, 8)
        quants = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(count, dim // 64, 32)
        return [np.concatenate([scales.reshape(count, dim // 64, 4), quants], axis=2).reshape(count, -1)]
    parts = [scales.reshape(count, blocks, form.scale_bytes)]
    if name == "q5_0":
        parts.append(rows[:, dim // 2 :].reshape(count, blocks, 4))
        rows = rows[:, : dim // 2]
    parts.append(rows.reshape(count, blocks, -1))
    return [np.concatenate(parts, axis=2).reshape(count, -1)]


def _unpacked(name: str, packed: Bytes, dim: int) -> tuple[Bytes, Bytes]:
    """The inverse of `_blocks`: rows and scales."""
    form = FORMATS[name]
    count, blocks = len(packed), dim // BLOCK
    if form.block is None:
        size = form.row_bytes(dim)
        return np.ascontiguousarray(packed[:, :size]), np.ascontiguousarray(packed[:, size:])
    if name == "nvfp4":
        parts = packed.reshape(count, dim // 64, 36)
        quants = parts[:, :, 4:].reshape(count, blocks * 2, 8)
        codes = np.stack([quants & 15, quants >> 4], axis=2).reshape(count, blocks, 2, 16)
        rows = codes[:, :, 0] | codes[:, :, 1] << 4
        return rows.reshape(count, -1), np.ascontiguousarray(parts[:, :, :4]).reshape(count, -1)
    parts = packed.reshape(count, blocks, -1)
    scales = np.ascontiguousarray(parts[:, :, : form.scale_bytes]).reshape(count, -1)
    rest = parts[:, :, form.scale_bytes :]
    if name == "q5_0":
        nibbles, high = rest[:, :, 4:].reshape(count, -1), rest[:, :, :4].reshape(count, -1)
        return np.concatenate([nibbles, high], axis=1), scales
    return np.ascontiguousarray(rest).reshape(count, -1), scales
