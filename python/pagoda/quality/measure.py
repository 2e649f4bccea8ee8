"""Measures what a cache does to the heads of `pagoda.quality.heads`, only through its public calls.

In a layer with window=1 every query sees one key, that of its own token. Its log-sum-exp is then the logit of that key as
stored, and its output the value as stored, whatever the row format: `read_logits` and `key_errors` need no more.
Caches are made by a function of a spec, so that the caller chooses formats, tiers, threads and retention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagoda.cache import Array, Cache
from pagoda.quality.heads import (
    DISTANCES,
    HEAD_DIM,
    SCALE,
    VALUE_DIM,
    WORDS,
    Float64,
    Head,
    margin,
    needle_weight,
    recall,
    sink_weight,
)
from pagoda.retention import SinkWindow
from pagoda.spec import AttentionLayer, ModelSpec

CacheOf = Callable[[ModelSpec, SinkWindow | None], Cache]
"""Makes a cache for a spec with this retention; it is closed after use."""

HEADS = 128
"""Queries attended at once: the most query heads that may share a K/V head."""
READ = 32
"""Queries for which the logits of all keys are read; the same number for each distance."""

TOKEN_BYTES = 7 * READ * np.dtype(np.float64).itemsize
"""Memory that `Recall` takes for each token of its context: logits and weights, exact and as stored, and intermediates."""

STREAM_BETA, STREAM_SINK = 28.0, 23.0
"""Logits of needle and sink in `streaming`. Over 131,072 keys the needle then weighs 0.993, and the sink, where there is no
needle, 0.995."""


@dataclass(frozen=True)
class Fidelity:
    """How well a cache keeps one head."""

    sigma: float
    """Noise on a logit: deviation over keys (what all of them share is no noise), root mean square over queries."""
    sigma_law: float
    """The same, from the errors of stored keys: sqrt(scale^2 sum_c q_c^2 e_c^2)."""
    kl: float
    """Mean over queries of the Kullback-Leibler divergence of the weights from the exact ones, in nats."""
    kl_worst: float
    """Its maximum."""
    needle_weight: float
    """Mean weight of needles, from the logits that were read."""
    needle_weight_law: float
    """Their closed form, without noise."""
    output_error: float
    """Root mean square of the outputs' error over that of the exact outputs."""
    found: float
    """Share of needles for which, of all words, theirs is the most like the output."""
    recall: dict[int, float]
    """Share of needles whose word is more like the output than the rival's, by the rival's distance."""
    recall_law: dict[int, float]
    """Phi(margin / (sqrt(2) sigma)), for the sigma measured."""


@dataclass(frozen=True)
class Streaming:
    """How a head with a sink answers after a part of its context has been dropped."""

    kept: int
    """Keys that the last query sees."""
    recall_within: float
    """Share of needles answered, of those that are kept."""
    recall_beyond: float | None
    """Share of needles answered, of those that were dropped; None if none were."""
    invented: float
    """Share of queries without a needle that were answered."""
    presence: float
    """Mean weight of tokens other than the sink, for queries without a needle."""
    presence_law: float
    """Its closed form."""


