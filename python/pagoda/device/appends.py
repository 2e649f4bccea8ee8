"""Writing new rows into their pages: the centres of K, the kernels that convert and write, and values that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from pagoda.device.driver import Driver, Stream, View, send
from pagoda.device.layers import LayerKernels
from pagoda.device.tables import GroupTables
from pagoda.errors import InvalidArgument
from pagoda.geometry import CoreLayer, owners_of
from pagoda.kernels import arguments, instances

APPEND_THREADS = 256
"""Threads of a thread block of `append` and `append_rows`."""

CENTER_THREADS = 512
"""Threads of the one thread block of `center`."""


class Centers:
    """The centre of each layer's K rows, on the device; zeros until it is known.

    addresses: for each layer with a centre that of its own or of its owner's. first: layers whose first rows determine the
    centre.
    """

    def __init__(self, driver: Driver, layers: list[CoreLayer]) -> None:
        self._sizes = own = {
            index: layer["num_kv_heads"] * layer["head_dim"]
            for index, layer in enumerate(layers)
            if layer["kv_owner"] is None and (layer["center_first"] or layer["center"] is not None)
        }
        self.first = {index for index in own if layers[index]["center_first"]}
        starts = dict(zip(own, accumulate(own.values(), initial=0), strict=False))
        numbers = np.zeros(sum(own.values()), np.float32)
        for index, start in starts.items():
            if index not in self.first:
                numbers[start : start + own[index]] = layers[index]["center"]
        self._memory, self._kept = send(driver, numbers), driver.memory(4 * max(own.values(), default=0))
        self.addresses = {
            index: self._memory.address + 4 * starts[owner]
            for index, owner in enumerate(owners_of(layers))
            if owner in own
        }

    def keep(self, layer: int, stream: Stream) -> None:
        """Saves the centre before `center` computes it from rows that may still be refused."""
        stream.copy(self._kept.address, self.addresses[layer], 4 * self._sizes[layer])

    def restore(self, layer: int, stream: Stream) -> None:
        """Restores the centre because those rows were refused."""
        stream.copy(self.addresses[layer], self._kept.address, 4 * self._sizes[layer])


class Misfits:
    """Whether values did not fit their row format: a flag on the device, which `append` sets. address: of the flag."""

    def __init__(self, driver: Driver) -> None:
        self._flag, self._seen = driver.memory(4), driver.pinned(4)
        self.address = self._flag.address

    def check(self, layer: int, stream: Stream) -> None:
        """Waits for the stream. Raises InvalidArgument for values of the layer that did not fit."""
        seen = self._seen.array.view(np.int32)
        stream.copy(self._seen.address, self.address, 4)
        stream.record().wait()
        if seen[0]:
            seen[0] = 0
            stream.copy(self.address, self._seen.address, 4)
            stream.record().wait()
            raise InvalidArgument(f"k, v = values of layer {layer}: finite ones that fit their row formats")


class Appends:
    """The launches that append. misfits: to raise an error for values that do not fit; None to raise none."""

    def __init__(
        self, driver: Driver, layers: Sequence[LayerKernels], centers: Centers, misfits: Misfits | None
    ) -> None:
        self._layers, self._centers, self._misfits = layers, centers, misfits
        self._first: set[int] = set()
        self._tokens_max = 0
        self._blocks_max = 4 * driver.multiprocessors

    def enter(self, tokens_max: int, *, centers: bool, in_graph: bool) -> None:
        """A step begins. tokens_max: rows that arrays may have; kernels are launched for this many. centers: whether rows of
        the step determine centres. in_graph: whether a graph may do the step; `center` is then always launched, and does
        nothing in steps whose rows determine none."""
        self._tokens_max = tokens_max
        self._first = self._centers.first if centers or in_graph else set()

    def append(self, layer: int, keys: View, values: View, tables: GroupTables, stream: Stream) -> None:
        """Writes K and V of the new tokens of one layer. values: the same as keys if V is a part of K."""
        if self._misfits is not None and stream.capturing:
            raise InvalidArgument("append: in a graph: not in a cache with checked=True, which waits for the device")
        kernels = self._layers[layer]
        call = kernels.append()
        call.k = arguments.Rows(keys.address, keys.strides[0], keys.strides[1])
        call.v = arguments.Rows(values.address, values.strides[0], values.strides[1])
        call.slots, call.tokens = tables.slots, tables.tokens
        if not self._tokens_max:
            return
        first = layer in self._first
        if first:
            if self._misfits is not None:
                self._centers.keep(layer, stream)
            centering = arguments.Center(
                k=call.k,
                tokens=tables.centering,
                kv_heads=call.kv_heads,
                head_dim=call.head_dim,
                center=call.center,
            )
            stream.launch(instances.center(keys.dtype), 1, CENTER_THREADS, centering)
        # A warp writes a quantised row; if nothing is quantised, a thread writes 8 elements.
        rows = self._tokens_max * call.kv_heads
        if kernels.quantises:
            threads = 32 * rows * (2 if call.v_head_dim else 1)
        else:
            threads = rows * (call.head_dim + call.v_head_dim) // 8
        blocks = min(-(-threads // APPEND_THREADS), self._blocks_max)
        dim = max(call.head_dim, call.v_head_dim)
        stream.launch(instances.append(*kernels.stored, keys.dtype, dim), blocks, APPEND_THREADS, call)
        if self._misfits is not None:
            try:
                self._misfits.check(layer, stream)
            except InvalidArgument:
                if first:
                    self._centers.restore(layer, stream)
                raise
