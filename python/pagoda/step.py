"""One forward pass: reserve on entering, append and attend layer by layer, commit on leaving; and its page tables."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Collection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, overload

import numpy as np
import numpy.typing as npt

from pagoda.checks import check_flag, integers, natural
from pagoda.device.driver import Stream
from pagoda.engine import Engine
from pagoda.errors import BackendUnavailable, InvalidArgument, PagodaError
from pagoda.report import StepReport
from pagoda.sequence import Batch, Uncopied

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pagoda.cache import Cache

Array = npt.NDArray[Any]


class DeviceArray(Protocol):
    """An array of CuPy or torch on a GPU."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


class DLPackArray(Protocol):
    """An array of another library, which hands out its memory by DLPack."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...


Rows = Array | DeviceArray | DLPackArray
"""What steps read and write: arrays of NumPy, those of CuPy, torch and others by DLPack where the cache is on a GPU."""

Q = TypeVar("Q", bound=Rows)


class _Options(TypedDict, total=False):
    """Of `Step.attend` and `Step.forward`."""

    out: Rows | None
    sink_logits: Rows | None
    dtype: str | None


class Table:
    """The page table of one layer of an open step, as arrays under their usual names. Valid until the step ends.

    Whoever takes a table has to write the layer's new rows, as docs/layout.md draws them, unless `append` was called before:
    it is refused afterwards. Other kernels know neither centres nor rotations: quantised rows need a cache with center=None
    and rotate=False. A layer with kv_owner has the table of its owner, and no rows.

    block_table: int32 [B, pages]: device block of each page; -1 past the end, for pages on another tier and for those that
    have left a window. For a layer with a window a sequence's columns begin at the last multiple of 4096 tokens up to the
    first page that it keeps. A page that was cut, by `drop` or between sinks and a window, has a column for each side.
    pointers: uint64 [B, pages]: address of each page's block; 0 past the end, for pages on disk and for those that have left.
    slot_mapping: int64 [sum(new)]: device block * page_size + row of each new token.
    """

    __slots__ = ("_layer", "_step", "block_table", "pointers", "slot_mapping")

    def __init__(self, step: Step, layer: int) -> None:
        self._step, self._layer = step, layer
        arrays = step._core.table(step._number, layer)
        self.block_table: npt.NDArray[np.int32] = arrays["block_table"]
        self.pointers: npt.NDArray[np.uint64] = arrays["pointers"]
        self.slot_mapping: npt.NDArray[np.int64] = arrays["slot_mapping"]

    @property
    def csr(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """`(kv_indptr, kv_indices, kv_last_page_len)`, int32, as FlashInfer takes them.

        Raises InvalidArgument for what this form cannot express: dropped tokens, sinks, pages off the device.
        """
        return self._step._core.csr_table(self._step._number, self._layer)

    @property
    def kv_indptr(self) -> npt.NDArray[np.int32]:
        """int32 [B + 1]: where each sequence's pages begin in `kv_indices`."""
        return self.csr[0]

    @property
    def kv_indices(self) -> npt.NDArray[np.int32]:
        """int32: the device blocks of all sequences, one after the other."""
        return self.csr[1]

    @property
    def kv_last_page_len(self) -> npt.NDArray[np.int32]:
        """int32 [B]: tokens in each sequence's last page."""
        return self.csr[2]

    def __repr__(self) -> str:
        return f"<Table of layer {self._layer}>"


