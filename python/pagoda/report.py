"""What a step moved: `Step.report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagoda.checks import is_number
from pagoda.errors import InvalidArgument


@dataclass(frozen=True)
class StepReport:
    """Bytes over each link, and the time that they had."""

    seconds: float
    """From entering the step to leaving it, or to now; on a GPU kernels and copies may go on."""
    waited: float
    """Seconds of these in which attention did nothing but wait for the disk."""
    bytes: dict[str, int]
    """What attention read, by link.

    On the CPU: "memory", rows in RAM, which holds both tiers, and in which those from disk arrive, each once however many
    queries of a sequence go over it; "disk", pages that were read from there, padding included. On a GPU: "pcie", pages of
    the host tier and of disk that were copied to it, and those that kernels read in place, of which it is an upper bound;
    "memory", rows that the CPU has read; "disk" as above."""

    def fractions(self, rates: Mapping[str, float]) -> dict[str, float]:
        """How much of each link's rate, in bytes a second, the step has used; 1 is the roofline.

        rates: `alone` of what `pagoda.rates.kept` has, or `ceilings` of its routes of a GPU. That of memory is what
        attention over f16 reads. On a GPU wait for the step's stream before leaving the step: else `seconds` are too few, and
        fractions too large.
        """
        if not isinstance(rates, Mapping) or not all(is_number(rate) and rate > 0 for rate in rates.values()):
            raise InvalidArgument(f"rates = {rates!r}: bytes a second above 0, by link")
        return {link: self.bytes[link] / rate / self.seconds for link, rate in rates.items() if link in self.bytes}
