"""Hugging Face config.json files: checked access to their keys, which mean the same as in transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pagoda._core import HEAD_DIM_MAX
from pagoda.checks import is_number, natural
from pagoda.errors import InvalidArgument
from pagoda.rope import ProportionalScaling, Rope, scaling_from_config
from pagoda.spec import HEADS_MAX, LAYERS_MAX

JSON_BYTES_MAX = 16 << 20

FULL, WINDOWED, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Kinds of layers."""

CONTEXT, TRAINED = "max_position_embeddings", "original_max_position_embeddings"
"""Keys for the number of tokens that a model takes, and that it was trained for before its rotation was scaled."""

PARTIAL = (
    *("glm", "glm4", "glm4_moe", "minimax_m2", "phi3", "qwen3_next"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
)
"""Families that use `partial_rotary_factor`. In transformers others ignore it, or fail."""

PER_LAYER = "per_layer_config"
"""The key under which single layers have keys of their own, by index. transformers writes it since 5.24."""


def read_text(path: Path) -> str:
    """The text of a small file. Its size may not be known before it is read: a pipe, or a device without an end.

    Raises OSError, and ValueError for more than JSON_BYTES_MAX bytes and for what is no UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(JSON_BYTES_MAX + 1)
    if len(content) > JSON_BYTES_MAX:
        raise ValueError(f"at most {JSON_BYTES_MAX} bytes")
    return content.decode("utf-8")


def read_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json, given as content, file or folder; for a multimodal model only the text part."""
    if isinstance(config, str | Path):
        path = Path(config)
        try:
            path = path / "config.json" if path.is_dir() else path
            config = json.loads(read_text(path))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"config = {str(path)!r}: a readable config.json ({error})") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"config = {type(config).__name__}: a JSON object")
    kind, text = config.get("model_type"), config.get("text_config")
    if not isinstance(text, dict):
        return config
    # The only wrapper whose text part is bidirectional by default.
    both_ways = kind == "paligemma" and text.get("use_bidirectional_attention") is None
    return {"model_type": kind, **text} | ({"use_bidirectional_attention": True} if both_ways else {})


class Config:
    """Checked access to the keys of a config."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def _value(self, key: str, default: Any) -> Any:
        """The value of a key; JSON's null counts as absent."""
        value = self.content.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        """An integer key."""
        return natural(f"config.{key}", self._value(key, default), low, high)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        # JSON may have integers that no float can hold.
        if not is_number(value) or not 0 < value <= sys.float_info.max:
            raise InvalidArgument(f"config.{key} = {value!r}: a finite number above 0")
        return float(value)

    def sequence(self, key: str, length: int) -> list[Any] | None:
        """A list of `length` entries, or None when absent."""
        value = self.content.get(key)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            raise InvalidArgument(f"config.{key} = {value!r}: a list of {length}")
        return value

    @property
    def layer_count(self) -> int:
        """num_hidden_layers."""
        return self.integer("num_hidden_layers", high=LAYERS_MAX)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, K/V heads and the size of a head."""
        queries = self.integer("num_attention_heads", high=HEADS_MAX)
        own = self.content.get("head_dim") is not None
        head_dim = self.integer("head_dim", high=HEAD_DIM_MAX) if own else self.integer("hidden_size") // queries
        return queries, self.integer("num_key_value_heads", queries, high=HEADS_MAX), head_dim

    def per_layer(self, layers: int) -> dict[int, dict[str, Any]]:
        """The keys that single layers have of their own, by the index of the layer."""
        entries = {} if self.content.get(PER_LAYER) is None else self.content[PER_LAYER]
        if not isinstance(entries, dict) or not all(isinstance(changes, dict) for changes in entries.values()):
            raise InvalidArgument(f"config.{PER_LAYER} = {entries!r}: an object for each of some layers")
        for index, changes in entries.items():
            # Indices have leading zeros, so that they sort in order: "05".
            if not (str(index).isdecimal() and len(str(index)) <= 9 and int(index) < layers):
                raise InvalidArgument(f"config.{PER_LAYER} = {index!r} among others: layers from 0 to {layers - 1}")
            if changes.get("skip"):
                raise InvalidArgument(
                    f"config.{PER_LAYER}.{index}.skip = {changes['skip']!r}: nothing, as no layer is left out"
                )
        return {int(index): changes for index, changes in entries.items()}

    def layer_types(self, other: str = WINDOWED) -> list[str] | None:
        """The entry of each layer in `layer_types`: full attention, or the other kind of the family. None if absent."""
        types = self.sequence("layer_types", self.layer_count)
        known = (FULL, other)
        if any(kind not in known for kind in types or ()):
            raise InvalidArgument(f"config.layer_types = {types!r}: of {', '.join(known)}")
        return types

    def rope_parameters(self, layer_type: str = FULL) -> dict[str, Any]:
        """The part of `rope_scaling` or `rope_parameters` for one kind of layer."""
        parameters = self.content.get("rope_scaling") or self.content.get("rope_parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidArgument(f"config.rope_scaling = {parameters!r}: a JSON object")
        context, trained = (self.content.get(key) for key in (CONTEXT, TRAINED))
        if isinstance(parameters.get(layer_type), dict):
            parameters = parameters[layer_type]
        elif trained is not None:
            # As in transformers, the config's own value takes precedence over that of a scaling for all layers.
            parameters = {**parameters, TRAINED: trained}
        for key in (CONTEXT, TRAINED):
            if parameters.get(key) is None and context is not None:
                parameters = {**parameters, key: context}
        return parameters

    def rope(self, layer_type: str = FULL, *, theta_key: str = "rope_theta") -> Rope:
        """The rotation of one kind of layer."""
        parameters = self.rope_parameters(layer_type)
        theta = Config(parameters).number("rope_theta", self.number(theta_key, 10000.0))
        _, _, head_dim = self.heads
        given = (source.get("partial_rotary_factor") for source in (parameters, self.content))
        partial = next((factor for factor in given if factor is not None), 1.0)
        if not is_number(partial) or not 0 < partial <= 1:
            raise InvalidArgument(f"config.partial_rotary_factor = {partial!r}: above 0, at most 1")
        scaling = scaling_from_config({**parameters, "partial_rotary_factor": partial})
        if partial == 1 or isinstance(scaling, ProportionalScaling):
            return Rope(theta, scaling=scaling)
        kind = self.content.get("model_type")
        if kind not in PARTIAL:
            raise InvalidArgument(
                f"config.partial_rotary_factor = {partial!r}: 1 for {kind}, or of proportional scaling"
            )
        return Rope(theta, int(head_dim * partial), scaling=scaling)
