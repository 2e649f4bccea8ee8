"""Scratch memory on the device that launches of attention share."""

from __future__ import annotations

from pagoda.device.driver import Driver, Memory


class Scratch:
    """Three pieces of memory, whose addresses are 0 until there are any: `partials`, results that every launch may overwrite;
    `counters`, which are 0 between launches; `parts` of results, which launches leave for others."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._held: list[Memory | None] = [None] * 3
        self._sizes = (0, 0, 0)
        self.partials = self.counters = self.parts = 0

    def covers(self, sizes: tuple[int, int, int]) -> bool:
        """Whether there are so many bytes of each."""
        return all(have >= want for have, want in zip(self._sizes, sizes, strict=True))

    def grow(self, sizes: tuple[int, int, int]) -> None:
        """Makes room, or changes nothing. Nothing may be under way that uses the old memory."""
        wanted = zip(self._held, self._sizes, sizes, strict=True)
        held = [self._driver.memory(want) if want > have else held for held, have, want in wanted]
        partials, counters, parts = map(max, self._sizes, sizes)
        # Ctrl-C may come at any line: nothing counts as there until all of it is.
        self._sizes = (0, 0, 0)
        self._held = held
        self.partials, self.counters, self.parts = (one.address if one else 0 for one in held)
        self._sizes = (partials, counters, parts)
