"""The forward pass of the Llama family, in float32. A model holds only weights; K and V go through a step.

Weights and everything computed from them are arrays of one library (`pagoda.lm.arrays`), written `Array`. Token ids,
positions and angles are small: they start as NumPy arrays and are then converted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pagoda.checks import check_choice, check_factor, integers
from pagoda.errors import InvalidArgument
from pagoda.hf_config import PER_LAYER, Config, read_config
from pagoda.lm.arrays import Library, library
from pagoda.lm.checkpoint import Checkpoint
from pagoda.lm.tokenizer import Tokenizer, load_tokenizer
from pagoda.rope import Rope
from pagoda.spec import AttentionLayer, ModelSpec

Float32 = npt.NDArray[np.float32]

Array = Any
"""A float32 array of the model's library."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")

ATTENTION_BIAS = ("llama", "qwen3", "smollm3")
"""Families that use `attention_bias`. Qwen2 always has biases on Q, K and V, Mistral never (transformers)."""

MLP_BIAS = ("llama", "smollm3")
"""Families that use `mlp_bias`."""


class ForwardStep(Protocol):
    """What a forward pass needs of a step: `pagoda.Step`, or that of a `ContiguousCache`."""

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """int64 [sum(new)]."""
        ...

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32 [B + 1]."""
        ...

    def forward(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Append and attend."""
        ...


S = TypeVar("S", contravariant=True)


class ForwardCache(Protocol[S]):
    """What `generate` needs of a cache: `pagoda.Cache`, or a `ContiguousCache`."""

    def step(self, batch: Sequence[S], new_tokens: Sequence[int]) -> AbstractContextManager[ForwardStep]:
        """A step that appends `new_tokens[i]` tokens to the i-th sequence."""
        ...


@dataclass(frozen=True)
class QueryLogScale:
    """Scales queries of layers without rotation by 1 + coefficient * ln((p + 1) / floor), or 1 if that is less."""

    floor: float
    coefficient: float

    def at(self, positions: npt.NDArray[np.int64]) -> Float32:
        """The factor of each position."""
        ratio = np.maximum(1.0, (positions + 1) / self.floor)
        return (1.0 + self.coefficient * np.log(ratio)).astype(np.float32)


@dataclass(frozen=True)
class Block:
    """The weights of one layer. Matrices are [in, out]; those with the same input are merged into one."""

    attention_norm: Array
    qkv: Array
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    o: Array
    o_bias: Array | None
    mlp_norm: Array
    gate_up: Array
    gate_up_bias: Array | None
    down: Array
    down_bias: Array | None


def is_folder(path: str | Path) -> bool:
    """Whether a path names a folder; False for values that are no path."""
    try:
        return bool(str(path)) and Path(path).is_dir()
    except (OSError, TypeError):
        return False


