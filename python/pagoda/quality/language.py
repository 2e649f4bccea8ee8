"""Measures what a cache does to the predictions of the shipped language model, in decode mode.

Held-out text is fed token by token, so that every prediction is made from K and V that went through the cache, including
those of the token itself; between the scored stretches the text is read in chunks. The reference is the same text over a
cache that stores float32. The model is a toy of 3.75 million parameters: rankings carry over to others, figures do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.cache import Cache, Sequence
from pagoda.errors import InvalidArgument
from pagoda.lm import LanguageModel
from pagoda.lm.generate import CHUNK
from pagoda.models import SHIPPED_MODEL, SHIPPED_TEXT
from pagoda.quality.heads import Float64
from pagoda.quality.measure import CacheOf, log_softmax
from pagoda.retention import SinkWindow

STARTS = (1024, 8192, 32768)
TOKENS = 2048


@dataclass(frozen=True)
class Divergence:
    """Predictions of one stretch of text, compared with those over float32."""

    start: int
    """Tokens before the stretch."""
    bits_per_byte: float
    """Of the text itself: mean of -log2 p(next byte)."""
    perplexity: float
    """Perplexity of the text over that of the float32 predictions."""
    kld: float
    """Mean Kullback-Leibler divergence from the float32 predictions, in nats."""
    kld_999: float
    """Its 99.9th percentile: of 2,048 predictions about the third largest."""
    same_top: float
    """Share of predictions with the same likeliest byte."""
    lost_lead: float
    """The largest lead over the runner-up, in nats, of a byte that was the likeliest over float32 and no longer is."""


class ShippedText:
    """The shipped model and text, and the predictions over float32, computed once.

    starts: how much text lies before each stretch of `tokens` predictions. Raises InvalidArgument if stretches overlap or the
    text is too short.
    """

    def __init__(self, cache_of_f32: CacheOf, starts: Collection[int] = STARTS, tokens: int = TOKENS) -> None:
        self.model = LanguageModel.load(SHIPPED_MODEL)
        self._text = self.model.tokenizer.encode(SHIPPED_TEXT.read_text())
        ends = [0, *(start + tokens for start in starts)]
        if tokens < 1 or any(start < end for start, end in zip(starts, ends, strict=False)):
            raise InvalidArgument(f"starts = {list(starts)}: growing, {tokens} tokens apart, for tokens of at least 1")
        if ends[-1] >= len(self._text):
            raise InvalidArgument(f"starts = {list(starts)}: with {tokens} tokens, within {len(self._text)} bytes")
        self.starts, self.tokens = tuple(starts), tokens
        self._exact = self._predict(cache_of_f32, None)

    def divergence(self, cache_of: CacheOf, *, keep: SinkWindow | None = None) -> list[Divergence]:
        """The divergence of each stretch over another cache, with all tokens or those that `keep` leaves."""
        stretches = zip(self.starts, self._exact, self._predict(cache_of, keep), strict=True)
        return [self._compare(start, exact, stored) for start, exact, stored in stretches]

    def _compare(self, start: int, exact: Float64, stored: Float64) -> Divergence:
        following = np.arange(self.tokens), self._text[start + 1 : start + self.tokens + 1]
        divergence = (np.exp(exact) * (exact - stored)).sum(axis=1)
        same = exact.argmax(axis=1) == stored.argmax(axis=1)
        second, first = np.partition(exact, -2, axis=1)[:, -2:].T
        return Divergence(
            start=start,
            bits_per_byte=float(-stored[following].mean() / math.log(2)),
            perplexity=math.exp(exact[following].mean() - stored[following].mean()),
            kld=float(divergence.mean()),
            kld_999=float(np.quantile(divergence, 0.999)),
            same_top=float(same.mean()),
            lost_lead=float(np.where(same, 0.0, first - second).max()),
        )

    def _predict(self, cache_of: CacheOf, keep: SinkWindow | None) -> list[Float64]:
        """Log-probabilities [tokens, 256] of each stretch."""
        stretches = []
        with cache_of(self.model.spec, keep) as cache:
            sequence, done = cache.create(), 0

            def feed(count: int) -> npt.NDArray[np.float32]:
                nonlocal done
                logits = self._feed(cache, sequence, self._text[done : done + count])
                done += count
                return logits

            for start in self.starts:
                while done < start:
                    feed(min(CHUNK, start - done))
                rows = np.stack([feed(1) for _ in range(self.tokens)]).astype(np.float64)
                stretches.append(log_softmax(rows))
        return stretches

    def _feed(self, cache: Cache, sequence: Sequence, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        with cache.step([sequence], [len(tokens)]) as step:
            logits: npt.NDArray[np.float32] = self.model.forward(tokens, step)[0]
        return logits
