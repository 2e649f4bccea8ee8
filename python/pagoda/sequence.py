"""Sequences of a cache, and fixed lists of them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

import numpy as np

from pagoda import _core
from pagoda.checks import natural
from pagoda.errors import UseAfterRelease

if TYPE_CHECKING:
    from pagoda.cache import Cache


class Uncopied:
    """An object that can be neither copied nor pickled: a copy would not know when the original has ended."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"{kind}: neither copied nor pickled; Sequence.fork shares pages, Cache.save keeps a sequence")


class Sequence(Uncopied):
    """One request, beam or branch: a list of tokens whose K and V the cache holds. Made by `Cache.create` and `fork`.

    `len` counts its tokens, also those that have left a window, but none that were dropped. A sequence that is garbage
    collected is released at the cache's next step or `load`.
    """

    __slots__ = ("__weakref__", "_cache", "_handle")

    def __init__(self, cache: Cache, handle: _core.Handle) -> None:
        self._cache = cache
        self._handle: _core.Handle | None = handle

    @property
    def id(self) -> int:
        """A number that no other live sequence of the cache has. Raises UseAfterRelease."""
        if self._handle is None:
            raise UseAfterRelease("sequence: released")
        return self._handle.id

    def __len__(self) -> int:
        return self._cache._core.length(self.id)

    def __bool__(self) -> bool:
        """True, even if empty, so that `cache.load(key) or cache.create()` returns the saved sequence if there is one."""
        return True

    @property
    def rewind_limit(self) -> int:
        """The smallest length, besides 0, that `truncate` accepts: 0 until pages have left a window."""
        return self._cache._core.rewind_limit(self.id)

    def fork(self) -> Sequence:
        """A second sequence with the same tokens and pages. No bytes are copied until one of the two is appended to."""
        return Sequence(self._cache, self._cache._core.fork(self.id))

    def truncate(self, length: int) -> None:
        """Removes the tokens from `length` on, as if they had never been appended; 0 begins anew at position 0.

        Raises InvalidArgument unless `length` is 0 or from `rewind_limit` to `len(self)`: once a window has moved on, at
        least the last `headroom` tokens can be removed.
        """
        self._cache._core.truncate(self.id, natural("length", length))

    def drop(self, start: int, stop: int) -> None:
        """Removes the tokens [start, stop): a context shift. No bytes move.

        Positions only grow: later tokens keep the positions they were stored with, and tokens before the gap are seen as if
        they stood right before those after it (`AttentionLayer.rope` says how to rotate queries for that). So new tokens go
        on at the same position as without the drop, also if the last ones were dropped. Once pages have left a window,
        raises InvalidArgument for sinks, and for more than `len(self) - rewind_limit` of the tokens still kept: the window
        would reach back to tokens that have left.
        """
        self._cache._core.drop(self.id, natural("start", start), natural("stop", stop))

    def release(self) -> None:
        """Ends the sequence; pages that no other sequence holds become free. Releasing twice raises UseAfterRelease."""
        self._cache._core.release(self.id)
        assert self._handle is not None
        self._handle.released()
        self._handle = None

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        # It may have been released already, or its cache closed.
        with suppress(UseAfterRelease):
            self.release()

    def __repr__(self) -> str:
        return "<Sequence released>" if self._handle is None else f"<Sequence {self._handle.id}>"


class Batch:
    """A fixed list of sequences, which a step need not check again. Made by `Cache.batch`."""

    __slots__ = ("_cache", "ids", "sequences")

    def __init__(self, cache: Cache, sequences: tuple[Sequence, ...]) -> None:
        self._cache = cache
        self.sequences = sequences
        self.ids = np.fromiter((sequence.id for sequence in self.sequences), np.uint64, len(self.sequences))

    def __len__(self) -> int:
        return len(self.sequences)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} sequence(s)>"
