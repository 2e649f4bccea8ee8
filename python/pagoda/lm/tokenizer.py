"""Text to tokens and back: bytes, or whatever a tokenizer.json says."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pagoda.errors import BackendUnavailable, InvalidArgument

Ids = npt.NDArray[np.int64]


class Decoder(Protocol):
    """Turns tokens into text as they come; a character is held back until it is whole."""

    def feed(self, token: int) -> str:
        """The text that the token completes."""
        ...


class Tokenizer(Protocol):
    """What a language model needs of a tokenizer."""

    def encode(self, text: str) -> Ids:
        """The tokens of a text, with the mark of a beginning if the model has one."""
        ...

    def decoder(self) -> Decoder:
        """A fresh decoder."""
        ...


class ByteTokenizer:
    """A token is a byte of UTF-8; one more token may mark a beginning."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos = bos

    def encode(self, text: str) -> Ids:
        """The bytes of a text."""
        ids = np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int64)
        return ids if self.bos is None else np.concatenate([np.array([self.bos], np.int64), ids])

    def decoder(self) -> Decoder:
        """A fresh decoder; bytes that are no UTF-8 become U+FFFD."""
        return _ByteDecoder()


class _ByteDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._utf8.decode(bytes([token])) if token < 256 else ""


class FileTokenizer:
    """A tokenizer.json, by the `tokenizers` package."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise BackendUnavailable(f"tokenizer = {path.name!r}: pip install 'pagoda-kv[tokenizers]'") from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise InvalidArgument(f"tokenizer = {str(path)!r}: a readable tokenizer.json ({error})") from error

    def encode(self, text: str) -> Ids:
        """The tokens of a text."""
        return np.array(self._tokenizer.encode(text).ids, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        text: str = self._tokenizer.decode(list(ids))
        return text

    def decoder(self) -> Decoder:
        """A fresh decoder."""
        return _FileDecoder(self)


class _FileDecoder:
    """Decodes a short tail again and again: what a token adds depends on its neighbours."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tail: list[int] = []
        self._told = ""

    def feed(self, token: int) -> str:
        self._tail.append(token)
        text = self._tokenizer.decode(self._tail)
        if text.endswith("\ufffd"):
            return ""
        new, self._told = text[len(self._told) :], text
        if len(self._tail) > 16:
            # The last token stays as context for the next one.
            self._tail = self._tail[-1:]
            self._told = self._tokenizer.decode(self._tail)
        return new


def load_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a model's folder: `"pagoda_tokenizer": "bytes"` in its config, or its tokenizer.json."""
    if config.get("pagoda_tokenizer") == "bytes":
        bos = config.get("bos_token_id")
        return ByteTokenizer(bos if isinstance(bos, int) and bos >= 256 else None)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise InvalidArgument(
            f'model = {str(folder)!r}: a tokenizer.json, or "pagoda_tokenizer": "bytes" in config.json'
        )
    return FileTokenizer(path)
