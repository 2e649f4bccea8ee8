"""The input of every library, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

COLD_BYTES = 512 << 20
BITS = {"f16": 16, "q8_0": 8, "q4_0": 4}
"""Of a value, by format, without scales: of those every library stores some."""


class LeftOut(Exception):
    """The library lacks something that the case needs."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    q_heads: int
    kv_heads: int
    dim: int
    context: int
    format: str
    threads: int

    @property
    def values(self) -> int:
        """Values of K and V in a layer."""
        return self.context * self.kv_heads * self.dim * 2

    @property
    def layers(self) -> int:
        return max(2, -(-COLD_BYTES * 8 // (self.values * BITS[self.format])))


@dataclass(frozen=True)
class Data:
    """K and V [context, kv_heads, dim] of one layer, of which every layer has a copy, and a query [q_heads, dim]."""

    q: Array
    k: Array
    v: Array

    @classmethod
    def draw(cls, case: Case) -> Data:
        rng = np.random.default_rng(0)
        rows = [rng.standard_normal((case.context, case.kv_heads, case.dim), np.float32) for _ in range(2)]
        q = rng.standard_normal((case.q_heads, case.dim), np.float32)
        return cls(q, rows[0].astype(np.float16), rows[1].astype(np.float16))

    def reference(self) -> Array:
        """The result in float64."""
        heads, group = self.k.shape[1], len(self.q) // self.k.shape[1]
        out = []
        for head in range(heads):
            q = self.q[head * group : (head + 1) * group].astype(np.float64)
            scores = q @ self.k[:, head].astype(np.float64).T * self.q.shape[1] ** -0.5
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out.append(weights / weights.sum(1, keepdims=True) @ self.v[:, head].astype(np.float64))
        return np.concatenate(out)


@dataclass(frozen=True)
class Attention:
    """Layers that a library holds. run: attends over the layer of an index, [q_heads, dim]. layer_bytes: K and V of one.
    held: memory of ours that the library works in.
    """

    run: Callable[[int], Array]
    layer_bytes: int
    held: Sequence[Any] = ()


Prepare = Callable[[Case, Data], Attention]
"""Fills a library's layers. Raises LeftOut or ModuleNotFoundError."""
