"""Train a small byte-level language model in Hugging Face SmolLM3 format, on a CPU, with JAX.

Windowed layers use RoPE; the few global layers use no positions at all, so that the model can be
read far beyond the length it was trained at. Tokens are bytes (0..255); there is no tokenizer.

    pip install jax safetensors
    python tools/prepare_text.py --out corpus
    python tools/train_byte_lm.py --text corpus --state state --export model --minutes 80
    python tools/train_byte_lm.py --text corpus --state state --export model --minutes 120 --resume

The learning rate warms up, stays flat, then falls to zero along a half cosine over the last part
of the run. How far the run is, is either step/--steps, or elapsed/--minutes (the time spent is
saved with the state, so a stopped and resumed run keeps its place). Batches depend on the seed and
the step alone. `state/latest.npz` is the whole training state; `state/stable.npz` is the last state
before the rate began to fall: to train longer, copy it over latest.npz and use --resume with a
larger --minutes or --steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

Params = dict[str, jax.Array]

# Big arrays come and go at every step: keep glibc from returning their memory to the system and
# from filling it with fresh 4 KiB pages each time (this more than doubles the speed).
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "1000000000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

DECAYED = ("_proj.weight",)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the model; `global_layers` see everything and have no positions."""

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    global_layers: tuple[int, ...] = (3,)
    window: int = 256
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def to_hugging_face(self) -> dict[str, Any]:
        is_global = [layer in self.global_layers for layer in range(self.num_layers)]
        return {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "pagoda_tokenizer": "bytes",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "no_rope_layers": [0 if g else 1 for g in is_global],
            "layer_types": ["full_attention" if g else "sliding_attention" for g in is_global],
            "use_sliding_window": True,
            "sliding_window": self.window,
            "max_position_embeddings": 1048576,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "use_cache": True,
            "torch_dtype": "float16",
        }


@dataclasses.dataclass(frozen=True)
class Stage:
    """From `start` (a fraction of the run) on, sequence lengths are drawn with these weights."""

    start: float
    weights: dict[int, float]


STAGES = (
    Stage(0.0, {1024: 0.7, 2048: 0.3}),
    Stage(0.15, {1024: 0.45, 2048: 0.45, 4096: 0.08, 8192: 0.02}),
    Stage(0.5, {1024: 0.35, 2048: 0.5, 4096: 0.1, 8192: 0.04, 16384: 0.01}),
    Stage(0.8, {1024: 0.33, 2048: 0.48, 4096: 0.12, 8192: 0.05, 16384: 0.015, 32768: 0.005}),
)


# ---------------------------------------------------------------- model


