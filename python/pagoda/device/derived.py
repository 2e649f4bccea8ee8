"""What deriving keys from V takes, in device memory: for each layer the weight of K's norm and the rotation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.device.driver import Driver, Memory, send
from pagoda.geometry import CoreLayer, owners_of

WEIGHT_MAX = 4
"""Exponent to which the largest weight is scaled: kernels hold keys as f16, where normalised values above 2800 would then
overflow. They are at most the square root of `head_dim`."""


@dataclass(frozen=True)
class DerivedKeys:
    """For one layer. weight, turns: addresses of `key_weight` and `turns` of unit.cuh. unit: the power of two by which
    weights have been divided, and scores must be multiplied."""

    memory: Memory
    weight: int
    turns: int
    unit: float


def derived_keys(driver: Driver, layers: Sequence[CoreLayer]) -> dict[int, DerivedKeys]:
    """The `DerivedKeys` of layers that have them; a layer that reads the pages of another shares those of that layer."""
    own: dict[int, DerivedKeys] = {}
    for index, (layer, owner) in enumerate(zip(layers, owners_of(layers), strict=True)):
        if layer["k_norm"] is not None:
            own[index] = own[owner] if owner in own else _derived(driver, layer["k_norm"], layer["rope"])
    return own


def _derived(driver: Driver, norm: list[float], rope: tuple[list[float], bool] | None) -> DerivedKeys:
    turns = turns_of(rope[0] if rope else [])
    unit = 2.0 ** (math.frexp(max(map(abs, norm)))[1] - WEIGHT_MAX)
    weight = (np.array(norm) / unit).astype(np.float32)
    memory = send(driver, np.concatenate([turns.view(np.uint8), weight.view(np.uint8)]))
    return DerivedKeys(memory, memory.address + turns.nbytes, memory.address, unit)


def turns_of(inv_freq: list[float]) -> npt.NDArray[np.uint64]:
    """The turn of each pair per position, in units of 2^-64 of a full turn: products with positions wrap as angles do."""
    parts = (round(frequency / (2 * math.pi) * 2.0**64) % (1 << 64) for frequency in inv_freq)
    return np.fromiter(parts, np.uint64, len(inv_freq))
