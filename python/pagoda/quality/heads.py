"""Attention heads whose answer is known in closed form, over contexts of any length.

A token t has a code of `CODE` signs. Its key is O (code_t, noise), with O a random orthonormal basis, and its value a word
of a small vocabulary. A query holds the code of the needle it looks for, so that a key at Hamming distance h from it has the
logit beta (1 - 2 h / CODE). Everything else follows from that, without trained weights:

- Weight of the needle among N random codes: p = 1 / (1 + N ((1 + e^(-2 beta / CODE)) / 2)^CODE), the mean of e^logit over
  codes. This is associative recall (https://arxiv.org/abs/2312.04927) with its softmax worked out.
- With noise of deviation sigma on each logit, a needle still beats a token at distance h with probability
  Phi(margin / (sqrt(2) sigma)), margin = 2 h beta / CODE: graded margins give a psychometric curve.
- If stored keys are off by e_c in channel c, independently, then sigma^2 = scale^2 sum_c q_c^2 e_c^2.

Four things would make storage look better than it is, and are avoided:

- Codes along the axes are exact in formats with a minimum and a maximum: hence O.
- Channels of zeros favour formats with blocks: hence O over all channels.
- A query parallel to its needle hides noise: hence `ASIDE`, by which most of a query lies where no key does.
- A needle and a rival that are nearly equal have similar errors: hence half of each key is noise, different for each token,
  where no query lies.

Keys of models have outliers in few channels (https://arxiv.org/abs/2402.02750), in the slowest RoPE pairs
(https://arxiv.org/abs/2502.01563). `OUTLIERS` adds them in ways that change no logit, except for a shift of all: every error
is caused by storage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from pagoda.errors import InvalidArgument

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

Outliers = Literal["none", "offset10", "offset60", "varying"]
OUTLIERS: tuple[Outliers, ...] = get_args(Outliers)
"""none; a constant of 10 or 60 standard deviations in four channels of all keys, as in Llama and Qwen (softmax ignores what
all keys have in common); noise of 20 deviations in these channels, different for each token, where queries are 0."""

HEAD_DIM = 128
VALUE_DIM = 64
CODE = 64
SCALE = HEAD_DIM**-0.5
OUTLIER_CHANNELS = (62, 63, 126, 127)
"""The two slowest RoPE pairs of a head whose halves rotate together."""
ASIDE = 3.0
"""Length of the part of a query that no key sees over that of the part that keys see: its cosine with the needle is about
0.3."""
WORDS = 256
DISTANCES = (1, 2, 4, 8)
CHUNK = 2048
"""Tokens made at a time. Rows depend only on the seed and the chunk, not on how much is read at once."""


def noise_mass(beta: float) -> float:
    """Mean of e^logit / e^beta over random codes: ((1 + e^(-2 beta / CODE)) / 2)^CODE."""
    return ((1 + math.exp(-2 * beta / CODE)) / 2) ** CODE


def needle_weight(beta: float, context: int, margin: float = math.inf, sink: float = -math.inf) -> float:
    """Softmax weight of a needle among `context` random keys, a rival whose logit is `margin` less, and a sink logit."""
    return 1 / (1 + context * noise_mass(beta) + math.exp(-margin) + math.exp(sink - beta))


def sink_weight(beta: float, context: int, sink: float) -> float:
    """Softmax weight of the sink without a needle: 1 / (1 + N e^(-sink) cosh(beta / CODE)^CODE)."""
    return 1 / (1 + context * math.exp(beta - sink) * noise_mass(beta))


def beta_for(context: int, weight: float = 0.99) -> float:
    """The beta that gives a needle among `context` random keys this weight, by bisection.

    It grows as ln(context). Raises InvalidArgument if no beta does: CODE <= log2(context weight / (1 - weight)).
    """
    if needle_weight(1e6, context) <= weight:
        raise InvalidArgument(f"context = {context}: codes of {CODE} signs cannot tell so many keys apart")
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if needle_weight(middle, context) < weight else (low, middle)
    return high


def margin(distance: int, beta: float) -> float:
    """How much lower the logit of a key at this Hamming distance is than the needle's."""
    return 2 * distance * beta / CODE


def recall(margin: float, sigma: float) -> float:
    """Probability that a needle beats a rival: Phi(margin / (sqrt(2) sigma))."""
    return 1.0 if sigma == 0 else 0.5 * (1 + math.erf(margin / (2 * sigma)))


