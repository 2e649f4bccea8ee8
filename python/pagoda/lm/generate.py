"""The decoding loop: reads a prompt in chunks, then writes one token at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda._core import TOKENS_MAX
from pagoda.checks import integers, natural
from pagoda.errors import InvalidArgument
from pagoda.lm.arrays import to_host
from pagoda.lm.model import ForwardCache, LanguageModel, S
from pagoda.lm.sampling import Sampler
from pagoda.lm.tokenizer import Decoder, Tokenizer

CHUNK = 512
"""How many tokens of a prompt a step reads."""

CUT = 4
"""The most tokens that one character may span."""

BEFORE = 16
"""How many tokens at the end of the prompt the first text written may depend on."""


@dataclass(frozen=True)
class Read:
    """Part of the prompt is in the cache."""

    tokens: int
    total: int
    step: Any
    """The step that read it; its `report` is valid until the loop goes on."""


@dataclass(frozen=True)
class Written:
    """A token was chosen. It enters the cache with the next step."""

    token: int
    text: str
    logits: npt.NDArray[np.float32]
    """float32 [vocab], on the host: the logits that it was chosen from."""
    step: Any
    """The step that computed these logits, as in `Read`; for the first token, the step that read the end of the prompt."""


def generate(
    model: LanguageModel,
    cache: ForwardCache[S],
    sequence: S,
    prompt: npt.NDArray[np.int64],
    new_tokens: int,
    sampler: Sampler,
    *,
    chunk: int = CHUNK,
    stop: Collection[int] | None = None,
) -> Iterator[Read | Written]:
    """Appends `prompt` to a sequence of a `pagoda.Cache` or `ContiguousCache`, then writes at most `new_tokens` tokens.

    The sequence may already hold tokens. It belongs to the caller, and after an error it holds what was committed. Writing
    ends with a token of `stop`, by default the model's `end_tokens`; `stop=()` never ends early. Yields events as they
    happen, and may be abandoned at any time. Raises InvalidArgument for an empty prompt, unknown tokens and counts out of
    range.
    """
    prompt = integers("prompt", prompt, "a list of tokens")
    if not len(prompt) or not 0 <= prompt.min() <= prompt.max() < model.vocab_size:
        shown = f"{prompt.min()} to {prompt.max()}" if len(prompt) else "0 tokens"
        raise InvalidArgument(f"prompt = {shown}: at least one token, all from 0 to {model.vocab_size - 1}")
    chunk = natural("chunk", chunk, 1, TOKENS_MAX)
    new_tokens = natural("new_tokens", new_tokens, 0, TOKENS_MAX)
    if not isinstance(sampler, Sampler):
        raise InvalidArgument(f"sampler = {sampler!r}: a Sampler")
    ends = model.end_tokens
    if stop is not None:
        ends = frozenset(integers("stop", list(stop) if isinstance(stop, Set) else stop, "a list of tokens").tolist())
    decoder = _decoder_after(model.tokenizer, prompt[-BEFORE:].tolist())

    def read(tokens: npt.NDArray[np.int64]) -> tuple[Any, npt.NDArray[np.float32]]:
        with model.device:
            with cache.step([sequence], [len(tokens)]) as step:
                logits = model.forward(tokens, step)
            return step, to_host(logits[0])

    done = 0
    while done < len(prompt):
        part = prompt[done : done + chunk]
        step, logits = read(part)
        done += len(part)
        yield Read(done, len(prompt), step)
    for index in range(new_tokens):
        token = sampler.pick(logits)
        last = index + 1 == new_tokens or token in ends
        text = decoder.feed(token)
        yield Written(token, text + decoder.finish() if last else text, logits, step)
        if last:
            return
        step, logits = read(np.array([token]))


def _decoder_after(tokenizer: Tokenizer, before: list[int]) -> Decoder:
    """A decoder that has been fed the end of the prompt: some decoders drop the first space of a text, and a prompt may end
    inside a character."""
    for start in range(CUT):
        decoder = tokenizer.decoder()
        if not "".join(map(decoder.feed, before[start:])).startswith("\ufffd"):
            break  # Otherwise it began inside a character.
    return decoder
