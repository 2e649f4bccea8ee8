"""A device whose kernels run on the emulator: NumPy arrays are its arrays.

Streams are lists of work that is done late: when somebody waits or queries an event. How much is done then is drawn
from a seed, so that a missing event between two streams shows.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from pagoda.device import cuda
from pagoda.device.driver import View, not_loaded
from pagoda.errors import BackendUnavailable, InvalidArgument
from pagoda.kernels.instances import Kernel

import emulator
from emulator import ptx

TYPES = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16", np.dtype(np.uint16): "u16"}
TYPES[np.dtype(ml_dtypes.bfloat16)] = "bf16"


def numpy_view(name: str, array: Any) -> View:
    """The view of a NumPy array. Raises InvalidArgument for anything else."""
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(f"{name} = {type(array).__name__}: an array of NumPy")
    kind = TYPES.get(array.dtype, str(array.dtype))
    return View(array.ctypes.data, array.shape, array.strides, kind, array.flags.writeable)


def numpy_empty(shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
    """`Driver.empty` for NumPy."""
    return np.empty(shape, np.float32 if dtype else like.dtype)


@cache
def of_sources(kernel: Kernel) -> emulator.Library:
    """A library with one kernel, named `kernel`, compiled from source."""
    return emulator.compile(_include(kernel), {"kernel": kernel.expression})


@cache
def of_ptx(kernel: Kernel) -> emulator.Library:
    """The same, compiled by NVRTC."""
    return ptx.compile(_include(kernel), {"kernel": kernel.expression})


def _include(kernel: Kernel) -> str:
    return f"#include <pagoda/{kernel.header}>"


PAGE_BYTES = 4096
"""The system's page size, to which memory is aligned."""

POISONED_BYTES = 64 << 20
"""Memory up to this size is poisoned and lies between canaries; more would take too long."""


