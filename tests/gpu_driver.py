"""A device for tests that pass NumPy arrays: each is copied to the device when it is named, and what a kernel has
changed of it is copied back after the launch.

Every launch is waited for, so interactions between streams are not tested here, but in tests/test_gpu.py.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
from emulator.driver import numpy_empty, numpy_view
from numpy.lib.array_utils import byte_bounds
from pagoda.device.driver import Driver, Event, HostArena, Memory, Pinned, Stream, View
from pagoda.errors import InvalidArgument
from pagoda.kernels.instances import Kernel

Array = npt.NDArray[Any]


def owner(array: Array) -> Array:
    """The array whose memory `array` is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Copied:
    """The memory of an array, and its copy on the device."""

    def __init__(self, driver: Driver, array: Array) -> None:
        self._array = array
        self.start, end = byte_bounds(array)
        self._host: Array = np.ctypeslib.as_array((ctypes.c_uint8 * (end - self.start)).from_address(self.start))
        self._sent = self._host
        self._stream = driver.stream()
        self._device, self._pinned = driver.memory(len(self._host)), driver.pinned(len(self._host))

    def send(self) -> None:
        """Copies the array to the device."""
        self._sent = self._host.copy()
        self._pinned.array[: len(self._sent)] = self._sent
        self._copy(self._device.address, self._pinned.address)

    def place(self, address: int) -> int:
        """The device address of a byte of the array."""
        return self._device.address + address - self.start

    def fetch(self) -> None:
        """Brings back only the bytes that differ from those sent: the caller may have written to others since."""
        self._copy(self._pinned.address, self._device.address)
        now = self._pinned.array[: len(self._host)]
        changed = np.flatnonzero(now != self._sent)
        if len(changed):
            assert self._array.flags.writeable, "a kernel wrote to an array that is read-only"
            self._host[changed] = self._sent[changed] = now[changed]

    def _copy(self, target: int, source: int) -> None:
        self._stream.copy(target, source, len(self._host))
        self._stream.record().wait()


class CopyingStream:
    """The stream of a step."""

    def __init__(self, inner: Stream, driver: CopyingDriver) -> None:
        self._inner, self._driver = inner, driver

    def record(self) -> Event:
        return self._inner.record()

    def follow(self, event: Event) -> None:
        self._inner.follow(event)

    def current(self) -> AbstractContextManager[object]:
        return self._inner.current()

    def copy(self, target: int, source: int, size: int) -> None:
        self._inner.copy(target, source, size)

    def zero(self, target: int, size: int) -> None:
        self._inner.zero(target, size)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        self._inner.copy_rows(target, target_pitch, source, source_pitch, width, rows)

    @property
    def capturing(self) -> bool:
        return self._inner.capturing

    def launch(
        self, kernel: Kernel, grid: int, threads: int, arguments: ctypes.Structure, *, shared_bytes: int = 0
    ) -> None:
        self._inner.launch(kernel, grid, threads, arguments, shared_bytes=shared_bytes)
        self._inner.record().wait()
        for copied in self._driver.copied.values():
            copied.fetch()


class CopyingDriver:
    """Wraps a device's driver to take NumPy arrays."""

    def __init__(self, inner: Driver) -> None:
        self._inner = inner
        self.multiprocessors, self.shared_bytes_max = inner.multiprocessors, inner.shared_bytes_max
        self.copied: dict[tuple[int, int], Copied] = {}
        """Arrays of the open step, by the bounds of their memory."""

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def free_bytes(self) -> int:
        return self._inner.free_bytes

    @property
    def copy_engine_bytes(self) -> int:
        return self._inner.copy_engine_bytes

    @property
    def ring_bytes(self) -> int:
        return self._inner.ring_bytes

    def memory(self, size: int) -> Memory:
        return self._inner.memory(size)

    def give_back(self) -> None:
        self._inner.give_back()

    def pinned(self, size: int) -> Pinned:
        return self._inner.pinned(size)

    def host_arena(self, size: int, piece: int) -> HostArena:
        return self._inner.host_arena(size, piece)

    def stream(self) -> Stream:
        return self._inner.stream()

    def caller_stream(self, given: object) -> Stream:
        if given is not None:
            raise InvalidArgument(f"stream = {given!r}: None, for arrays of NumPy")
        self.copied.clear()
        return CopyingStream(self._inner.caller_stream(None), self)

    def captures_another(self, stream: Any) -> bool:
        return False

    def view(self, name: str, array: Any, stream: Stream) -> View:
        view = numpy_view(name, array)
        if array.size == 0:
            return view
        whole = owner(array)
        place = byte_bounds(whole)
        if place not in self.copied:
            self.copied[place] = Copied(self._inner, whole)
        copied = self.copied[place]
        copied.send()
        return View(copied.place(view.address), view.shape, view.strides, view.dtype, view.writeable)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        return numpy_empty(shape, like, dtype)
