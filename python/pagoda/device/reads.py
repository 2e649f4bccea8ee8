"""Layers of pages on disk, for attention on a device: threads of `pagoda._core` read them ahead into a ring of pinned memory
and verify them there, and the device copies them on.

A slot is given back when the copies from it have arrived.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from pagoda import _core
from pagoda.device.driver import Event, Stream


class Found(NamedTuple):
    """A slot with pages that have been read and verified: the address of the first, and bytes from one to the next."""

    slot: int
    address: int
    stride: int


class Reads:
    """The ring of pinned memory; `pagoda._core` knows what is in it. copying: the stream of the copies from it."""

    def __init__(self, core: _core.Cache, copying: Stream) -> None:
        self._core, self._copying = core, copying
        self._lent: deque[tuple[int, Event]] = deque()
        self._taking = False

    def take(self, place: int, wait: bool) -> Found | None:
        """The slot with the read number `place` of the open step; None if that has not been read yet.

        wait: until it has been. Raises CorruptPage and TierIOError, only with `wait`.
        """
        if self._taking:
            # After Ctrl-C or an error: wait until nothing is copied any more from the slots taken.
            self._copying.record().wait()
            self._core.give_back(None)
        self._taking = True
        self.give_back()
        found = self._core.take_read(place, wait)
        while wait and found is None:
            # Copies from all slots are under way.
            self._lent[0][1].wait()
            self.give_back()
            found = self._core.take_read(place, wait)
        self._taking = found is not None
        return None if found is None else Found(*found)

    def copied(self, slot: int) -> None:
        """Notes that the copies from a slot have been started."""
        self._lent.append((slot, self._copying.record()))
        self._taking = False

    def give_back(self) -> None:
        """Gives back the slots whose copies have ended."""
        while self._lent and self._lent[0][1].done():
            self._core.give_back(self._lent[0][0])
            self._lent.popleft()
