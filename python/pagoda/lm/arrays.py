"""The array library that a model computes with: NumPy on the CPU, CuPy on a GPU. Both have the same functions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.device import cuda, device_index


@dataclass(frozen=True)
class Library:
    """An array library and its device."""

    xp: Any
    """The module, `numpy` or `cupy`. Its `asarray` takes arrays of the host."""
    device: AbstractContextManager[object]
    """Makes the device CuPy's current one; does nothing on the CPU. Can be entered any number of times."""


def library(device: str) -> Library:
    """The library for a device, named as in `pagoda.Cache`. Raises InvalidArgument and BackendUnavailable."""
    index = device_index(device)
    if index is None:
        return Library(np, nullcontext())
    gpu = cuda.gpu(index)
    import cupy

    return Library(cupy, gpu)


def to_host(array: Any) -> npt.NDArray[Any]:
    """The array as a NumPy array. On a GPU, which must be the current device, waits for the current stream."""
    return array if isinstance(array, np.ndarray) else array.get()
