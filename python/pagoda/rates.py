"""Measured bandwidths of a machine's links: how they are stored, and how work is divided by them."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

READER_ROWS = 4
"""Query rows per K/V head in measurements of attention on the CPU: few enough that it is bound by memory."""

LINKS, ROUTES = {"memory", "disk"}, {"ring", "mapped", "memory"}
"""The keys of rates in `Calibration`, and in `Routes`."""

ROUNDING = 1e-9
"""Relative error allowed in sums of bytes."""


@dataclass(frozen=True)
class Routes:
    """The ways of attention to pages of the host tier, on a machine with a GPU.

    "ring", copies to device memory; "mapped", kernels that read in place; "memory", attention on the CPU.
    """

    threads: int
    """Threads of the CPU."""
    rates: list[dict[str, float]]
    """Bytes a second of routes used at once, for each set of routes that was measured."""
    start: dict[str, float]
    """Seconds that a route takes to start, beyond the quickest one."""
    formats: dict[str, float] = field(default_factory=dict)
    """Bytes a second of the CPU alone, by row format. `rates` are those of f16."""

    def over(self, row_bytes: Mapping[str, float]) -> Routes:
        """The routes for rows with this many bytes of each format.

        Together with other routes, which read the same memory, the CPU is assumed to be no faster than with f16, and no
        faster than alone with these rows. If a format was not measured, sets of routes with the CPU are left out.
        """
        if not row_bytes.keys() <= self.formats.keys():
            return replace(self, rates=[rates for rates in self.rates if "memory" not in rates])
        alone = sum(row_bytes.values()) / sum(size / self.formats[name] for name, size in row_bytes.items())
        slowed = [
            rates | ({"memory": min(rates["memory"], alone)} if "memory" in rates else {}) for rates in self.rates
        ]
        return replace(self, rates=slowed)

    def divide(self, size: float, costs: Mapping[str, float], most: Mapping[str, float]) -> dict[str, float]:
        """How many of `size` bytes to give each route, so that all routes end together, as early as possible.

        costs: how often a route reads each byte; routes without a cost are not used. most: limits on the bytes of a route;
        without one there is no limit. A route that could not start in time gets none. Empty if no measured set of routes
        fits.
        """
        best, chosen = math.inf, dict[str, float]()
        for measured in self.rates:
            if measured.keys() <= costs.keys():
                rates = {route: rate / costs[route] for route, rate in measured.items()}
                seconds, shares = _together(size, rates, self.start, most)
                if seconds < best:
                    best, chosen = seconds, shares
        return chosen

    @property
    def ceilings(self) -> dict[str, float]:
        """The highest rate of each link with one route alone, named as in `StepReport.bytes`."""
        alone = {route: rate for rates in self.rates if len(rates) == 1 for route, rate in rates.items()}
        return {"pcie": max(alone["ring"], alone["mapped"]), "memory": alone["memory"]}


def _together(
    size: float, rates: dict[str, float], start: Mapping[str, float], most: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Seconds that routes used at once take for `size` bytes, and the bytes of each; infinite if their limits are too low."""
    ends = {route: start[route] + most.get(route, math.inf) / rate for route, rate in rates.items()}

    def done(seconds: float) -> dict[str, float]:
        return {route: rate * max(0.0, min(seconds, ends[route]) - start[route]) for route, rate in rates.items()}

    # Between two of these moments the rate is constant.
    moments = sorted({start[route] for route in rates} | {*ends.values()})
    for moment, after in zip(moments, [*moments[1:], math.inf], strict=True):
        left = size - sum(done(moment).values())
        if left <= ROUNDING * size:
            return moment, done(moment)
        running = sum(rate for route, rate in rates.items() if start[route] <= moment < ends[route])
        if running * (after - moment) > left:
            return moment + left / running, done(moment + left / running)
    return math.inf, {}


@dataclass(frozen=True)
class Calibration:
    """Bytes a second of memory and of a disk, by link named as in `StepReport.bytes`; and the routes of GPUs."""

    threads: int
    """CPU threads that read memory."""
    directory: str
    """The directory of the file that was read."""
    alone: dict[str, float]
    """Each link, with the other one idle."""
    together: dict[str, float]
    """Both links at once."""
    gpus: dict[str, Routes] = field(default_factory=dict)
    """Routes by the name of the GPU, which is `Driver.name`."""


def place() -> Path:
    """The file of the calibration: one for each machine that shares the folder. Raises OSError without a home."""
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or default).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error
    return folder / "pagoda" / f"calibration-{platform.node()}.json"


def keep(calibration: Calibration) -> None:
    """Writes a calibration to its file, replacing an earlier one. Raises OSError."""
    path = place()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(asdict(calibration), indent=2))
    fresh.replace(path)


def kept() -> Calibration | None:
    """The calibration that was kept; None if there is none, or it cannot be read or is not valid."""
    try:
        read: dict[str, Any] = json.loads(place().read_text())
        gpus = {name: Routes(**routes) for name, routes in read.pop("gpus", {}).items()}
        calibration = Calibration(**read, gpus=gpus)
        return calibration if _is_whole(calibration) else None
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None


def _is_whole(calibration: Calibration) -> bool:
    """Whether a calibration that was read is complete, with rates that are above 0 and finite.

    Raises TypeError or AttributeError for some values of other types.
    """
    gpus = list(calibration.gpus.values())
    links = [calibration.alone, calibration.together]
    ways = [rates for routes in gpus for rates in routes.rates]
    rates = [rate for each in [*links, *ways, *(routes.formats for routes in gpus)] for rate in each.values()]
    return (
        isinstance(calibration.directory, str)
        and all(type(threads) is int for threads in [calibration.threads, *(routes.threads for routes in gpus)])
        and all(each.keys() == LINKS for each in links)
        and all(each and each.keys() <= ROUTES for each in ways)
        and all(routes.start.keys() == ROUTES and routes.ceilings for routes in gpus)
        and all(0 < rate < math.inf for rate in rates)
        and all(0 <= seconds < math.inf for routes in gpus for seconds in routes.start.values())
    )


def routes_of(gpu: str, threads: int) -> Routes | None:
    """The routes kept for a GPU and this number of CPU threads; None if there are none."""
    before = kept()
    routes = None if before is None else before.gpus.get(gpu)
    return routes if routes is not None and routes.threads == threads else None
