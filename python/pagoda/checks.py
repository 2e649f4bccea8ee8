"""Checks of arguments that many calls take. Each error names the argument, the value and the limit."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda._core import PAGE_SIZE_MAX, PAGE_SIZE_MIN
from pagoda.errors import InvalidArgument

FACTOR_MIN, FACTOR_MAX = 1e-18, 1e18
"""The range of numbers that kernels multiply by: products and quotients of two of them are normal float32 numbers."""


BOOLS = (bool, np.bool_)


def as_int(value: Any) -> Any:
    """The value as an int if it is an integer of any type, NumPy's included; bools and all else are returned as they are."""
    if isinstance(value, BOOLS):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def as_ints(owner: Any) -> None:
    """Applies `as_int` to every field of a dataclass in `__post_init__`: sums and products of NumPy integers may overflow."""
    for field in fields(owner):
        if field.init:
            object.__setattr__(owner, field.name, as_int(getattr(owner, field.name)))


def is_number(value: object) -> bool:
    """Whether the value is a float or an integer of any type; a bool is neither."""
    number = as_int(value)
    return isinstance(number, int | float) and not isinstance(number, bool)


def check_flag(name: str, value: bool) -> None:
    """Raises InvalidArgument unless the value is a bool."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} = {value!r}: True or False")


def check_integer(name: str, value: int, low: int, high: int) -> None:
    """Raises InvalidArgument unless the value is an int from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgument(f"{name} = {value!r}: an int from {low} to {high}")


def check_factor(name: str, value: float) -> None:
    """Raises InvalidArgument unless kernels can multiply by the value."""
    if not is_number(value) or not FACTOR_MIN <= value <= FACTOR_MAX:
        raise InvalidArgument(f"{name} = {value!r}: an int or float from {FACTOR_MIN} to {FACTOR_MAX}")


def check_text(name: str, value: str) -> None:
    """Raises InvalidArgument unless the value is a str."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} = {value!r}: a text")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises InvalidArgument unless the value is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(f"{name} = {value!r}: one of {', '.join(map(repr, choices))}")


def check_list(name: str, value: Sequence[Any], of: str) -> None:
    """Raises InvalidArgument unless the value is a list, an array or another sequence that is not text."""
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    if not is_array and (not isinstance(value, Sequence) or isinstance(value, str | bytes)):
        raise InvalidArgument(f"{name} = {value!r}: a list of {of}")


def check_page_size(name: str, value: int) -> None:
    """Raises InvalidArgument unless pages of a cache may have this many tokens."""
    if not isinstance(value, int) or not PAGE_SIZE_MIN <= value <= PAGE_SIZE_MAX or value.bit_count() != 1:
        raise InvalidArgument(f"{name} = {value!r}: an int, a power of two from {PAGE_SIZE_MIN} to {PAGE_SIZE_MAX}")


def check_threads(name: str, value: int) -> None:
    """Raises InvalidArgument unless a cache may have this many threads."""
    check_integer(name, value, 1, 1024)


def natural(name: str, value: int, low: int = 0, high: int = (1 << 63) - 1) -> int:
    """The value as an int. Raises InvalidArgument unless it is an integer from `low` to `high`."""
    number: int = as_int(value)
    check_integer(name, number, low, high)
    return number


def token_range(name: str, value: tuple[int, int]) -> tuple[int, int]:
    """The start and stop of a range of tokens. Raises InvalidArgument unless the value is a pair of integers."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidArgument(f"{name} = {value!r}: a pair (start, stop)")
    start, stop = value
    return natural(f"{name}[0]", start), natural(f"{name}[1]", stop)


def integers(name: str, values: Collection[int] | npt.ArrayLike, limit: str) -> npt.NDArray[np.int64]:
    """A list of integers as int64. Raises InvalidArgument, with `limit`, for anything else, bools included."""
    array = _array(name, values, limit)
    kind = array.dtype.kind
    # To NumPy an empty list has floats.
    if array.ndim != 1 or kind not in ("iu" if array.size else "iuf"):
        raise InvalidArgument(f"{name} = {array.dtype} {list(array.shape)}: {limit}")
    if array is not values and _has_bool(values):
        raise InvalidArgument(f"{name} = a list with True or False: {limit}")
    if kind == "u" and array.max(initial=0) >= 1 << 63:
        raise InvalidArgument(f"{name} = {values!r}: {limit}, below 2**63")
    return _plain(array, np.int64)


def _array(name: str, values: Any, limit: str) -> npt.NDArray[Any]:
    """The value as a NumPy array. Raises InvalidArgument, with `limit`, if NumPy or the value's own library refuses."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        # Only its type: a deleted array of JAX has no `repr` either.
        raise InvalidArgument(f"{name} = {type(values).__name__}: {limit} ({error})") from error


def _plain(array: npt.NDArray[Any], dtype: type[Any]) -> npt.NDArray[Any]:
    """The array in the form that `pagoda._core` reads: contiguous and aligned."""
    plain = np.asarray(array, dtype, order="C")
    return plain if plain.flags.aligned else plain.copy()


def _has_bool(values: Any) -> bool:
    """Whether a list, or a list in it, has True or False: NumPy turns them into 1 and 0 if there are numbers, too."""
    if not isinstance(values, Sequence) or isinstance(values, memoryview):
        return False
    kinds = set(map(type, values))
    return not kinds.isdisjoint(BOOLS) or (
        any(issubclass(kind, Sequence) for kind in kinds) and any(map(_has_bool, values))
    )


def floats(name: str, values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Numbers as float32. Raises InvalidArgument for bools, for anything else but numbers, and for numbers too large."""
    array = _array(name, values, "an array of numbers")
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        raise InvalidArgument(f"{name} = {array.dtype} {list(array.shape)}: an array of numbers")
    if _has_bool(values):
        raise InvalidArgument(f"{name} = a list with True or False: an array of numbers")
    with np.errstate(over="ignore"):
        result = _plain(array, np.float32)
    if array.dtype.kind == "f" and array.dtype.itemsize > 4 and not np.array_equal(np.isinf(result), np.isinf(array)):
        raise InvalidArgument(f"{name} = numbers up to {np.abs(array[np.isfinite(array)]).max()}: those of float32")
    return result


def finite(name: str, values: npt.ArrayLike, shape: tuple[int, ...], why: str = "") -> list[float]:
    """Finite numbers of a given shape, flattened row by row. Raises InvalidArgument; `why` is appended to its message."""
    array = floats(name, values)
    if array.shape != shape:
        shown = f"shape {list(array.shape)}"
    elif not np.isfinite(array).all():
        shown = f"{array[~np.isfinite(array)][0]} among others"
    else:
        return [float(x) for x in array.ravel()]
    raise InvalidArgument(f"{name} = {shown}: finite numbers {list(shape)}{why}")
