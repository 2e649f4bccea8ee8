"""What a model's layers store: the geometry that caches and the planner work with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagoda._core import HEAD_DIM_MAX, TOKENS_MAX
from pagoda.checks import as_ints, check_factor, check_flag, check_integer, check_list, check_text
from pagoda.errors import InvalidArgument
from pagoda.formats import row_format
from pagoda.rope import Rope

__all__ = ["AttentionLayer", "Layer", "ModelSpec", "Rope", "StateLayer"]

HEADS_MAX = 4096
LAYERS_MAX = 4096


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer.

    num_q_heads, num_kv_heads: query heads are a multiple of K/V heads; a cache takes up to 128 query heads per K/V head.
    head_dim, v_head_dim: elements of a K and of a V row (the same by default), multiples of 8 from 8 to 1024.
    window: a query sees that many of the last tokens, including itself; a cache frees older ones.
    scale: factor of dot products, from 1e-18 to 1e18; head_dim**-0.5 by default.
    rope: how the caller rotates queries and keys; needed only if `drop` is to shift positions, or sinks are to follow a
    window (`SinkWindow`).
    softcap: scores become softcap * tanh(score / softcap); from 1e-18 to 1e18.
    sinks: a learned logit per query head joins the softmax (given to `Step.attend`).
    kv_owner: index of the earlier layer whose K and V this one reads. This layer stores none, and its window is at most the
    owner's.
    v_alias: V is the first v_head_dim elements of the stored K row.
    k_eq_v: Gemma 4's attention_k_eq_v: K is V times the weight of K's norm, then rotated by `rope`. Only V is stored, in the
    format of V, and K is derived from it (`Cache(k_norms=)`).
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    window: int | None = None
    scale: float | None = None
    rope: Rope | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_owner: int | None = None
    v_alias: bool = False
    k_eq_v: bool = False

    def __post_init__(self) -> None:
        as_ints(self)
        check_integer("num_kv_heads", self.num_kv_heads, 1, HEADS_MAX)
        check_integer("num_q_heads", self.num_q_heads, 1, HEADS_MAX)
        if self.num_q_heads % self.num_kv_heads:
            raise InvalidArgument(f"num_q_heads = {self.num_q_heads}: a multiple of num_kv_heads = {self.num_kv_heads}")
        for name, dim in (("head_dim", self.head_dim), ("v_head_dim", self.v_dim)):
            check_integer(name, dim, 8, HEAD_DIM_MAX)
            if dim % 8:
                raise InvalidArgument(f"{name} = {dim}: a multiple of 8")
        if self.window is not None:
            check_integer("window", self.window, 1, TOKENS_MAX)
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None:
                check_factor(name, value)
        for name in ("sinks", "v_alias", "k_eq_v"):
            check_flag(name, getattr(self, name))
        if self.rope is not None:
            if not isinstance(self.rope, Rope):
                raise InvalidArgument(f"rope = {self.rope!r}: None or a Rope")
            self.rope.inv_freq(self.head_dim)
        if self.kv_owner is not None:
            check_integer("kv_owner", self.kv_owner, 0, LAYERS_MAX)
        if self.v_alias and self.v_dim > self.head_dim:
            raise InvalidArgument(f"v_head_dim = {self.v_dim}: at most head_dim = {self.head_dim} with v_alias")
        if self.k_eq_v and (self.v_dim != self.head_dim or self.v_alias):
            shape = f"v_head_dim = {self.v_dim}, v_alias = {self.v_alias}"
            raise InvalidArgument(f"{shape}: head_dim = {self.head_dim} and False with k_eq_v")

    @property
    def v_dim(self) -> int:
        """Elements of a V row."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def bytes_per_token(self, k_dtype: str, v_dtype: str) -> int:
        """Bytes that one token stores in this layer. Raises InvalidArgument for an unknown format."""
        if self.kv_owner is not None:
            return 0
        k = 0 if self.k_eq_v else row_format(k_dtype, "k_dtype").bytes(self.head_dim)
        v = 0 if self.v_alias else row_format(v_dtype, "v_dtype").bytes(self.v_dim)
        return self.num_kv_heads * (k + v)


@dataclass(frozen=True)
class StateLayer:
    """A layer with a fixed state per sequence and nothing per token: linear attention, or a state-space model.

    state_elements are kept in float32, conv_elements (the last inputs of a short convolution) in 16 bits.
    """

    state_elements: int
    conv_elements: int = 0

    def __post_init__(self) -> None:
        as_ints(self)
        check_integer("state_elements", self.state_elements, 1, 1 << 40)
        check_integer("conv_elements", self.conv_elements, 0, 1 << 40)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return self.state_elements * 4 + self.conv_elements * 2


Layer = AttentionLayer | StateLayer


