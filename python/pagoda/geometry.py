"""From a model's layers to the arguments of the core: layer groups, block sizes, extents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda._core import ARENA_BYTES_MAX, BLOCKS_PER_GROUP_MAX, EXTENTS_MAX, GROUPS_MAX
from pagoda.checks import check_list, finite
from pagoda.errors import BackendUnavailable, InvalidArgument
from pagoda.formats import FORMATS, cause
from pagoda.outliers import Outliers
from pagoda.retention import Keeps
from pagoda.spec import AttentionLayer, ModelSpec

EXTENT_BYTES = 32 << 20
"""The target size of an extent, the unit in which memory is given back."""

EXTENT_GROWTH = 4
"""How many times its target size an extent may have, if then no block of any group crosses its borders."""


class CoreLayer(TypedDict):
    """One layer as `pagoda._core.Cache` takes it."""

    group: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    v_alias: bool
    k_dtype: str
    v_dtype: str
    center: list[float] | None
    center_first: bool
    rotate: tuple[bool, bool]
    k_norm: list[float] | None
    window: int | None
    keeps: Keeps | None
    scale: float
    softcap: float | None
    sinks: bool
    kv_owner: int | None
    rope: tuple[list[float], bool] | None


Dtypes = list[tuple[str, str]]
"""The row formats of K and V, for each layer."""


def group_layers(spec: ModelSpec, dtypes: Dtypes) -> list[list[int]]:
    """The layers of each group; groups are in the order of their first layers. Layers of a group have the same shape and
    lifetime of pages, so that a block holds a page of all of them."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        if isinstance(layer, AttentionLayer) and layer.kv_owner is None:
            shape = layer.num_kv_heads, layer.head_dim, layer.v_dim, layer.v_alias, layer.k_eq_v
            groups.setdefault((*shape, layer.window, dtypes[index]), []).append(index)
    return list(groups.values())


def owners_of(layers: Sequence[CoreLayer]) -> list[int]:
    """The layer whose pages each layer reads: itself, or its `kv_owner`."""
    return [index if layer["kv_owner"] is None else layer["kv_owner"] for index, layer in enumerate(layers)]


def core_layers(
    spec: ModelSpec,
    dtypes: Dtypes,
    outliers: Outliers,
    keeps: list[Keeps | None],
    k_norms: Sequence[npt.NDArray[Any] | None] | None,
) -> list[CoreLayer]:
    """The layers as the core takes them; a layer that reads another's pages has that layer's formats.

    Raises BackendUnavailable for layers that no backend supports yet, and InvalidArgument for rows that do not fit a format.
    """
    groups = group_layers(spec, dtypes)
    if len(groups) > GROUPS_MAX:
        raise InvalidArgument(f"spec = layers of {len(groups)} shapes, windows and formats: at most {GROUPS_MAX}")
    group_of = {layer: group for group, members in enumerate(groups) for layer in members}
    norms = _norms(spec, k_norms)
    layers: list[CoreLayer] = []
    for index, (layer, kept) in enumerate(zip(spec.layers, keeps, strict=True)):
        if not isinstance(layer, AttentionLayer):
            raise BackendUnavailable(
                f"layers[{index}] = {type(layer).__name__}: the cache has attention layers only so far"
            )
        owner = index if layer.kv_owner is None else layer.kv_owner
        k_dtype, v_dtype = formats_stored(index, layer, *dtypes[owner])
        rope = layer.rope
        layers.append(
            {
                "group": group_of[owner],
                "num_q_heads": layer.num_q_heads,
                "num_kv_heads": layer.num_kv_heads,
                "head_dim": layer.head_dim,
                "v_head_dim": layer.v_dim,
                "v_alias": layer.v_alias or layer.k_eq_v,
                "k_dtype": k_dtype,
                "v_dtype": v_dtype,
                **outliers.of(owner, layer, (k_dtype, v_dtype)),
                "k_norm": norms[owner],
                "window": None if kept is None else kept.window,
                "keeps": kept,
                "scale": layer.head_dim**-0.5 if layer.scale is None else layer.scale,
                "softcap": layer.softcap,
                "sinks": layer.sinks,
                "kv_owner": layer.kv_owner,
                "rope": None if rope is None else (rope.inv_freq(layer.head_dim).tolist(), rope.interleaved),
            }
        )
    return layers


def formats_stored(index: int, layer: AttentionLayer, k_dtype: str, v_dtype: str) -> tuple[str, str]:
    """The formats of the rows that a layer stores, from those given for K and V. Raises InvalidArgument for rows that do not
    fit a format."""
    if layer.k_eq_v:
        # Only rows of V are stored.
        k_dtype = v_dtype
    stored = {"head_dim": (layer.head_dim, k_dtype), "v_head_dim": (layer.v_dim, k_dtype if layer.v_alias else v_dtype)}
    for name, (dim, dtype) in stored.items():
        if dim % FORMATS[dtype].unit:
            limit = f"a multiple of {FORMATS[dtype].unit}, for {cause(dtype)}"
            raise InvalidArgument(f"layers[{index}].{name} = {dim}: {limit}")
    return k_dtype, v_dtype


