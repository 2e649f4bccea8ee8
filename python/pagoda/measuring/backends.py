"""The backends of `pagoda bench longcontext`: they read weights, make arrays, wait for the end of a step, and tell how many
bytes went over which link."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from pagoda.device.driver import Driver
from pagoda.device.mover import WORD
from pagoda.lm.arrays import Library
from pagoda.measuring.filling import Rows
from pagoda.measuring.gpu import Reader, ceilings
from pagoda.report import StepReport


class Backend(Protocol):
    """Where the measured decode loop runs; a context manager, to be entered before the loop."""

    def __enter__(self) -> Backend: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def ceilings(self) -> dict[str, float]:
        """Bytes a second of the links that only a GPU has, each alone, measured now."""

    def array(self, rows: Rows) -> Any:
        """Converts an array of the host to one that a step takes."""

    def read_weights(self, layer: int) -> None:
        """Reads the weights of one layer, before any later work."""

    def finish(self) -> None:
        """Waits until the work of a step that has been left has ended."""

    def moved(self, report: StepReport, rows: int) -> dict[str, int]:
        """Bytes that a step has read over each link, weights included. rows: bytes of K and V that it has attended to."""


class CpuBackend:
    """Weights are memory, of which each layer reads its share, with as many threads as attention."""

    def __init__(self, weight_bytes: int, layers: int, threads: int) -> None:
        self._weight_bytes = weight_bytes
        words = np.ones(weight_bytes // 8, np.uint64)
        self._shares = [np.array_split(share, threads) for share in np.array_split(words, layers)]
        self._pool = ThreadPoolExecutor(threads)

    def __enter__(self) -> CpuBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def ceilings(self) -> dict[str, float]:
        """A CPU has no other links."""
        return {}

    def array(self, rows: Rows) -> Any:
        """The array itself."""
        return rows

    def read_weights(self, layer: int) -> None:
        """Reads the weights before it returns."""
        if self._weight_bytes:
            list(self._pool.map(np.add.reduce, self._shares[layer]))

    def finish(self) -> None:
        """Does nothing: kernels of the CPU have ended when a step is left."""

    def moved(self, report: StepReport, rows: int) -> dict[str, int]:
        """Bytes from "memory", which both tiers are in, and from "disk"."""
        return report.bytes | {"memory": report.bytes["memory"] + self._weight_bytes}


class GpuBackend:
    """Weights are device memory that a kernel reads, on the stream of the steps. Arrays are f16, like those of models.

    library: of arrays on the device. Raises BackendUnavailable if the device has no room.
    """

    def __init__(self, driver: Driver, library: Library, weight_bytes: int, layers: int) -> None:
        self._weight_bytes = weight_bytes
        self._driver, self._library, self._layers = driver, library, layers
        self._weights, self._reader = driver.memory(weight_bytes), Reader(driver)

    def __enter__(self) -> GpuBackend:
        self._library.device.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._library.device.__exit__(*error)

    def ceilings(self) -> dict[str, float]:
        """The ceilings of the device's memory and of the link to it."""
        return ceilings(self._driver)

    def array(self, rows: Rows) -> Any:
        """A copy on the device."""
        return self._library.xp.asarray(rows.astype(np.float16))

    def read_weights(self, layer: int) -> None:
        """Launches the kernel that reads the weights."""
        words = self._weight_bytes // WORD
        start, stop = (WORD * (words * place // self._layers) for place in (layer, layer + 1))
        if start < stop:
            self._reader.read(self._driver.caller_stream(None), self._weights.address + start, stop - start)

    def finish(self) -> None:
        """Waits for the stream."""
        self._driver.caller_stream(None).record().wait()

    def moved(self, report: StepReport, rows: int) -> dict[str, int]:
        """Counts as "device" all rows that neither came over "pcie" nor were read by the CPU, from "memory"."""
        here = max(0, rows - report.bytes["pcie"] - report.bytes["memory"])
        return {"device": self._weight_bytes + here} | report.bytes
