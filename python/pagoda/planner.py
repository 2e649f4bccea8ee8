"""How much memory a context takes, and where it goes. Pure arithmetic: nothing is allocated."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from pagoda import _core
from pagoda._core import RUN_ROWS, TOKENS_MAX
from pagoda.checks import as_ints, check_flag, check_page_size, natural
from pagoda.device.passage import passage_bytes, stored_bytes
from pagoda.device.ring import SLOTS, ring_slots
from pagoda.errors import InvalidArgument
from pagoda.formats import row_format
from pagoda.geometry import formats_stored, group_layers
from pagoda.retention import Keeps, SinkWindow, keeps_by_layer
from pagoda.spec import AttentionLayer, ModelSpec, check_spec

BYTES_MAX = (1 << 63) - 1

COUNT_MAX = (1 << 40) - 1
"""The largest number of pages, tokens or sequences."""


@dataclass(frozen=True)
class Footprint:
    """The memory of `batch` sequences of `tokens` tokens."""

    tokens: int
    batch: int
    paged_bytes: int
    """Whole pages; for layers with a window, at most those that the window, its headroom and sinks reach into."""
    state_bytes: int
    """Fixed states of recurrent layers."""

    @property
    def total_bytes(self) -> int:
        """Pages and states."""
        return self.paged_bytes + self.state_bytes


@dataclass(frozen=True)
class Split:
    """Where the pages of a context lie: as many as fit on the device, then on the host, then on disk."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    lacking_bytes: int
    """Bytes that fit on no tier; 0 if all fit."""


@dataclass(frozen=True)
class Rings:
    """Memory that pages of slower tiers pass through on their way to attention and between tiers.

    device_bytes: part of a GPU's budget, in which no page lies. Beside the budgets are disk_bytes, into which pages on disk
    are read, and stage_bytes, between the disk and a GPU. reaches_disk: whether steps could attend to pages on disk.
    """

    device_bytes: int = 0
    disk_bytes: int = 0
    stage_bytes: int = 0
    reaches_disk: bool = True


