"""Text to tokens and back: by bytes, or by a tokenizer.json."""

from __future__ import annotations

import codecs
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pagoda.checks import natural
from pagoda.errors import BackendUnavailable, InvalidArgument

Ids = npt.NDArray[np.int64]


PENDING_MAX = 64
"""The most tokens that the decoder of a tokenizer.json decodes again with each token while they end inside a character."""


class Decoder(Protocol):
    """Turns tokens into text as they come; a character is held back until it is whole."""

    def feed(self, token: int) -> str:
        """The text that the token completes."""
        ...

    def finish(self) -> str:
        """The text that was held back, as U+FFFD, since no more tokens will complete it."""
        ...


class Tokenizer(Protocol):
    """What a language model needs of a tokenizer."""

    def encode(self, text: str) -> Ids:
        """The tokens of a text, with a beginning-of-text token if the model has one."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens."""
        ...

    def decoder(self) -> Decoder:
        """A fresh decoder."""
        ...


class ByteTokenizer:
    """Each token is a byte of UTF-8. bos: one more token, from 256 on, that marks the beginning. Raises InvalidArgument."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos = None if bos is None else natural("bos_token_id", bos, 256)

    def encode(self, text: str) -> Ids:
        """The bytes of a text; "\\udc80" to "\\udcff" stand for invalid UTF-8 bytes, as `surrogateescape` decodes them.

        Raises InvalidArgument for other surrogates.
        """
        ids = np.frombuffer(_utf8(text, "surrogateescape"), np.uint8).astype(np.int64)
        return ids if self.bos is None else np.concatenate([np.array([self.bos], np.int64), ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; invalid UTF-8 becomes U+FFFD. Raises InvalidArgument for anything that is no token."""
        decoder = self.decoder()
        return "".join(decoder.feed(natural("ids", token)) for token in ids) + decoder.finish()

    def decoder(self) -> Decoder:
        """A new decoder; invalid UTF-8 becomes U+FFFD."""
        return _ByteDecoder()


class _ByteDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._utf8.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class FileTokenizer:
    """A tokenizer.json, by the `tokenizers` package. Texts are neither truncated nor padded, even if the file says so."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise BackendUnavailable(f"tokenizer = {path.name!r}: pip install 'pagoda-kv[tokenizers]'") from error
        self._path = path
        self._tokenizer = self._ask("a readable tokenizer.json", tokenizers.Tokenizer.from_file, str(path))
        # The file may have the settings of its training. transformers leaves both to the caller.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> Ids:
        """The tokens of a text. Raises InvalidArgument for text that the file has no tokens for, such as surrogates."""
        _utf8(text, "strict")
        return np.array(self._ask("one with tokens for the text", self._tokenizer.encode, text).ids, np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens. Raises InvalidArgument for tokens that the file cannot decode."""
        text: str = self._ask("one with text for the tokens", self._tokenizer.decode, list(ids))
        return text

    def _ask(self, limit: str, call: Callable[..., Any], given: object) -> Any:
        """Calls the library and returns the result. Raises InvalidArgument, with `limit`, for any error."""
        try:
            return call(given)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # An inconsistent file makes the library panic, and a panic is no `Exception`.
            raise InvalidArgument(f"tokenizer = {str(self._path)!r}: {limit} ({error})") from error

    def decoder(self) -> Decoder:
        """A fresh decoder."""
        return _FileDecoder(self)


class _FileDecoder:
    """Decodes the last tokens again with each new one, because the text of a token depends on those before it.

    `_tokens` begins, and its first `_context` tokens end, where a character was complete, so that none is cut. A U+FFFD that
    the model really writes looks like an incomplete character, and may show late or more than once.
    """

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0
        self._told = ""

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        pending = len(self._tokens) - self._context
        if text.endswith("\ufffd") and pending < PENDING_MAX:
            # The text before the last character is final, unless incomplete bytes change what was already returned.
            settled = _settled(text)
            return self._tell(settled) if settled.startswith(self._told) else ""
        new = self._tell(text)
        self._tokens = self._tokens[self._context :]
        self._context = len(self._tokens)
        self._told = self._tokenizer.decode(self._tokens)
        return new

    def finish(self) -> str:
        return self._tell(self._tokenizer.decode(self._tokens))

    def _tell(self, text: str) -> str:
        # Bytes that were returned as U+FFFD may have become a character since.
        told, self._told = self._told, text
        return text[[*map(operator.eq, told, text), False].index(False) :]


def _settled(text: str) -> str:
    """A text without the end that may still change: up to 3 of a character's 4 bytes, each of them a U+FFFD."""
    for _ in range(3):
        text = text.removesuffix("\ufffd")
    return text


def _utf8(text: str, surrogates: str) -> bytes:
    try:
        return text.encode("utf-8", surrogates)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"text: {text[error.start]!a} at {error.start} is no character") from error


def load_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a model's folder: bytes if its config has `"pagoda_tokenizer": "bytes"`, else its tokenizer.json."""
    if config.get("pagoda_tokenizer") == "bytes":
        bos = config.get("bos_token_id")
        return ByteTokenizer(bos if isinstance(bos, int) and bos >= 256 else None)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise InvalidArgument(
            f'model = {str(folder)!r}: a tokenizer.json, or "pagoda_tokenizer": "bytes" in config.json'
        )
    return FileTokenizer(path)
