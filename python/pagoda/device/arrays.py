"""The caller's arrays, as kernels take them: shapes, types and strides are checked here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

from pagoda.device.driver import Driver, Stream, View
from pagoda.errors import InvalidArgument
from pagoda.kernels.instances import NAMES

FLOATS = tuple(NAMES)
"""Types of queries, outputs and new rows."""


class Arrays:
    """Checks arrays for one device. now: the stream of the open step, on which they are used.

    A step sets `tokens`, how many new tokens it has, and `tokens_max`, the most rows that arrays may have.
    """

    def __init__(self, driver: Driver, now: Callable[[], Stream]) -> None:
        self._driver, self._now = driver, now
        self.tokens = self.tokens_max = 0

    def rows(
        self, name: str, array: Any, row: tuple[int, ...], dtype: str | None, kinds: Collection[str] = FLOATS
    ) -> View:
        """An array [tokens, *row] of one of the types `kinds`, with any strides but a contiguous last dimension.

        dtype: "bf16" if 16-bit integers are the bits of bf16. Raises InvalidArgument.
        """
        if dtype is not None and (not isinstance(dtype, str) or dtype != "bf16"):
            raise InvalidArgument(f'dtype = {dtype!r}: None, or "bf16" for 16-bit integers')
        view = self._driver.view(name, array, self._now())
        if view.shape[1:] != row or not self.tokens <= view.shape[0] <= self.tokens_max:
            more = "" if self.tokens == self.tokens_max else f", or up to {self.tokens_max} tokens"
            raise InvalidArgument(f"{name} = shape {list(view.shape)}: {[self.tokens, *row]}{more}")
        if view.dtype == "u16" and dtype == "bf16":
            view = view._replace(dtype="bf16")
        if view.dtype not in kinds:
            raise InvalidArgument(f'{name} = dtype {view.dtype}: {", ".join(kinds)} (or u16 with dtype="bf16")')
        size, strides = view.itemsize, view.strides
        if 0 not in view.shape and (strides[-1] != size or math.gcd(*strides) != size):
            raise InvalidArgument(f"{name} = strides {strides}: a contiguous last dimension")
        if view.address % size:
            raise InvalidArgument(f"{name} = address {view.address:#x}: a multiple of {size}")
        return view

    def output(self, name: str, array: Any, row: tuple[int, ...], like: View, dtype: str | None) -> View:
        """An array for results: rows of the same type as `like`, which overlap neither each other nor `like`."""
        view = self.rows(name, array, row, dtype, kinds=(like.dtype,))
        if not view.writeable:
            raise InvalidArgument(f"{name} = read-only: a writeable array")
        if _overlap(view.shape, view.strides, view.itemsize):
            raise InvalidArgument(f"{name} = strides {view.strides}: rows that do not overlap")
        (low, high), (theirs_low, theirs_high) = view.bytes, like.bytes
        if low < theirs_high and theirs_low < high:
            raise InvalidArgument(f"{name} = memory of q: memory of its own")
        return view

    def floats(self, name: str, array: Any, length: int) -> int:
        """The address of a contiguous float32 array [length]. Raises InvalidArgument."""
        view = self._driver.view(name, array, self._now())
        if view.dtype != "f32" or view.shape != (length,) or view.strides != (4,):
            given = f"dtype {view.dtype}, shape {list(view.shape)}, strides {list(view.strides)}"
            raise InvalidArgument(f"{name} = {given}: f32 [{length}], contiguous")
        if view.address % view.itemsize:
            raise InvalidArgument(f"{name} = address {view.address:#x}: a multiple of {view.itemsize}")
        return view.address


@lru_cache
def _overlap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether rows of an array may overlap."""
    reach = shape[-1] * itemsize
    axes = sorted((abs(stride), length) for stride, length in zip(strides[:-1], shape[:-1], strict=True) if length > 1)
    for stride, length in axes:
        if math.prod(shape) and stride < reach:
            return True
        reach = stride * length
    return False
