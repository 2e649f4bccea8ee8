"""Arrays, streams and delays of a real GPU, for tests."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from mirror import DTYPES

Array = npt.NDArray[Any]

SPIN = """
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}
"""

CYCLES_PER_MS = 2_000_000
"""At 2 GHz. Most clocks are slower, so delays are rather longer."""


@lru_cache(maxsize=1)
def _spin() -> Any:
    import cupy

    return cupy.RawKernel(SPIN, "spin")


def delay(milliseconds: float) -> None:
    """Keeps CuPy's current stream busy."""
    _spin()((1,), (1,), (np.int64(milliseconds * CYCLES_PER_MS),))


def to_device(array: Array) -> Any:
    """A CuPy array; for bfloat16 its bits."""
    import cupy

    return cupy.asarray(array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array)


def to_host(array: Any, dtype: str) -> Array:
    """The reverse of `to_device`, after the current stream's work."""
    host: Array = array.get()
    return host.view(DTYPES[dtype])


def memory(address: int, size: int, owner: object) -> Any:
    """Device memory that belongs to `owner`, as a CuPy array of bytes."""
    import cupy

    unowned = cupy.cuda.UnownedMemory(address, size, owner)
    return cupy.ndarray((size,), np.uint8, cupy.cuda.MemoryPointer(unowned, 0))
