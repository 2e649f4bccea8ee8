"""Row formats: how one K or V row (one token, one head) is stored, and in how many bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda._core import HEAD_DIM_MAX
from pagoda.checks import check_choice, check_list, floats, natural
from pagoda.errors import InvalidArgument

VARIABLE = "PAGODA_KV_DTYPE"
"""Environment variable with formats for every cache, whatever it asks for, to find out whether a format is at fault: one for
K and V, or two with a comma. Commands that measure formats they name, or plan with them, refuse to run with it."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RowFormat:
    """How a row is stored. bits: of an element. scale_bytes: of one scale, for each `block` elements, or for a row if None.

    unit: the number of elements of a row is a multiple of it. rotate: whether rows are rotated by default
    (`pagoda.outliers`).
    """

    bits: int
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
        return dim * self.bits // 8

    def scales_bytes(self, dim: int) -> int:
        """Bytes of the scales of a row."""
        return self.scale_bytes * (-(-dim // self.block) if self.block else 1)

    def bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` elements."""
        return self.row_bytes(dim) + self.scales_bytes(dim)


FORMATS = {
    name: RowFormat(bits, unit, scale_bytes, block, rotate=name in ("int8", "q8_0", "q5_0", "q4_0"))
    for name, bits, unit, scale_bytes, block in _core.ROW_FORMATS
}
"""fp8_e4m3 and int8: one float32 scale a row. q8_0, q5_0, q4_0: ggml's blocks of 32 elements with a float16 scale
(ggml-common.h). mxfp4: OCP's blocks of 32 E2M1 with an E8M0 scale. nvfp4: blocks of 16 E2M1 with an E4M3 scale.
docs/layout.md says how values are converted.

A CPU may multiply quantised rows as integers, or (AMD's) fp8_e4m3 as bfloat16. The error of attention, against float64 over
the stored rows, is then 1e-4 for int8 and q8_0, and some 1e-2 for the others. If values have a common mean it is up to 1e-3
where one token has nearly all of the weight of its tile of 64, and for the others up to 0.2 where one of some 64 tokens has
most of the weight. PAGODA_CPU_ISA=avx512, avx2, neon or scalar in the environment computes in floats, to within 1e-6;
docs/adr/0013 has the figures."""

GGML = tuple(name for name, form in FORMATS.items() if form.block is not None)
"""Formats that ggml also has, with its own order of bytes."""


def row_format(name: str, argument: str) -> RowFormat:
    """The format with this name. Raises InvalidArgument."""
    check_choice(argument, name, tuple(FORMATS))
    return FORMATS[name]


def check_not_forced() -> None:
    """Raises InvalidArgument while the environment sets formats for every cache: results would be of those."""
    if forced := os.environ.get(VARIABLE):
        raise InvalidArgument(
            f"{VARIABLE} = {forced!r}: unset, for what measures formats that it names, or plans with them"
        )


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


def cause(name: str) -> str:
    """A format of a cache as an error names it: with the variable, where that chose it."""
    return f"{name}, as {VARIABLE} says" if os.environ.get(VARIABLE) else name


def encode(x: npt.ArrayLike, name: str) -> Bytes:
    """Encodes rows of numbers in a row format.

    x: [..., dim]; dim is a multiple of the format's unit, for nvfp4 of 64. Returns uint8 [..., bytes]. Formats that ggml has
    come as its blocks (ggml-common.h: scale, then fifth bits, then quants; nvfp4 in blocks of 64); fp8_e4m3 and int8 as
    elements and then the float32 scale. Raises InvalidArgument.
    """
    numbers = floats("x", x)
    dim = _row(name, numbers.shape, f"x = shape {list(numbers.shape)}")
    shape = (*numbers.shape[:-1], FORMATS[name].bytes(dim))
    if not numbers.size:
        return np.zeros(shape, np.uint8)
    rows, scales = _core.encode_rows(numbers.reshape(-1, dim), name)
    packed = to_ggml(rows, scales, name) if name in GGML else np.concatenate([rows, scales], axis=1)
    return packed.reshape(shape)


def decode(rows: Bytes, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Decodes what `encode` returns: from uint8 [*shape[:-1], bytes] to float32 [*shape]. Raises InvalidArgument."""
    check_list("shape", shape, "sizes")
    shape = tuple(natural("shape", size) for size in shape)
    dim = _row(name, shape, f"shape = {list(shape)}")
    size = FORMATS[name].bytes(dim)
    rows = _bytes("rows", rows, (*shape[:-1], size))
    if not rows.size:
        return np.zeros(shape, np.float32)
    packed = rows.reshape(-1, size)
    if name in GGML:
        data, scales = from_ggml(packed, name)
    else:
        data, scales = (np.ascontiguousarray(part) for part in np.split(packed, [FORMATS[name].row_bytes(dim)], axis=1))
    return _core.decode_rows(data, scales, name, dim).reshape(shape)


def to_ggml(rows: Bytes, scales: Bytes, name: str) -> Bytes:
    """Reorders rows as pages hold them into ggml's blocks, which begin with their scale. No value changes.

    rows: uint8 [..., bytes], the elements of each row; in q5_0 the fifth bits follow all nibbles. scales: uint8 [..., bytes],
    the scales of each row. docs/layout.md draws both. Returns uint8 [..., bytes]: blocks of 32 elements, for nvfp4 of 64, as
    in ggml-common.h. Only a cache with center=None and rotate=False stores rows untransformed. Raises InvalidArgument.
    """
    check_choice("name", name, GGML)
    rows = _bytes("rows", rows)
    form, unit, lead = FORMATS[name], _unit(name), rows.shape[:-1]
    dim = _row(name, (rows.shape[-1] * 8 // form.bits,), f"rows = uint8 {list(rows.shape)}")
    scales = _bytes("scales", scales, (*lead, form.scales_bytes(dim)))
    parts = [scales.reshape(*lead, dim // unit, form.scales_bytes(unit))]
    if name == "q5_0":
        rows, fifth = np.split(rows, [dim // 2], axis=-1)
        parts.append(fifth.reshape(*lead, dim // unit, unit // 8))
    elif name == "nvfp4":
        # Each byte holds two elements: in ggml j and j + 8 of a sub-block of 16, here j and j + 16 of a unit of 32.
        rows = _paired(rows, 16, 8)
    parts.append(rows.reshape(*lead, dim // unit, unit if name == "q8_0" else unit // 2))
    return np.concatenate(parts, axis=-1).reshape(*lead, form.bytes(dim))


def from_ggml(blocks: Bytes, name: str) -> tuple[Bytes, Bytes]:
    """The inverse of `to_ggml`: rows and scales from ggml's blocks, uint8 [..., bytes]. Raises InvalidArgument."""
    check_choice("name", name, GGML)
    blocks = _bytes("blocks", blocks)
    form, unit, lead = FORMATS[name], _unit(name), blocks.shape[:-1]
    dim = _row(name, (blocks.shape[-1] // form.bytes(unit) * unit,), f"blocks = uint8 {list(blocks.shape)}")
    blocks = _bytes("blocks", blocks, (*lead, form.bytes(dim)))
    parts = blocks.reshape(*lead, dim // unit, form.bytes(unit))
    scales, rows = np.split(parts, [form.scales_bytes(unit)], axis=-1)
    if name == "q5_0":
        fifth, nibbles = np.split(rows, [unit // 8], axis=-1)
        rows = np.concatenate([nibbles.reshape(*lead, dim // 2), fifth.reshape(*lead, dim // 8)], axis=-1)
    elif name == "nvfp4":
        rows = _paired(rows, 8, 16)
    rows = np.ascontiguousarray(rows.reshape(*lead, form.row_bytes(dim)))
    return rows, np.ascontiguousarray(scales.reshape(*lead, form.scales_bytes(dim)))


def _paired(rows: Bytes, width: int, other: int) -> Bytes:
    """4-bit codes whose bytes hold elements j and j + width of each group of 2 width, as bytes of j and j + other."""
    halves = rows.reshape(-1, 1, width)
    codes = np.concatenate([halves & 15, halves >> 4], axis=1).reshape(-1, 2, other)
    paired: Bytes = codes[:, 0] | codes[:, 1] << 4
    return paired


def _unit(name: str) -> int:
    """A row has a multiple of so many elements where ggml's order has blocks of them."""
    return 64 if name == "nvfp4" else FORMATS[name].unit


def _row(name: str, shape: tuple[int, ...], given: str) -> int:
    """The elements of a row of an array of a shape. given: what the message says that it was."""
    row_format(name, "name")
    unit = _unit(name)
    if not shape or not 1 <= shape[-1] <= HEAD_DIM_MAX or shape[-1] % unit:
        raise InvalidArgument(f"{given}: rows of a multiple of {unit} elements up to {HEAD_DIM_MAX}, for {name}")
    return shape[-1]


def _bytes(argument: str, value: Bytes, shape: tuple[int, ...] | None = None) -> Bytes:
    """An array of bytes, of this shape if it is known, and of no subclass. Raises InvalidArgument for what is none."""
    if not isinstance(value, np.ndarray):
        raise InvalidArgument(f"{argument} = {type(value).__name__}: an array of uint8")
    if value.dtype != np.uint8 or value.ndim == 0 or (shape is not None and value.shape != shape):
        limit = "[..., bytes]" if shape is None else list(shape)
        raise InvalidArgument(f"{argument} = {value.dtype} {list(value.shape)}: uint8 {limit}")
    return np.asarray(value)
