"""Checkpoints in the layout of Hugging Face: model.safetensors, or several files with an index."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from pagoda.checks import floats
from pagoda.errors import InvalidArgument
from pagoda.hf_config import read_text

Float32 = npt.NDArray[np.float32]


KINDS: dict[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: its file, type, shape, and the bytes [start, stop) of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> npt.NDArray[Any]:
        """The elements as stored, in one dimension. Raises InvalidArgument if the file has become shorter."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        if len(data) != self.stop - self.start:
            raise InvalidArgument(f"checkpoint = {str(self.path)!r}: {self.stop} bytes, as when it was opened")
        return np.frombuffer(data, KINDS[self.dtype])


class Checkpoint:
    """The tensors of a folder, as float32. Each is read only when it is taken, so a model is in memory only once."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, Stored] = {}
        for path in _parts(folder):
            for name, tensor in _header(path).items():
                if name in self._tensors:
                    raise InvalidArgument(
                        f"checkpoint = {str(path)!r}: {name} is in {self._tensors[name].path.name} too"
                    )
                self._tensors[name] = tensor

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Float32:
        """Reads a tensor and removes it from the checkpoint.

        Raises InvalidArgument if it is missing, of another shape or an unknown type, or beyond float32.
        """
        if name not in self._tensors:
            raise InvalidArgument(f"checkpoint: no tensor {name}; {list(shape)} was expected")
        tensor = self._tensors.pop(name)
        if tensor.shape != shape:
            raise InvalidArgument(f"checkpoint: {name} has shape {list(tensor.shape)}; {list(shape)} was expected")
        if tensor.dtype not in KINDS:
            raise InvalidArgument(f"checkpoint: {name} is {tensor.dtype}; one of {', '.join(KINDS)}")
        values = tensor.read()
        rows = bf16_to_f32(values) if tensor.dtype == "BF16" else floats(f"checkpoint: {name}", values)
        return rows.reshape(shape)

    def rest(self, *prefixes: str) -> list[str]:
        """Names of tensors that begin with one of the prefixes and have not been taken."""
        return sorted(name for name in self._tensors if name.startswith(prefixes))


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> Float32:
    """Converts bfloat16, which is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _header(path: Path) -> dict[str, Stored]:
    """The tensors of one file: 8 bytes of length, a JSON header, the data (https://github.com/huggingface/safetensors)."""
    try:
        # Before the library, whose older versions panic at a name that no file can have.
        with path.open("rb") as file:
            # It checks the header: its length, its types, and that tensors fill the file without gaps or overlaps.
            with safetensors.safe_open(path, framework="numpy"):
                pass
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InvalidArgument(f"checkpoint = {str(path)!r}: a readable safetensors file ({error})") from error
    header.pop("__metadata__", None)
    return {
        name: Stored(path, entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"]))
        for name, entry in header.items()
    }


def _parts(folder: Path) -> list[Path]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    try:
        names = sorted(set(json.loads(read_text(index))["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidArgument(
            f"model = {str(folder)!r}: model.safetensors, or parts with an index ({error})"
        ) from error
    if outside:
        raise InvalidArgument(f"model = {str(folder)!r}: parts in the folder itself, not {outside[0]!r}")
    return [folder / name for name in names]
