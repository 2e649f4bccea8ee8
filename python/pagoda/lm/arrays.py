"""The arrays that a model computes with: NumPy's on the CPU, CuPy's on a GPU. The two libraries have the same functions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.device import cuda, device_index


@dataclass(frozen=True)
class Library:
    """Where arrays are and what computes with them."""

    xp: Any
    """The module, `numpy` or `cupy`. Its `asarray` takes arrays of the host."""
    device: AbstractContextManager[object]
    """Makes the device CuPy's current one; on the CPU nothing. Entered as often as one likes."""


def library(device: str) -> Library:
    """The library of a device as `pagoda.Cache` names them. Raises InvalidArgument and BackendUnavailable."""
    index = device_index(device)
    if index is None:
        return Library(np, nullcontext())
    gpu = cuda.gpu(index)
    import cupy

    return Library(cupy, gpu)


def to_host(array: Any) -> npt.NDArray[Any]:
    """An array of any library as one of NumPy. On a GPU, which is the current device, it waits for the current stream."""
    return array if isinstance(array, np.ndarray) else array.get()
