"""The cache: sequences of tokens, their K and V in pages, and steps that append and attend.

This is the file to read first; sequence.py and step.py have the rest of the objects that callers hold. All are a thin,
checked interface to `pagoda._core`, which holds the bookkeeping (crates/pagoda-core), the memory (crates/pagoda-store) and
the CPU kernels (crates/pagoda-cpu).

    cache = pagoda.Cache(spec)                       # budgets per tier, row formats
    sequence = cache.create()
    with cache.step([sequence], [n]) as step:        # pages for n more tokens, or OutOfBlocks and nothing changed
        for layer in range(len(spec.layers)):
            step.append(layer, k, v)                 # written into their pages
            out = step.attend(layer, q)              # over every page, wherever it lies
    # leaving the block commits; an exception rolls back to before the step
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Collection
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pagoda import _core, placement
from pagoda._core import SEQUENCES_MAX, TOKENS_MAX, cores
from pagoda.checks import (
    as_int,
    check_choice,
    check_flag,
    check_list,
    check_page_size,
    check_threads,
    integers,
    is_number,
    natural,
    token_range,
)
from pagoda.device import engine_for
from pagoda.device.driver import Stream
from pagoda.disk import DISK_TIMEOUT, disk_arguments
from pagoda.engine import SECONDS_MAX, Engine, forced_isa
from pagoda.errors import BackendUnavailable, CorruptPage, InvalidArgument, OutOfBlocks, PagodaError, TierIOError
from pagoda.formats import formats_by_layer
from pagoda.geometry import Geometry, core_layers, group_layers, tier_memory
from pagoda.outliers import Outliers
from pagoda.retention import SinkWindow, keeps_by_layer
from pagoda.sequence import Batch, Sequence, Uncopied
from pagoda.sizes import parse_size
from pagoda.spec import ModelSpec, check_spec
from pagoda.stats import TIERS, Stats
from pagoda.step import Array, Step, Table

log = logging.getLogger("pagoda")

T = TypeVar("T")

__all__ = ["Array", "Batch", "Cache", "Plan", "Sequence", "Step", "Table", "Ticket"]

os.register_at_fork(after_in_child=_core.after_fork_in_child)

META_BYTES_MAX = 64 << 20
"""Of `meta` in `save`: it is part of the index, which is read whole and has 4 GiB at most."""


class Plan:
    """Copies that would move pages; made by `Cache.plan`. It cannot be executed once its pages have changed or moved."""

    __slots__ = ("_cache", "_core")

    def __init__(self, cache: Cache, core: _core.Plan) -> None:
        self._cache, self._core = cache, core

    @property
    def copies(self) -> list[tuple[int, int, str, str, int]]:
        """`(page, layer group, from, to, bytes)` of each page; 0 bytes if the target tier already holds a copy."""
        return self._core.copies

    @property
    def bytes(self) -> int:
        """Bytes that executing the plan copies."""
        return self._core.bytes

    def __len__(self) -> int:
        return len(self._core)

    def __repr__(self) -> str:
        return f"<Plan of {len(self)} page(s)>"


class Ticket:
    """A plan under way. Dropping the ticket cancels nothing: a failure is then raised at the cache's next step."""

    __slots__ = ("_cache", "_core", "plan")

    def __init__(self, cache: Cache, plan: Plan, core: _core.Ticket) -> None:
        self._cache, self.plan, self._core = cache, plan, core

    def done(self) -> bool:
        """Whether the copies have arrived. Raises TierIOError if they failed, and CorruptPage if pages on disk do not verify;
        those pages stay where they were."""
        return self._cache._core.ticket_done(self._core)

    def wait(self, timeout: float | None = None) -> bool:
        """Sleeps until `done`, or for `timeout` seconds. Returns whether the copies have arrived; raises as `done` does."""
        timeout = SECONDS_MAX if timeout is None else as_int(timeout)
        if not is_number(timeout) or not 0 <= timeout <= SECONDS_MAX:
            raise InvalidArgument(f"timeout = {timeout!r}: None, or seconds from 0 to {SECONDS_MAX}")
        arrived = self._cache._core.wait(self._core, timeout)
        return arrived and self.done()

    def __repr__(self) -> str:
        return f"<Ticket of {len(self.plan)} page(s)>"


