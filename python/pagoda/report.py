"""What a step moved: `Step.report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagoda.checks import is_number
from pagoda.errors import InvalidArgument


@dataclass(frozen=True)
class StepReport:
    """Bytes over each link, and the time that the step took."""

    seconds: float
    """From entering the step until leaving it, or until now; on a GPU kernels and copies may still be running after that."""
    waited: float
    """The part of `seconds` in which attention only waited for the disk."""
    bytes: dict[str, int]
    """What attention read, by link.

    On the CPU: "memory", rows in RAM, including those that arrived from disk, each once however many queries of a sequence
    read it; "disk", pages read from disk, padding included. On a GPU: "pcie", pages of the host tier and of disk that were
    copied to it, plus an upper bound of those that kernels read in place; "memory", rows read by the CPU; "disk" as above."""

    def fractions(self, rates: Mapping[str, float]) -> dict[str, float]:
        """The fraction of each link's rate, in bytes a second, that the step used; 1 is the roofline. Raises InvalidArgument.

        rates: `alone` of the calibration that `pagoda.rates.kept` returns, or `ceilings` of its routes of a GPU. The rate of
        memory is that of attention over f16. On a GPU wait for the step's stream before leaving the step: otherwise `seconds`
        is too small, and fractions are too large.
        """
        if not isinstance(rates, Mapping) or not all(is_number(rate) and rate > 0 for rate in rates.values()):
            raise InvalidArgument(f"rates = {rates!r}: bytes a second above 0, by link")
        return {link: self.bytes[link] / rate / self.seconds for link, rate in rates.items() if link in self.bytes}
