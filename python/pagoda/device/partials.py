"""Attention on the CPU for a cache on a device, over pages of the host tier where they lie: the route "memory".

Queries are copied to the host. The CPU goes over its share of the pages while kernels go over theirs. Its sums, not yet
results, are sent to the device as one more part, from which the last launch starts. The caller's thread computes too, so
`attend` returns when the CPU is done; kernels may still run. The CPU's share follows from measured rates (`pagoda doctor
--calibrate`); without any it has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda.device.driver import Driver, Event, Pinned, Stream, View
from pagoda.device.mover import KERNEL_BLOCKS, KERNEL_THREADS, RUN_BYTES, WORD, list_runs
from pagoda.formats import FORMATS
from pagoda.geometry import CoreLayer, owners_of
from pagoda.kernels import instances
from pagoda.rates import READER_ROWS, Routes

ELEMENTS: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


@dataclass(frozen=True)
class Asked:
    """Queries on their way to the host: those of sequences for which the CPU computes a part.

    begins: for each sequence of the batch, the CPU attends to all tokens before this one; 0 if it has no part. tokens: the
    rows of these queries in the batch. come: the event of their arrival.
    """

    layer: int
    begins: npt.NDArray[np.uint32]
    tokens: Sequence[int]
    queries: npt.NDArray[Any]
    dtype: str
    come: Event


class Buffer:
    """Pinned memory that grows. Old memory is kept until the end, because a kernel may still read it."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._held = driver, list[Pinned]()

    def take(self, size: int) -> Pinned:
        """At least `size` bytes, with any contents."""
        if not self._held or len(self._held[-1].array) < size:
            self._held.append(self._driver.pinned(1 << max(12, (size - 1).bit_length())))
        return self._held[-1]


class Partials:
    """The CPU's part in attention of a cache on a device.

    centers: addresses on the device, for each layer with a centre. Pinned memory is rewritten only once later queries on the
    same stream have arrived: whatever read it has then ended.
    """

    def __init__(
        self,
        driver: Driver,
        core: _core.Cache,
        layers: list[CoreLayer],
        centers: dict[int, int],
        routes: Routes,
        isa: str | None,
    ) -> None:
        self._core, self._layers, self._driver = core, layers, driver
        self._routes = routes
        self._row_bytes = {layer["group"]: _row_bytes(layer) for layer in layers}
        self._cpu = _core.Partials(routes.threads, isa)
        owners = enumerate(owners_of(layers))
        self._centers = {index: centers[index] for index, owner in owners if layers[owner]["center_first"]}
        self._untold = set(self._centers)
        self._queries, self._parts, self._center, self._runs = (Buffer(driver) for _ in range(4))

    def divide(self, group: int, pages: dict[str, int], page_bytes: int, *, ring: bool) -> dict[str, float]:
        """Bytes of a layer of the group for each route. pages: from `_core.Cache.host_pages`; ring: whether there is one."""
        costs = {"mapped": pages["reads"] / pages["pages"]}
        if ring:
            costs["ring"] = 1
        if pages["divisible"]:
            layers = [layer for layer in self._layers if layer["group"] == group]
            heads = max(layer["num_q_heads"] // layer["num_kv_heads"] for layer in layers)
            costs["memory"] = -(-pages["new_tokens"] * heads // READER_ROWS)
        most = {"memory": float(pages["divisible"] * page_bytes)}
        return self._routes.over(self._row_bytes[group]).divide(pages["pages"] * page_bytes, costs, most)

    def forget_centers(self) -> None:
        """Forgets the centres that come from first rows: they may change."""
        self._untold = set(self._centers)

    def ask(
        self, stream: Stream, layer: int, q: View, begins: npt.NDArray[np.uint32], bounds: npt.NDArray[np.int32]
    ) -> Asked:
        """Starts copying queries to the host for which the CPU computes a part: of sequences where `begins` is not 0.

        bounds: where the new tokens of each sequence begin.
        """
        tokens = [token for place in np.flatnonzero(begins) for token in range(*bounds[place : place + 2])]
        (heads, dim), size = q.shape[1:], q.itemsize
        row = heads * dim * size
        pinned = self._queries.take(len(tokens) * row)
        in_one = q.strides[1] == dim * size and q.strides[0] >= row
        target = pinned.address
        for run in _neighbours(tokens):
            if in_one:
                stream.copy_rows(target, row, q.address + run[0] * q.strides[0], q.strides[0], row, len(run))
            else:
                for place, (token, head) in enumerate(product(run, range(heads))):
                    source = q.address + token * q.strides[0] + head * q.strides[1]
                    stream.copy(target + place * dim * size, source, dim * size)
            target += len(run) * row
        if layer in self._untold:
            center = self._center.take(4 * self._center_length(layer))
            stream.copy(center.address, self._centers[layer], 4 * self._center_length(layer))
        queries = pinned.array[: len(tokens) * row].view(ELEMENTS[q.dtype]).reshape(-1, heads, dim)
        return Asked(layer, begins, tokens, queries, q.dtype, stream.record())

    def answer(self, stream: Stream, asked: Asked, target: int) -> int:
        """Computes, and sends the parts to the device: the one of the batch's n-th query to the n-th row from `target` on.
        Returns how many bytes of K and V were read."""
        asked.come.wait()
        if asked.layer in self._untold:
            length = self._center_length(asked.layer)
            center = self._center.take(4 * length).array[: 4 * length].view(np.float32)
            self._cpu.center(self._core, asked.layer, center)
            self._untold.remove(asked.layer)
        layer = self._layers[asked.layer]
        heads, dim, tokens = layer["num_q_heads"], layer["v_head_dim"] + 2, asked.tokens
        row = 4 * heads * dim
        pinned = self._parts.take(len(tokens) * row)
        parts = pinned.array[: len(tokens) * row].view(np.float32).reshape(-1, heads, dim)
        dtype = "bf16" if asked.dtype == "bf16" else None
        read = self._cpu.attend(self._core, asked.layer, asked.begins, asked.queries, parts, dtype)
        self._send(stream, [(pinned.address + at * row, target + token * row, row) for at, token in enumerate(tokens)])
        return read

    def _send(self, stream: Stream, runs: list[tuple[int, int, int]]) -> None:
        """Copies by a kernel: the copy engine would first finish the copies into the ring that are queued."""
        if any(x % WORD for run in runs for x in run):
            for source, target, size in runs:
                stream.copy(target, source, size)
            return
        call = list_runs(self._runs.take(RUN_BYTES * len(runs)), runs)
        stream.launch(instances.MOVE, KERNEL_BLOCKS, KERNEL_THREADS, call)

    def _center_length(self, layer: int) -> int:
        return self._layers[layer]["num_kv_heads"] * self._layers[layer]["head_dim"]


def _row_bytes(layer: CoreLayer) -> Counter[str]:
    """Bytes of a K row and a V row by format; the same in all layers of a group."""
    sizes = Counter({layer["k_dtype"]: FORMATS[layer["k_dtype"]].bytes(layer["head_dim"])})
    if not layer["v_alias"]:
        sizes[layer["v_dtype"]] += FORMATS[layer["v_dtype"]].bytes(layer["v_head_dim"])
    return sizes


def _neighbours(numbers: Sequence[int]) -> list[list[int]]:
    """Splits ascending numbers into runs of consecutive ones."""
    runs = groupby(enumerate(numbers), lambda placed: placed[1] - placed[0])
    return [[number for _, number in run] for _, run in runs]
