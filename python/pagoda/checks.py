"""Checks of arguments that many calls take. Each names the argument, the value and the limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagoda.errors import InvalidArgument


def check_integer(name: str, value: int, low: int, high: int) -> None:
    """Raises InvalidArgument unless the value is an int from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgument(f"{name} = {value!r}: an integer from {low} to {high}")


def check_page_size(name: str, value: int) -> None:
    """Raises InvalidArgument unless pages of a cache may have so many tokens."""
    if not isinstance(value, int) or value not in {1 << n for n in range(3, 13)}:
        raise InvalidArgument(f"{name} = {value!r}: a power of two from 8 to 4096")


def natural(name: str, value: int) -> int:
    """An int, or an integer of NumPy, as an int. Raises InvalidArgument unless it is from 0 to 2**63 - 1."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise InvalidArgument(f"{name} = {value!r}: an integer from 0 to 2**63 - 1")
    return int(value)


def token_counts(name: str, values: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Integers, one for each sequence, as int64. Raises InvalidArgument for what is no list of integers."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidArgument(f"{name} = {values!r}: a list of integers, one a sequence") from error
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} = {array.dtype} {array.shape}: a list of integers, one a sequence")
    return np.ascontiguousarray(array, np.int64)
