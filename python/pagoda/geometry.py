"""From a model's layers to what the core takes: layer groups, block sizes, extents."""

from __future__ import annotations

from typing import TypedDict

from pagoda.errors import BackendUnavailable, InvalidArgument
from pagoda.formats import row_format
from pagoda.retention import Keeps, SinkWindow, keeps_by_layer
from pagoda.spec import AttentionLayer, ModelSpec

EXTENT_BYTES = 32 << 20
"""The size of an extent that is aimed at: memory is given back in such pieces."""

TIER_BYTES_MAX = 1 << 48
"""The largest arena: `limits::ARENA_BYTES_MAX` of the core."""


class CoreLayer(TypedDict):
    """One layer as `pagoda._core.Cache` takes it."""

    group: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    v_alias: bool
    window: int | None
    keeps: Keeps | None
    scale: float
    rope: tuple[list[float], bool] | None


def group_layers(spec: ModelSpec) -> list[list[int]]:
    """The layers of each group, in the order in which groups first appear."""
    return [list(group.layers) for group in spec.groups]


def core_layers(spec: ModelSpec, retention: SinkWindow | None = None, headroom: int = 0) -> list[CoreLayer]:
    """The layers as the core takes them. Raises BackendUnavailable for what the CPU backend does not do yet."""
    group_of = {layer: group for group, members in enumerate(group_layers(spec)) for layer in members}
    keeps = keeps_by_layer(spec, retention, headroom)
    return [_core_layer(index, layer, group_of.get(index, 0), keeps[index]) for index, layer in enumerate(spec.layers)]


def _core_layer(index: int, layer: object, group: int, keeps: Keeps | None) -> CoreLayer:
    if not isinstance(layer, AttentionLayer):
        raise BackendUnavailable(
            f"layers[{index}] = {type(layer).__name__}: the cache has attention layers only so far"
        )
    for name in ("softcap", "sinks", "kv_owner"):
        if getattr(layer, name) not in (None, False):
            raise BackendUnavailable(
                f"layers[{index}].{name} = {getattr(layer, name)!r}: not supported by the cache yet"
            )
    rope = layer.rope
    return {
        "group": group,
        "num_q_heads": layer.num_q_heads,
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "v_head_dim": layer.v_dim,
        "v_alias": layer.v_alias,
        "window": None if keeps is None else keeps[1],
        "keeps": keeps,
        "scale": layer.head_dim**-0.5 if layer.scale is None else layer.scale,
        "rope": None if rope is None else (rope.inv_freq(layer.head_dim).tolist(), rope.interleaved),
    }


def block_bytes(spec: ModelSpec, page_size: int, dtypes: tuple[str, str]) -> list[int]:
    """Bytes of a block of each layer group: `page_size` rows of K and V of all its layers."""
    for name, dtype in zip(("k_dtype", "v_dtype"), dtypes, strict=True):
        if not row_format(dtype, name).stored:
            raise BackendUnavailable(f"{name} = {dtype!r}: the cache stores f32, f16 and bf16 so far")
    attention = {index: layer for index, layer in enumerate(spec.layers) if isinstance(layer, AttentionLayer)}
    return [
        page_size * sum(attention[index].bytes_per_token(*dtypes) for index in members)
        for members in group_layers(spec)
    ]


def tier_memory(
    spec: ModelSpec, page_size: int, dtypes: tuple[str, str], device_bytes: int, host_bytes: int
) -> list[tuple[int, int]]:
    """(bytes, extent bytes) of the device and the host tier.

    An extent holds whole blocks of the largest group, about `EXTENT_BYTES` of them, but few enough that every group can
    have some. Raises InvalidArgument when a budget cannot hold one block of each group.
    """
    sizes = block_bytes(spec, page_size, dtypes)
    largest, groups = max(sizes), len(sizes)
    memory = []
    for name, budget in (("device_memory", device_bytes), ("host_memory", host_bytes)):
        least = largest * groups
        if budget > TIER_BYTES_MAX or (budget < least and (budget > 0 or name == "device_memory")):
            limit = f"from {least} bytes, one page of each of {groups} layer group(s), to {TIER_BYTES_MAX}"
            raise InvalidArgument(f"{name} = {budget}: {limit}")
        per_extent = max(1, min(EXTENT_BYTES // largest, budget // (largest * groups * 8)))
        memory.append((budget, largest * per_extent))
    return memory
