"""The part of CuPy that Pagoda calls, over host memory and the emulator. It is as strict as CuPy about names and
arguments, the current device, memory that is registered twice, and what a graph may contain in global capture mode. It
is stricter about default streams: each call on one is noted with its device.

All work is done at once; tests/emulator/driver.py has streams that are late. tests/test_cuda.py compares names and
arguments with the real CuPy where it is installed.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import emulator
import numpy as np
import numpy.typing as npt
from pagoda.kernels import arguments

DEVICES = 2
DEVICE_BYTES = 64 << 20
"""Memory of all devices together."""
CAPTURE_UNSUPPORTED, CAPTURE_IMPLICIT = 900, 906
"""cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureImplicit."""
STATIC_SHARED_BYTES = 48 << 10
"""Limit of a launch's dynamic shared memory, unless the kernel's own limit is set."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class OutOfMemoryError(MemoryError):
    pass


class CompileException(Exception):
    pass


bound = threading.local()
"""Whether a thread has a context. CuPy sets CUDA's current device when a `Device` is left, but when one is entered only if
another was current."""


class Device:
    """A device, current inside `with`."""

    current = 0
    host_pointers = 1
    """0 where registered host memory has another address on the device: under WSL 2, on Tegra."""

    def __init__(self, device: int | None = None) -> None:
        self.id = Device.current if device is None else int(device)
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(Device.current)
        Device.current = self.id
        return self

    def __exit__(self, *_: object) -> None:
        Device.current = self._before.pop()
        bound.context = True

    @property
    def compute_capability(self) -> str:
        return "90"

    @property
    def attributes(self) -> dict[str, int]:
        return {
            "MultiProcessorCount": 3,
            "MaxSharedMemoryPerBlockOptin": 227 << 10,
            "CanUseHostPointerForRegisteredMem": Device.host_pointers,
        }

    @property
    def mem_info(self) -> tuple[int, int]:
        with self:
            return Runtime.memGetInfo()


class Stream:
    """A stream of the device that is current when it is created. The device of external and default streams is unknown."""

    entered: ClassVar[list[Stream]] = []
    captured: ClassVar[dict[int, Graph]] = {}
    """Graphs under capture, by the address of their stream."""
    made = 0
    waits = False
    """Whether it waits for the default stream of its device, as those do that callers make without `non_blocking`."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        assert null or non_blocking, "others wait for the default stream of their device"
        Stream.made += not null
        self.ptr, self.device_id = (0, -1) if null else (4096 + Stream.made, Device.current)

    def begin_capture(self, mode: int | None = None) -> None:
        Stream.captured[self.ptr] = Graph(self.waits)

    def end_capture(self) -> Graph:
        return Stream.captured.pop(self.ptr)

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        version, address = obj.__cuda_stream__()
        assert version == 0
        stream = cls(null=True)
        stream.ptr = address
        return stream

    def __enter__(self) -> Stream:
        self._require(Device.current)
        Stream.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        Stream.entered.pop()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)
        refuse_in_graph(self.ptr)
        note_default(self.ptr)

    def is_capturing(self) -> bool:
        note_default(self.ptr)
        if not self.ptr and any(graph.waits for graph in Stream.captured.values()):
            raise CUDARuntimeError(CAPTURE_IMPLICIT)
        return self.ptr in Stream.captured

    def _require(self, device: int) -> None:
        if self.device_id not in (-1, device):
            raise RuntimeError(f"a stream of device {self.device_id} on device {device}")


class Graph:
    """Captured launches. waits: whether their stream waits for the default one."""

    def __init__(self, waits: bool) -> None:
        self.waits = waits
        self.launches: list[Callable[[], None]] = []

    def launch(self, stream: Stream | None = None) -> None:
        for launch in self.launches:
            launch()


def refuse_in_captures() -> None:
    """For calls that CUDA refuses in every thread during a capture in global mode, which is then lost."""
    if Stream.captured:
        raise CUDARuntimeError(CAPTURE_UNSUPPORTED)


def refuse_in_graph(stream: int) -> None:
    """For calls that CUDA does capture, but that no graph of a cache may contain: docs/adr/0009."""
    assert stream not in Stream.captured, "a graph is of launches alone"


on_default: set[int] = set()
"""Devices whose default stream was used. Address 0 stands for that of the current device."""


def note_default(address: int) -> None:
    if not address:
        on_default.add(Device.current)


def get_current_stream(device_id: int = -1) -> Stream:
    return Stream.entered[-1] if Stream.entered else Stream(null=True)


class Event:
    """An event; only streams of its device may record it."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        assert block, "who waits sleeps"
        assert disable_timing, "to time takes as long as to record"
        self._device, self.ptr = Device.current, id(self)

    def record(self, stream: Stream | None = None) -> None:
        assert stream is not None, "which one is current says nothing of the cache's"
        refuse_in_graph(stream.ptr)
        stream._require(self._device)
        note_default(stream.ptr)

    def synchronize(self) -> None:
        refuse_in_captures()


