"""Which token comes next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagoda.errors import InvalidArgument


@dataclass
class Sampler:
    """Greedy at temperature 0; otherwise draws from the `top_k` likeliest tokens that hold `top_p` of the probability.

    Ties go to the lower token. Draws are repeatable by `seed`.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    _rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, int | float) and 0 <= self.temperature < math.inf):
            raise InvalidArgument(f"temperature = {self.temperature!r}: a finite number, at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidArgument(f"top_k = {self.top_k!r}: at least 1")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p = {self.top_p!r}: above 0, at most 1")
        self._rng = np.random.default_rng(self.seed)

    def pick(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token, from float32 [vocab] logits."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        ids, probabilities = self.distribution(logits)
        return int(self._rng.choice(ids, p=probabilities))

    def distribution(self, logits: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The tokens that `pick` draws from, likeliest first, and their probabilities."""
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        scaled = logits[order].astype(np.float64) / self.temperature
        weights = np.exp(scaled - scaled[0])
        weights /= weights.sum()
        # The token that crosses top_p still counts.
        kept = int(np.searchsorted(np.cumsum(weights), self.top_p)) + 1
        weights = weights[:kept]
        return order[:kept], weights / weights.sum()