@dataclass(frozen=True)
class ModelSpec:
    """The layers of a model, in order. Only layers with attention or a state count; an MLP does not."""

    layers: tuple[Layer, ...]
    name: str

    def __init__(self, layers: Sequence[Layer], name: str = "") -> None:
        check_list("layers", layers, "an AttentionLayer or StateLayer for each layer")
        check_text("name", name)
        if not 1 <= len(layers) <= LAYERS_MAX:
            raise InvalidArgument(f"layers = {len(layers)} of them: from 1 to {LAYERS_MAX}")
        for index, layer in enumerate(layers):
            if not isinstance(layer, AttentionLayer | StateLayer):
                raise InvalidArgument(f"layers[{index}] = {type(layer).__name__}: an AttentionLayer or StateLayer")
            if isinstance(layer, AttentionLayer) and (owner := layer.kv_owner) is not None:
                _check_owner(index, layer, layers[owner] if owner < index else None)
        object.__setattr__(self, "layers", tuple(layers))
        object.__setattr__(self, "name", name)

    @classmethod
    def preset(cls, name: str) -> ModelSpec:
        """The geometry of a known model, by its lower-case Hugging Face name, such as "qwen3-8b". Raises InvalidArgument."""
        from pagoda.presets import preset_config

        return cls.from_config(preset_config(name), name=name)

    @classmethod
    def from_config(cls, config: str | Path | dict[str, Any], *, name: str = "") -> ModelSpec:
        """The geometry in a Hugging Face config.json: the path of the file or its folder, or its content as a dict, as
        `to_dict()` of a transformers config returns it. Raises InvalidArgument."""
        from pagoda.families import layers_of
        from pagoda.hf_config import read_config

        check_text("name", name)
        content = read_config(config)
        return cls(layers_of(content), name or str(content.get("model_type", "")))

    def storing_k(self) -> ModelSpec:
        """The same model with both K and V stored in layers with `k_eq_v`, for use without the weights of K's norms."""
        layers = [replace(layer, k_eq_v=False) if isinstance(layer, AttentionLayer) else layer for layer in self.layers]
        return ModelSpec(layers, self.name)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """The attention layers."""
        return tuple(layer for layer in self.layers if isinstance(layer, AttentionLayer))

    def bytes_per_token(self, k_dtype: str = "f16", v_dtype: str = "f16") -> int:
        """Bytes of K and V that one token stores, over all attention layers."""
        return sum(layer.bytes_per_token(k_dtype, v_dtype) for layer in self.attention_layers)

    def full_bytes_per_token(self, k_dtype: str = "f16", v_dtype: str = "f16") -> int:
        """The part of these bytes in layers without a window, whose memory grows without bound."""
        full = [layer for layer in self.attention_layers if layer.window is None]
        return sum(layer.bytes_per_token(k_dtype, v_dtype) for layer in full)

    def window_bytes(self, k_dtype: str = "f16", v_dtype: str = "f16") -> int:
        """Bytes that the windowed layers need for one sequence once their windows are full."""
        windowed = [layer for layer in self.attention_layers if layer.window is not None]
        return sum((layer.window or 0) * layer.bytes_per_token(k_dtype, v_dtype) for layer in windowed)

    def state_bytes(self) -> int:
        """Bytes that the recurrent layers need for one sequence, whatever its length."""
        return sum(layer.state_bytes for layer in self.layers if isinstance(layer, StateLayer))


def check_spec(name: str, value: ModelSpec) -> None:
    """Raises InvalidArgument unless the value is a ModelSpec."""
    if not isinstance(value, ModelSpec):
        raise InvalidArgument(f"{name} = {value!r}: a ModelSpec; ModelSpec.preset(name) has those of known models")


def _check_owner(index: int, layer: AttentionLayer, owner: Layer | None) -> None:
    """Raises InvalidArgument unless a layer can read the K and V of its kv_owner."""
    if not isinstance(owner, AttentionLayer) or owner.kv_owner is not None:
        raise InvalidArgument(f"layers[{index}].kv_owner = {layer.kv_owner}: an earlier layer that stores its K and V")
    # Derived keys are rotated in the same way for all layers that read them.
    names = ["num_kv_heads", "head_dim", "v_dim", "v_alias", "k_eq_v", *(["rope"] if owner.k_eq_v else [])]
    for name in names:
        mine, theirs = getattr(layer, name), getattr(owner, name)
        if mine != theirs:
            shown = "v_head_dim" if name == "v_dim" else name
            raise InvalidArgument(f"layers[{index}].{shown} = {mine}: {theirs}, that of its kv_owner {layer.kv_owner}")
    if owner.window is not None and (layer.window is None or layer.window > owner.window):
        raise InvalidArgument(
            f"layers[{index}].window = {layer.window}: at most {owner.window}, that of its kv_owner {layer.kv_owner}"
        )
