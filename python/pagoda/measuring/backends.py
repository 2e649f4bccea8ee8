"""What `pagoda bench longcontext` needs of where the cache is: weights to read, arrays, the end of a step, and how many
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
    """Where a decode loop that is measured runs; a context manager, to be entered before the loop."""

    def __enter__(self) -> Backend: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def ceilings(self) -> dict[str, float]:
        """Bytes a second of links that a CPU alone does not have, each alone, measured now."""

    def array(self, rows: Rows) -> Any:
        """An array of the host as a step takes it."""

    def read_weights(self, layer: int) -> None:
        """Reads those of one layer, before anything that is asked for later."""

    def finish(self) -> None:
        """Waits until a step that has been left has ended."""

    def moved(self, report: StepReport, rows: int) -> dict[str, int]:
        """What a step has read over each link, weights included. rows: bytes of K and V that it has attended to."""


class CpuBackend:
    """Weights are memory that each layer reads its share of, on as many threads as attention has."""

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
        """There are none."""
        return {}

    def array(self, rows: Rows) -> Any:
        """The array itself."""
        return rows

    def read_weights(self, layer: int) -> None:
        """Has read when it returns."""
        if self._weight_bytes:
            list(self._pool.map(np.add.reduce, self._shares[layer]))

    def finish(self) -> None:
        """There is nothing to wait for: kernels of the CPU have ended when a step is left."""

    def moved(self, report: StepReport, rows: int) -> dict[str, int]:
        """By "memory", which both tiers are in, and "disk"."""
        return report.bytes | {"memory": report.bytes["memory"] + self._weight_bytes}


class GpuBackend:
    """Weights are memory of the device that a kernel reads, on the stream of the steps. Arrays are f16, as those of models.

    library: of arrays on the device. Raises BackendUnavailable where it has no room.
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
        """Of the device's memory and of the link to it."""
        return ceilings(self._driver)

    def array(self, rows: Rows) -> Any:
        """A copy on the device."""
        return self._library.xp.asarray(rows.astype(np.float16))

    def read_weights(self, layer: int) -> None:
        """Is launched when it returns."""
        words = self._weight_bytes // WORD
        start, stop = (WORD * (words * place // self._layers) for place in (layer, layer + 1))
        if start < stop:
            self._reader.read(self._driver.caller_stream(None), self._weights.address + start, stop - start)

    def finish(self) -> None:
        """Waits for the stream."""
        self._driver.caller_stream(None).record().wait()

    def moved(self, report: StepReport, rows: int) -> dict[str, int]:
        """What neither came over "pcie" nor was read by the CPU, in "memory", was read where it lies, in "device" memory."""
        here = max(0, rows - report.bytes["pcie"] - report.bytes["memory"])
        return {"device": self._weight_bytes + here} | report.bytes
