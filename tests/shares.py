"""Fixes how work on pages of the host tier is divided, whatever is faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagoda.rates import Routes


@dataclass(frozen=True)
class Shares(Routes):
    """Fixed shares of the bytes by route. The CPU takes as much of its share as it can."""

    threads: int = 2
    rates: list[dict[str, float]] = field(default_factory=list)
    start: dict[str, float] = field(default_factory=dict)
    ring: float = 0.0
    mapped: float = 0.0
    memory: float = 0.0

    def over(self, row_bytes: Mapping[str, float]) -> Shares:
        return self

    def divide(self, size: float, costs: Mapping[str, float], most: Mapping[str, float]) -> dict[str, float]:
        memory = min(self.memory * size, most["memory"])
        return {"ring": self.ring * size if "ring" in costs else 0.0, "mapped": self.mapped * size, "memory": memory}
