"""Arrays of CuPy, torch and others on a GPU, as kernels see them."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from pagoda.device.driver import Stream, View
from pagoda.errors import InvalidArgument

TYPES = {"<f4": "f32", "<f2": "f16", "<u2": "u16", "<V2": "bf16"}
"""Type strings of array interfaces. The last one is used by ml_dtypes, and so by CuPy."""

DLPACK_CUDA = (2, 13)
"""kDLCUDA and kDLCUDAManaged of dlpack.h: memory that kernels read."""


def of_torch(array: Any) -> bool:
    """Whether an array is a tensor of torch, without importing torch."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(array, tensor)


@lru_cache
def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides of an array without gaps."""
    return tuple(accumulate(shape[:0:-1], operator.mul, initial=itemsize))[::-1]


@lru_cache
def _apart(shape: tuple[int, ...], strides: tuple[int, ...], unit: int, itemsize: int) -> tuple[int, ...]:
    """Strides in bytes, from strides in units; those of axes of length 1 are ignored if the array is otherwise contiguous."""
    dense, given = _contiguous(shape, itemsize), tuple(stride * unit for stride in strides)
    gaps = any(length > 1 and a != b for length, a, b in zip(shape, given, dense, strict=True))
    return given if gaps else dense


@lru_cache
def _kind(dtype: np.dtype[Any]) -> str | None:
    """The kernels' name for a NumPy type; None if they do not take it."""
    return TYPES.get(dtype.str)


class Tensors:
    """Reads the tensors of torch."""

    def __init__(self, torch: Any) -> None:
        self._strided = torch.strided
        self._kinds = {
            torch.float32: ("f32", 4),
            torch.float16: ("f16", 2),
            torch.bfloat16: ("bf16", 2),
            torch.uint16: ("u16", 2),
        }

    def read(self, tensor: Any, device: int) -> View | None:
        """A tensor on a GPU; None if it is not on the device, not strided, of a type that kernels do not take, without
        memory, or still to be negated."""
        kind, itemsize = self._kinds.get(tensor.dtype, ("", 0))
        if not kind or not tensor.is_cuda or tensor.get_device() != device or tensor.layout is not self._strided:
            return None
        address = tensor.data_ptr()
        if not address or tensor.is_neg():
            return None
        shape = tuple(tensor.shape)
        return View(address, shape, _apart(shape, tensor.stride(), itemsize, itemsize), kind)


def _read_cupy(array: Any, device: int) -> View | None:
    """An array of CuPy; None if it is on another device, without memory, or of a type that kernels do not take."""
    memory, kind = array.data, _kind(array.dtype)
    if kind is None or memory.device_id != device or not memory.ptr:
        return None
    shape = array.shape
    return View(memory.ptr, shape, _apart(shape, array.strides, 1, array.itemsize), kind)


@lru_cache
def _reader(kind: type) -> Callable[[Any, int], View | None] | None:
    """A faster reader for arrays of a type than CUDA's array interface, which takes longer to make and check than the rest of
    a launch. None for subclasses, so that what they override is respected."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and issubclass(kind, getattr(torch, "Tensor", ())):
        return Tensors(torch).read if kind in (torch.Tensor, torch.nn.Parameter) else None
    return _read_cupy if kind is getattr(cupy, "ndarray", None) else None


@lru_cache
def _are_sizes(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether an array may have this shape and these strides. Raises TypeError for anything but integers."""
    sizes = [*map(operator.index, shape)]
    return len([*map(operator.index, strides)]) == len(sizes) and min(sizes, default=0) >= 0


def _by_dlpack(array: Any) -> bool:
    """Whether an array hands out memory of a GPU by DLPack."""
    place = getattr(array, "__dlpack_device__", None)
    return place is not None and place()[0] in DLPACK_CUDA


def cupy_array(name: str, array: Any) -> Any:
    """The same memory as an array of CuPy. Raises InvalidArgument if CuPy does not take it."""
    import cupy

    try:
        return cupy.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} = {type(array).__name__}: one that CuPy takes by DLPack ({error})") from error


def view(name: str, array: Any, device: int, stream: Stream) -> View:
    """An array on the device number `device`, by the array interface of CUDA or by DLPack, for kernels on a stream. Raises
    InvalidArgument."""
    known: Any = type(array)
    reader = _reader(known)
    if reader is not None and (found := reader(array, device)) is not None:
        return found
    kind = None
    if of_torch(array):
        if array.is_neg():
            raise InvalidArgument(f"{name} = a tensor that is yet to be negated: what its resolve_neg() returns")
        array = array.detach()
        # Not every version of torch supports bf16 in its array interface.
        if str(array.dtype) == "torch.bfloat16":
            kind, array = "bf16", array.view(sys.modules["torch"].int16)
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
    except KeyError as error:
        # torch has no type string for some of its types, such as 8-bit floats.
        raise InvalidArgument(f"{name} = dtype {array.dtype}: one of those that array interfaces have") from error
    if interface is None:
        if _by_dlpack(array):
            # The array's library makes CuPy's current stream wait for its pending writes.
            with stream.current():
                array = cupy_array(name, array)
            return view(name, array, device, stream)
        raise InvalidArgument(f"{name} = {type(array).__name__}: an array of CuPy or torch on the device")
    place: Any = getattr(array, "device", None)
    index = place.id if hasattr(place, "id") else getattr(place, "index", None)
    if index not in (None, device):
        raise InvalidArgument(f"{name} = an array on cuda:{index}: on cuda:{device}, the device of the cache")
    try:
        shape, typestr, strides = tuple(interface["shape"]), interface["typestr"], interface.get("strides")
        strides = _contiguous(shape, np.dtype(typestr).itemsize) if strides is None else tuple(strides)
        address, read_only = interface["data"]
        # A kernel that reads at address 0 ends all work on the device, and kernels ignore masks.
        fits = _are_sizes(shape, strides) and (0 < address < 1 << 64 or 0 in shape) and interface.get("mask") is None
    except (AttributeError, LookupError, TypeError, ValueError):
        fits = False
    if not fits:
        limit = "shape, typestr, data, no mask, and as many strides as sizes if any"
        raise InvalidArgument(f"{name} = an array whose __cuda_array_interface__ is {interface!r}: {limit}")
    kind = kind or TYPES.get(typestr, str(typestr))
    return View(int(address), shape, strides, kind, not read_only)