class Memory:
    """Bytes of the device, or of the host as the device sees it. guarded: arrays between canaries, also freed ones."""

    def __init__(self, size: int, fill: int, guarded: list[emulator.Guarded]) -> None:
        try:
            if size <= POISONED_BYTES:
                guarded.append(emulator.Guarded(max(1, -(-size // 256) * 256), np.uint8, fill))
                whole = guarded[-1].array
                self.array: npt.NDArray[np.uint8] = whole[:size]
                # Freed memory is poisoned: it may belong to others.
                weakref.finalize(self.array, whole.fill, emulator.POISON).atexit = False
            else:
                room = np.zeros(size + PAGE_BYTES, np.uint8)
                start = -room.ctypes.data % PAGE_BYTES
                self.array = room[start : start + size]
        except MemoryError as error:
            raise BackendUnavailable(f"{size} bytes of memory") from error
        self.address = self.array.ctypes.data


class HostArena(Memory):
    """Host memory that is pinned in pieces; the device cannot reach the rest."""

    def __init__(self, size: int, piece: int, guarded: list[emulator.Guarded]) -> None:
        super().__init__(size, emulator.POISON, guarded)
        self.piece, self.pinned = piece, set[int]()

    def pin(self, addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        one_by_one = np.vectorize(self._pin, otypes=[bool])
        begins: npt.NDArray[np.bool_] = one_by_one(addresses, sizes)
        return begins

    def _pin(self, address: int, size: int) -> bool:
        start = int(address) - self.address
        if not 0 <= start < len(self.array):
            return False
        for index in range(start // self.piece, (start + int(size) - 1) // self.piece + 1):
            if index not in self.pinned:
                # As on a GPU, where pinning makes the system provide the memory.
                self.array[index * self.piece : (index + 1) * self.piece : 4096] = 0
                self.pinned.add(index)
        return start % self.piece == 0

    def require(self, address: int, size: int) -> None:
        """Raises EmulatorError if a copy's bytes lie in this arena, but not all in one pinned piece."""
        start = address - self.address
        if 0 <= start < len(self.array):
            pieces = {start // self.piece, (start + size - 1) // self.piece}
            if len(pieces) > 1 or not pieces <= self.pinned:
                raise emulator.EmulatorError(f"a copy of {size} bytes at {start} of the host arena: not pinned")

    def close(self) -> None:
        self.pinned.clear()


class Event:
    """A place in a stream's work."""

    def __init__(self, stream: Stream, place: int) -> None:
        self.stream, self.place = stream, place

    def done(self) -> bool:
        """Whether it has been reached. Each query lets some work be done, or none."""
        self.stream.driver.refuse_in_graphs()
        self.stream.driver.work_a_little()
        return self.stream.finished >= self.place

    def wait(self) -> None:
        """Does all work before it."""
        self.stream.driver.refuse_in_graphs()
        self.stream.reach(self.place)


class Stream:
    """Work in order, each piece a function."""

    def __init__(self, driver: EmulatedDriver) -> None:
        self.driver = driver
        self.work: list[Callable[[], None]] = []
        self.captured: list[Callable[[], None]] | None = None
        self.finished = 0
        driver.streams.append(self)

    def reach(self, place: int) -> None:
        """Does work up to `place`."""
        with self.driver.turn:
            while self.finished < place:
                piece = self.work[self.finished]
                self.finished += 1
                piece()

    def record(self) -> Event:
        self.refuse_in_graphs()
        return Event(self, len(self.work))

    def refuse_in_graphs(self) -> None:
        if self.captured is not None:
            raise emulator.EmulatorError("something else than a kernel in a graph")

    def follow(self, event: Any) -> None:
        self.refuse_in_graphs()
        self.work.append(event.wait)

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copy(self, target: int, source: int, size: int) -> None:
        self.refuse_in_graphs()
        for arena in self.driver.arenas:
            arena.require(source, size)
            arena.require(target, size)

        def piece() -> None:
            ctypes.memmove(target, source, size)

        self.work.append(piece)

    def zero(self, target: int, size: int) -> None:
        self.refuse_in_graphs()

        def piece() -> None:
            ctypes.memset(target, 0, size)

        self.work.append(piece)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        for arena in self.driver.arenas:
            arena.require(source, (rows - 1) * source_pitch + width)
        assert min(target_pitch, source_pitch) >= width
        assert rows > 0
        for row in range(rows):
            self.copy(target + row * target_pitch, source + row * source_pitch, width)

    @property
    def capturing(self) -> bool:
        return self.captured is not None

    def launch(
        self, kernel: Kernel, grid: int, threads: int, arguments: ctypes.Structure, *, shared_bytes: int = 0
    ) -> None:
        call = type(arguments).from_buffer_copy(arguments)
        seed = self.driver.random.randrange(1 << 30)
        library = self.driver.load(kernel, self)
        work = self.work if self.captured is None else self.captured
        work.append(lambda: library.launch("kernel", grid, threads, call, shared_bytes=shared_bytes, seed=seed))


class CallerStream(Stream):
    """A caller's stream. The caller reads results as NumPy arrays, so it waits for attention, and for nothing else.

    Making it current, as with CuPy's streams, has no effect.
    """

    def __enter__(self) -> CallerStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def launch(
        self, kernel: Kernel, grid: int, threads: int, arguments: ctypes.Structure, *, shared_bytes: int = 0
    ) -> None:
        super().launch(kernel, grid, threads, arguments, shared_bytes=shared_bytes)
        if kernel.header == "attend.cuh" and self.captured is None:
            self.reach(len(self.work))

    def begin_capture(self) -> None:
        """From now on kernels are recorded instead of run; anything else is refused."""
        self.captured = []

    def end_capture(self) -> Graph:
        """Returns the recorded kernels."""
        captured, self.captured = self.captured or [], None
        return Graph(self, captured)


class Graph:
    """Captured kernels."""

    def __init__(self, stream: CallerStream, work: list[Callable[[], None]]) -> None:
        self._stream, self._work = stream, work

    def launch(self) -> None:
        """Runs them, and waits as the caller would."""
        self._stream.work.extend(self._work)
        self._stream.reach(len(self._stream.work))


class EmulatedDriver:
    """One device. compile: compiles its kernels."""

    name = "emulated"
    multiprocessors = 3
    shared_bytes_max = 227 << 10
    free_bytes = 24 << 30
    copy_engine_bytes = 6 << 10
    """Small enough that tests use both ways of copying."""
    ring_bytes = 0
    """All pages on the host go through the ring, if there is one."""

    def __init__(self, seed: int = 0, compile: Callable[[Kernel], emulator.Library] = of_sources) -> None:
        self.random, self.compile = random.Random(seed), compile
        # Several threads may wait for the device at once.
        self.turn = threading.RLock()
        self.streams: list[Stream] = []
        self.guarded: list[emulator.Guarded] = []
        self.arenas: list[HostArena] = []
        self._default = CallerStream(self)
        self._loaded: set[Kernel] = set()
        self._kept: deque[Any] = deque(maxlen=1000)

    def work_a_little(self) -> None:
        """Lets each stream do some work, or none."""
        for stream in self.streams:
            if self.random.random() < 0.5:
                stream.reach(self.random.randint(stream.finished, len(stream.work)))

    def catch_up(self) -> None:
        """Does all remaining work."""
        for stream in self.streams:
            stream.reach(len(stream.work))

    def check(self) -> None:
        """Raises EmulatorError if any memory was written outside its bounds."""
        for guarded in self.guarded:
            guarded.check()

    def refuse_in_graphs(self) -> None:
        """For calls that CUDA treats as unsafe while any stream is captured: allocating, loading kernels, querying events and
        waiting."""
        for stream in self.streams:
            stream.refuse_in_graphs()

    def load(self, kernel: Kernel, stream: Stream) -> emulator.Library:
        """A kernel, for launches on a stream."""
        if kernel not in self._loaded:
            if stream.capturing:
                raise not_loaded(kernel)
            self.refuse_in_graphs()
            self._loaded.add(kernel)
        return self.compile(kernel)

    def memory(self, size: int) -> Memory:
        self.refuse_in_graphs()
        return Memory(size, 0, self.guarded)

    def give_back(self) -> None:
        """Does nothing: there is no pool."""

    def pinned(self, size: int) -> Memory:
        self.refuse_in_graphs()
        return Memory(size, emulator.POISON, self.guarded)

    def host_arena(self, size: int, piece: int) -> HostArena:
        self.refuse_in_graphs()
        self.arenas.append(HostArena(size, piece, self.guarded))
        return self.arenas[-1]

    def stream(self) -> Stream:
        return Stream(self)

    def caller_stream(self, given: object) -> Stream:
        if given is None:
            return self._default
        if not isinstance(given, CallerStream):
            raise InvalidArgument(f"stream = {given!r}: a stream of this device, or None")
        return given

    def captures_another(self, stream: Any) -> bool:
        return self._default is not stream and self._default.capturing

    def view(self, name: str, array: Any, stream: Any) -> View:
        view = numpy_view(name, array)
        # As a memory pool would: memory that a stream still reads is not given to others.
        self._kept.append(array)
        return view

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        return numpy_empty(shape, like, dtype)


AnyDriver = TypeVar("AnyDriver", bound=EmulatedDriver)


def install_driver(monkeypatch: pytest.MonkeyPatch, driver: AnyDriver) -> AnyDriver:
    """Makes `driver` the device "cuda" of caches; skips the test if there is no compiler (`emulator.require`)."""
    emulator.require()
    monkeypatch.setattr(cuda, "open_driver", lambda index: driver)
    return driver