def _norms(spec: ModelSpec, k_norms: Sequence[npt.NDArray[Any] | None] | None) -> list[list[float] | None]:
    """For each layer that derives K from V, the weight of K's norm times the factor by which the rotation scales."""
    if k_norms is not None:
        check_list("k_norms", k_norms, "an array or None for each layer")
    given = [None] * len(spec.layers) if k_norms is None else list(k_norms)
    if len(given) != len(spec.layers):
        raise InvalidArgument(f"k_norms = {len(given)} arrays: {len(spec.layers)}, one for each layer")
    norms: list[list[float] | None] = []
    for index, (layer, weight) in enumerate(zip(spec.layers, given, strict=True)):
        if not (isinstance(layer, AttentionLayer) and layer.k_eq_v and layer.kv_owner is None):
            if weight is not None:
                raise InvalidArgument(
                    f"k_norms[{index}] = an array: None, as layers[{index}] stores no V to derive K from"
                )
            norms.append(None)
            continue
        why = f", as layers[{index}] has k_eq_v; or store K, ModelSpec.storing_k()"
        if weight is None:
            raise InvalidArgument(f"k_norms[{index}] = None: finite numbers [{layer.head_dim}]{why}")
        norm = np.array(finite(f"k_norms[{index}]", weight, (layer.head_dim,), why))
        if layer.rope is not None:
            norm[: layer.rope.dim_of(layer.head_dim)] *= layer.rope.attention_factor
        norms.append(norm.tolist())
    return norms


Plane = tuple[tuple[int, int], tuple[int, int]]
"""K or V of one layer inside a block: offset and head stride of its rows, and of their scales. Bytes."""


@dataclass
class BlockLayout:
    """The layout of a group's blocks: docs/layout.md. planes: K and V of each layer."""

    planes: dict[int, tuple[Plane, Plane]]
    block_bytes: int


@dataclass(frozen=True)
class Run:
    """The part of a layer in each block of its group: `bytes` from `start` on."""

    start: int
    bytes: int


@dataclass(frozen=True)
class Geometry:
    """What a cache stores and where: its layers, and blocks that hold `page_size` tokens of all layers of a group each."""

    layers: list[CoreLayer]
    page_size: int

    @cached_property
    def layouts(self) -> list[BlockLayout]:
        """The block layout of each layer group."""
        layouts = []
        for group in range(1 + max(layer["group"] for layer in self.layers)):
            stored = {
                index: (
                    layer["num_kv_heads"],
                    layer["head_dim"],
                    layer["v_head_dim"],
                    layer["k_dtype"],
                    None if layer["v_alias"] else layer["v_dtype"],
                )
                for index, layer in enumerate(self.layers)
                if layer["group"] == group and layer["kv_owner"] is None
            }
            block_bytes, planes = _core.block_layout(list(stored.values()), self.page_size)
            layouts.append(BlockLayout(dict(zip(stored, planes, strict=True)), block_bytes))
        return layouts

    @cached_property
    def layer_bytes(self) -> list[int]:
        """Bytes of one layer in a block, by layer group: all layers of a group have the same shape."""
        return [layout.block_bytes // len(layout.planes) for layout in self.layouts]

    @cached_property
    def runs(self) -> list[Run]:
        """The run of each layer, or of its owner: a layer's part of a block is contiguous."""
        runs = []
        for layer, owner in zip(self.layers, owners_of(self.layers), strict=True):
            ((offset, _), _), _ = self.layouts[layer["group"]].planes[owner]
            runs.append(Run(offset, self.layer_bytes[layer["group"]]))
        return runs


def tier_memory(name: str, budget: int, sizes: list[int], *, needed: bool) -> tuple[int, int]:
    """(bytes, extent bytes) of a tier in memory. sizes: bytes of a block, by layer group.

    An extent holds whole blocks of the largest group, about `EXTENT_BYTES` of them, but few enough that every group can have
    some extents. If the sizes of other groups do not divide one such block, their blocks may cross the borders of extents, so
    an extent then holds at least two: every extent has room for a block of any group. It holds up to `EXTENT_GROWTH` times as
    many if nothing is then lost at the borders (docs/layout.md). Raises InvalidArgument, naming `name`, if the budget cannot
    hold one block of each group; 0 is no tier unless `needed`.
    """
    largest, groups = max(sizes), len(sizes)
    period = math.lcm(*sizes) // largest
    fewest = min(2, period)
    aim = max(fewest, EXTENT_BYTES // largest)
    least = largest * fewest * groups
    most = min(ARENA_BYTES_MAX, EXTENTS_MAX * aim * largest, BLOCKS_PER_GROUP_MAX * min(sizes))
    if budget > most or (budget < least and (budget > 0 or needed)):
        none = "" if needed else "0, or "
        limit = f"{none}from {least} bytes, one page of each of {groups} layer group(s), to {most}"
        raise InvalidArgument(f"{name} = {budget}: {limit}")
    room = budget // (largest * groups * 8)
    count = max(fewest, min(aim, room))
    whole = -(-count // period) * period
    return budget, largest * (whole if whole <= min(EXTENT_GROWTH * aim, room) else count)