class Memory:
    """Uninitialised memory."""

    def __init__(self, size: int) -> None:
        refuse_in_captures()
        if type(size) is not int or size <= 0:
            raise TypeError(f"size = {size!r}")
        # Nor is it zero on a device.
        self.array = np.full(size + 512, 0xFF, np.uint8)
        self.ptr = -(-self.array.ctypes.data // 512) * 512


class Block:
    """Device memory, and the pieces of it in use: bytes by offset."""

    def __init__(self, size: int) -> None:
        self.size, self.memory, self.pieces = size, Memory(size), dict[int, int]()

    def gap(self, size: int) -> tuple[int, int] | None:
        """The smallest gap of at least `size` bytes: its bytes and its offset."""
        starts = [0, *(start + length for start, length in sorted(self.pieces.items()))]
        ends = [*sorted(self.pieces), self.size]
        gaps = [(end - start, start) for start, end in zip(starts, ends, strict=True)]
        return min((gap for gap in gaps if gap[0] >= size), default=None)


class MemoryPointer:
    """A piece of a block, in use as long as this object lives."""

    def __init__(self, block: Block, start: int, size: int) -> None:
        block.pieces[start] = size
        self.ptr = block.memory.ptr + start
        weakref.finalize(self, block.pieces.pop, start)


class MemoryPool:
    """Keeps freed memory and cuts smaller allocations from it. Only whole blocks are given back to the device."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.reused = set[int]()
        """Addresses of memory whose last owner nobody has waited for: it may still be written to."""
        self.refusals = 0
        """Each is slow: CuPy first frees all that it holds, twice, and collects garbage."""

    def alloc(self, size: int) -> MemoryPointer:
        if type(size) is not int or size <= 0:
            raise TypeError(f"size = {size!r}")
        size = -(-size // 512) * 512
        found = [(*gap, number) for number, block in enumerate(self.blocks) if (gap := block.gap(size))]
        if found:
            _, start, number = min(found)
            block = self.blocks[number]
        else:
            if self.held + size > DEVICE_BYTES:
                self.free_all_blocks()
            if self.held + size > DEVICE_BYTES:
                self.refusals += 1
                raise OutOfMemoryError(f"{size} bytes beside {self.held}")
            start, block = 0, Block(size)
            self.blocks.append(block)
        piece = MemoryPointer(block, start, size)
        ctypes.memset(piece.ptr, 0xFF, size)
        self.reused.add(piece.ptr)
        return piece

    @property
    def held(self) -> int:
        return sum(block.size for block in self.blocks)

    def free_all_blocks(self) -> None:
        self.blocks = [block for block in self.blocks if block.pieces]


pool = MemoryPool()


def alloc_pinned_memory(size: int) -> Any:
    memory = Memory(size)
    pinned: Any = (ctypes.c_uint8 * size).from_address(memory.ptr)
    pinned.ptr, pinned.memory = memory.ptr, memory
    return pinned


class PinnedMemory(Memory):
    """Host memory that CUDA allocates: at the same address on every device."""

    def __init__(self, size: int, flags: int = 0) -> None:
        assert flags == Runtime.hostAllocPortable, "for every context"
        super().__init__(size)


registered: dict[int, int] = {}
"""Host memory that kernels and copies can reach: bytes by address."""


class Runtime(ModuleType):
    CUDARuntimeError = CUDARuntimeError
    memcpyDefault = 4
    hostAllocPortable = 1

    @staticmethod
    def driverGetVersion() -> int:
        return 13000

    @staticmethod
    def runtimeGetVersion() -> int:
        return 13020

    @staticmethod
    def getDeviceCount() -> int:
        return DEVICES

    @staticmethod
    def deviceGetPCIBusId(device: int) -> str:
        return f"0000:{device:02x}:00.0"

    @staticmethod
    def memGetInfo() -> tuple[int, int]:
        bound.context = True
        return DEVICE_BYTES - pool.held, DEVICE_BYTES

    @staticmethod
    def hostRegister(ptr: int, size: int, flags: int) -> None:
        refuse_in_captures()
        assert flags == 1 | 2, "for every context, and mapped"
        assert Device.host_pointers, "kernels would look for it elsewhere"
        if any(ptr < start + length and start < ptr + size for start, length in registered.items()):
            raise CUDARuntimeError(712)
        registered[ptr] = size

    @staticmethod
    def hostUnregister(ptr: int) -> None:
        if ptr not in registered:
            raise CUDARuntimeError(713)
        del registered[ptr]

    @staticmethod
    def eventQuery(event: int) -> int:
        assert type(event) is int
        return CAPTURE_UNSUPPORTED if Stream.captured else 0

    @staticmethod
    def streamSynchronize(stream: int) -> None:
        refuse_in_captures()
        note_default(stream)

    @staticmethod
    def deviceSynchronize() -> None:
        refuse_in_captures()
        pool.reused.clear()

    @staticmethod
    def memset(ptr: int, value: int, size: int) -> None:
        refuse_in_captures()
        assert ptr not in pool.reused, "kernels of its last owner may still write there"
        ctypes.memset(ptr, value, size)

    @staticmethod
    def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
        assert type(stream) is int
        refuse_in_graph(stream)
        note_default(stream)
        ctypes.memset(ptr, value, size)

    @staticmethod
    def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
        assert kind == Runtime.memcpyDefault
        assert type(stream) is int
        refuse_in_graph(stream)
        note_default(stream)
        ctypes.memmove(dst, src, size)

    @staticmethod
    def memcpy2DAsync(
        dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        if width > min(dpitch, spitch) or max(dpitch, spitch) >= 1 << 31:
            raise CUDARuntimeError(12)
        for row in range(height):
            Runtime.memcpyAsync(dst + row * dpitch, src + row * spitch, width, kind, stream)


class RawKernel:
    """A kernel on the emulator. kernel: its function on the current device."""

    def __init__(self, header: str, library: emulator.Library) -> None:
        self._function = Function(header, library)

    @property
    def kernel(self) -> Function:
        self._function.require()
        return self._function

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self.kernel.shared_bytes_max

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        self.kernel.shared_bytes_max = size


class Function:
    """A kernel on one device, loaded as long as this object lives."""

    loaded: ClassVar[weakref.WeakValueDictionary[int, Function]] = weakref.WeakValueDictionary()

    def __init__(self, header: str, library: emulator.Library) -> None:
        self.library, self._device, self.shared_bytes_max = library, Device.current, STATIC_SHARED_BYTES
        self.arguments, self.ptr = ARGUMENTS[header], id(self)
        Function.loaded[self.ptr] = self

    def require(self) -> None:
        assert Device.current == self._device, "a kernel of another device"


ARGUMENTS: dict[str, type[ctypes.Structure]] = {
    "append.cuh": arguments.Append,
    "append_rows.cuh": arguments.Append,
    "attend.cuh": arguments.Attend,
    "center.cuh": arguments.Center,
    "move.cuh": arguments.Move,
    "read.cuh": arguments.Read,
    "unpack.cuh": arguments.Unpack,
}


def ctx_get_current() -> int:
    """The current device's; 0 in a thread that has made no call yet that gives it a context."""
    return Device.current + 1 if getattr(bound, "context", False) else 0


def launch_kernel(
    f: int,
    grid_dim_x: int,
    grid_dim_y: int,
    grid_dim_z: int,
    block_dim_x: int,
    block_dim_y: int,
    block_dim_z: int,
    shared_mem_bytes: int,
    stream: int,
    kernel_params: int,
    extra: int,
) -> None:
    assert ctx_get_current(), "CUDA_ERROR_INVALID_CONTEXT"
    assert (grid_dim_y, grid_dim_z, block_dim_y, block_dim_z, extra) == (1, 1, 1, 1, 0)
    function = Function.loaded[f]
    function.require()
    note_default(stream)
    if shared_mem_bytes > function.shared_bytes_max:
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
    address = ctypes.c_void_p.from_address(kernel_params).value
    assert address is not None
    # Copied as CUDA does: the caller may change the arguments at once.
    given = function.arguments.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(function.arguments)))

    def launch() -> None:
        function.library.launch("kernel", grid_dim_x, block_dim_x, given, shared_bytes=shared_mem_bytes)

    if graph := Stream.captured.get(stream):
        graph.launches.append(launch)
    else:
        launch()