def init_params(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Weights under their Hugging Face names, each [out, in]."""
    rng = np.random.default_rng(seed)
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size

    def normal(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        scale = gain / math.sqrt(columns)
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    out_gain = 1.0 / math.sqrt(2 * config.num_layers)
    params = {
        "model.embed_tokens.weight": normal(config.vocab_size, hidden, 0.8),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(config.num_layers):
        params |= {
            f"model.layers.{layer}.{name}": value
            for name, value in {
                "input_layernorm.weight": np.ones(hidden, np.float32),
                "self_attn.q_proj.weight": normal(q_size, hidden),
                "self_attn.k_proj.weight": normal(kv_size, hidden),
                "self_attn.v_proj.weight": normal(kv_size, hidden),
                "self_attn.o_proj.weight": normal(hidden, q_size, out_gain),
                "post_attention_layernorm.weight": np.ones(hidden, np.float32),
                "mlp.gate_proj.weight": normal(inner, hidden),
                "mlp.up_proj.weight": normal(inner, hidden),
                "mlp.down_proj.weight": normal(hidden, inner, out_gain),
            }.items()
        }
    return params


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope_table(length: int, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    half = config.head_dim // 2
    inv_freq = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.arange(length)[:, None] * inv_freq[None, :]
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def apply_rope(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [batch, length, heads, head_dim] in the split-halves convention."""
    cos, sin = (t[None, :, None, :] for t in table)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def weigh(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention over the last-but-one axis of k and v, for already scaled q.

    The row sum comes out of the same product as the output: v gets a column of ones.
    """
    scores = jnp.where(mask, jnp.einsum("...qd,...kd->...qk", q, k), -1e30)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    ones = jnp.ones((*v.shape[:-1], 1), v.dtype)
    values = jnp.concatenate((v, ones), axis=-1)
    out = jnp.einsum("...qk,...kd->...qd", jnp.exp(scores - top), values)
    return out[..., :-1] / out[..., -1:]


def window_attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> jax.Array:
    """Each query sees itself and the window - 1 tokens before it; cost is linear in length.

    q is [batch, kv_heads, group, length, head_dim], k and v [batch, kv_heads, length, head_dim].
    Blocks of half a window each see their own block and the two before it.
    """
    batch, kv_heads, group, length, dim = q.shape
    block = window // 2
    count = length // block
    qb = q.reshape(batch, kv_heads, group, count, block, dim).transpose(0, 1, 3, 2, 4, 5)
    qb = qb.reshape(batch, kv_heads, count, group * block, dim)

    def neighbours(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, 0), (2 * block, 0), (0, 0)))
        padded = padded.reshape(batch, kv_heads, count + 2, block, dim)
        return jnp.concatenate([padded[:, :, i : i + count] for i in range(3)], axis=3)

    query = (jnp.arange(group * block) % block)[None, :, None]
    key = jnp.arange(3 * block)[None, None, :] - 2 * block
    first = jnp.arange(count)[:, None, None] * block
    mask = (query - key >= 0) & (query - key < window) & (first + key >= 0)
    out = weigh(qb, neighbours(k), neighbours(v), mask)
    out = out.reshape(batch, kv_heads, count, group, block, dim).transpose(0, 1, 3, 2, 4, 5)
    return out.reshape(batch, kv_heads, group, length, dim)


def global_attention(q: jax.Array, k: jax.Array, v: jax.Array, chunk: int = 256) -> jax.Array:
    """Causal attention over everything, in chunks of queries.

    The length is cut into parts with as many keys as they need. Short sequences keep their scores
    for the backward pass; long ones go chunk by chunk and compute them again.
    """
    batch, kv_heads, group, length, dim = q.shape
    chunk = min(length, chunk)
    long = length > 2048
    part = length // 8 if long else chunk

    def attend(qc: jax.Array, start: jax.Array | int, kc: jax.Array, vc: jax.Array) -> jax.Array:
        position = start + jnp.arange(group * chunk) % chunk
        mask = jnp.arange(kc.shape[2])[None, :] <= position[:, None]
        out = weigh(qc.reshape(batch, kv_heads, group * chunk, dim), kc, vc, mask)
        return out.reshape(batch, kv_heads, group, chunk, dim)

    pieces = []
    for start in range(0, length, part):
        qp = q[:, :, :, start : start + part]
        kp, vp = k[:, :, : start + part], v[:, :, : start + part]
        if not long:
            pieces.append(attend(qp, start, kp, vp))
            continue
        chunks = qp.reshape(batch, kv_heads, group, part // chunk, chunk, dim)
        starts = start + chunk * jnp.arange(part // chunk)
        body = jax.checkpoint(lambda item, kp=kp, vp=vp: attend(item[0], item[1], kp, vp))
        out = jax.lax.map(body, (jnp.moveaxis(chunks, 3, 0), starts))
        pieces.append(jnp.moveaxis(out, 0, 3).reshape(batch, kv_heads, group, part, dim))
    return jnp.concatenate(pieces, axis=3)


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bits(key, x.shape, jnp.uint8) >= round(rate * 256)
    return jnp.where(keep, x * (256 / (256 - round(rate * 256))), 0.0)


def forward(
    params: Params,
    tokens: jax.Array,
    config: ModelConfig,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Logits [batch, length, vocab] of tokens [batch, length]."""
    batch, length = tokens.shape
    group = config.num_heads // config.num_kv_heads
    table = rope_table(length, config)
    keys = [None] * (2 * config.num_layers) if key is None else jax.random.split(key, 2 * config.num_layers)
    x = params["model.embed_tokens.weight"][tokens.reshape(-1)]  # [batch * length, hidden]
    for layer in range(config.num_layers):
        w = {
            name: params[f"model.layers.{layer}.{name}.weight"].T
            for name in (
                "input_layernorm",
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "post_attention_layernorm",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            )
        }
        y = rms_norm(x, w["input_layernorm"], config.rms_norm_eps)
        heads = (batch, length, -1, config.head_dim)
        q = (y @ w["self_attn.q_proj"]).reshape(heads) * config.head_dim**-0.5
        k = (y @ w["self_attn.k_proj"]).reshape(heads)
        v = (y @ w["self_attn.v_proj"]).reshape(heads).transpose(0, 2, 1, 3)
        is_global = layer in config.global_layers
        if not is_global:
            q, k = apply_rope(q, table), apply_rope(k, table)
        k = k.transpose(0, 2, 1, 3)
        q = q.reshape(batch, length, config.num_kv_heads, group, config.head_dim)
        q = q.transpose(0, 2, 3, 1, 4)
        y = global_attention(q, k, v) if is_global else window_attention(q, k, v, config.window)
        y = y.transpose(0, 3, 1, 2, 4).reshape(batch * length, -1)
        x = x + drop(y @ w["self_attn.o_proj"], dropout, keys[2 * layer])
        y = rms_norm(x, w["post_attention_layernorm"], config.rms_norm_eps)
        y = jax.nn.silu(y @ w["mlp.gate_proj"]) * (y @ w["mlp.up_proj"])
        x = x + drop(y @ w["mlp.down_proj"], dropout, keys[2 * layer + 1])
    x = rms_norm(x, params["model.norm.weight"], config.rms_norm_eps)
    return (x @ params["model.embed_tokens.weight"].T).reshape(batch, length, -1)


def token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood, in nats, of every target."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


# ---------------------------------------------------------------- training


@partial(jax.jit, static_argnames=("config", "dropout", "decay", "clip"), donate_argnums=(0, 1, 2))
def train_step(
    params: Params,
    mean: Params,
    square: Params,
    batch: jax.Array,
    step: jax.Array,
    rate: jax.Array,
    key: jax.Array,
    *,
    config: ModelConfig,
    dropout: float,
    decay: float,
    clip: float,
) -> tuple[Params, Params, Params, jax.Array, jax.Array]:
    """One AdamW step on batch [sequences, length + 1]; also returns loss and gradient norm."""

    def loss_of(p: Params) -> jax.Array:
        logits = forward(p, batch[:, :-1], config, dropout, key)
        return jnp.mean(token_losses(logits, batch[:, 1:]))

    loss, grads = jax.value_and_grad(loss_of)(params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    scale = jnp.minimum(1.0, clip / (norm + 1e-6))
    usable = jnp.isfinite(norm)  # a step with a broken gradient changes nothing
    beta1, beta2 = 0.9, 0.95
    count = step.astype(jnp.float32) + 1.0
    for name, raw in grads.items():
        grad = jnp.where(usable, raw * scale, 0.0)
        mean[name] = beta1 * mean[name] + (1 - beta1) * grad
        square[name] = beta2 * square[name] + (1 - beta2) * grad * grad
        update = (mean[name] / (1 - beta1**count)) / (jnp.sqrt(square[name] / (1 - beta2**count)) + 1e-8)
        if name.endswith(DECAYED):
            update = update + decay * params[name]
        params[name] = params[name] - jnp.where(usable, rate, 0.0) * update
    return params, mean, square, loss, norm


def learning_rate(step: int, progress: float, peak: float, warmup: int, cooldown: float) -> float:
    """Linear warm-up over `warmup` steps, flat, then a half cosine to zero at the very end."""
    rate = peak * min(1.0, (step + 1) / warmup)
    if progress > 1.0 - cooldown:
        done = min(1.0, (progress - (1.0 - cooldown)) / cooldown)
        rate *= 0.5 * (1.0 + math.cos(math.pi * done))
    return rate


def draw_batch(text: np.ndarray, step: int, progress: float, tokens: int, seed: int) -> np.ndarray:
    """The batch of a step: sequences of one length, drawn anywhere in the text."""
    rng = np.random.default_rng((seed, step))
    stage = [s for s in STAGES if progress >= s.start][-1]
    lengths = list(stage.weights)
    length = lengths[int(rng.choice(len(lengths), p=list(stage.weights.values())))]
    starts = rng.integers(0, len(text) - length - 1, max(1, tokens // length))
    return np.stack([text[s : s + length + 1] for s in starts]).astype(np.int32)


@partial(jax.jit, static_argnames=("config",))
def bits_of(params: Params, batch: jax.Array, config: ModelConfig) -> jax.Array:
    logits = forward(params, batch[:, :-1], config)
    return token_losses(logits, batch[:, 1:]) / math.log(2)


def dev_bits(params: Params, text: np.ndarray, config: ModelConfig, length: int = 2048) -> float:
    """Bits per byte of a text cut into pieces, the second half of each scored."""
    starts = range(0, len(text) - length - 1, length)
    batch = np.stack([text[s : s + length + 1] for s in starts]).astype(np.int32)
    bits = [bits_of(params, batch[i : i + 1], config)[:, length // 2 :] for i in range(len(batch))]
    return float(np.mean(np.concatenate(bits)))


# ---------------------------------------------------------------- state and export


def save_state(path: Path, groups: dict[str, Params], scalars: dict[str, float]) -> None:
    """Writes the whole training state, atomically."""
    arrays = {f"{g}/{n}": np.asarray(a) for g, group in groups.items() for n, a in group.items()}
    arrays |= {f"scalar/{name}": np.asarray(value) for name, value in scalars.items()}
    partial_path = path.with_suffix(".partial")
    with partial_path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    partial_path.replace(path)


def load_state(path: Path) -> tuple[dict[str, Params], dict[str, float]]:
    groups: dict[str, Params] = {}
    scalars: dict[str, float] = {}
    with np.load(path) as data:
        for full in data.files:
            group, name = full.split("/", 1)
            if group == "scalar":
                scalars[name] = float(data[full])
            else:
                groups.setdefault(group, {})[name] = jnp.asarray(data[full])
    return groups, scalars


def export(folder: Path, params: Params, config: ModelConfig) -> int:
    """Writes config.json and model.safetensors (float16); returns the size of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hugging_face(), indent=2) + "\n")
    weights = {name: np.asarray(value).astype(np.float16) for name, value in params.items()}
    target = folder / "model.safetensors"
    save_file(weights, target, metadata={"format": "pt"})
    return target.stat().st_size


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder with train.txt, dev.txt")
    parser.add_argument("--state", type=Path, required=True, help="folder for the training state")
    parser.add_argument("--export", type=Path, required=True, help="folder for the finished model")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="length of the run in steps")
    length.add_argument("--minutes", type=float, help="length of the run in minutes")
    parser.add_argument("--resume", action="store_true", help="go on from state/latest.npz")
    parser.add_argument("--stop-after", type=int, help="stop (and save) after this many steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=4096,
        help="tokens in a step (a longer sequence is a step of its own)",
    )
    parser.add_argument("--peak-rate", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--cooldown", type=float, default=0.4, help="fraction of the run")
    parser.add_argument("--decay", type=float, default=0.1, help="AdamW weight decay")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--dropout", type=float, default=0.0, help="on both residual branches")
    parser.add_argument("--save-seconds", type=float, default=240.0)
    parser.add_argument("--log-seconds", type=float, default=30.0)
    default = ModelConfig()
    for field in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=getattr(default, field))
    parser.add_argument("--head-dim", type=int, default=default.head_dim)
    parser.add_argument("--window", type=int, default=default.window)
    parser.add_argument("--global-layers", type=int, nargs="+", default=default.global_layers)
    args = parser.parse_args()
    for name in ("steps", "minutes", "warmup"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f"--{name} {value}: above 0")
    return args


def main() -> None:
    args = parse_args()
    config = ModelConfig(
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_layers=args.num_layers,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        window=args.window,
        global_layers=tuple(args.global_layers),
    )
    text = np.frombuffer((args.text / "train.txt").read_bytes(), np.uint8)
    dev = np.frombuffer((args.text / "dev.txt").read_bytes(), np.uint8)
    args.state.mkdir(parents=True, exist_ok=True)
    latest, stable = args.state / "latest.npz", args.state / "stable.npz"

    if args.resume:
        groups, scalars = load_state(latest)
        params, mean, square = groups["params"], groups["mean"], groups["square"]
    else:
        params = {name: jnp.asarray(a) for name, a in init_params(config, args.seed).items()}
        mean = {name: jnp.zeros_like(a) for name, a in params.items()}
        square = {name: jnp.zeros_like(a) for name, a in params.items()}
        scalars = {"step": 0, "seconds": 0.0, "tokens": 0}
    step, seconds, tokens = int(scalars["step"]), scalars["seconds"], int(scalars["tokens"])
    size = sum(a.size for a in params.values())
    print(f"{size} parameters, {len(text)} bytes of text, starting at step {step}", flush=True)

    def save(path: Path) -> None:
        groups = {"params": params, "mean": mean, "square": square}
        save_state(path, groups, {"step": step, "seconds": seconds, "tokens": tokens})

    key = jax.random.key(args.seed, impl="unsafe_rbg")
    first_step = step
    began = logged = saved = time.monotonic()
    seconds_before, tokens_logged = seconds, tokens
    losses: list[jax.Array] = []
    cooling = False
    while True:
        seconds = seconds_before + time.monotonic() - began
        progress = step / args.steps if args.steps else seconds / (60 * args.minutes)
        finished = progress >= 1.0
        if finished or (args.stop_after and step - first_step >= args.stop_after):
            break
        if progress > 1.0 - args.cooldown and not cooling:
            cooling = True
            if step > first_step or not stable.exists():
                save(stable)
        batch = draw_batch(text, step, progress, args.batch_tokens, args.seed)
        params, mean, square, loss, norm = train_step(
            params,
            mean,
            square,
            jnp.asarray(batch),
            jnp.int32(step),
            jnp.float32(learning_rate(step, progress, args.peak_rate, args.warmup, args.cooldown)),
            jax.random.fold_in(key, step),
            config=config,
            dropout=args.dropout,
            decay=args.decay,
            clip=args.clip,
        )
        losses.append(loss)
        step += 1
        tokens += batch[:, 1:].size
        now = time.monotonic()
        if now - logged > args.log_seconds:
            bits = float(np.mean([float(x) for x in losses])) / math.log(2)
            now = time.monotonic()
            speed = (tokens - tokens_logged) / (now - logged)
            print(
                f"step {step} {progress:6.1%} train {bits:.4f} bits/byte, norm {float(norm):.2f}, "
                f"{tokens / 1e6:.2f}M tokens, {speed:.0f}/s",
                flush=True,
            )
            losses, logged, tokens_logged = [], now, tokens
        if now - saved > args.save_seconds:
            save(latest)
            bits = dev_bits(params, dev, config)
            print(f"step {step} dev {bits:.4f} bits/byte", flush=True)
            saved = time.monotonic()
            logged += saved - now

    save(latest)
    bits = dev_bits(params, dev, config)
    print(f"step {step}, {tokens} tokens, {seconds:.0f} s, dev {bits:.4f} bits/byte", flush=True)
    print(f"{args.export}: model.safetensors has {export(args.export, params, config)} bytes")


if __name__ == "__main__":
    if any(name not in os.environ for name in ALLOCATOR):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**ALLOCATOR, **os.environ})
    main()
