"""Which tokens of a sequence a cache keeps, if not all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagoda._core import TOKENS_MAX
from pagoda.checks import as_ints, check_choice, check_integer
from pagoda.errors import InvalidArgument
from pagoda.spec import ModelSpec


class Keeps(NamedTuple):
    """What a layer keeps of a sequence: `Window` of the core. trailing: whether sinks are seen right before the window."""

    sinks: int
    window: int
    headroom: int
    trailing: bool

    @property
    def tokens(self) -> int:
        """How many tokens these are."""
        return self.sinks + self.window + self.headroom


@dataclass(frozen=True)
class SinkWindow:
    """Keeps the first `sinks` and the last `window` tokens: endless text in constant memory.

    Applies to layers without a window of their own: their queries see these tokens, including themselves, and no others.
    positions: with "original" sinks are seen where they were stored, ever farther away; with "cache" as if they stood right
    before the window, by rotating queries and no keys. https://arxiv.org/abs/2309.17453.
    """

    sinks: int = 64
    window: int = 16384
    positions: str = "original"

    def __post_init__(self) -> None:
        as_ints(self)
        check_integer("sinks", self.sinks, 0, TOKENS_MAX)
        check_integer("window", self.window, 1, TOKENS_MAX)
        check_choice("positions", self.positions, ("original", "cache"))


def keeps_by_layer(spec: ModelSpec, retention: SinkWindow | None, headroom: int) -> list[Keeps | None]:
    """What each layer keeps; None is everything. Raises InvalidArgument if the retention does not apply to the model.

    If some layers of a model have a `rope`, those without one do not rotate, so positions do not matter to them. If no layer
    has one, it is unknown how to rotate.
    """
    if retention is not None and not isinstance(retention, SinkWindow):
        raise InvalidArgument(f"retention = {retention!r}: None or a SinkWindow")
    check_integer("headroom", headroom, 0, TOKENS_MAX)
    if retention is not None:
        if all(layer.window is not None for layer in spec.attention_layers):
            raise InvalidArgument(f"retention = {retention}: a model with layers that have no window of their own")
        if retention.positions == "cache" and all(layer.rope is None for layer in spec.attention_layers):
            raise InvalidArgument('retention.positions = "cache": layers with a rope, to rotate queries by')
    keeps: list[Keeps | None] = []
    for index, layer in enumerate(spec.layers):
        window, owner = getattr(layer, "window", None), getattr(layer, "kv_owner", None)
        source = None if window is None or owner is None else keeps[owner]
        if source is not None and (source.sinks > 0 or window > source.window):
            limit = "none" if source.sinks > 0 else f"at most {source.window}"
            why = f"as layer {owner} keeps {source.sinks} sinks and {source.window} tokens for it"
            raise InvalidArgument(f"layers[{index}].window = {window}: {limit}, {why}")
        if window is not None:
            keeps.append(Keeps(0, window, headroom, trailing=False))
        elif retention is not None:
            trailing = retention.positions == "cache"
            keeps.append(Keeps(retention.sinks, retention.window, headroom, trailing))
        else:
            keeps.append(None)
    for kept in filter(None, keeps):
        if kept.tokens > TOKENS_MAX:
            raise InvalidArgument(
                f"headroom = {headroom}: with {kept.sinks} sinks and {kept.window} more, at most {TOKENS_MAX}"
            )
    return keeps