class Step(Uncopied):
    """One forward pass over a ragged batch: a context manager made by `Cache.step`.

    Entering reserves pages for the new tokens, all or nothing. Leaving commits them. An exception rolls back, and so does a
    commit on leaving that is refused.
    """

    __slots__ = ("__weakref__", "_began", "_cache", "_counts", "_ended", "_number", "_open", "_stream", "batch")

    def __init__(self, cache: Cache, batch: Batch, counts: npt.NDArray[np.int64], stream: Stream | None) -> None:
        self._open = False
        self._cache = cache
        self.batch, self._counts, self._stream = batch, counts, stream
        self._began = self._ended = 0.0

    @property
    def _core(self) -> Engine:
        """The engine, while this is the open step. Raises InvalidArgument afterwards, when another step may be open."""
        self._check_open()
        return self._cache._core

    def _check_open(self) -> None:
        if not self._open:
            raise InvalidArgument("step = closed: an open step; enter it with `with`")

    def __enter__(self) -> Step:
        if self._open:
            raise InvalidArgument("step = open: one that is not; this one goes on")
        self._began = time.perf_counter()
        self._number = next(self._cache._steps)
        try:
            # Set early: Ctrl-C may come as soon as the core has opened the step.
            self._open = True
            self._cache._entered[self._number] = weakref.ref(self)
            self._cache._reserve(self._number, self.batch, self._counts, self._stream)
        except PagodaError:
            self._end()
            raise
        except BaseException:
            self._open = False
            # Roll back at once, if possible: enclosing `with` blocks may be about to release its sequences.
            with contextlib.suppress(PagodaError):
                self._cache._end_unfinished()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        try:
            if kind is None:
                self.commit()
        finally:
            if self._open:
                # A commit that Ctrl-C interrupts may have ended the step. Its error is more useful than the rollback's.
                with contextlib.suppress(PagodaError):
                    self._cache._core.rollback(self._number)
                self._end()

    def _goes_on(self, number: int) -> bool:
        """Whether this is still the open step of that number, which somebody is to end."""
        return self._open and self._number == number

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """int64 [sum(new)]: the positions to rotate the new queries and keys with."""
        return self._core.positions(self._number)

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32 [B + 1]: where each sequence's new tokens begin."""
        return self._core.cu_seqlens(self._number)

    def table(self, layer: int) -> Table:
        """The page table of a layer, for other kernels; for a layer with kv_owner, the table of its owner."""
        return Table(self, natural("layer", layer))

    def append(self, layer: int, k: Rows | None = None, v: Rows | None = None, *, dtype: str | None = None) -> None:
        """Writes K and V of the new tokens of one layer into their pages, converted to the row formats of the cache.

        k: [sum(new), num_kv_heads, head_dim] and v: [.., v_head_dim], float32, float16 or bfloat16 (or its bits as uint16
        with dtype="bf16"), with any strides but a contiguous last dimension. On the CPU they are NumPy arrays;
        docs/transformers.md says how to pass those of torch and JAX. On a GPU they are arrays of CuPy, torch or others there
        (by DLPack), and k and v have the same type. No v for a layer with v_alias, no k for one with k_eq_v. Rounds to
        nearest even; what f16 cannot hold is stored as +-65504, or raises InvalidArgument in a cache with checked=True.
        """
        self._core.append(self._number, natural("layer", layer), k, v, dtype)

    @overload
    def attend(self, layer: int, q: Q, *, return_lse: Literal[False] = False, **options: Unpack[_Options]) -> Q: ...
    @overload
    def attend(self, layer: int, q: Q, *, return_lse: Literal[True], **options: Unpack[_Options]) -> tuple[Q, Any]: ...
    @overload
    def attend(self, layer: int, q: Rows, *, return_lse: bool, **options: Unpack[_Options]) -> Any: ...
    def attend(
        self,
        layer: int,
        q: Rows,
        *,
        out: Rows | None = None,
        return_lse: bool = False,
        sink_logits: Rows | None = None,
        dtype: str | None = None,
    ) -> Any:
        """Causal attention of the new tokens over all tokens up to them, within the layer's window.

        q: [sum(new), num_q_heads, head_dim] in the types of `append`. Returns [sum(new), num_q_heads, v_head_dim] in q's
        type and library, in `out` if given; what f16 cannot hold is +-65504. With return_lse, returns a pair of that and the
        float32 natural log-sum-exp [sum(new), num_q_heads]. A query that sees nothing gets 0 and -inf. Call `append` first,
        for a layer with kv_owner that of its owner.

        Raises CorruptPage for a page on disk that does not verify, and TierIOError for one that cannot be read, or not in
        time: the step can then only be rolled back. Their `sequences` are those that hold the page; the others can go on.

        sink_logits: float32 [num_q_heads], required for a layer with sinks and refused for others; on a GPU a contiguous
        array of the device, whose address a captured graph keeps. Each adds to its head the score of one more token, with V =
        0. The log-sum-exp does not include it.
        """
        check_flag("return_lse", return_lse)
        layer = natural("layer", layer)
        out, lse = self._core.attend(self._number, layer, q, out, return_lse, dtype, sink_logits)
        return (out, lse) if return_lse else out

    @overload
    def forward(
        self,
        layer: int,
        q: Q,
        k: Rows | None = None,
        v: Rows | None = None,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> Q: ...
    @overload
    def forward(
        self,
        layer: int,
        q: Q,
        k: Rows | None = None,
        v: Rows | None = None,
        *,
        return_lse: Literal[True],
        **options: Unpack[_Options],
    ) -> tuple[Q, Any]: ...
    @overload
    def forward(
        self,
        layer: int,
        q: Rows,
        k: Rows | None = None,
        v: Rows | None = None,
        *,
        return_lse: bool,
        **options: Unpack[_Options],
    ) -> Any: ...
    def forward(
        self,
        layer: int,
        q: Rows,
        k: Rows | None = None,
        v: Rows | None = None,
        *,
        out: Rows | None = None,
        return_lse: bool = False,
        sink_logits: Rows | None = None,
        dtype: str | None = None,
    ) -> Any:
        """`append`, then `attend`. Without k and v, as for a layer with kv_owner, only `attend`."""
        if k is not None or v is not None:
            self.append(layer, k, v, dtype=dtype)
        return self.attend(layer, q, out=out, return_lse=return_lse, sink_logits=sink_logits, dtype=dtype)

    @property
    def report(self) -> StepReport:
        """What attention has read in this step, by link; valid until the next step of the cache is entered."""
        seconds = (time.perf_counter() if self._open else self._ended) - self._began
        attended, from_disk, waited = self._cache._core.attended()
        if self._cache._device is None:
            return StepReport(seconds, waited, {"memory": attended, "disk": from_disk})
        traffic = self._cache._device.traffic
        moved = {"pcie": traffic.ring + traffic.mapped, "disk": from_disk, "memory": traffic.memory}
        return StepReport(seconds, waited, moved)

    def replay(self, launch: Callable[[], object]) -> None:
        """Replays a graph that an earlier step captured, for the appends and attends of all layers. See `Cache.declare`.

        launch: the `launch` of a CuPy graph or the `replay` of a torch graph, called with the step's stream as the current
        stream of CuPy and torch. Raises InvalidArgument if no maxima are declared, if a sequence has more new tokens than
        declared for graphs, and if a layer was already appended to in this step. Raises BackendUnavailable on the CPU.
        """
        if not callable(launch):
            raise InvalidArgument(f"launch = {launch!r}: what launches a graph")
        if self._cache._device is None:
            raise BackendUnavailable("replay: graphs are of GPUs; this cache is on the CPU")
        self._check_open()
        self._cache._device.replay(self._number, launch)

    def commit(self, accepted: Collection[int] | npt.NDArray[np.int64] | None = None) -> None:
        """Ends the step, keeping the first `accepted[i]` new tokens of the i-th sequence, or all by default.

        Raises InvalidArgument, and leaves the step open, when a layer was not appended to, a count is too large, or the
        step's stream is being captured.
        """
        if accepted is not None:
            accepted = integers("accepted", accepted, "a list of integers, one a sequence")
        self._core.commit(self._number, accepted)
        self._end()
        self._cache._spill.ahead(self.batch.ids)

    def rollback(self) -> None:
        """Ends the step as if it had not been entered, as an exception does."""
        self._core.rollback(self._number)
        self._end()

    def __repr__(self) -> str:
        return f"<Step of {len(self.batch)} sequence(s), {'open' if self._open else 'closed'}>"

    def _end(self) -> None:
        self._open, self._ended = False, time.perf_counter()
        self._cache._entered.pop(self._number, None)