class RawModule:
    """Device code, compiled by the emulator."""

    def __init__(self, *, code: str, options: tuple[str, ...] = (), name_expressions: Any = None) -> None:
        assert isinstance(options, tuple), "a list is refused"
        comment, include, end = code.split("\n")
        assert comment.startswith("//")
        assert not end
        self._include, self._names = include, list(name_expressions)

    def get_function(self, name: str) -> RawKernel:
        assert name in self._names
        # Loading a module allocates.
        refuse_in_captures()
        header = self._include.partition("/")[2].rstrip(">")
        return RawKernel(header, emulator.compile(self._include, {"kernel": name}))


class NdArray:
    """A device array; an empty one has no address."""

    def __init__(self, hidden: npt.NDArray[Any]) -> None:
        self.hidden, self.dtype, self.shape, self.device = hidden, hidden.dtype, hidden.shape, Device()
        self.strides, self.itemsize = hidden.strides, hidden.itemsize
        self.data = SimpleNamespace(ptr=hidden.ctypes.data if hidden.size else 0, device_id=self.device.id)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # As CuPy: no strides for a contiguous array, no address for an empty one.
        hidden = self.hidden
        return {
            "shape": hidden.shape,
            "typestr": hidden.dtype.str,
            "strides": None if hidden.flags.c_contiguous else hidden.strides,
            "data": (hidden.ctypes.data if hidden.size else 0, False),
            "version": 3,
        }


