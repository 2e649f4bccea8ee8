"""Rotary position embeddings: the angle by which each pair of elements turns from one position to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda._core import HEAD_DIM_MAX, TOKENS_MAX
from pagoda.checks import FACTOR_MAX, as_ints, check_factor, check_flag, check_integer, is_number, natural
from pagoda.errors import InvalidArgument


def check_factors(**numbers: float) -> None:
    """Raises InvalidArgument unless frequencies can be multiplied by all of them."""
    for name, value in numbers.items():
        check_factor(f"rope_scaling.{name}", value)


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches low frequencies by `factor` and blends the ones between (Llama 3.1; transformers `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        as_ints(self)
        low, high = self.low_freq_factor, self.high_freq_factor
        check_factors(factor=self.factor, low_freq_factor=low, high_freq_factor=high)
        check_integer("rope_scaling.original_context", self.original_context, 1, TOKENS_MAX)
        if low >= high:
            raise InvalidArgument(f"rope_scaling.low_freq_factor = {low}: below high_freq_factor = {high}")

    def apply(self, inv_freq: npt.NDArray[np.float64], theta: float) -> npt.NDArray[np.float64]:
        """The scaled frequencies."""
        turns = self.original_context * inv_freq / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return (1 - blend) * inv_freq / self.factor + blend * inv_freq


@dataclass(frozen=True)
class LinearScaling:
    """Divides every frequency by `factor` (position interpolation, https://arxiv.org/abs/2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        as_ints(self)
        check_factors(factor=self.factor)

    def apply(self, inv_freq: npt.NDArray[np.float64], theta: float) -> npt.NDArray[np.float64]:
        """The scaled frequencies."""
        return inv_freq / self.factor


@dataclass(frozen=True)
class ProportionalScaling:
    """Turns only the first pairs, a fraction `partial` of all, and divides their frequencies by `factor`.

    Gemma 4; transformers `rope_type: proportional`. Unlike with a smaller `rotary_dim`, pairs are (i, i + head_dim/2).
    """

    partial: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        as_ints(self)
        check_factors(partial=self.partial, factor=self.factor)
        if self.partial > 1:
            raise InvalidArgument(f"rope_scaling.partial = {self.partial}: at most 1")

    def apply(self, inv_freq: npt.NDArray[np.float64], theta: float) -> npt.NDArray[np.float64]:
        """The scaled frequencies, 0 for pairs that do not turn."""
        return np.where(np.arange(len(inv_freq)) < int(self.partial * len(inv_freq)), inv_freq / self.factor, 0.0)


@dataclass(frozen=True)
class YarnScaling:
    """Interpolates low frequencies and keeps high ones (YaRN, https://arxiv.org/abs/2309.00071, section 3.2).

    magnitude: the factor of cosines and sines; by default that of section 3.4, see `attention_factor`.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float | None = None

    def __post_init__(self) -> None:
        as_ints(self)
        check_factors(factor=self.factor, beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        check_integer("rope_scaling.original_context", self.original_context, 1, TOKENS_MAX)
        check_flag("rope_scaling.truncate", self.truncate)
        if self.magnitude is not None:
            check_factors(magnitude=self.magnitude)

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines: 0.1 ln(factor) + 1 (section 3.4) unless `magnitude` is given."""
        return _yarn_magnitude(self.factor) if self.magnitude is None else self.magnitude

    def apply(self, inv_freq: npt.NDArray[np.float64], theta: float) -> npt.NDArray[np.float64]:
        """The scaled frequencies."""

        dim = 2 * len(inv_freq)

        def pair_with(turns: float) -> float:
            return dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = np.clip((np.arange(len(inv_freq)) - low) / max(high - low, 0.001), 0.0, 1.0)
        scaled: npt.NDArray[np.float64] = inv_freq / self.factor * ramp + inv_freq * (1 - ramp)
        return scaled


def _yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class LongRopeScaling:
    """Divides the frequency of each pair by a factor of its own (LongRoPE, https://arxiv.org/abs/2402.13753; Phi-3).

    factors: one per pair. attention_factor: the factor of cosines and sines.
    """

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        as_ints(self)
        if not isinstance(self.factors, tuple):
            raise InvalidArgument(f"rope_scaling.factors = {self.factors!r}: a tuple of numbers")
        check_factors(**{f"factors[{pair}]": factor for pair, factor in enumerate(self.factors)})
        check_factors(attention_factor=self.attention_factor)

    def apply(self, inv_freq: npt.NDArray[np.float64], theta: float) -> npt.NDArray[np.float64]:
        """The scaled frequencies. Raises InvalidArgument unless there is one factor per frequency."""
        if len(self.factors) != len(inv_freq):
            raise InvalidArgument(f"rope_scaling.factors = {len(self.factors)} numbers: {len(inv_freq)}, one a pair")
        return inv_freq / np.array(self.factors, np.float64)


Scaling = Llama3Scaling | LinearScaling | LongRopeScaling | ProportionalScaling | YarnScaling


@dataclass(frozen=True)
class Rope:
    """How queries and keys are rotated: pair i turns by theta**(-2i / rotary_dim) per position.

    rotary_dim: the whole row by default. interleaved: pairs are (2i, 2i + 1) instead of (i, i + rotary_dim/2).
    https://arxiv.org/abs/2104.09864.
    """

    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        as_ints(self)
        if not is_number(self.theta) or not 1 < self.theta <= FACTOR_MAX:
            raise InvalidArgument(f"rope.theta = {self.theta!r}: a number above 1, at most {FACTOR_MAX}")
        if self.rotary_dim is not None:
            check_integer("rope.rotary_dim", self.rotary_dim, 2, HEAD_DIM_MAX)
            if self.rotary_dim % 2:
                raise InvalidArgument(f"rope.rotary_dim = {self.rotary_dim}: even")
        check_flag("rope.interleaved", self.interleaved)
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise InvalidArgument(f"rope.scaling = {self.scaling!r}: None, or a scaling of pagoda.rope")

    def dim_of(self, head_dim: int) -> int:
        """How many elements of a row of `head_dim` are rotated. Raises InvalidArgument if the row has fewer."""
        head_dim = natural("head_dim", head_dim, 2, HEAD_DIM_MAX)
        dim = head_dim if self.rotary_dim is None else self.rotary_dim
        if dim > head_dim:
            raise InvalidArgument(f"rope.rotary_dim = {dim}: at most head_dim = {head_dim}")
        return dim

    def inv_freq(self, head_dim: int) -> npt.NDArray[np.float32]:
        """float32 [rotary_dim / 2]: radians per position, for each pair of a row of `head_dim` elements.

        Raises InvalidArgument if the row has fewer elements, or the scaling is for another number of pairs.
        """
        dim = self.dim_of(head_dim)
        inv_freq: npt.NDArray[np.float64] = self.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.scaling is not None:
            inv_freq = self.scaling.apply(inv_freq, self.theta)
        return inv_freq.astype(np.float32)

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines."""
        return self.scaling.attention_factor if isinstance(self.scaling, LongRopeScaling | YarnScaling) else 1.0


def scaling_from_config(config: dict[str, Any]) -> Scaling | None:
    """The scaling in a Hugging Face `rope_scaling` or `rope_parameters`. Raises InvalidArgument for other types.

    For LongRoPE it takes the factors for max_position_embeddings. mrope (images, with positions of three numbers) does not
    change frequencies.
    """
    kind = config.get("rope_type", config.get("type", "default"))
    try:
        if kind == "linear":
            return LinearScaling(config["factor"])
        if kind == "proportional":
            return ProportionalScaling(config.get("partial_rotary_factor", 1.0), config.get("factor", 1.0))
        if kind == "llama3":
            return Llama3Scaling(
                config["factor"],
                config["low_freq_factor"],
                config["high_freq_factor"],
                _whole(config["original_max_position_embeddings"]),
            )
        if kind == "yarn":
            return YarnScaling(
                config["factor"],
                _whole(config["original_max_position_embeddings"]),
                config.get("beta_fast") or 32.0,
                config.get("beta_slow") or 1.0,
                config.get("truncate", True),
                _magnitude_from_config(config),
            )
        if kind in ("longrope", "su"):
            return _longrope_from_config(config)
    except InvalidArgument:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidArgument(f"rope_scaling = {config!r}: {kind} scaling with its numbers ({error!r})") from error
    if kind in ("default", "mrope"):
        return None
    kinds = "default, linear, llama3, longrope, mrope, proportional or yarn"
    raise InvalidArgument(f"rope_scaling.rope_type = {kind!r}: {kinds}")


def _whole(number: Any) -> Any:
    """Converts integers that JSON has as floats, such as 8192.0; returns anything else as it is."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _magnitude_from_config(config: dict[str, Any]) -> float | None:
    """The factor of cosines and sines in a YaRN config, given directly or by DeepSeek's pair of scales; None if absent."""
    given, scale, over = (config.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if not scale or not over:
        return None
    factor = float(config["factor"])
    return _yarn_magnitude(factor, float(scale)) / _yarn_magnitude(factor, float(over))


def _longrope_from_config(config: dict[str, Any]) -> LongRopeScaling:
    """transformers: `_compute_longrope_parameters`, for sequences of max_position_embeddings."""
    original = config["original_max_position_embeddings"]
    stretch = config["max_position_embeddings"] / original
    factors = tuple(config["long_factor" if stretch > 1 else "short_factor"])
    if config.get("attention_factor") is not None:
        return LongRopeScaling(factors, config["attention_factor"])
    factor = stretch if config.get("factor") is None else config["factor"]
    check_factors(factor=factor)
    return LongRopeScaling(factors, math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0)


def score_factor_from_config(config: dict[str, Any]) -> float:
    """The factor of scores that DeepSeek-V3 has with YaRN, besides the usual scale: the square of a magnitude.

    transformers: `yarn_apply_mscale`. Raises InvalidArgument as `scaling_from_config` does.
    """
    scaling, over = scaling_from_config(config), config.get("mscale_all_dim")
    if not isinstance(scaling, YarnScaling) or not over:
        return 1.0
    check_factor("rope_scaling.mscale_all_dim", over)
    return _yarn_magnitude(scaling.factor, over) ** 2
