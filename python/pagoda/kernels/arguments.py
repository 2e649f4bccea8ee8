"""The arguments of device kernels, field by field as in cuda/pagoda: `ctypes` lays them out as C++ does."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import numpy as np

TIERS = 3

SPAN = np.dtype(
    [(name, "<i4") for name in ("first_page", "skip", "count", "before")]
    + [("offset", "<i8"), ("position", "<i8"), ("sight", "<i4")],
    align=True,
)
"""`Span` of tables.cuh."""

QUERY_BLOCK = np.dtype(
    [(name, "<i4") for name in ("sequence", "first_span", "token", "queries", "position", "from", "low", "high")]
    + [(name, "<i4") for name in ("first_part", "parts", "target")]
)
"""`QueryBlock` of unit.cuh."""


class Sight(IntEnum):
    """`Sight` of tables.cuh."""

    IN_WINDOW = 0
    ALWAYS = 1
    TRAILING = 2


class Division(IntEnum):
    """`Division` of unit.cuh."""

    TILES = 0
    RUNS = 1
    UNITS = 2


class Rows(ctypes.Structure):
    """The caller's array [token, head, element]; strides in bytes."""

    _fields_ = [("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class Strip(ctypes.Structure):
    """Rows, or their scales, of one layer inside a block, in bytes."""

    _fields_ = [("offset", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class Plane(ctypes.Structure):
    """K or V of one layer inside a block."""

    _fields_ = [("rows", Strip), ("scales", Strip)]


class Pages(ctypes.Structure):
    """The page tables of one layer group, on the device."""

    _fields_ = [
        ("table", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("bases", ctypes.c_void_p * TIERS),
        ("pitches", ctypes.c_int64 * TIERS),
        ("page_shift", ctypes.c_int),
        ("spans", ctypes.c_void_p),
    ]


class Append(ctypes.Structure):
    """Arguments of the kernels `append` and `append_rows`."""

    _fields_ = [
        ("k", Rows),
        ("v", Rows),
        ("slots", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("kv_heads", ctypes.c_int),
        ("head_dim", ctypes.c_int),
        ("v_head_dim", ctypes.c_int),
        ("base", ctypes.c_void_p),
        ("block_bytes", ctypes.c_int64),
        ("page_shift", ctypes.c_int),
        ("k_plane", Plane),
        ("v_plane", Plane),
        ("center", ctypes.c_void_p),
        ("rotate_k", ctypes.c_int),
        ("rotate_v", ctypes.c_int),
        ("misfit", ctypes.c_void_p),
    ]


class Center(ctypes.Structure):
    """Arguments of the kernel `center`."""

    _fields_ = [
        ("k", Rows),
        ("tokens", ctypes.c_void_p),
        ("kv_heads", ctypes.c_int),
        ("head_dim", ctypes.c_int),
        ("center", ctypes.c_void_p),
    ]


class Attend(ctypes.Structure):
    """Arguments of the kernel `attend`."""

    _fields_ = [
        ("pages", Pages),
        ("k_plane", Plane),
        ("v_plane", Plane),
        ("q", Rows),
        ("out", Rows),
        ("lse", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("prefix", ctypes.c_void_p),
        ("totals", ctypes.c_void_p),
        ("members", ctypes.c_void_p),
        ("part_rows", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("sets", ctypes.c_int),
        ("group", ctypes.c_int),
        ("set_shift", ctypes.c_int),
        ("window", ctypes.c_int),
        ("division", ctypes.c_int),
        ("stretch", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
        ("angles", ctypes.c_void_p),
        ("rotary_pairs", ctypes.c_int),
        ("interleaved", ctypes.c_int),
        ("center", ctypes.c_void_p),
        ("rotate_k", ctypes.c_int),
        ("rotate_v", ctypes.c_int),
        ("key_weight", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("pending", ctypes.c_void_p),
    ]


class Unpack(ctypes.Structure):
    """Arguments of the kernel `unpack`."""

    _fields_ = [("words", ctypes.c_void_p)]


class Move(ctypes.Structure):
    """Arguments of the kernel `move`. runs: uint64 [count, 3]: source, target, bytes."""

    _fields_ = [("runs", ctypes.c_void_p), ("count", ctypes.c_uint32)]


class Read(ctypes.Structure):
    """Arguments of the kernel `read`. words: device memory, as `count` words of 16 bytes."""

    _fields_ = [
        ("words", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("found", ctypes.c_void_p),
        ("sought", ctypes.c_uint32),
    ]