def recall_head(context: int, outliers: Outliers = "none", seed: int = 0) -> Head:
    """The head whose needles weigh 0.99 without their rivals. Raises InvalidArgument, as `Head` and `beta_for`."""
    return Head(context, beta_for(context), outliers, seed=seed)


@dataclass(frozen=True)
class Head:
    """One head over `context` tokens. The last token asks all queries at once, one per query head.

    beta: logit of a needle; with 0 all weights are equal, and the output is the mean of all values. rivals: every needle has
    a rival with another value, at the distances of `DISTANCES` in turn. needles: queries for a code that a token has.
    strangers: queries for a code that none has. sink: logit of token 0 for every query; its value is 0. Ages of needles are
    spaced evenly in the logarithm, so that any window holds some.
    """

    context: int
    beta: float
    outliers: Outliers = "none"
    needles: int = 512
    rivals: bool = True
    strangers: int = 0
    sink: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.outliers not in OUTLIERS:
            raise InvalidArgument(f"outliers = {self.outliers!r}: one of {', '.join(OUTLIERS)}")
        special = self.needles * (2 if self.rivals else 1)
        if not 2 * special <= self.context:
            raise InvalidArgument(f"context = {self.context}: at least {2 * special}, twice the needles and rivals")

    @cached_property
    def basis(self) -> Float64:
        """float64 [HEAD_DIM, columns]: orthonormal; for codes, for the sink (one column), for keys only, for queries only."""
        rows = np.arange(HEAD_DIM)
        if self.outliers == "varying":
            rows = np.delete(rows, OUTLIER_CHANNELS)
        basis = np.zeros((HEAD_DIM, len(rows)))
        basis[rows] = haar(len(rows), np.random.default_rng((self.seed, 1)))
        return basis

    @cached_property
    def codes(self) -> Float32:
        """float32 [queries, CODE] of signs: the code that each query looks for, the strangers last."""
        return _signs(np.random.default_rng((self.seed, 2)), self.needles + self.strangers, CODE)

    @cached_property
    def distances(self) -> Ids:
        """int64 [needles]: how far each needle's rival is."""
        return np.resize(np.array(DISTANCES), self.needles)

    @cached_property
    def ages(self) -> Ids:
        """int64 [needles]: how many tokens each needle lies before the last one."""
        rng = np.random.default_rng((self.seed, 3))
        wanted = np.exp(np.linspace(0, math.log(self.context - 2), self.needles)).astype(np.int64)
        at = np.arange(self.needles)
        return rng.permutation(at + np.maximum.accumulate(wanted - at))

    @cached_property
    def words(self) -> Ids:
        """int64 [context]: the word that is each token's value."""
        words = np.random.default_rng((self.seed, 4)).integers(0, WORDS, self.context)
        needles = self.context - 1 - self.ages
        words[needles] = np.resize(np.arange(WORDS), self.needles)
        if self.rivals:
            words[self._rivals] = (words[needles] + 1) % WORDS
        return words

    @property
    def answers(self) -> Ids:
        """int64 [needles]: the word of each needle. A rival has the next word."""
        return self.words[self.context - 1 - self.ages]

    @cached_property
    def vocabulary(self) -> Float64:
        """float64 [WORDS, VALUE_DIM]: random directions of length sqrt(VALUE_DIM), orthogonal to `presence`."""
        rng = np.random.default_rng((self.seed, 5))
        words = rng.standard_normal((WORDS, VALUE_DIM))
        words -= np.outer(words @ self.presence, self.presence) / VALUE_DIM
        words *= math.sqrt(VALUE_DIM) / np.linalg.norm(words, axis=1, keepdims=True)
        return words

    @cached_property
    def presence(self) -> Float64:
        """float64 [VALUE_DIM]: added to the values of all tokens but the sink, so that an output shows their weight."""
        shared: Float64 = _signs(np.random.default_rng((self.seed, 6)), 1, VALUE_DIM)[0].astype(np.float64)
        return shared

    @cached_property
    def queries(self) -> Float32:
        """float32 [queries, HEAD_DIM]: (beta code + aside + the part that sees the sink), in the basis."""
        seen = self.codes * (self.beta / (CODE * SCALE))
        others = self.basis.shape[1] - CODE - 1
        aside = np.random.default_rng((self.seed, 7)).standard_normal((len(seen), others - others // 2))
        aside *= ASIDE * self.beta / (SCALE * math.sqrt(CODE)) / np.linalg.norm(aside, axis=1, keepdims=True)
        sink = np.full((len(seen), 1), (self.sink or 0.0) / (SCALE * math.sqrt(CODE)))
        unseen = np.zeros((len(seen), others // 2))
        queries: Float32 = (np.hstack([seen, sink, unseen, aside]) @ self.basis.T).astype(np.float32)
        return queries

    def chunks(self) -> Iterator[tuple[Float32, Float32]]:
        """Keys [n, 1, HEAD_DIM] and values [n, 1, VALUE_DIM] of one chunk of tokens after another; the last is one token."""
        for start, stop in self._bounds:
            keys = self._codes(start, stop) @ self.basis[:, :CODE].T + self._noise(start, stop)
            values = self.vocabulary[self.words[start:stop]] + self.presence
            if self.sink is not None and start == 0:
                keys[0], values[0] = math.sqrt(CODE) * self.basis[:, CODE], 0
            self._add_outliers(keys, start)
            yield keys[:, None].astype(np.float32), values[:, None].astype(np.float32)

    def logits(self, queries: int) -> Float64:
        """float64 [queries, context]: exact logits of the first queries, without the shift that outliers add to all keys.

        They are computed from the codes, in integers up to the last factor, not from `queries` and keys.
        """
        wanted = self.codes[:queries]
        logits = np.hstack([wanted @ self._codes(*bounds).T for bounds in self._bounds]).astype(np.float64)
        logits *= self.beta / CODE
        if self.sink is not None:
            logits[:, 0] = self.sink
        return logits

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        bounds = [*range(0, self.context - 1, CHUNK), self.context - 1, self.context]
        return list(itertools.pairwise(bounds))

    @property
    def _rivals(self) -> Ids:
        """Positions of the rivals: random free ones, but neither the first nor the last."""
        free = np.setdiff1d(np.arange(1, self.context - 1), self.context - 1 - self.ages)
        return np.random.default_rng((self.seed, 8)).choice(free, self.needles, replace=False)

    @cached_property
    def _planted(self) -> tuple[Ids, Float32]:
        """Positions in order, and codes, of needles and rivals."""
        at, codes = self.context - 1 - self.ages, self.codes[: self.needles]
        if self.rivals:
            flips = np.random.default_rng((self.seed, 9)).random((self.needles, CODE)).argsort(1)
            near = np.where(flips < self.distances[:, None], -codes, codes)
            at, codes = np.concatenate([at, self._rivals]), np.concatenate([codes, near])
        order = np.argsort(at)
        return at[order], codes[order]

    def _codes(self, start: int, stop: int) -> Float32:
        codes = _signs(np.random.default_rng((self.seed, 10, start)), stop - start, CODE)
        at, planted = self._planted
        here = slice(*np.searchsorted(at, (start, stop)))
        codes[at[here] - start] = planted[here]
        return codes

    def _noise(self, start: int, stop: int) -> Float64:
        """float64 [n, HEAD_DIM]: the part of keys that no query sees, as long as a code."""
        columns = self.basis[:, CODE + 1 :][:, : (self.basis.shape[1] - CODE - 1) // 2]
        noise = np.random.default_rng((self.seed, 11, start)).standard_normal((stop - start, columns.shape[1]))
        added: Float64 = noise * math.sqrt(CODE / columns.shape[1]) @ columns.T
        return added

    def _add_outliers(self, keys: Float64, start: int) -> None:
        """Adds outliers in place. Without them a key is about sqrt(HEAD_DIM) long: the deviation of a channel is 1."""
        channels = np.array(OUTLIER_CHANNELS)
        if self.outliers == "varying":
            noise = np.random.default_rng((self.seed, 12, start)).standard_normal((len(keys), len(channels)))
            keys[:, channels] += 20 * noise
        elif self.outliers != "none":
            size = {"offset10": 10, "offset60": 60}[self.outliers]
            keys[:, channels] += size * np.array([1, -1, -1, 1])


def haar(size: int, rng: np.random.Generator) -> Float64:
    """A uniformly random orthogonal matrix: QR of a Gaussian matrix, with the signs of R's diagonal removed.

    https://arxiv.org/abs/math-ph/0609050
    """
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    return np.asarray(q * np.sign(np.diag(r)))


def _signs(rng: np.random.Generator, rows: int, columns: int) -> Float32:
    return rng.integers(0, 2, (rows, columns), dtype=np.int8).astype(np.float32) * 2 - 1