def empty(shape: tuple[int, ...], dtype: Any) -> NdArray:
    return NdArray(np.empty(shape, dtype))


class DLPackArray:
    """An array of a library that has only DLPack; on CUDA, unless `kind` says otherwise. stream: the address of the stream
    that last had to wait for the library's pending writes."""

    def __init__(self, hidden: npt.NDArray[Any], kind: int = 2) -> None:
        self._array, self._kind, self.stream = NdArray(hidden), kind, None

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.stream = stream
        if self._array.dtype == np.dtype("S1"):
            raise BufferError("characters")
        return self._array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._kind, self._array.device.id


def from_dlpack(array: Any) -> NdArray:
    given: NdArray = array.__dlpack__(stream=get_current_stream().ptr or 1)
    return given


def install(monkeypatch: Any) -> Any:
    """Makes `import cupy` give the stand-in; returns it."""
    runtime = Runtime("cupy.cuda.runtime")
    cuda = SimpleNamespace(
        runtime=runtime,
        Device=Device,
        Stream=Stream,
        Event=Event,
        driver=SimpleNamespace(launchKernel=launch_kernel, ctxGetCurrent=ctx_get_current),
        get_current_stream=get_current_stream,
        alloc=pool.alloc,
        alloc_pinned_memory=alloc_pinned_memory,
        PinnedMemory=PinnedMemory,
        compiler=SimpleNamespace(CompileException=CompileException),
        nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
    )
    cupy: Any = ModuleType("cupy")
    cupy.cuda, cupy.RawModule, cupy.empty, cupy.float32 = cuda, RawModule, empty, np.float32
    cupy.ndarray = NdArray
    cupy.get_default_memory_pool, cupy.from_dlpack = lambda: pool, from_dlpack
    registered.clear()
    pool.blocks.clear()
    pool.reused.clear()
    pool.refusals = 0
    on_default.clear()
    Stream.captured.clear()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


def differences(ours: Any, theirs: Any, path: str = "cupy") -> list[str]:
    """What the stand-in has but CuPy lacks: names, and arguments where Python can list them."""
    found: list[str] = []
    for name, value in vars(ours).items():
        if name.startswith("_"):
            continue
        here = f"{path}.{name}"
        if not hasattr(theirs, name):
            found.append(here)
        elif isinstance(value, SimpleNamespace | ModuleType):
            found += differences(value, getattr(theirs, name), here)
        elif callable(value):
            found += _arguments(value, getattr(theirs, name), here)
    if isinstance(ours, Runtime):
        found += [f"{path}.{name}" for name in vars(Runtime) if not name.startswith("_") and not hasattr(theirs, name)]
    return found


def _arguments(ours: Any, theirs: Any, path: str) -> list[str]:
    try:
        known = inspect.signature(theirs).parameters
        asked = inspect.signature(ours).parameters
    except (TypeError, ValueError):
        return []
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
        return []
    return [f"{path}({name})" for name in asked if name not in known]
