"""How much memory a context takes, and where it goes. Pure arithmetic: nothing is allocated."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from pagoda import _core
from pagoda.device.engine import RUN_ROWS, TILE
from pagoda.device.passage import stored_bytes
from pagoda.device.streaming import SLOTS, Run, slot_bytes
from pagoda.errors import InvalidArgument
from pagoda.formats import row_format
from pagoda.retention import SinkWindow, keeps_by_layer
from pagoda.spec import AttentionLayer, ModelSpec

TOKENS_MAX = 1 << 31
"""The longest sequence: `limits::TOKENS_PER_SEQUENCE_MAX` of the core."""


@dataclass(frozen=True)
class Footprint:
    """The memory of `batch` sequences of `tokens` tokens."""

    tokens: int
    batch: int
    paged_bytes: int
    """Whole pages; of layers with a window at most those that the window, its headroom and sinks reach into."""
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
    """What no tier has room for; 0 if it fits."""


@dataclass(frozen=True)
class Planner:
    """Reckons for one model, row formats and page size. Raises InvalidArgument for unknown formats and bad numbers."""

    spec: ModelSpec
    k_dtype: str = "f16"
    v_dtype: str = "f16"
    page_size: int = 64
    retention: SinkWindow | None = None
    headroom: int | None = None
    """As of `Cache`: a page if None."""

    def __post_init__(self) -> None:
        row_format(self.k_dtype, "k_dtype")
        row_format(self.v_dtype, "v_dtype")
        _natural("page_size", self.page_size, 1)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes, in all layers."""
        return self.spec.bytes_per_token(self.k_dtype, self.v_dtype)

    def footprint(self, tokens: int, batch: int = 1) -> Footprint:
        """The memory of a context."""
        _natural("tokens", tokens, 0)
        _natural("batch", batch, 1)
        pages = -(-tokens // self.page_size)
        paged = 0
        keeps = keeps_by_layer(self.spec, self.retention, self.page_size if self.headroom is None else self.headroom)
        for layer, kept in zip(self.spec.layers, keeps, strict=True):
            if isinstance(layer, AttentionLayer):
                most = pages
                if kept is not None:
                    sinks, window, headroom, _ = kept
                    # A window that ends inside a page reaches into one page more.
                    most = min(pages, -(-sinks // self.page_size) - (-(window + headroom) // self.page_size) + 1)
                paged += layer.bytes_per_token(self.k_dtype, self.v_dtype) * self.page_size * most
        return Footprint(tokens, batch, paged * batch, self.spec.state_bytes() * batch)

    @property
    def disk_ring_bytes(self) -> int:
        """Memory beside the budgets that pages on disk pass through, on the CPU (docs/adr/0015)."""
        run = max((stored_bytes(run.bytes) for run in self._runs()), default=0)
        return _core.ring_bytes(max(1, RUN_ROWS // self.page_size) * run) if run else 0

    def device_ring_bytes(self, device_bytes: int) -> int:
        """The part of the memory of a GPU that pages of the host tier pass through (docs/adr/0016)."""
        runs, stretch = self._runs(), max(TILE, self.page_size) // self.page_size
        return SLOTS * slot_bytes(runs, stretch, device_bytes) if runs else 0

    def _runs(self) -> list[Run]:
        """What each layer has in a page, if it has anything."""
        sizes = (layer.bytes_per_token(self.k_dtype, self.v_dtype) for layer in self.spec.attention_layers)
        return [Run(0, self.page_size * size) for size in sizes if size]

    def split(self, footprint: Footprint, device_bytes: int, host_bytes: int = 0, disk_bytes: int = 0) -> Split:
        """Fills the tiers in order; states stay on the device."""
        left = footprint.paged_bytes
        room = max(0, device_bytes - footprint.state_bytes)
        parts = []
        for budget in (room, host_bytes, disk_bytes):
            parts.append(min(left, budget))
            left -= parts[-1]
        lacking = left + max(0, footprint.state_bytes - device_bytes)
        return Split(parts[0] + min(footprint.state_bytes, device_bytes), parts[1], parts[2], lacking)

    def longest_context(self, budget_bytes: int, batch: int = 1) -> int:
        """The most tokens, in whole pages, whose memory fits a budget; 0 if none do, `TOKENS_MAX` if memory stops growing."""
        pages = range(1, TOKENS_MAX // self.page_size + 1)
        fit = bisect_right(
            pages, budget_bytes, key=lambda count: self.footprint(count * self.page_size, batch).total_bytes
        )
        return fit * self.page_size


def _natural(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 1 << 40:
        raise InvalidArgument(f"{name} = {value!r}: an integer from {low} to 2**40 - 1")
