"""The exceptions of Pagoda. Every message names the argument, the value and the limit."""

from collections.abc import Collection


class PagodaError(Exception):
    """The base of all errors that Pagoda raises on purpose."""


class OutOfBlocks(PagodaError):
    """A tier has too few free blocks.

    tier: "device", "host" or "disk". layer_group: the first one that is short, as an index into `Cache.stats`. blocks_short,
    bytes_short: how many more are needed; for a step, in all layer groups together. draining: blocks of that layer group that
    become free when the steps and copies that may use them have ended, without those of moves under way.
    """

    def __init__(
        self,
        message: str = "",
        *,
        tier: str = "device",
        layer_group: int = 0,
        blocks_short: int = 0,
        bytes_short: int = 0,
        draining: int = 0,
    ) -> None:
        super().__init__(message)
        self.tier, self.layer_group = tier, layer_group
        self.blocks_short, self.bytes_short, self.draining = blocks_short, bytes_short, draining


class InvalidArgument(PagodaError, ValueError):
    """An argument that the call does not accept. Also a ValueError."""


class UseAfterRelease(PagodaError):
    """A sequence was used after its release, or a cache after `close`."""


class _OfPage(PagodaError):
    def __init__(self, message: str = "", *, sequences: Collection[int] = ()) -> None:
        super().__init__(message)
        self.sequences = tuple(sequences)


class CorruptPage(_OfPage):
    """Stored bytes do not verify, or the index of a directory is broken or gone.

    sequences: the `id` of every sequence that holds the page, if it was a page.
    """


class TierIOError(_OfPage):
    """A directory, its drive or a copy between tiers failed, or did not answer in time.

    sequences: the `id` of every sequence that holds the page which could not be copied or read, if it was a page.
    """


class GeometryMismatch(PagodaError):
    """Stored pages are of another model, format or disk_memory."""


class BackendUnavailable(PagodaError):
    """Something is missing in this build or on this machine, or the system refuses it."""


class InvariantError(PagodaError):
    """The bookkeeping is broken."""