@dataclass(frozen=True)
class Planner:
    """Computes memory for one model, its row formats and page size. Raises InvalidArgument for bad numbers, and for formats
    that are unknown or do not fit the model's rows.

    Results are slightly optimistic for models with several layer groups: a cache holds up to an extent, mostly 32 MiB, less
    for each group and tier, as a group does not share its last extent. What blocks of several sizes lose at the borders of
    extents of small tiers (docs/layout.md) is not counted either.
    """

    spec: ModelSpec
    k_dtype: str = "f16"
    v_dtype: str = "f16"
    page_size: int = 64
    retention: SinkWindow | None = None
    headroom: int | None = None
    """As in `Cache`: a page if None."""

    def __post_init__(self) -> None:
        as_ints(self)
        check_spec("spec", self.spec)
        row_format(self.k_dtype, "k_dtype")
        row_format(self.v_dtype, "v_dtype")
        check_page_size("page_size", self.page_size)
        for index, layer in enumerate(self.spec.layers):
            if isinstance(layer, AttentionLayer):
                formats_stored(index, layer, self.k_dtype, self.v_dtype)
        self._keeps()

    def _keeps(self) -> list[Keeps | None]:
        headroom = self.page_size if self.headroom is None else self.headroom
        return keeps_by_layer(self.spec, self.retention, headroom)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes, over all layers."""
        return self.spec.bytes_per_token(self.k_dtype, self.v_dtype)

    def footprint(self, tokens: int, batch: int = 1) -> Footprint:
        """The memory of `batch` sequences of `tokens` tokens each. Raises InvalidArgument."""
        tokens = natural("tokens", tokens, 0, COUNT_MAX)
        batch = natural("batch", batch, 1, COUNT_MAX)
        pages = -(-tokens // self.page_size)
        paged = 0
        for index, kept in enumerate(self._keeps()):
            if isinstance(self.spec.layers[index], AttentionLayer):
                most = pages
                if kept is not None:
                    sinks, window, headroom, _ = kept
                    # A window that ends inside a page touches one page more.
                    most = min(pages, -(-sinks // self.page_size) - (-(window + headroom) // self.page_size) + 1)
                paged += self._layer_bytes(index) * most
        return Footprint(tokens, batch, paged * batch, self.spec.state_bytes() * batch)

    def rings(self, device_bytes: int, *, host: bool, disk: bool, on_gpu: bool) -> Rings:
        """The rings of a cache with these tiers (docs/adr/0015 to 0017), on a GPU without deterministic=True."""
        device_bytes = natural("device_bytes", device_bytes, 0, BYTES_MAX)
        for name, flag in (("host", host), ("disk", disk), ("on_gpu", on_gpu)):
            check_flag(name, flag)
        # All layers of a group have the same shape.
        widths = [self._layer_bytes(layers[0]) for layers in self._groups()]
        if not widths:
            return Rings()
        if not on_gpu:
            run = RUN_ROWS // self.page_size * max(map(stored_bytes, widths))
            return Rings(disk_bytes=_core.ring_bytes(run) if disk else 0)
        sinks = 0 if self.retention is None else self.retention.sinks
        slots = ring_slots(widths, self.page_size, device_bytes, host=host, disk=disk, deterministic=False, sinks=sinks)
        ring = SLOTS * slots.bytes
        if not disk:
            return Rings(ring)
        through = passage_bytes(self.block_bytes(), device_bytes - ring, slots.read)
        return Rings(ring, through.ring, through.stage, reaches_disk=ring > 0)

    def block_bytes(self) -> list[int]:
        """Bytes of a page, by layer group: a block holds one."""
        return [sum(map(self._layer_bytes, layers)) for layers in self._groups()]

    def _groups(self) -> list[list[int]]:
        return group_layers(self.spec, [(self.k_dtype, self.v_dtype)] * len(self.spec.layers))

    def _layer_bytes(self, index: int) -> int:
        """What an attention layer has in a page."""
        layer = self.spec.layers[index]
        assert isinstance(layer, AttentionLayer)
        if layer.kv_owner is not None:
            return 0
        k_dtype, v_dtype = formats_stored(index, layer, self.k_dtype, self.v_dtype)
        v_stored = None if layer.v_alias or layer.k_eq_v else v_dtype
        stored = layer.num_kv_heads, layer.head_dim, layer.v_dim, k_dtype, v_stored
        return _core.block_layout([stored], self.page_size)[0]

    def room(self, size: int) -> int:
        """Bytes of pages that fit into `size` bytes of the device or the host tier, if no page lies in two tiers.

        If layer groups have pages of several sizes, this is rounded down to a multiple of their common divisor.
        """
        size = natural("size", size, 0, BYTES_MAX)
        pages = self.block_bytes()
        return size - size % math.gcd(*pages) if pages else 0

    def room_on_disk(self, disk_memory: int) -> int:
        """Bytes of pages that fit into a disk tier with this budget, where pages have headers and layers are padded.

        Raises InvalidArgument for a budget that a cache would refuse.
        """
        disk_memory = natural("disk_memory", disk_memory, 0, BYTES_MAX)
        runs = [[self._layer_bytes(index) for index in layers] for layers in self._groups()]
        return _core.disk_room(runs, disk_memory) if runs and disk_memory else 0

    def split(self, footprint: Footprint, device_bytes: int, host_bytes: int = 0, disk_bytes: int = 0) -> Split:
        """Fills tiers of these sizes (see `room` and `room_on_disk`) in order; states stay on the device."""
        if not isinstance(footprint, Footprint):
            raise InvalidArgument(f"footprint = {footprint!r}: a Footprint")
        budgets = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
        device_bytes, host_bytes, disk_bytes = (natural(name, size, 0, BYTES_MAX) for name, size in budgets.items())
        left = footprint.paged_bytes
        room = max(0, device_bytes - footprint.state_bytes)
        parts = []
        for budget in (room, host_bytes, disk_bytes):
            parts.append(min(left, budget))
            left -= parts[-1]
        lacking = left + max(0, footprint.state_bytes - device_bytes)
        return Split(parts[0] + min(footprint.state_bytes, device_bytes), parts[1], parts[2], lacking)

    def longest_context(self, device_bytes: int, host_bytes: int = 0, disk_bytes: int = 0, *, batch: int = 1) -> int:
        """The most tokens, in whole pages, that `split` can place; 0 if none, `TOKENS_MAX` if memory stops growing."""
        pages = range(1, TOKENS_MAX // self.page_size + 1)

        def lacking(count: int) -> int:
            footprint = self.footprint(count * self.page_size, batch)
            return self.split(footprint, device_bytes, host_bytes, disk_bytes).lacking_bytes

        return bisect_right(pages, 0, key=lacking) * self.page_size
