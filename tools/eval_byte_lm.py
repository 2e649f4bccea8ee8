"""Read, measure and sample a byte-level SmolLM3 checkpoint, with nothing but NumPy.

A plain float32 forward pass over a key/value cache, written apart from the trainer (its own
attention, its own softmax), so that the two check each other.

    python tools/eval_byte_lm.py MODEL position   bits per byte by position, over 131072 bytes
    python tools/eval_byte_lm.py MODEL compare    the same bytes after a short and a long context
    python tools/eval_byte_lm.py MODEL sample     text that goes on after a prompt of 131072 bytes

MODEL is the folder with config.json, model.safetensors and held_out.txt. Only numpy is needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def read_safetensors(path: Path) -> dict[str, F32]:
    """All tensors of a safetensors file, as float32."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    tensors: dict[str, F32] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = (8 + size + offset for offset in entry["data_offsets"])
        kind = {"F16": "<f2", "F32": "<f4", "BF16": "<u2"}[entry["dtype"]]
        data = np.frombuffer(raw[first:last], kind).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            data = (data.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = data.astype(np.float32)
    return tensors


class ByteModel:
    """A SmolLM3 model and one sequence's cache; `feed` reads bytes and returns their logits."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights = read_safetensors(folder / "model.safetensors")
        if self.config.get("pagoda_tokenizer") != "bytes":
            raise ValueError("not a byte-level model")
        c = self.config
        self.num_layers: int = c["num_hidden_layers"]
        shape = (c["num_key_value_heads"], capacity, c["head_dim"])
        self.keys = [np.zeros(shape, np.float32) for _ in range(self.num_layers)]
        self.values = [np.zeros(shape, np.float32) for _ in range(self.num_layers)]
        self.length = 0

    def rope(self, x: F32, start: int) -> F32:
        """Rotates x [heads, count, head_dim] for the positions from `start` on."""
        half = x.shape[-1] // 2
        inv_freq = self.config["rope_theta"] ** (-np.arange(half) / half)
        angles = (start + np.arange(x.shape[1]))[:, None] * inv_freq
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)

    def norm(self, x: F32, name: str) -> F32:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        y: F32 = x / np.sqrt(mean + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]
        return y

    def attention(self, layer: int, x: F32) -> F32:
        c, start, count = self.config, self.length, len(x)
        end = start + count
        prefix = f"model.layers.{layer}.self_attn."

        def project(name: str) -> F32:
            y = x @ self.weights[f"{prefix}{name}_proj.weight"].T
            return y.reshape(count, -1, c["head_dim"]).transpose(1, 0, 2)

        q, k, v = project("q"), project("k"), project("v")
        if c["no_rope_layers"][layer]:  # 1: this layer rotates; 0: it has no positions
            q, k = self.rope(q, start), self.rope(k, start)
        self.keys[layer][:, start:end] = k
        self.values[layer][:, start:end] = v
        windowed = c["use_sliding_window"] and c["layer_types"][layer] == "sliding_attention"
        window = c["sliding_window"] if windowed else end
        low = max(0, start - window + 1)
        future = np.triu(np.ones((count, count), bool), 1)
        if windowed:
            gone = np.arange(start, end)[:, None] - np.arange(low, end)[None, :] >= window
        group = len(q) // len(k)
        out = np.empty_like(q)
        for head in range(len(q)):
            seen_keys = self.keys[layer][head // group, low:end]
            scores = (q[head] * np.float32(c["head_dim"] ** -0.5)) @ seen_keys.T
            scores[:, start - low :][future] = -np.inf
            if windowed:
                scores[gone] = -np.inf
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            out[head] = scores @ self.values[layer][head // group, low:end]
            out[head] /= scores.sum(axis=-1, keepdims=True)
        return out.transpose(1, 0, 2).reshape(count, -1) @ self.weights[f"{prefix}o_proj.weight"].T

    def feed(self, tokens: Bytes) -> F32:
        """Appends tokens to the sequence; returns logits [count, vocab]."""
        w = self.weights
        x = w["model.embed_tokens.weight"][tokens]
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            x = x + self.attention(layer, self.norm(x, f"{prefix}input_layernorm"))
            y = self.norm(x, f"{prefix}post_attention_layernorm")
            gate = y @ w[f"{prefix}mlp.gate_proj.weight"].T
            gate /= 1 + np.exp(-gate)
            y = gate * (y @ w[f"{prefix}mlp.up_proj.weight"].T)
            x = x + y @ w[f"{prefix}mlp.down_proj.weight"].T
        self.length += len(tokens)
        logits: F32 = self.norm(x, "model.norm") @ w["model.embed_tokens.weight"].T
        return logits


def score(model: ByteModel, text: Bytes, skip: int = 0, chunk: int = 512) -> npt.NDArray[Any]:
    """Bits of each byte of text after the first; the first `skip` bytes are read, not scored."""
    bits = np.zeros(len(text) - 1)
    for start in range(0, len(text) - 1, chunk):
        piece = text[start : min(start + chunk, len(text) - 1)]
        logits = model.feed(piece).astype(np.float64)
        end = start + len(piece)
        if end <= skip:
            continue
        logits -= logits.max(axis=1, keepdims=True)
        wanted = logits[np.arange(len(piece)), text[start + 1 : end + 1]]
        bits[start:end] = (np.log(np.exp(logits).sum(axis=1)) - wanted) / math.log(2)
    return bits


def by_position(folder: Path, text: Bytes, context: int) -> None:
    """Reads `context` bytes in one go and prints bits per byte by position."""
    began = time.monotonic()
    bits = score(ByteModel(folder, context), text[: context + 1])
    edges = [0, *(e for e in (512, 2048, 8192, 16384, 32768, 65536, 98304) if e < context), context]
    for first, last in itertools.pairwise(edges):
        print(f"{first:7d} to {last:7d}: {bits[first:last].mean():.4f} bits per byte")
    print(f"all {context}: {bits.mean():.4f} bits per byte, {time.monotonic() - began:.0f} s")


def compare(folder: Path, text: Bytes, context: int, short: int, tail: int) -> None:
    """Scores the last `tail` bytes of a context twice: with all of it, and in short pieces.

    Short: every piece of short / 4 bytes is scored after the bytes before it, so that its bytes
    see between 3/4 of `short` and `short` bytes.
    """
    text = text[: context + 1]
    long_bits = score(ByteModel(folder, context), text, skip=context - tail)[context - tail :]
    stride = short // 4
    seen = short - stride
    pieces = []
    for start in range(context - tail, context, stride):
        piece = text[start - seen : start + stride + 1]
        pieces.append(score(ByteModel(folder, short), piece)[seen:])
    short_bits = np.concatenate(pieces)
    ratio = long_bits.mean() / short_bits.mean() - 1
    print(f"bytes {context - tail} to {context} of the text, {len(short_bits)} bytes scored")
    print(f"  context {seen} to {short}: {short_bits.mean():.4f} bits per byte")
    print(f"  context {context - tail} to {context}: {long_bits.mean():.4f} bits per byte")
    print(f"  long against short: {ratio:+.2%}")


def sample(folder: Path, prompt: Bytes, count: int, temperature: float, seed: int) -> bytes:
    """Continues a prompt; temperature 0 takes the likeliest byte every time."""
    model = ByteModel(folder, len(prompt) + count)
    rng = np.random.default_rng(seed)
    for start in range(0, len(prompt), 1024):
        logits = model.feed(prompt[start : start + 1024])
    out = bytearray()
    for _ in range(count):
        last = logits[-1].astype(np.float64)
        if temperature == 0:
            token = int(last.argmax())
        else:
            weights = np.exp((last - last.max()) / temperature)
            token = int(rng.choice(len(weights), p=weights / weights.sum()))
        out.append(token)
        logits = model.feed(np.array([token], np.uint8))
    return bytes(out)


def latin_1(text: str) -> Bytes:
    """The bytes of a prompt, one for each character."""
    return np.frombuffer(text.encode("latin-1"), np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("what", choices=("position", "compare", "sample"))
    parser.add_argument("--text", type=Path, help="default: held_out.txt of the model")
    parser.add_argument("--offset", type=int, default=0, help="where in the text to start")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--short", type=int, default=2048, help="compare: the short context")
    parser.add_argument("--tail", type=int, default=16384, help="compare: how many bytes to score")
    parser.add_argument("--prompt", type=latin_1, help="sample: a prompt in Latin-1, instead of a part of the text")
    parser.add_argument("--prompt-bytes", type=int, default=131072)
    parser.add_argument("--count", type=int, default=600, help="sample: bytes to write")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    path = args.text or args.model / "held_out.txt"
    text = np.frombuffer(path.read_bytes(), np.uint8)[args.offset :]
    seen = args.short - args.short // 4
    prompt = text[: args.prompt_bytes] if args.prompt is None else args.prompt
    if args.what != "sample" and not 0 < args.context < len(text):
        parser.error(f"--context {args.context}: above 0, and below the {len(text)} bytes from --offset on")
    if args.what == "compare" and not (args.short >= 4 and 0 < args.tail <= args.context - seen):
        limit = f"at least 4, and above 0 and at most --context less 3/4 of --short, {args.context - seen}"
        parser.error(f"--short {args.short}, --tail {args.tail}: {limit}")
    if args.what == "sample" and not len(prompt):
        parser.error("--prompt, --prompt-bytes: a byte at least")
    if args.what == "position":
        by_position(args.model, text, args.context)
    elif args.what == "compare":
        compare(args.model, text, args.context, args.short, args.tail)
    else:
        out = sample(args.model, prompt, args.count, args.temperature, args.seed)
        print(f"[... {bytes(prompt[-200:]).decode('latin-1')}]{out.decode('latin-1')}")


if __name__ == "__main__":
    main()
