"""Layers of pages on disk, as attention on a device gets them: read ahead by threads of `pagoda._core` into a ring of pinned
memory and verified there, then copied on by the device.

A slot is given back when what was copied from it has arrived.
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
    """The ring, of which `pagoda._core` knows what is in it. copying: the stream that copies from it are made on."""

    def __init__(self, core: _core.Cache, copying: Stream) -> None:
        self._core, self._copying = core, copying
        self._lent: deque[tuple[int, Event]] = deque()
        self._taking = False

    def take(self, place: int, wait: bool) -> Found | None:
        """The slot with what comes at a place of all that the open step reads.

        None where it is not there yet. wait: until it is. Raises CorruptPage and TierIOError, with `wait` alone.
        """
        if self._taking:
            # After Ctrl-C or an error: wait until nothing is copied any more from slots that were taken.
            self._copying.record().wait()
            self._core.give_back(None)
        self._taking = True
        self.give_back()
        found = self._core.take_read(place, wait)
        while wait and found is None:
            # All slots are being copied from.
            self._lent[0][1].wait()
            self.give_back()
            found = self._core.take_read(place, wait)
        self._taking = found is not None
        return None if found is None else Found(*found)

    def copied(self, slot: int) -> None:
        """The copies from what was taken are on their way."""
        self._lent.append((slot, self._copying.record()))
        self._taking = False

    def give_back(self) -> None:
        """Gives slots back whose copies have ended."""
        while self._lent and self._lent[0][1].done():
            self._core.give_back(self._lent[0][0])
            self._lent.popleft()
