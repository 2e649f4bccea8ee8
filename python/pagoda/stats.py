"""The types that `Cache.stats` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagoda.checks import check_choice

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class BlockCounts:
    """Blocks of one layer group on one tier."""

    free: int
    """Blocks that the group could take now, if the others took none: groups share the memory of a tier."""
    used: int
    """Blocks with a page, of a sequence or kept by `save`, and those of moves under way, even of pages that nobody holds any
    more. The next step that needs the room of copies takes it."""
    draining: int
    """Other blocks that become free when the steps and copies that may use them have ended."""


@dataclass(frozen=True)
class DiskIO:
    """How a disk tier does its I/O, and how much of it."""

    direct: bool
    """Whether I/O bypasses the cache of the operating system (O_DIRECT)."""
    io_uring: bool
    """Whether I/O uses io_uring; otherwise threads with system calls do it."""
    refused: list[str]
    """Notes from opening the directory: what failed, with the error; that it is in memory; damage found in its index."""
    bytes_written: int
    """Bytes written to the drive, headers and padding included."""
    bytes_read: int
    """Bytes read from it."""
    corrupt: int
    """Pages that did not verify when they were read."""
    ring_bytes: int
    """Bytes of memory, not counted in the budgets, through which pages on disk are streamed to attention. Allocated as it is
    used on the CPU, pinned at once on a GPU."""


@dataclass(frozen=True)
class Stats:
    """A snapshot of a cache."""

    block_bytes: tuple[int, ...]
    """Bytes of a block, by layer group: layers of the same shape, formats and window, in the order of their first layers."""
    device: tuple[BlockCounts, ...]
    """Blocks of the device tier, by layer group."""
    host: tuple[BlockCounts, ...]
    """Blocks of the host tier, by layer group."""
    disk: tuple[BlockCounts, ...]
    """Blocks of the disk tier, by layer group; empty without one."""
    sequences: int
    """Sequences that have not been released."""
    shared_pages: int
    """Pages that the page tables refer to more than once."""
    dead_rows: int
    """Tokens in pages that no sequence sees any more, left by `drop`, `truncate` and windows."""
    moved_bytes: dict[tuple[str, str], int]
    """Bytes copied so far, by (source, target) tier."""
    disk_io: DiskIO | None
    """The I/O of the disk tier; None without one."""

    @classmethod
    def from_core(cls, stats: dict[str, Any]) -> Stats:
        """From the dict that `_core` returns."""
        tiers = {tier: tuple(BlockCounts(*counts) for counts in rows) for tier, rows in stats["blocks"].items()}
        return cls(
            block_bytes=tuple(stats["block_bytes"]),
            device=tiers["device"],
            host=tiers["host"],
            disk=tiers.get("disk", ()),
            sequences=stats["sequences"],
            shared_pages=stats["shared_pages"],
            dead_rows=stats["dead_rows"],
            moved_bytes=stats["moved_bytes"],
            disk_io=None if stats["disk"] is None else DiskIO(**stats["disk"]),
        )

    def used_bytes(self, tier: str) -> int:
        """Bytes of the blocks in use on "device", "host" or "disk". Raises InvalidArgument for another tier."""
        check_choice("tier", tier, TIERS)
        rows: tuple[BlockCounts, ...] = getattr(self, tier)
        return sum(size * counts.used for size, counts in zip(self.block_bytes, rows, strict=bool(rows)))
