"""Centring and rotation: they keep a few large elements of a quantised row from costing the others their precision.

Centring subtracts a constant vector from the K rows of each head. This lowers all scores of a query by its product with that
vector, which is added back. Rotation multiplies K and V by random signs and a Hadamard matrix, over blocks of the largest
power of two that divides the row; queries and results are rotated to match. Neither changes attention except for what
quantisation loses: docs/adr/0011 says how much, and where the defaults come from. Both apply to quantised formats only, and
not to layers whose K and V are one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from pagoda._core import F16_MAX
from pagoda.checks import finite
from pagoda.errors import InvalidArgument
from pagoda.formats import FORMATS
from pagoda.spec import AttentionLayer


class CoreOutliers(TypedDict):
    """The choice for one layer, as the core takes it."""

    center: list[float] | None
    center_first: bool
    rotate: tuple[bool, bool]


class Outliers:
    """The choice of a cache. Raises InvalidArgument.

    center: for each layer an array [num_kv_heads, head_dim], such as the bias of the K projection, or None; or None for all.
    "first" takes the mean of the first K rows of a layer, which are those of a step in an empty cache. Elements
    whose mean is less than twice the standard deviation get 0; if a mean is NaN or beyond float16, nothing is centred. The
    centre stays as long as any sequence has tokens. When all are gone, for example after a warm-up, it is taken again from
    the next first rows. If these are fewer than 8, the previous centre stays, with 0 for elements whose mean it does not
    bring nearer to 0.
    "auto": "first", but None in a deterministic cache, as "first" depends on what came first.
    rotate: whether to rotate rows; "auto" decides by the format.
    """

    def __init__(
        self,
        center: Sequence[npt.NDArray[Any] | None] | npt.NDArray[Any] | str | None,
        rotate: bool | str,
        layers: int,
        *,
        deterministic: bool,
    ) -> None:
        if (
            not isinstance(center, Sequence | np.ndarray | None)
            or (isinstance(center, str | bytes) and center not in ("auto", "first"))
            or (isinstance(center, np.ndarray) and center.ndim == 0)
        ):
            raise InvalidArgument(f'center = {center!r}: "auto", "first", None, or an array or None for each layer')
        if not isinstance(center, str) and center is not None and len(center) != layers:
            raise InvalidArgument(f"center = {len(center)} arrays: {layers}, one for each layer")
        if not isinstance(rotate, bool) and not (isinstance(rotate, str) and rotate == "auto"):
            raise InvalidArgument(f'rotate = {rotate!r}: "auto", True or False')
        if isinstance(center, str) and center == "first" and deterministic:
            raise InvalidArgument(
                'center = "first": not with deterministic=True, as bits would depend on what came first'
            )
        self._first = isinstance(center, str) and not deterministic
        self._given = [None] * layers if isinstance(center, str) or center is None else list(center)
        self._rotate = rotate

    def of(self, index: int, layer: AttentionLayer, dtypes: tuple[str, str]) -> CoreOutliers:
        """The choice for one layer."""
        k, v = (FORMATS[name].quantised and not (layer.v_alias or layer.k_eq_v) for name in dtypes)
        center = self._center(index, layer)
        rotate_k, rotate_v = (FORMATS[name].rotate if self._rotate == "auto" else bool(self._rotate) for name in dtypes)
        return {
            "center": center if k else None,
            "center_first": self._first and k,
            "rotate": (rotate_k and k, rotate_v and v),
        }

    def _center(self, index: int, layer: AttentionLayer) -> list[float] | None:
        given = self._given[index]
        if given is None:
            return None
        center = finite(f"center[{index}]", given, (layer.num_kv_heads, layer.head_dim))
        largest = max(center, key=abs)
        # No model's K has a larger offset, and next to one the rows themselves would be lost in rounding.
        if abs(largest) > F16_MAX:
            raise InvalidArgument(f"center[{index}] = {largest} among others: numbers from {-F16_MAX:g} to {F16_MAX:g}")
        return center
