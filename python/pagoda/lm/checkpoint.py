"""Checkpoints as Hugging Face lays them out: model.safetensors, whole or in parts with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from pagoda.errors import InvalidArgument

Float32 = npt.NDArray[np.float32]


class Checkpoint:
    """The tensors of a folder, as float32."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, tuple[str, list[int], bytes]] = {}
        for path in _parts(folder):
            try:
                tensors = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
            except (OSError, safetensors.SafetensorError) as error:
                raise InvalidArgument(f"checkpoint = {str(path)!r}: a readable safetensors file ({error})") from error
            for name, tensor in tensors:
                self._tensors[name] = (tensor["dtype"], tensor["shape"], tensor["data"])

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Float32:
        """A tensor, read once. Raises InvalidArgument when it is missing, of another shape or an unknown type."""
        if name not in self._tensors:
            raise InvalidArgument(f"checkpoint: no tensor {name}; {list(shape)} was expected")
        dtype, found, data = self._tensors.pop(name)
        if tuple(found) != shape:
            raise InvalidArgument(f"checkpoint: {name} has shape {found}; {list(shape)} was expected")
        if dtype == "BF16":
            return bf16_to_f32(np.frombuffer(data, np.uint16)).reshape(shape)
        kinds: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
        if dtype not in kinds:
            raise InvalidArgument(f"checkpoint: {name} is {dtype}; one of BF16, {', '.join(kinds)}")
        return np.frombuffer(data, kinds[dtype]).reshape(shape).astype(np.float32)


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> Float32:
    """bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: Float32) -> npt.NDArray[np.uint16]:
    """Rounds to the nearest bfloat16, ties to even. NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _parts(folder: Path) -> list[Path]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        parts = sorted(folder / Path(name).name for name in names)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidArgument(
            f"model = {str(folder)!r}: model.safetensors, or parts with an index ({error})"
        ) from error
    return parts