class Recall:
    """A head without a sink, and its exact attention, computed once."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._logits = head.logits(READ)
        self._log_weights = log_softmax(self._logits)
        self._weights = np.exp(self._log_weights)
        self._outputs = self._weights @ head.vocabulary[head.words] + head.presence

    def fidelity(self, cache_of: CacheOf) -> Fidelity:
        """Runs the head through two caches: one for answers, one to read logits."""
        head = self.head
        answers, _ = ask(head, cache_of)
        stored = read_logits(head, cache_of)
        sigma = float(np.sqrt((stored - self._logits).var(axis=1).mean()))
        log_stored = log_softmax(stored)
        divergence = self._divergence(log_stored)
        needles = log_stored[np.arange(READ), (head.context - 1 - head.ages)[:READ]]
        margins = {distance: margin(distance, head.beta) for distance in DISTANCES}
        laws = [needle_weight(head.beta, head.context, margins[distance]) for distance in head.distances[:READ]]
        likeness, queries = answers @ head.vocabulary.T, np.arange(head.needles)
        beats = likeness[queries, head.answers] > likeness[queries, (head.answers + 1) % WORDS]
        squares = head.queries[:READ].astype(np.float64) ** 2
        errors = np.linalg.norm(answers[:READ] - self._outputs)
        return Fidelity(
            sigma=sigma,
            sigma_law=float(SCALE * np.sqrt((squares @ key_errors(head, cache_of) ** 2).mean())),
            kl=float(divergence.mean()),
            kl_worst=float(divergence.max()),
            needle_weight=float(np.exp(needles).mean()),
            needle_weight_law=float(np.mean(laws)),
            output_error=float(errors / np.linalg.norm(self._outputs)),
            found=float((likeness.argmax(axis=1) == head.answers).mean()),
            recall={distance: float(beats[head.distances == distance].mean()) for distance in DISTANCES},
            recall_law={distance: recall(margins[distance], sigma) for distance in DISTANCES},
        )

    def kl(self, cache_of: CacheOf) -> float:
        """`Fidelity.kl` alone."""
        return float(self._divergence(log_softmax(read_logits(self.head, cache_of))).mean())

    def _divergence(self, log_stored: Float64) -> Float64:
        """float64 [READ]: divergence of the weights with these logarithms from the exact ones, in nats."""
        divergence: Float64 = np.einsum("qt,qt->q", self._weights, self._log_weights - log_stored)
        return divergence


def streaming(
    context: int, cache_of: CacheOf, *, window: int | None = None, keep: SinkWindow | None = None, seed: int = 0
) -> Streaming:
    """Runs the head with a sink over a layer with this window, over the tokens that `keep` leaves, or over all tokens."""
    head = Head(context, STREAM_BETA, needles=128, rivals=False, strangers=128, sink=STREAM_SINK, seed=seed)
    outputs, _ = ask(head, cache_of, window=window, keep=keep)
    presence = outputs @ head.presence / VALUE_DIM
    answered = presence > 0.5
    needles = slice(0, head.needles)
    right = answered[needles] & ((outputs[needles] @ head.vocabulary.T).argmax(axis=1) == head.answers)
    sinks, recent = (keep.sinks, keep.window) if keep else (0 if window else 1, window or context)
    within = (head.ages < recent) | (context - 1 - head.ages < sinks)
    kept = min(context, sinks + recent)
    return Streaming(
        kept=kept,
        recall_within=float(right[within].mean()),
        recall_beyond=None if within.all() else float(right[~within].mean()),
        invented=float(answered[head.needles :].mean()),
        presence=float(presence[head.needles :].mean()),
        presence_law=1 - sink_weight(STREAM_BETA, kept, STREAM_SINK) if sinks else 1.0,
    )


def ask(
    head: Head, cache_of: CacheOf, *, window: int | None = None, keep: SinkWindow | None = None
) -> tuple[Float64, Float64]:
    """Appends all tokens in chunks to a layer with this window; the last token asks all queries.

    Returns float64 outputs [queries, VALUE_DIM] and log-sum-exps [queries].
    """
    outputs, sums, seen = [], [], 0
    with cache_of(ModelSpec([AttentionLayer(HEADS, 1, HEAD_DIM, VALUE_DIM, window=window)]), keep) as cache:
        sequence = cache.create()
        for keys, values in head.chunks():
            with cache.step([sequence], [len(keys)]) as step:
                step.append(0, keys, values)
                seen += len(keys)
                for part in _parts(head.queries, HEADS) if seen == head.context else ():
                    output, total = step.attend(0, part[None], return_lse=True)
                    outputs.append(output[0])
                    sums.append(total[0])
    count = len(head.queries)
    return np.concatenate(outputs)[:count].astype(np.float64), np.concatenate(sums)[:count].astype(np.float64)


def read_logits(head: Head, cache_of: CacheOf) -> Float64:
    """float64 [READ, context]: logits of all stored keys for the first queries, as computed by the cache's own attention."""
    queries = head.queries[:READ]
    layer = AttentionLayer(READ, 1, HEAD_DIM, VALUE_DIM, window=1)
    pieces = []
    with cache_of(ModelSpec([layer]), None) as cache:
        sequence = cache.create()
        for keys, values in head.chunks():
            with cache.step([sequence], [len(keys)]) as step:
                every = np.broadcast_to(queries, (len(keys), READ, HEAD_DIM))
                _, logits = step.forward(0, every, keys, values, return_lse=True)
            pieces.append(logits.T)
    return np.concatenate(pieces, axis=1).astype(np.float64)


def key_errors(head: Head, cache_of: CacheOf) -> Float64:
    """float64 [HEAD_DIM]: deviation of the error of stored keys in each channel, over the first chunk.

    The queries are the unit vectors, so each logit is one channel of a stored key.
    """
    keys, values = next(head.chunks())
    layer = AttentionLayer(HEAD_DIM, 1, HEAD_DIM, VALUE_DIM, window=1, scale=1.0)
    with cache_of(ModelSpec([layer]), None) as cache:
        with cache.step([cache.create()], [len(keys)]) as step:
            every = np.broadcast_to(np.eye(HEAD_DIM, dtype=np.float32), (len(keys), HEAD_DIM, HEAD_DIM))
            _, stored = step.forward(0, every, keys, values, return_lse=True)
    errors: Float64 = (stored.astype(np.float64) - keys[:, 0]).std(axis=0)
    return errors


def _parts(rows: Array, size: int) -> list[Array]:
    """Rows in parts of `size`, the last one padded with zeros."""
    padded = np.concatenate([rows, np.zeros((-len(rows) % size, *rows.shape[1:]), rows.dtype)])
    return list(padded.reshape(-1, size, *rows.shape[1:]))


def log_softmax(logits: Float64) -> Float64:
    """The logarithms of the softmax of each row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: Float64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