class LanguageModel:
    """A decoder-only model: token ids in, logits out. Made by `LanguageModel.load`."""

    def __init__(self, config: dict[str, Any], checkpoint: Checkpoint, tokenizer: Tokenizer, arrays: Library) -> None:
        reader = Config(config)
        kind, act = config.get("model_type"), config.get("hidden_act", "silu")
        if kind not in FAMILIES:
            raise InvalidArgument(f"config.model_type = {kind!r}: one of {', '.join(FAMILIES)}")
        if act != "silu":
            raise InvalidArgument(f"config.hidden_act = {act!r}: silu")
        if config.get(PER_LAYER):
            raise InvalidArgument(f"config.{PER_LAYER} = {config[PER_LAYER]!r}: none, for layers that are all alike")
        self.config, self.tokenizer = config, tokenizer
        self.device, self._xp = arrays.device, arrays.xp
        self.spec = ModelSpec.from_config(config)
        _require_one_rotation(reader)
        self.vocab_size = reader.integer("vocab_size")
        self._hidden, self._inner = reader.integer("hidden_size"), reader.integer("intermediate_size")
        epsilon = reader.number("rms_norm_eps", 1e-6)
        check_factor("config.rms_norm_eps", epsilon)
        self._epsilon = np.float32(epsilon)
        self._log_scale = _query_log_scale(config)
        self.end_tokens = _end_tokens(config)
        self._biased = _biased(config)
        # As in transformers, the default depends on the family.
        tied = _flag(config, "tie_word_embeddings", default=kind == "smollm3")
        embedding, head = _embedding_and_head(checkpoint, self.vocab_size, self._hidden, tied=tied)
        self._embedding, self._head = self._xp.asarray(embedding), self._xp.asarray(head)
        self._blocks = [self._block(checkpoint, index, layer) for index, layer in enumerate(self.spec.attention_layers)]
        self._norm = self._xp.asarray(checkpoint.take("model.norm.weight", self._hidden))
        # A bias, norm or layer left over would mean another model. Old checkpoints have inv_freq, which is derived here.
        rest = [name for name in checkpoint.rest("model.", "lm_head.") if not name.endswith(".rotary_emb.inv_freq")]
        if rest:
            raise InvalidArgument(f"checkpoint: {rest[0]}: not part of the {kind} model of this config")

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> LanguageModel:
        """Reads a Hugging Face checkpoint folder, and its weights to a device, named as in `pagoda.Cache`.

        On a GPU forward passes run on CuPy's current stream, which steps also use by default, and need the model's device to
        be current: `with model.device, cache.step(...) as step`. Raises InvalidArgument for a folder that cannot be read or
        is not supported, and BackendUnavailable for a missing device or tokenizers package.
        """
        if not is_folder(folder):
            raise InvalidArgument(f"folder = {folder!r}: one with config.json and model.safetensors")
        arrays, folder = library(device), Path(folder)
        config = read_config(folder) | _ends(folder / "generation_config.json")
        with arrays.device:
            return cls(config, Checkpoint(folder), load_tokenizer(folder, config), arrays)

    def forward(self, tokens: npt.ArrayLike, step: ForwardStep, logits: Literal["last", "all"] = "last") -> Array:
        """Runs the new tokens of a step through all layers.

        tokens: integers [sum(new)], below vocab_size, on the host. Returns float32 logits on the model's device: [B, vocab],
        of each sequence's last new token, or with logits="all" [sum(new), vocab], of all new tokens. With "last", sequences
        without new tokens have no row. Raises InvalidArgument.
        """
        positions = step.positions
        xp, ids = self._xp, integers("tokens", tokens, "a list of integers, one a new token")
        if len(ids) != len(positions):
            raise InvalidArgument(f"tokens = {len(ids)} integers: {len(positions)}, one a new token")
        check_choice("logits", logits, ("last", "all"))
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise InvalidArgument(f"tokens = {int(ids.min())} to {int(ids.max())}: from 0 to {self.vocab_size - 1}")
        ropes = {layer.rope: layer.head_dim for layer in self.spec.attention_layers}
        turns = {rope: self._turns(rope, head_dim, positions) for rope, head_dim in ropes.items()}
        growth = None if self._log_scale is None else xp.asarray(self._log_scale.at(positions))[:, None, None]
        x = self._embedding[xp.asarray(ids)]
        for index, (layer, block) in enumerate(zip(self.spec.attention_layers, self._blocks, strict=True)):
            q, k, v = self._qkv(layer, block, self._rms_norm(x, block.attention_norm))
            turn = turns[layer.rope]
            if turn is not None:
                _rotate(q, *turn)
                _rotate(k, *turn)
            elif growth is not None and layer.window is None:
                q = q * growth
            mixed = step.forward(index, q, k, v)
            x += _linear(mixed.reshape(len(ids), layer.num_q_heads * layer.v_dim), block.o, block.o_bias)
            gate_up = _linear(self._rms_norm(x, block.mlp_norm), block.gate_up, block.gate_up_bias)
            x += _linear(self._swiglu(gate_up), block.down, block.down_bias)
        if logits == "last":
            bounds = step.cu_seqlens
            x = x[xp.asarray(bounds[1:][np.diff(bounds) > 0] - 1)]
        return self._rms_norm(x, self._norm) @ self._head

    def _qkv(self, layer: AttentionLayer, block: Block, x: Array) -> tuple[Array, Array, Array]:
        queries, keys = layer.num_q_heads, layer.num_q_heads + layer.num_kv_heads
        rows = _linear(x, block.qkv, block.qkv_bias).reshape(len(x), keys + layer.num_kv_heads, layer.head_dim)
        q, k, v = rows[:, :queries], rows[:, queries:keys], rows[:, keys:]
        if block.q_norm is not None:
            q, k = self._rms_norm(q, block.q_norm), self._rms_norm(k, block.k_norm)
        return q, k, v

    def _rms_norm(self, x: Array, weight: Array) -> Array:
        """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, https://arxiv.org/abs/1910.07467."""
        mean = self._xp.einsum("...d,...d->...", x, x)[..., None] / np.float32(x.shape[-1])
        y = x * (1 / self._xp.sqrt(mean + self._epsilon))
        y *= weight
        return y

    def _swiglu(self, gate_up: Array) -> Array:
        """silu(gate) * up, https://arxiv.org/abs/2002.05202."""
        xp, half = self._xp, gate_up.shape[1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
        # Below -80 the result is 0 in float32 either way, and exp stays finite.
        weight = xp.negative(gate)
        xp.minimum(weight, 80, out=weight)
        xp.exp(weight, out=weight)
        weight += 1
        xp.divide(gate, weight, out=weight)
        weight *= up
        return weight

    def _turns(self, rope: Rope | None, head_dim: int, positions: npt.NDArray[np.int64]) -> tuple[Array, Array] | None:
        """Cosines and sines [tokens, 1, pairs]. Angles are formed in float64: at position 10^6 float32 is off by a tenth."""
        if rope is None:
            return None
        angles = positions[:, None, None] * rope.inv_freq(head_dim).astype(np.float64)
        np.remainder(angles, 2 * math.pi, out=angles)
        small = angles.astype(np.float32)
        cos, sin = (self._xp.asarray(turn(small) * np.float32(rope.attention_factor)) for turn in (np.cos, np.sin))
        return cos, sin

    def _block(self, checkpoint: Checkpoint, index: int, layer: AttentionLayer) -> Block:
        prefix = f"model.layers.{index}."
        hidden, inner, dim = self._hidden, self._inner, layer.head_dim
        queries, keys = layer.num_q_heads * dim, layer.num_kv_heads * dim

        def take(name: str, *shape: int) -> Array:
            return self._xp.asarray(checkpoint.take(f"{prefix}{name}.weight", *shape))

        def linear(parts: dict[str, int], width: int) -> tuple[Array, Array | None]:
            weights = [checkpoint.take(f"{prefix}{part}.weight", out, width) for part, out in parts.items()]
            biases = [checkpoint.take(f"{prefix}{part}.bias", n) for part, n in parts.items() if part in self._biased]
            matrix = self._xp.asarray(np.ascontiguousarray(np.concatenate(weights).T))
            return matrix, self._xp.asarray(np.concatenate(biases)) if biases else None

        def head_norm(name: str) -> Array | None:
            return take(f"self_attn.{name}", dim) if self.config["model_type"] == "qwen3" else None

        return Block(
            take("input_layernorm", hidden),
            *linear({"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}, hidden),
            head_norm("q_norm"),
            head_norm("k_norm"),
            *linear({"self_attn.o_proj": hidden}, queries),
            take("post_attention_layernorm", hidden),
            *linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden),
            *linear({"mlp.down_proj": hidden}, inner),
        )


def _require_one_rotation(reader: Config) -> None:
    """Raises InvalidArgument for LongRoPE with other factors for short contexts: stored keys have only one rotation."""
    short, long = (reader.rope_parameters().get(key) for key in ("short_factor", "long_factor"))
    if short != long:
        raise InvalidArgument(f"config.rope_scaling.short_factor = {short!r}: {long!r}, the long_factor")


def _embedding_and_head(checkpoint: Checkpoint, vocab: int, hidden: int, *, tied: bool) -> tuple[Float32, Float32]:
    """The embedding [vocab, hidden] and the head [hidden, vocab].

    A tied matrix may be stored under either name. Matrices stored under both names are not tied, whatever the config says:
    transformers, `tie_weights`.
    """
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    stored = [name for name in names if name in checkpoint] if tied else names
    matrices = [checkpoint.take(name, vocab, hidden) for name in stored or names]
    return matrices[0], np.ascontiguousarray(matrices[-1].T)


def _flag(config: dict[str, Any], key: str, *, default: bool = False) -> bool:
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise InvalidArgument(f"config.{key} = {value!r}: true or false")
    return default if value is None else value


def _biased(config: dict[str, Any]) -> frozenset[str]:
    """The projections that have a bias. q, k and v go together, and so do gate and up."""
    kind = config["model_type"]
    attention = kind in ATTENTION_BIAS and _flag(config, "attention_bias")
    names = [f"self_attn.{part}_proj" for part in "qkv" if attention or kind == "qwen2"]
    names += ["self_attn.o_proj"] if attention else []
    if kind in MLP_BIAS and _flag(config, "mlp_bias"):
        names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    return frozenset(names)


def _ends(path: Path) -> dict[str, Any]:
    """The end tokens of a generation_config.json, if it exists and has any: they take precedence over those of the config."""
    ends = read_config(path).get("eos_token_id") if path.exists() else None
    return {} if ends is None else {"eos_token_id": ends}


def _end_tokens(config: dict[str, Any]) -> frozenset[int]:
    """eos_token_id: absent, a token or a list of them."""
    value = config.get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in tokens):
        raise InvalidArgument(f"config.eos_token_id = {value!r}: a token, or a list of tokens")
    return frozenset(tokens)


def _query_log_scale(config: dict[str, Any]) -> QueryLogScale | None:
    entry = config.get("pagoda_query_log_scale")
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise InvalidArgument(f"config.pagoda_query_log_scale = {entry!r}: an object with floor and coefficient")
    for key in ("floor", "coefficient"):
        check_factor(f"config.pagoda_query_log_scale.{key}", entry.get(key, math.nan))
    return QueryLogScale(entry["floor"], entry["coefficient"])


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    y = x @ weight
    if bias is not None:
        y += bias
    return y


def _rotate(rows: Array, cos: Array, sin: Array) -> None:
    """Rotates pairs (i, i + pairs) of [tokens, heads, head_dim] in place."""
    pairs = cos.shape[2]
    low, high = rows[..., :pairs], rows[..., pairs:]
    turned = low * sin
    low *= cos
    low -= high * sin
    high *= cos
    high += turned
