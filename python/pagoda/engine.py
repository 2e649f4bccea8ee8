"""The interface between a cache and what holds its pages: `pagoda._core.Cache` on the CPU, `pagoda.device.engine` on a GPU.

A sequence is the `id` of its handle, layers and layer groups are numbers from 0 on, tiers are "device", "host" and "disk".
Errors are those of `pagoda.errors`, raised as `Cache` and `Step` say of their calls.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pagoda._core import Handle, Plan, Ticket

SECONDS_MAX = 1e9
"""Seconds for which `Engine.wait` waits without an end, and the most that it is given."""


def forced_isa() -> str | None:
    """The instruction set that PAGODA_CPU_ISA in the environment names for the CPU's kernels; None where it names none."""
    return os.environ.get("PAGODA_CPU_ISA") or None


def cores() -> int:
    """How many cores this process may run on: a cache has as many workers, if nobody says how many."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Engine(Protocol):
    """Bookkeeping, memory and kernels of one cache."""

    @property
    def isa(self) -> str | None:
        """The instruction set of the CPU's kernels; None where a device has the kernels."""

    # Sequences.

    def create(self) -> Handle:
        """A new, empty sequence, which is released when the handle is gone."""

    def fork(self, sequence: int) -> Handle:
        """A sequence over the same pages."""

    def release(self, sequence: int) -> None:
        """Ends a sequence."""

    def truncate(self, sequence: int, length: int) -> None:
        """Takes tokens back from the end."""

    def drop(self, sequence: int, start: int, stop: int) -> None:
        """Takes tokens out of the middle."""

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""

    def rewind_limit(self, sequence: int) -> int:
        """The least length to truncate to, besides 0."""

    # The open step, of which there is one at most. Its calls name it: those of a step that has ended raise InvalidArgument.

    def reserve(self, number: int, sequences: npt.NDArray[np.uint64], new_tokens: npt.NDArray[np.int64]) -> None:
        """Opens a step of B sequences, by a number that no other has, or raises OutOfBlocks and changes nothing."""

    def append(self, number: int, layer: int, k: Any, v: Any = None, dtype: str | None = None) -> None:
        """See `Step.append`."""

    def attend(
        self,
        number: int,
        layer: int,
        q: Any,
        out: Any = None,
        return_lse: bool = False,
        dtype: str | None = None,
        sink_logits: Any = None,
    ) -> tuple[Any, Any]:
        """See `Step.attend`; the results, and the log-sum-exp or None."""

    def commit(self, number: int, accepted: npt.NDArray[np.int64] | None = None) -> None:
        """Closes the step; of each sequence's new tokens the first `accepted` stay, all by default."""

    def rollback(self, number: int) -> None:
        """Closes the step as if it had never been opened."""

    def positions(self, number: int) -> npt.NDArray[np.int64]:
        """int64 [sum(new)]: the position of every new token."""

    def cu_seqlens(self, number: int) -> npt.NDArray[np.int32]:
        """int32 [B + 1]: where each sequence's new tokens begin."""

    def table(self, number: int, layer: int) -> dict[str, npt.NDArray[Any]]:
        """The arrays of `Table`, by name; from then on writing the layer's rows is the caller's."""

    def csr_table(
        self, number: int, layer: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """See `Table.csr`."""

    def step_is_open(self) -> bool:
        """Whether there is one."""

    def pages_on_disk(self) -> int:
        """Pages of its sequences that are on disk."""

    def attended(self) -> tuple[int, int, float]:
        """Of the step that was opened last: bytes of the rows that the CPU has attended to, bytes read from disk for
        attention, and seconds in which it did nothing but wait for these."""

    # Pages and tiers.

    def plan(
        self,
        sequence: int,
        to: str,
        tokens: tuple[int, int] | None,
        groups: Sequence[int],
        *,
        keep: bool = False,
        newest_first: bool = False,
        pages_max: Sequence[int] | None = None,
        only_from: str | None = None,
        unshared: bool = False,
        sealed: bool = False,
    ) -> Plan:
        """What moving the pages that hold tokens [start, stop), or all, to a tier would copy; changes nothing.

        keep: leave the copy that is read today. newest_first, pages_max: which pages, and how many of each group at most.
        only_from: pages that are read from this tier. unshared: pages that no other sequence holds. sealed: full pages; to
        disk go no others.
        """

    def execute(self, plan: Plan) -> Ticket:
        """Starts a plan in the background, or raises OutOfBlocks and changes nothing."""

    def under_way(self, sequence: int) -> list[Ticket]:
        """Plans under way that move pages of a sequence, to be waited for; their failures are for who started them."""

    def moves_between(self, source: str, target: str, *, keep: bool) -> list[Ticket]:
        """Plans under way that move pages from one tier to another; as `under_way`. keep: those that leave a copy, too."""

    def ticket_done(self, ticket: Ticket) -> bool:
        """Whether a plan's copies have arrived; raises if they failed."""

    def wait(self, ticket: Ticket, seconds: float) -> bool:
        """Sleeps until a plan's copies have arrived, or no more will, or `seconds` have passed; says which."""

    def wait_patiently(self, ticket: Ticket) -> None:
        """Sleeps until a plan's copies have ended, as long as the disk does anything, and `disk_timeout` more."""

    def resting(
        self,
        source: str,
        target: str,
        group: int,
        most: int,
        batch: npt.NDArray[np.uint64],
        *,
        unshared: bool = False,
    ) -> list[int]:
        """Up to `most` sequences with pages that a plan would move between two tiers, the one that rested longest first; none
        of the open step, nor of a batch. unshared: pages that no other sequence holds."""

    def movable(self, source: str, target: str, batch: npt.NDArray[np.uint64]) -> list[tuple[int, int]]:
        """Those of a batch with pages that a plan would move between two tiers, with each layer group of such pages."""

    def free_blocks(self, tier: str) -> list[int]:
        """Blocks of each layer group that a tier could hand out now."""

    def finish_draining(self) -> None:
        """Waits for what blocks of any tier may drain for: steps, and reads ahead of need.

        Raises TierIOError when the drive does nothing for `disk_timeout` seconds.
        """

    def drained_blocks(self) -> int:
        """Blocks of all tiers that have drained so far."""

    def ended_sequences(self) -> int:
        """Sequences that have ended so far."""

    def drop_copies(self, tier: str, group: int, pages_max: int, *, but_of: int | None = None) -> int:
        """Frees blocks of pages that are read from a faster tier, or that keys on disk alone hold; returns how many.

        but_of: a sequence whose pages keep their copies.
        """

    # Sequences that are kept on disk.

    def check_save(self, sequence: int, key: str, meta_bytes: int) -> None:
        """Raises InvalidArgument unless sequences can be kept.

        Raises TierIOError where there is no room to note one, or the drive has yet to answer for the key.
        """

    def save(self, sequence: int, key: str, meta: bytes) -> None:
        """Keeps a sequence whose sealed pages are on disk."""

    def load(self, key: str) -> Handle | None:
        """A sequence with what is kept under a key; None if nothing is."""

    def forget(self, key: str) -> bool:
        """Lets go of what is kept under a key; says whether there was something."""

    def saved(self) -> dict[str, bytes]:
        """The keys, and the `meta` of each."""

    def lost(self) -> list[tuple[str, str]]:
        """Keys that were lost when the directory was opened, and why."""

    # All of it.

    def stats(self) -> dict[str, Any]:
        """What `Stats.from_core` takes."""

    def audit(self) -> None:
        """Checks the whole bookkeeping. Raises InvariantError."""

    def close(self) -> None:
        """Waits for what is under way and gives everything back. Twice is no error."""
