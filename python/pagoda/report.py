"""What a step moved: `Step.report`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """Bytes over each link, and the time that they had."""

    seconds: float
    """From entering the step to leaving it, or to now; on a GPU kernels and copies may go on."""
    waited: float
    """Seconds of these in which attention did nothing but wait for the disk."""
    bytes: dict[str, int]
    """By link, what attention read: "memory", rows in the RAM that holds both tiers, and those from disk when they have come;
    "disk", pages that came from there, padding included. On a GPU "pcie", pages of the host tier and of disk that were copied
    to it, or that kernels have read in place, of these the most that it can have been. "memory" is there what the CPU has
    read."""

    def fractions(self, rates: dict[str, float]) -> dict[str, float]:
        """How much of each link's rate, in bytes a second, the step has used; 1 is the roofline.

        rates: `alone` of what `pagoda.rates.kept` has, or `ceilings` of its routes of a GPU.
        """
        return {link: self.bytes[link] / rate / self.seconds for link, rate in rates.items() if link in self.bytes}
