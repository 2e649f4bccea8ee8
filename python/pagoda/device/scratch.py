"""Scratch memory on the device, shared by the launches of attention."""

from __future__ import annotations

from pagoda.device.driver import Driver, Memory


class Scratch:
    """Three pieces of memory: `partials`, `counters` and `parts`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._held: list[Memory | None] = [None] * 3
        self._sizes = [0] * 3

    @property
    def partials(self) -> int:
        """The address of results that every launch may overwrite; 0 if there are none."""
        return self._address(0)

    @property
    def counters(self) -> int:
        """The address of counters, which are zero between launches; 0 if there are none."""
        return self._address(1)

    @property
    def parts(self) -> int:
        """The address of parts of results, which launches leave for later ones; 0 if there are none."""
        return self._address(2)

    def covers(self, sizes: tuple[int, int, int]) -> bool:
        """Whether there are at least this many bytes of each."""
        return all(have >= want for have, want in zip(self._sizes, sizes, strict=True))

    def grow(self, sizes: tuple[int, int, int], *, exactly: bool) -> None:
        """Makes room: exactly, if the sizes are final, or else in powers of two, so that a growing batch seldom waits for it.
        Nothing may be under way that uses the old memory. Raises BackendUnavailable; the old memory of a piece that is
        refused is gone."""
        for number, (have, want) in enumerate(zip(self._sizes, sizes, strict=True)):
            if want > have:
                # The old piece goes first: there may be no memory for both. Ctrl-C may come at any line.
                self._sizes[number], self._held[number] = 0, None
                size = want if exactly else 1 << (want - 1).bit_length()
                self._held[number] = self._driver.memory(size)
                self._sizes[number] = size

    def _address(self, number: int) -> int:
        held = self._held[number]
        return held.address if held else 0
