"""The interface between a cache and the engine that holds its pages: `pagoda._core.Cache` on the CPU, `pagoda.device.engine`
on a GPU.

Sequences are given by the `id` of their handle, layers and layer groups by numbers from 0 on, tiers by "device", "host" and
"disk". Errors are those of `pagoda.errors`, raised as the calls of `Cache` and `Step` document.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pagoda._core import Handle, Plan, Ticket

SECONDS_MAX = 1e9
"""The most seconds that `Engine.wait` is given; with this many it waits without a limit."""


def forced_isa() -> str | None:
    """The instruction set that PAGODA_CPU_ISA in the environment names for the CPU's kernels; None if it is not set."""
    return os.environ.get("PAGODA_CPU_ISA") or None


class Engine(Protocol):
    """Bookkeeping, memory and kernels of one cache."""

    @property
    def isa(self) -> str | None:
        """The instruction set of the CPU's kernels; None if the kernels run on a device."""

    # Sequences.

    def create(self) -> Handle:
        """A new, empty sequence, which is released when the handle is gone."""

    def fork(self, sequence: int) -> Handle:
        """A sequence over the same pages."""

    def release(self, sequence: int) -> None:
        """Ends a sequence."""

    def truncate(self, sequence: int, length: int) -> None:
        """Removes tokens from the end."""

    def drop(self, sequence: int, start: int, stop: int) -> None:
        """Removes tokens from the middle."""

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""

    def rewind_limit(self, sequence: int) -> int:
        """The smallest length to truncate to, besides 0."""

    # The open step; there is at most one. Its calls pass its number: calls for a step that has ended raise InvalidArgument.

    def reserve(self, number: int, sequences: npt.NDArray[np.uint64], new_tokens: npt.NDArray[np.int64]) -> None:
        """Opens a step of B sequences under a number that no other step has, or raises OutOfBlocks and changes nothing."""

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
        """See `Step.attend`. Returns the results, and the log-sum-exp or None."""

    def commit(self, number: int, accepted: npt.NDArray[np.int64] | None = None) -> None:
        """Closes the step; the first `accepted` of each sequence's new tokens stay, all by default."""

    def rollback(self, number: int) -> None:
        """Closes the step as if it had never been opened."""

    def positions(self, number: int) -> npt.NDArray[np.int64]:
        """int64 [sum(new)]: the position of every new token."""

    def cu_seqlens(self, number: int) -> npt.NDArray[np.int32]:
        """int32 [B + 1]: where each sequence's new tokens begin."""

    def table(self, number: int, layer: int) -> dict[str, npt.NDArray[Any]]:
        """The arrays of `Table`, by name; from then on the caller writes the layer's rows."""

    def csr_table(
        self, number: int, layer: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """See `Table.csr`."""

    def step_is_open(self) -> bool:
        """Whether a step is open."""

    def pages_on_disk(self) -> int:
        """Pages of the open step's sequences that are on disk."""

    def attended(self) -> tuple[int, int, float]:
        """For the step that was opened last: bytes of the rows that the CPU has attended to, bytes read from disk for
        attention, and seconds that the CPU only waited for those reads."""

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
        """The copies that would move the pages of tokens [start, stop), or of all, to a tier; changes nothing.

        keep: keep the copy that is read now. pages_max: at most this many pages of each group, newest_first: starting with
        the newest. only_from: only pages that are read from this tier. unshared: only pages that no other sequence holds.
        sealed: only full pages; no others can go to disk anyway.
        """

    def execute(self, plan: Plan) -> Ticket:
        """Starts a plan in the background, or raises OutOfBlocks and changes nothing."""

    def under_way(self, sequence: int) -> list[Ticket]:
        """Plans under way that move pages of a sequence, to be waited for; failures are reported to whoever started them."""

    def moves_between(self, source: str, target: str, *, keep: bool) -> list[Ticket]:
        """Like `under_way`, for plans that move pages from one tier to another. keep: also those that leave a copy."""

    def ticket_done(self, ticket: Ticket) -> bool:
        """Whether a plan's copies have arrived; raises if they failed."""

    def wait(self, ticket: Ticket, seconds: float) -> bool:
        """Sleeps until a plan's copies have ended or `seconds` have passed; returns whether they have ended."""

    def wait_patiently(self, ticket: Ticket) -> None:
        """Sleeps until a plan's copies have ended, while the disk does anything, and `disk_timeout` more."""

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
        """Up to `most` sequences with pages that a plan would move between two tiers, longest at rest first, without those of
        the open step and of a batch. unshared: count only pages that no other sequence holds."""

    def movable(self, source: str, target: str, batch: npt.NDArray[np.uint64]) -> list[tuple[int, int]]:
        """The sequences of a batch with pages that a plan would move between two tiers, once for each layer group of such
        pages."""

    def free_blocks(self, tier: str) -> list[int]:
        """How many blocks of each layer group a tier could hand out now."""

    def finish_draining(self) -> None:
        """Waits for whatever draining blocks of any tier wait for: steps, and reads ahead of need.

        Raises TierIOError when the drive does nothing for `disk_timeout` seconds.
        """

    def drained_blocks(self) -> int:
        """How many blocks have drained so far, over all tiers."""

    def ended_sequences(self) -> int:
        """How many sequences have ended so far."""

    def drop_copies(self, tier: str, group: int, pages_max: int, *, but_of: int | None = None) -> int:
        """Frees blocks of pages that are read from a faster tier, or that only keys on disk hold; returns how many.

        but_of: a sequence whose pages keep their copies.
        """

    # Sequences that are kept on disk.

    def check_save(self, sequence: int, key: str, meta_bytes: int) -> None:
        """Raises InvalidArgument unless sequences can be kept.

        Raises TierIOError if the index has no room for one, or the drive has not yet answered for the key.
        """

    def save(self, sequence: int, key: str, meta: bytes) -> None:
        """Keeps a sequence whose sealed pages are on disk."""

    def load(self, key: str) -> Handle | None:
        """A new sequence with what is kept under a key; None if there is nothing."""

    def forget(self, key: str) -> bool:
        """Deletes what is kept under a key; returns whether there was something."""

    def saved(self) -> dict[str, bytes]:
        """The keys, and the `meta` of each."""

    def meta(self, key: str) -> bytes | None:
        """The `meta` of a key; None if nothing is kept under it."""

    def lost(self) -> list[tuple[str, str]]:
        """Keys that were lost when the directory was opened, and why."""

    # All of it.

    def stats(self) -> dict[str, Any]:
        """The argument of `Stats.from_core`."""

    def audit(self) -> None:
        """Checks all bookkeeping. Raises InvariantError."""

    def close(self) -> None:
        """Waits for whatever is under way and gives everything back. Closing twice is no error."""
