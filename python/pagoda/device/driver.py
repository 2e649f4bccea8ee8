"""The interface of an engine to a device: memory, streams, events, kernels. Nothing here knows what a page is."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pagoda.errors import InvalidArgument
from pagoda.kernels.instances import Kernel


class View(NamedTuple):
    """The caller's array as a kernel sees it. dtype: "f32", "f16", "bf16", "u16" or another name; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    writeable: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of an element, for types that kernels take."""
        return 4 if self.dtype == "f32" else 2

    @property
    def bytes(self) -> tuple[int, int]:
        """The addresses where its elements begin and end."""
        if 0 in self.shape:
            return self.address, self.address
        low, high = _reach(self.shape, self.strides)
        return self.address + low, self.address + high + self.itemsize


@lru_cache
def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """The smallest and largest offset of an element from the first one, in bytes."""
    reach = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)


class Memory(Protocol):
    """Bytes on the device, which live as long as this object."""

    @property
    def address(self) -> int:
        """Of the first byte, aligned to 256."""


class Pinned(Protocol):
    """Bytes of the host that the device reads and writes in place, which live as long as this object."""

    @property
    def address(self) -> int:
        """Of the first byte, on the device too."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes."""


class HostArena(Protocol):
    """Address space of the host that is made accessible to the device piece by piece."""

    @property
    def address(self) -> int:
        """Of the first byte, on the device too."""

    @property
    def piece(self) -> int:
        """Bytes of a piece."""

    def pin(self, addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Makes those runs of bytes that lie in this arena usable by the device; returns for each run whether a piece begins
        with its first byte. sizes: broadcast to the shape of the addresses.

        Raises BackendUnavailable when the system refuses.
        """

    def close(self) -> None:
        """Gives everything back. Nothing may be under way that uses it."""


class Pending(Protocol):
    """Something under way."""

    def done(self) -> bool:
        """Whether it has ended."""

    def wait(self) -> None:
        """Sleeps until it has."""


class Event(Pending, Protocol):
    """A point in a stream: under way until the stream has reached it."""


class Stream(Protocol):
    """Work that the device does in the order given."""

    def record(self) -> Event:
        """Marks the point after all work so far."""

    def follow(self, event: Event) -> None:
        """Makes work from now on wait for the event."""

    def current(self) -> AbstractContextManager[object]:
        """Makes this the stream that the caller's libraries use."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Copies bytes between any two places."""

    def zero(self, target: int, size: int) -> None:
        """Zeroes bytes of the device."""

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """Copies `rows` times `width` bytes; pitches: bytes from row to row."""

    @property
    def capturing(self) -> bool:
        """Whether work is recorded for a graph instead of done."""

    def launch(
        self, kernel: Kernel, grid: int, threads: int, arguments: ctypes.Structure, *, shared_bytes: int = 0
    ) -> None:
        """Starts a kernel. Raises KernelCompileError, and `not_loaded` for a kernel first launched in a captured stream."""


class Driver(Protocol):
    """One device."""

    @property
    def name(self) -> str:
        """A name that no other device of the machine has."""

    @property
    def multiprocessors(self) -> int:
        """How many multiprocessors it has."""

    @property
    def shared_bytes_max(self) -> int:
        """Shared memory that a thread block can have."""

    @property
    def free_bytes(self) -> int:
        """Memory of the device that is free now."""

    def memory(self, size: int) -> Memory:
        """Zeroed bytes of the device. Raises BackendUnavailable if it has too few."""

    def give_back(self) -> None:
        """Gives unused memory that a pool holds back to the device."""

    @property
    def copy_engine_bytes(self) -> int:
        """The size from which the copy engine copies runs of bytes faster than a kernel does."""

    @property
    def ring_bytes(self) -> int:
        """Bytes of a layer from which attention reads host pages faster through a ring than in place."""

    def pinned(self, size: int) -> Pinned:
        """Pinned bytes of the host. Raises BackendUnavailable if the system refuses."""

    def host_arena(self, size: int, piece: int) -> HostArena:
        """Address space that is pinned in pieces, whose size is a multiple of `piece` bytes."""

    def stream(self) -> Stream:
        """A new stream."""

    def caller_stream(self, given: object) -> Stream:
        """The stream that the caller means, or the current one of its library for None. Raises InvalidArgument."""

    def captures_another(self, stream: Stream) -> bool:
        """Whether the current stream of the caller's library is another one, and captured."""

    def view(self, name: str, array: Any, stream: Stream) -> View:
        """The caller's array, for kernels on a stream. Raises InvalidArgument with the argument's name if it is no array of
        the device."""

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        """A new array of the same library as `like` and, unless `dtype` is "f32", of the same type."""


def not_loaded(kernel: Kernel) -> InvalidArgument:
    """The error for launching a kernel that is not loaded yet into a graph: CUDA would refuse, and end the capture."""
    return InvalidArgument(
        f"step: in a graph before {kernel.short} was launched; once as it is: a graph loads no kernels"
    )


def send(driver: Driver, data: npt.NDArray[np.generic]) -> Memory:
    """Device memory with the bytes of a contiguous array."""
    memory, pinned, stream = driver.memory(data.nbytes), driver.pinned(data.nbytes), driver.stream()
    pinned.array[: data.nbytes] = data.reshape(-1).view(np.uint8)
    stream.copy(memory.address, pinned.address, data.nbytes)
    stream.record().wait()
    return memory