class Cache(Uncopied):
    """A tiered, paged KV cache.

    spec: the model's layers, of at most 64 shapes, windows and formats. page_size: tokens in a page, a power of two from
    8 to 4096; on a CPU quantised rows are read up to three times as fast in pages of 16 or more as in pages of 8.
    k_dtype, v_dtype: row formats of `pagoda.formats`, one for all layers or one for each; PAGODA_KV_DTYPE in the environment
    overrides them, by a format for both or by two with a comma, such as "q8_0,q4_0".
    center, rotate: how rows are transformed before quantisation, see `pagoda.outliers`; "auto" decides by the format. A
    deterministic cache subtracts only centres that are given: one from the first rows depends on which sequence came first.
    With resume=True quantised K needs center=None or arrays, so that later caches know what was subtracted.
    k_norms: for each layer with `k_eq_v` the weight of K's norm [head_dim], None for others; only V is stored then, and K is
    derived from it. `ModelSpec.storing_k` stores both.

    device: "cpu", "cuda", "cuda:1"; "auto" is the CPU for now.
    device_memory, host_memory: budgets, in bytes or like "512MiB"; host_memory=0 is no host tier. A CPU allocates memory as
    it is used. On a GPU the device tier is allocated at once, and the host tier is pinned as it is used; at most an eighth of
    device_memory is a ring through which pages of other tiers are streamed.
    threads: CPU workers; by default one for each core that the process may use, by its affinity and the quota of its cgroup.
    On a GPU they do a part of attention over the host tier, if `pagoda doctor --calibrate` has measured this GPU with the
    same number of threads.

    disk, disk_memory: a directory for a third tier, and the bytes that it may use there. The directory is created if only its
    last part is missing, and nobody else may have write access. Page checksums are verified on every read.
    disk_writes_per_day: bytes of pages that may be written there at once, and as many again over each day. With resume=True
    writes of earlier caches with such a limit count too. The index of what `save` keeps is not counted.
    disk_timeout: seconds that `attend` waits for a read, and other calls (and opening the directory) for a disk that does
    nothing, before they raise TierIOError. I/O under way then continues; until it ends its memory is not reused, and no other
    cache can open the directory.
    resume: False uses a file without a name that goes with the cache. True keeps what was saved by `save` until `forget`,
    even after a kill: the next cache with the same directory finds it again, if it has the same layers, formats, page_size,
    center, rotate, k_norms, retention, headroom (where there are windows) and model. Its disk_memory may differ if it has
    room for it. Only one cache at a time can use the directory.
    model: a text that stands for the weights, which the cache cannot see: a name and revision, or a digest. A directory of
    another model is refused.

    zero_on_free: True zeroes the bytes of pages that nobody holds any more, on every tier, before their memory is reused: on
    the CPU as soon as they are free, on a GPU with the first call after the steps that may read them have ended. On disk they
    become holes; if a drive takes longer than disk_timeout for that, they count as draining until then. Opening a directory
    zeroes what no kept sequence holds. SECURITY.md says what is not zeroed.
    deterministic: the bits of a result depend on the sequence alone, not on batch, chunks, threads or where pages lie. After
    a `drop` of tokens that have left a window they depend on the `drop` too: `truncate` brings none of them back.
    checked: `append` raises for values that do not fit their row format, infinities and NaN.

    spill: when the device tier is full, its oldest pages go to the host tier, and from there to disk; pages of sequences that
    are not in the step go first. Pages on disk come back, as many as there is room for, when a step has other sequences than
    the one before or others were released since. Steps also attend to pages that stay on disk: they are read ahead, layer by
    layer, through memory beside the budgets (see `stats().disk_io`). On a GPU this needs the ring. If device_memory is too
    small for one, nothing goes to disk automatically, and a step whose queries see pages there raises InvalidArgument, which
    says how much memory is needed.
    retention: what layers without a window keep; everything by default, or `SinkWindow`.
    headroom: tokens kept behind every window, so that `truncate` can take back as many; a page by default. A layer with a
    window holds the pages of its last `window + headroom` tokens. Older pages leave when a step commits, so memory is
    constant however long a sequence grows. A step's own tokens are held until then.

    Calls may come from several threads, and take turns. A cache has at most one open step: entering another raises
    InvalidArgument, and so does changing or forking a sequence that is in it.

    Raises InvalidArgument (also a ValueError) for bad or conflicting arguments, BackendUnavailable for what this machine
    lacks or refuses, GeometryMismatch for a directory of another model, or if disk_memory is too small for what is kept
    there, CorruptPage if its index is broken or gone, TierIOError if it cannot be used or another cache has it open. On a GPU
    a kernel is compiled when it is first launched, which raises `pagoda.kernels.loader.KernelCompileError` if it fails.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        page_size: int = 64,
        k_dtype: str | Collection[str] = "f16",
        v_dtype: str | Collection[str] = "f16",
        center: Collection[Array | None] | Array | str | None = "auto",
        rotate: bool | str = "auto",
        k_norms: Collection[Array | None] | None = None,
        device: str = "auto",
        device_memory: int | str = "2GiB",
        host_memory: int | str = "8GiB",
        disk: str | Path | None = None,
        disk_memory: int | str = 0,
        resume: bool = False,
        disk_writes_per_day: int | str | None = None,
        disk_timeout: float = DISK_TIMEOUT,
        model: str | None = None,
        zero_on_free: bool = False,
        threads: int | None = None,
        deterministic: bool = False,
        checked: bool = False,
        spill: bool = True,
        retention: SinkWindow | None = None,
        headroom: int | None = None,
    ) -> None:
        page_size, threads = as_int(page_size), as_int(cores() if threads is None else threads)
        check_spec("spec", spec)
        check_threads("threads", threads)
        check_page_size("page_size", page_size)
        flags = {"zero_on_free": zero_on_free, "deterministic": deterministic, "checked": checked, "spill": spill}
        for name, flag in flags.items():
            check_flag(name, flag)
        self.spec, self.page_size = spec, page_size
        self.retention, self.headroom = retention, as_int(page_size if headroom is None else headroom)
        self.dtypes = formats_by_layer(k_dtype, v_dtype, len(spec.layers))
        """Row formats of K and V, by layer."""
        self._groups = group_layers(spec, self.dtypes)
        keeps = keeps_by_layer(spec, retention, self.headroom)
        outliers = Outliers(center, rotate, len(spec.layers), deterministic=deterministic)
        layers = core_layers(spec, self.dtypes, outliers, keeps, k_norms)
        geometry = Geometry(layers, page_size)
        sizes = [layout.block_bytes for layout in geometry.layouts]
        memory = [
            tier_memory(name, parse_size(size, name), sizes, needed=name == "device_memory")
            for name, size in (("device_memory", device_memory), ("host_memory", host_memory))
        ]
        (device_bytes, _), (host_bytes, _) = memory
        on_disk = disk_arguments(disk, disk_memory, resume, disk_writes_per_day, disk_timeout, model, geometry)
        options: dict[str, Any] = {
            "memory": memory,
            "threads": threads,
            "deterministic": deterministic,
            "checked": checked,
            "zero_on_free": zero_on_free,
            "disk": on_disk,
        }
        self._device = engine_for(device, geometry, **options)
        self._core: Engine = self._device or _core.Cache(layers, page_size=page_size, isa=forced_isa(), **options)
        self._steps = itertools.count(1)
        self._entered: dict[int, weakref.ref[Step]] = {}
        """Steps that may be open, by number. No finaliser ends abandoned steps, as a Ctrl-C in it would be lost."""
        # Do not spill pages to disk if steps could not attend to them there.
        to_disk = on_disk is not None and (self._device is None or self._device.attends_to_disk)
        below = [tier for tier, there in (("host", host_bytes > 0), ("disk", to_disk)) if there]
        self._spill = placement.Spill(self._core, below if spill else [])
        self._page_bytes = sum(sizes)
        """Of a block of every layer group."""
        self._pages_max = min(*self._core.free_blocks("device"), device_bytes // self._page_bytes)
        """Of the device, pages that have a block of every layer group, were all else gone from there."""
        if on_disk is not None:
            for refused in self._core.stats()["disk"]["refused"]:
                log.warning("disk = %s: without %s", disk, refused)
            for key, why in self._core.lost():
                log.warning("disk = %s: %r is lost: %s", disk, key, why)

    def create(self) -> Sequence:
        """A new, empty sequence."""
        return Sequence(self, self._core.create())

    def batch(self, sequences: Collection[Sequence]) -> Batch:
        """A fixed batch for `step`, whose sequences are checked once. Raises InvalidArgument and UseAfterRelease."""
        return self._batch("sequences", sequences)

    def step(
        self,
        batch: Batch | Collection[Sequence],
        new_tokens: Collection[int] | npt.NDArray[np.int64],
        *,
        stream: object = None,
    ) -> Step:
        """A step that appends `new_tokens[i]` tokens to the i-th sequence, at most 2**31 - 1 in all; enter it with `with`.

        Entering raises OutOfBlocks, and changes no sequence, when the device tier has too few blocks and no more can be
        spilled. Pages may have moved by then, and moves that were under way have ended.
        stream: on a GPU the stream of the step: a stream of CuPy or torch, or its address. None is CuPy's current stream, or
        torch's if CuPy's is the default one. A stream that differs by thread (cudaStreamPerThread) is refused. Kernels use
        the arrays of the step on this stream. Write what they read on it, or have it wait, as it does for arrays by DLPack;
        do not reuse the memory of these arrays until the stream has passed that point.
        """
        if stream is not None and self._device is None:
            raise InvalidArgument(f"stream = {stream!r}: None on the CPU backend")
        on = None if self._device is None else self._device.caller_stream(stream)
        if not isinstance(batch, Batch):
            batch = self._batch("batch", batch)
        if batch._cache is not self:
            raise InvalidArgument(f"batch = {batch!r}: a batch of this cache")
        return Step(self, batch, integers("new_tokens", new_tokens, "a list of integers, one a sequence"), on)

    def declare(self, *, sequences: int, new_tokens: int, context: int, tokens: int | None = None) -> None:
        """Declares maxima of all steps to come, so that a graph can be captured in one step and replayed in later ones.

        sequences: in a step. new_tokens: for each sequence, in steps that a graph does. context: tokens that a sequence
        keeps. tokens: new tokens of any step, over all sequences; `sequences * new_tokens` by default. From then on steps
        allocate no device memory. Steps with up to `new_tokens` for each sequence launch the same kernels with the same
        arguments, whatever sequences grow, join or leave. Steps with more, prompts for example, launch what they need,
        without a graph. K, V, queries and outputs may have up to `tokens` rows, of which kernels use the first sum(new).
        Steps beyond the maxima raise InvalidArgument. So may those with a sequence of more than 8 spans (each has one, one
        more after each `drop`, and one for its sinks), or of several pieces of sinks that follow the window, since a `drop`
        has cut them. Maxima are declared once, as graphs keep the addresses of what was allocated for them. docs/kernels.md
        says how much memory that takes.

            cache.declare(sequences=64, new_tokens=1, context=131072, tokens=2048)
            with cache.step([prompt], [2048], stream=stream) as step:
                forward(step)
            with cache.step(batch, ones, stream=stream) as step:     # once as it is: kernels are loaded
                forward(step)
            with cache.step(batch, ones, stream=stream) as step:
                stream.begin_capture()
                forward(step)                                        # append and attend with out=, on that stream
                graph = stream.end_capture()
                graph.launch(stream)
            with cache.step(others, ones, stream=stream) as step:
                step.replay(graph.launch)

        The caller captures the step's stream, inside of one step. InvalidArgument is raised there for kernels that were never
        launched, and for appends and attends while the current stream is captured but not the step's. Graphs read pages of
        the host tier in place. A step that streams these pages allocates, so capturing it raises InvalidArgument, as does
        replaying a graph in a step whose queries see pages on disk. Raises BackendUnavailable on the CPU, which would gain
        nothing, and in a cache with checked=True, whose steps wait for the device.
        """
        sequences = natural("sequences", sequences, 1, SEQUENCES_MAX)
        new_tokens = natural("new_tokens", new_tokens, 1, TOKENS_MAX // sequences)
        context = natural("context", context, 1, TOKENS_MAX)
        tokens = sequences * new_tokens if tokens is None else natural("tokens", tokens, 1, TOKENS_MAX)
        if self._device is None:
            raise BackendUnavailable("declare: graphs are of GPUs; this cache is on the CPU")
        self._device.declare(sequences, new_tokens, context, tokens)

    def plan(
        self,
        sequence: Sequence,
        to: str,
        tokens: tuple[int, int] | None = None,
        layers: Collection[int] | None = None,
        *,
        keep: bool = False,
    ) -> Plan:
        """The copies that would move the pages of tokens [start, stop) to tier `to`. Changes nothing.

        layers: whole layer groups; all by default. keep: keep the copy that is read now. A page that is not full has only one
        copy and never goes to disk; a step that appends to it brings it back to the device. Pages that another plan is moving
        are left out: wait for its ticket first.
        """
        check_choice("to", to, TIERS)
        check_flag("keep", keep)
        return self._plan(sequence, to, tokens, layers, keep=keep)

    def execute(self, plan: Plan) -> Ticket:
        """Starts a plan in the background, all or nothing. Raises OutOfBlocks if the target tier is full."""
        if not isinstance(plan, Plan) or plan._cache is not self:
            raise InvalidArgument(f"plan = {plan!r}: a plan of this cache")
        return Ticket(self, plan, self._core.execute(plan._core))

    def demote(self, sequence: Sequence, tokens: tuple[int, int] | None = None, to: str = "host") -> Ticket:
        """Moves pages from faster tiers to this one, in the background; pages on a slower tier stay there.

        All pages can go to the host, and the sequence then holds nothing on the device. Only full pages can go to disk.
        Raises OutOfBlocks if the host is full: other sequences are not pushed down to disk for it.
        """
        check_choice("to", to, ("host", "disk"))
        return self._move(sequence, to, tokens, only_from="device" if to == "host" else None)

    def promote(self, sequence: Sequence, tokens: tuple[int, int] | None = None, to: str = "device") -> Ticket:
        """Moves pages from slower tiers to this one, in the background; pages on a faster tier stay there.

        Raises OutOfBlocks if not all of them fit: no others leave for them. `prefetch` takes as many as fit.
        """
        check_choice("to", to, ("device", "host"))
        return self._move(sequence, to, tokens, only_from="disk" if to == "host" else None)

    def prefetch(self, sequence: Sequence) -> Ticket:
        """Copies the newest pages to the device tier in the background, as many as fit there.

        The slower copies stay, so that demoting these pages again copies no bytes.
        """
        free = self._core.free_blocks("device")
        pages = max(free)
        while True:
            most = [min(pages, blocks) for blocks in free]
            newest = partial(self._plan, sequence, "device", pages_max=most, keep=True, newest_first=True)
            try:
                return self._start(newest)
            except OutOfBlocks as error:
                # Groups share extents, so free memory is not free for all of them at once; one page less in each group saves
                # at most one block in each. At least a 32nd less, or there might be as many tries as pages.
                pages -= max(-(-error.bytes_short // self._page_bytes), pages // 32)

    def save(self, sequence: Sequence, key: str, tokens: tuple[int, int] | None = None, meta: bytes = b"") -> None:
        """Saves a sequence to disk under a key, replacing what was there. On return it is safe from a loss of power.

        The sequence itself does not change. Pages that are already on disk are not written again. tokens: save only
        [start, stop), as `truncate(stop)` and then `drop(0, start)` would leave them: they keep their positions. meta: up to
        64 MiB, which `meta` returns. Waits for moves of its pages that are under way.

        Raises InvalidArgument in a cache without resume=True, and while a step is open if full pages are not on disk yet:
        they arrive there between steps. Raises OutOfBlocks when the disk tier is full. Raises TierIOError when the disk fails
        or does nothing for `disk_timeout` seconds, and, before any page is written, when the index has no room for another
        line (4 GiB). After an error the key is as it was, with one exception: if the line that names the pages was already on
        its way to the drive, the key changes once the drive answers, and until then calls with this key raise TierIOError.
        """
        self._check_ours(sequence)
        if not isinstance(meta, bytes):
            raise InvalidArgument(f"meta = {meta!r}: bytes")
        if len(meta) > META_BYTES_MAX:
            raise InvalidArgument(f"meta = {len(meta)} bytes: at most {META_BYTES_MAX}")
        key = _key(key)
        if tokens is not None:
            start, stop = token_range("tokens", tokens)
            least = sequence.rewind_limit
            if not start <= stop <= len(sequence) or 0 < stop < least:
                limit = f"a start, and a stop that is 0 or from {least} to {len(sequence)}"
                raise InvalidArgument(f"tokens = {tokens}: {limit}")
            with sequence.fork() as part:
                part.truncate(stop)
                try:
                    part.drop(0, start)
                except InvalidArgument as error:
                    # The error of `drop` names arguments that the caller has not given.
                    limit = f"a start of 0, or one that drop(0, start) takes of a sequence of {stop} tokens"
                    raise InvalidArgument(f"tokens = {tokens}: {limit}, as pages have left a window") from error
                return self.save(part, key, meta=meta)
        self._core.check_save(sequence.id, key, len(meta))
        to_disk = partial(self.plan, sequence, "disk", keep=True)
        spare = partial(self._spill.spare, "disk", but_of=sequence.id)
        all_there = False
        while True:
            for under_way in self._core.under_way(sequence.id):
                self._core.wait_patiently(under_way)
            ticket = self._sparing(spare, partial(self._start, to_disk))
            self._core.wait_patiently(ticket._core)
            ticket.done()
            try:
                return self._sparing(spare, partial(self._core.save, sequence.id, key, meta))
            except InvalidArgument:
                # Another thread may have started moving pages just before the plan was made; by now they may have arrived.
                if all_there or self._core.step_is_open():
                    raise
                all_there = not (self._core.under_way(sequence.id) or to_disk().bytes)

    def load(self, key: str) -> Sequence | None:
        """A new sequence with what `save` kept under a key; None if there is nothing, or it does not verify, which is logged.

        As many pages as fit are read into memory, on the host tier first, and verified; `prefetch` copies them to the device.
        Raises OutOfBlocks when the device tier has no block for the last page and none can be spilled, as while a step is
        open. Raises TierIOError when the disk cannot be read or does nothing for `disk_timeout` seconds, and InvalidArgument
        in a cache without resume=True.
        """
        try:
            handle = self._with_room(partial(self._core.load, _key(key)), np.empty(0, np.uint64), np.empty(0, np.int64))
            if handle is None:
                return None
            sequence = Sequence(self, handle)
            try:
                self._spill.bring_in(np.array([sequence.id], np.uint64))
            except PagodaError:
                # Release at once: the error's traceback would hold the sequence for as long as somebody holds the error.
                sequence.release()
                raise
        except CorruptPage as error:
            log.warning("%r does not verify: %s", key, error)
            return None
        return sequence

    def forget(self, key: str) -> bool:
        """Deletes what is kept under a key; returns whether there was something.

        Raises TierIOError when the drive fails or does nothing for `disk_timeout` seconds; the key is then as it was, with
        the exception that `save` names. Raises InvalidArgument in a cache without resume=True.
        """
        return self._core.forget(_key(key))

    def saved(self) -> dict[str, bytes]:
        """The keys under which sequences are kept, and their `meta`; empty in a cache without resume=True."""
        return self._core.saved()

    def meta(self, key: str) -> bytes | None:
        """The `meta` of what is kept under a key; None if there is nothing, and in a cache without resume=True."""
        return self._core.meta(_key(key))

    def stats(self) -> Stats:
        """Blocks and bytes by tier, and counters. The time it takes grows with sequences, not with their pages."""
        return Stats.from_core(self._core.stats())

    def audit(self) -> None:
        """Checks all bookkeeping. Raises InvariantError with the first broken invariant."""
        self._core.audit()

    def close(self) -> None:
        """Closes the cache and gives its memory back; copies under way finish first. Later calls raise UseAfterRelease.

        Raises TierIOError when the drive does nothing for `disk_timeout` seconds. The cache is closed all the same, but
        memory that the drive may still write to, and the directory, are given back only when the drive has answered.
        """
        self._core.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TierIOError as unanswered:
            if error is None:
                raise
            # The earlier error is the more useful one.
            log.warning("%s", unanswered)

    def __repr__(self) -> str:
        # There is no spec if __init__ failed.
        return f"<Cache of {len(self.spec.layers)} layer(s)>" if hasattr(self, "spec") else "<Cache of nothing>"

    def _reserve(self, number: int, batch: Batch, counts: npt.NDArray[np.int64], stream: Stream | None) -> None:
        self._end_unfinished()
        reserve = partial(self._core.reserve, number, batch.ids, counts)
        if self._device is not None:
            reserve = partial(self._device.reserve, number, batch.ids, counts, stream)
        while True:
            self._with_room(reserve, batch.ids, counts)
            if not self._spill.may_bring_in(batch.ids):
                return
            self._core.rollback(number)
            self._spill.bring_in(batch.ids)

    def _end_unfinished(self) -> None:
        """Rolls back the steps that nobody will end."""
        for number, entered in tuple(self._entered.items()):
            step = entered()
            if step is not None and step._goes_on(number):
                continue
            with contextlib.suppress(InvalidArgument):  # It may have ended, and another thread's step be open.
                self._core.rollback(number)
            self._entered.pop(number, None)

    def _with_room(self, call: Callable[[], T], batch: npt.NDArray[np.uint64], new_tokens: npt.NDArray[np.int64]) -> T:
        """Makes a call that takes blocks of the device, and repeats it as long as room can be made for it."""
        while True:
            drained = self._core.drained_blocks()
            try:
                return call()
            except OutOfBlocks as error:
                # Move no pages for a step whose own pages alone could never fit.
                if (-(-new_tokens // self.page_size)).sum() > self._pages_max:
                    raise
                # Blocks of the target tier may be draining because the drive is slow to read, or may have drained by now.
                if not self._spill.make_room(error.blocks_short, batch) and not self._spill.drain(drained):
                    raise

    def _plan(
        self,
        sequence: Sequence,
        to: str,
        tokens: tuple[int, int] | None = None,
        layers: Collection[int] | None = None,
        **options: Any,
    ) -> Plan:
        self._check_ours(sequence)
        span = None if tokens is None else token_range("tokens", tokens)
        return Plan(self, self._core.plan(sequence.id, to, span, self._groups_of(layers), **options))

    def _move(self, sequence: Sequence, to: str, tokens: tuple[int, int] | None, only_from: str | None) -> Ticket:
        """Starts moving pages; copies that nobody needs make room, once the steps that may read them have ended."""
        plan = partial(self._plan, sequence, to, tokens, only_from=only_from)

        def spare(blocks: int) -> bool:
            # Its own copies last: a page with a copy on the target needs no room there, but would without it.
            return self._spill.spare(to, blocks, sequence.id) or self._spill.spare(to, blocks)

        return self._sparing(spare, partial(self._start, plan))

    def _start(self, plan: Callable[[], Plan]) -> Ticket:
        """Executes a plan; makes it again if another thread has changed or moved its pages since."""
        while True:
            made = plan()
            try:
                return self.execute(made)
            except InvalidArgument:
                if plan().copies == made.copies:
                    raise

    def _sparing(self, spare: Callable[[int], bool], call: Callable[[], T]) -> T:
        """Makes a call that takes blocks, and repeats it while blocks of their tier drain or copies there can be dropped."""
        while True:
            drained = self._core.drained_blocks()
            try:
                return call()
            except OutOfBlocks as error:
                if not (error.draining and self._spill.drain(drained)) and not spare(error.blocks_short):
                    raise

    def _batch(self, name: str, sequences: Collection[Sequence]) -> Batch:
        check_list(name, sequences, "sequences")
        # Check the tuple that is kept: a list may have changed by the time it is iterated again.
        sequences = tuple(sequences)
        for index, sequence in enumerate(sequences):
            # Only a bad entry needs a name, for its message: names for all would cost time in every step.
            if not isinstance(sequence, Sequence) or sequence._cache is not self:
                self._check_ours(sequence, f"{name}[{index}]")
        if len(set(sequences)) < len(sequences):
            index = next(index for index, sequence in enumerate(sequences) if sequence in sequences[:index])
            raise InvalidArgument(f"{name}[{index}] = {sequences[index]!r}: each sequence once")
        return Batch(self, sequences)

    def _check_ours(self, sequence: Sequence, name: str = "sequence") -> None:
        if not isinstance(sequence, Sequence) or sequence._cache is not self:
            raise InvalidArgument(f"{name} = {sequence!r}: a sequence of this cache")

    def _groups_of(self, layers: Collection[int] | None) -> list[int]:
        if layers is None:
            return list(range(len(self._groups)))
        wanted = set(integers("layers", layers, "a list of integers, those of whole layer groups").tolist())
        chosen = [group for group, members in enumerate(self._groups) if wanted & set(members)]
        whole = {layer for group in chosen for layer in self._groups[group]}
        if whole != wanted:
            raise InvalidArgument(f"layers = {sorted(wanted)}: whole layer groups, of {self._groups}")
        return chosen


def _key(key: str) -> str:
    try:
        size = len(key.encode()) if isinstance(key, str) else 0
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= _core.KEY_BYTES_MAX:
        raise InvalidArgument(f"key = {key!r}: a text of 1 to {_core.KEY_BYTES_MAX} bytes")
    return key
