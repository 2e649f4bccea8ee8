"""Choosing the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagoda.checks import FACTOR_MAX, as_ints, check_integer, is_number
from pagoda.errors import InvalidArgument


@dataclass
class Sampler:
    """Greedy at temperature 0; otherwise samples from the likeliest tokens: at most `top_k`, that hold `top_p` probability.

    Ties go to the lower token. `seed` makes draws repeatable. Raises InvalidArgument.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    _rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        as_ints(self)
        if not is_number(self.temperature) or not 0 <= self.temperature <= FACTOR_MAX:
            raise InvalidArgument(f"temperature = {self.temperature!r}: a number from 0 to {FACTOR_MAX}")
        if self.top_k is not None:
            check_integer("top_k", self.top_k, 1, (1 << 31) - 1)
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p = {self.top_p!r}: above 0, at most 1")
        check_integer("seed", self.seed, 0, (1 << 64) - 1)
        self._rng = np.random.default_rng(self.seed)

    def pick(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token, from logits: a NumPy array of floats [vocab]. Raises InvalidArgument for anything else, for NaN,
        and if the highest is not finite."""
        ids, probabilities = self.distribution(logits)
        return int(self._rng.choice(ids, p=probabilities))

    def distribution(self, logits: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The tokens that `pick` draws from, likeliest first, and their probabilities. Raises as `pick` does."""
        _check(logits)
        if self.temperature == 0:
            return np.array([np.argmax(logits)]), np.ones(1)
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        scaled = logits[order].astype(np.float64)
        # Subtract first: dividing the logits themselves by a temperature near 0 would overflow.
        with np.errstate(over="ignore"):
            weights = np.exp((scaled - scaled[0]) / self.temperature)
        weights /= weights.sum()
        # The token that crosses top_p is kept, too.
        kept = int(np.searchsorted(np.cumsum(weights), self.top_p)) + 1
        weights = weights[:kept]
        return order[:kept], weights / weights.sum()


def _check(logits: npt.NDArray[np.float32]) -> None:
    # NumPy's functions ignore a mask.
    if not isinstance(logits, np.ndarray) or isinstance(logits, np.ma.MaskedArray):
        raise InvalidArgument(f"logits = {type(logits).__name__}: an array of floats [vocab]")
    if logits.ndim != 1 or logits.dtype.kind != "f":
        raise InvalidArgument(f"logits = {logits.dtype} {list(logits.shape)}: an array of floats [vocab]")
    top = logits.max(initial=-np.inf)
    if not math.isfinite(top):
        raise InvalidArgument(f"logits: the highest is {top}; a finite number was expected")
