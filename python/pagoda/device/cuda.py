"""A CUDA device, by CuPy."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import operator
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.device import thresholds
from pagoda.device.driver import Driver, HostArena, Stream, View, not_loaded
from pagoda.errors import BackendUnavailable, InvalidArgument
from pagoda.kernels import loader
from pagoda.kernels.instances import Kernel

TYPES = {"<f4": "f32", "<f2": "f16", "<u2": "u16", "<V2": "bf16"}
"""Type strings of array interfaces. The last is what ml_dtypes says, and CuPy with it."""

DLPACK_CUDA = (2, 13)
"""kDLCUDA and kDLCUDAManaged of dlpack.h: memory that kernels read."""

CAPABILITY_MIN = (8, 0)

INSTALL = 'pip install "pagoda-kv[cuda13]" (or [cuda12])'

NO_DEVICE, DRIVER_TOO_OLD, NOT_READY = 100, 35, 600
"""cudaErrorNoDevice, cudaErrorInsufficientDriver, cudaErrorNotReady."""

DEFAULT_STREAM = (0, 1)
"""Its addresses: none, and cudaStreamLegacy."""

PITCH_MAX = (1 << 31) - 1
"""Bytes from row to row that a copy of rows takes, on every device (cudaDevAttrMaxPitch)."""


ONE_ADDRESS = ctypes.c_void_p * 1
"""Where the arguments of a kernel are, as CUDA wants it to be told: every kernel has one."""


class Lack(NamedTuple):
    """What is missing and what brings it."""

    found: str
    remedy: str


def lack() -> Lack | None:
    """Why there is no device to use; None where there is one."""
    try:
        import cupy
    except ImportError as error:
        if error.name == "cupy":
            return Lack("CuPy is not installed", INSTALL)
        return Lack(f"CuPy does not load ({error.__cause__ or error})", INSTALL)
    except OSError as error:
        return Lack(f"CuPy cannot make its folder ({error})", "set CUPY_CACHE_DIR to a folder that can be written")
    runtime = cupy.cuda.runtime
    driver, wanted = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if not driver:
        return Lack("there is no NVIDIA driver", "install it; start containers with --gpus all")
    try:
        count()
    except runtime.CUDARuntimeError as error:
        if error.status == DRIVER_TOO_OLD:
            return Lack(
                f"the NVIDIA driver is for CUDA {version(driver)}, CuPy for CUDA {version(wanted)}",
                "update the driver, or install pagoda-kv[cuda12] and no cupy-cuda13x",
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if error.status == NO_DEVICE and visible is not None:
            return Lack(f"CUDA_VISIBLE_DEVICES = {visible!r} leaves no device", "unset it")
        return Lack(f"CuPy finds no device ({error})", "nvidia-smi says what the driver sees")
    return None


def version(number: int) -> str:
    """CUDA's version numbers, as 13.2 of 13020."""
    return f"{number // 1000}.{number % 1000 // 10}"


def count() -> int:
    """How many devices there are. Where there is none CuPy raises."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def capability(index: int) -> tuple[int, int]:
    """The compute capability of a device."""
    import cupy

    return divmod(int(cupy.cuda.Device(index).compute_capability), 10)


def gpu(index: int) -> Any:
    """CuPy's device number `index`. Raises BackendUnavailable with what is missing, and InvalidArgument."""
    missing = lack()
    if missing is not None:
        raise BackendUnavailable(f"device = cuda: {missing.found}; {missing.remedy}")
    if index >= count():
        raise InvalidArgument(f"device = cuda:{index}: from cuda:0 to cuda:{count() - 1}")
    if capability(index) < CAPABILITY_MIN:
        raise BackendUnavailable(
            f"device = cuda:{index}: compute capability {capability(index)}; from {CAPABILITY_MIN} on"
        )
    import cupy

    return cupy.cuda.Device(index)


def open_driver(index: int) -> Driver:
    """The device number `index`, as an engine needs it. Raises as `gpu` does."""
    return CudaDriver(gpu(index))


class _Memory:
    def __init__(self, size: int) -> None:
        import cupy

        try:
            self._memory = cupy.cuda.alloc(max(1, size))
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise BackendUnavailable(f"device_memory: {size} bytes ({error})") from error
        # A pool hands out memory again that kernels on the stream where it was freed may still use.
        cupy.cuda.runtime.deviceSynchronize()
        cupy.cuda.runtime.memset(self._memory.ptr, 0, size)
        # Callers' streams do not wait for the default stream, on which the memory was zeroed.
        cupy.cuda.runtime.streamSynchronize(0)
        self.address = int(self._memory.ptr)


class _Pinned:
    def __init__(self, size: int) -> None:
        import cupy

        try:
            self._memory = cupy.cuda.alloc_pinned_memory(max(1, size))
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise BackendUnavailable(f"host_memory: {size} pinned bytes ({error})") from error
        self.address = int(self._memory.ptr)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8, size)


TOUCH_THREADS = 8
"""Threads that write to memory before it is registered: the system clears pages as they are first written, and one thread
clears some 3 GB/s."""

MAP_NORESERVE = 0x4000
"""Of Linux: address space is not memory yet. Python names it from 3.13 on."""

MADV_WIPEONFORK = 18
"""Of Linux: a forked child finds zeros there. Python has no name for it."""

PIECE_BYTES = 256 << 20
"""Host memory that is registered at a time, about."""


class _HostArena:
    """Address space that is registered with the driver piece by piece, as it is used."""

    def __init__(self, size: int, piece: int) -> None:
        import cupy

        # Pieces begin and end at pages of the system: no page can be registered twice.
        piece = math.lcm(piece, mmap.PAGESIZE)
        self.piece = piece * max(1, PIECE_BYTES // piece)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, size, flags=flags)
        except OSError as error:
            raise BackendUnavailable(f"host_memory = {size}: {error}") from error
        # A fork would copy all that is pinned. Older kernels leave the copies to the parent: what is written there from then
        # on the device would never see. gVisor does not know the advice.
        with contextlib.suppress(OSError):
            self._map.madvise(MADV_WIPEONFORK)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._pinned: set[int] = set()
        # Registration outlives the memory, and whoever gets the same addresses later could not register them. So it ends with
        # the array, which is collected last: an engine that nobody has closed has waited for its kernels by then.
        runtime = cupy.cuda.runtime
        self._unregister = weakref.finalize(self._bytes, _unregister, runtime, self.address, self._pinned, self.piece)
        self._unregister.atexit = False

    def pin(self, addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        # What lies before the arena comes out far behind it.
        starts = np.array(addresses, np.uint64, ndmin=1) - np.uint64(self.address)
        inside: npt.NDArray[np.bool_] = starts < len(self._bytes)
        if not inside.any():
            return inside
        lasts = starts + np.asarray(sizes, np.uint64) - np.uint64(1)
        begin, end = (places[inside].astype(np.intp) // self.piece for places in (starts, lasts))
        pieces = -(-len(self._bytes) // self.piece)
        # How many runs each piece is touched by, from where they begin and end.
        touched = np.bincount(begin, minlength=pieces + 1) - np.bincount(end + 1, minlength=pieces + 1)
        for index in np.flatnonzero(touched.cumsum()).tolist():
            if index not in self._pinned:
                self._register(index)
        inside &= starts % self.piece == 0
        return inside

    def _register(self, index: int) -> None:
        import cupy

        piece = self._bytes[index * self.piece : (index + 1) * self.piece]
        share = -(-len(piece) // TOUCH_THREADS)
        with ThreadPoolExecutor(TOUCH_THREADS) as pool:
            list(pool.map(_touch, (piece[at : at + share] for at in range(0, len(piece), share))))
        runtime = cupy.cuda.runtime
        try:
            # 1: for every context; 2: mapped, so that kernels reach it.
            runtime.hostRegister(piece.ctypes.data, len(piece), 1 | 2)
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailable(
                f"host_memory: {len(piece)} bytes more cannot be pinned ({error}); {len(self._pinned)} pieces are"
            ) from error
        self._pinned.add(index)

    def close(self) -> None:
        self._unregister()


def _unregister(runtime: Any, address: int, pinned: set[int], piece: int) -> None:
    while pinned:
        # Refused alone by a device that has failed, and to a forked child.
        with contextlib.suppress(runtime.CUDARuntimeError):
            runtime.hostUnregister(address + pinned.pop() * piece)


def _touch(piece: npt.NDArray[np.uint8]) -> None:
    """Makes the system take memory for it."""
    piece[:: mmap.PAGESIZE] = 0


class _AllocatedArena:
    """Memory of the host that CUDA allocates, all at once. Some devices have another address for memory that is registered
    (WSL 2, Tegra), none for this."""

    def __init__(self, size: int) -> None:
        import cupy

        runtime = cupy.cuda.runtime
        try:
            # Not from CuPy's pool, which would round it up to a power of two.
            self._memory = cupy.cuda.PinnedMemory(size + mmap.PAGESIZE, runtime.hostAllocPortable)
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailable(f"host_memory: {size} pinned bytes ({error})") from error
        # The disk wants pages of the system; CUDA aligns to less.
        self.address = -(-int(self._memory.ptr) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.piece = size

    def pin(self, addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        begins: npt.NDArray[np.bool_] = np.array(addresses, np.uint64, ndmin=1) == self.address
        return begins

    def close(self) -> None:
        """The memory goes with this object: a drive may still answer for it."""


class _Event:
    """A point in a stream. kept: where the event of CUDA goes when nobody has this any more, to mark another point: to make
    one takes several times as long as to record it."""

    __slots__ = ("_kept", "event")

    def __init__(self, event: Any, kept: list[Any]) -> None:
        self._kept = kept
        self.event = event

    def __del__(self) -> None:
        # Not if Ctrl-C came before it was all there.
        if hasattr(self, "event"):
            self._kept.append(self.event)

    def done(self) -> bool:
        import cupy

        # CuPy's `Event.done` says "not done" for ever of a device that has failed.
        runtime = cupy.cuda.runtime
        status = runtime.eventQuery(self.event.ptr)
        if status not in (0, NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def wait(self) -> None:
        self.event.synchronize()


class _Foreign(NamedTuple):
    """A stream of others, as `cupy.cuda.Stream.from_external` takes it."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and the address."""
        return 0, self.address


class _Stream:
    """Every device has a default stream, and all are at address 0: that of the current one is meant."""

    def __init__(self, stream: Any, driver: CudaDriver) -> None:
        self._stream, self._driver = stream, driver

    def record(self) -> _Event:
        driver = self._driver
        # An event belongs to the current device, and only streams of that device can record it.
        with driver.device:
            try:
                event = driver.events.pop()
            except IndexError:
                event = driver.new_event()
            event.record(self._stream)
        return _Event(event, driver.events)

    def follow(self, event: Any) -> None:
        with self._driver.device:
            self._stream.wait_event(event.event)

    def current(self) -> Any:
        with contextlib.ExitStack() as every:
            every.enter_context(self._driver.device)
            every.enter_context(self._stream)
            if torch := _torch():
                index, address = self._driver.device.id, self._stream.ptr
                # torch takes an external stream at address 0 for a new one, and none at 1.
                default = address in DEFAULT_STREAM
                # To make a stream torch's current one takes longer than a launch.
                if torch.cuda.current_stream(index).cuda_stream != (0 if default else address):
                    stream = torch.cuda.default_stream(index) if default else torch.cuda.ExternalStream(address, index)
                    every.enter_context(torch.cuda.stream(stream))
            return every.pop_all()

    def copy(self, target: int, source: int, size: int) -> None:
        runtime = self._driver.runtime
        with self._driver.device:
            runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, self._stream.ptr)

    def zero(self, target: int, size: int) -> None:
        with self._driver.device:
            self._driver.runtime.memsetAsync(target, 0, size, self._stream.ptr)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        if max(target_pitch, source_pitch) > PITCH_MAX:
            for row in range(rows):
                self.copy(target + row * target_pitch, source + row * source_pitch, width)
            return
        runtime = self._driver.runtime
        pitches = target, target_pitch, source, source_pitch
        with self._driver.device:
            runtime.memcpy2DAsync(*pitches, width, rows, runtime.memcpyDefault, self._stream.ptr)

    @property
    def capturing(self) -> bool:
        with self._driver.device:
            try:
                return bool(self._stream.is_capturing())
            except self._driver.runtime.CUDARuntimeError:
                raise
            except RuntimeError:
                # So says CuPy of a capture that an error has made invalid, which goes on until somebody ends it.
                return True

    def launch(
        self, kernel: Kernel, grid: int, threads: int, arguments: ctypes.Structure, *, shared_bytes: int = 0
    ) -> None:
        driver = self._driver
        function = driver.functions.get(kernel)
        if function is None:
            if self.capturing:
                raise not_loaded(kernel)
            function = driver.load(kernel, shared_bytes)
        address, api = self._stream.ptr, driver.api
        # Copied before the call returns, as the arguments are.
        places = ONE_ADDRESS(ctypes.addressof(arguments))
        with driver.device:
            if not api.ctxGetCurrent():
                # The first call of this thread; of the runtime's any makes the device's context the current one.
                driver.runtime.memGetInfo()
            api.launchKernel(
                function.ptr, grid, 1, 1, threads, 1, 1, shared_bytes, address, ctypes.addressof(places), 0
            )


def _torch() -> Any:
    """torch, if anybody uses it on a GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _of_torch(array: Any) -> bool:
    """Whether an array is a tensor of torch, if anybody uses that."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(array, tensor)


@lru_cache
def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides of an array without gaps."""
    return tuple(accumulate(shape[:0:-1], operator.mul, initial=itemsize))[::-1]


@lru_cache
def _apart(shape: tuple[int, ...], strides: tuple[int, ...], unit: int, itemsize: int) -> tuple[int, ...]:
    """Strides in bytes, of strides in units; where only axes of length 1 say otherwise, those of an array without gaps."""
    dense, given = _contiguous(shape, itemsize), tuple(stride * unit for stride in strides)
    gaps = any(length > 1 and a != b for length, a, b in zip(shape, given, dense, strict=True))
    return given if gaps else dense


@lru_cache
def _kind(dtype: np.dtype[Any]) -> str | None:
    """What kernels call a type of NumPy's, if they take it."""
    return TYPES.get(dtype.str)


class Tensors:
    """Reads the tensors of a torch."""

    def __init__(self, torch: Any) -> None:
        self._strided = torch.strided
        self._kinds = {torch.float32: ("f32", 4), torch.float16: ("f16", 2), torch.bfloat16: ("bf16", 2)}
        if hasattr(torch, "uint16"):
            self._kinds[torch.uint16] = "u16", 2

    def read(self, tensor: Any, device: int) -> View | None:
        """A tensor of a GPU as it lies there; None for one that is not on the device, not dense, of no type that kernels
        take, without memory, or yet to be negated."""
        kind, itemsize = self._kinds.get(tensor.dtype, ("", 0))
        if not kind or not tensor.is_cuda or tensor.get_device() != device or tensor.layout is not self._strided:
            return None
        address = tensor.data_ptr()
        if not address or tensor.is_neg():
            return None
        shape = tuple(tensor.shape)
        return View(address, shape, _apart(shape, tensor.stride(), itemsize, itemsize), kind)


def _read_cupy(array: Any, device: int) -> View | None:
    """An array of CuPy; None for one of another device, without memory, or of no type that kernels take."""
    memory, kind = array.data, _kind(array.dtype)
    if kind is None or memory.device_id != device or not memory.ptr:
        return None
    shape = array.shape
    return View(memory.ptr, shape, _apart(shape, array.strides, 1, array.itemsize), kind)


@lru_cache
def _reader(kind: type) -> Callable[[Any, int], View | None] | None:
    """What reads arrays of a type without the array interface of CUDA, which to make and to check takes longer than all else
    that a launch takes. Not those of other classes: whatever they override goes on to hold."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and issubclass(kind, getattr(torch, "Tensor", ())):
        return Tensors(torch).read if kind in (torch.Tensor, torch.nn.Parameter) else None
    return _read_cupy if kind is getattr(cupy, "ndarray", None) else None


@lru_cache
def _are_sizes(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether an array may have this shape and these strides. Raises TypeError for what are no integers."""
    sizes = [*map(operator.index, shape)]
    return len([*map(operator.index, strides)]) == len(sizes) and min(sizes, default=0) >= 0


def _by_dlpack(array: Any) -> bool:
    """Whether an array hands out memory of a GPU by DLPack."""
    place = getattr(array, "__dlpack_device__", None)
    return place is not None and place()[0] in DLPACK_CUDA


def _cupy_array(name: str, array: Any) -> Any:
    """The same memory as an array of CuPy. Raises InvalidArgument for types that CuPy does not know."""
    import cupy

    try:
        return cupy.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} = {type(array).__name__}: one that CuPy takes by DLPack ({error})") from error


def view(name: str, array: Any, device: int, stream: Stream) -> View:
    """An array on the device of that number, with the array interface of CUDA or by DLPack, for kernels on a stream. Raises
    InvalidArgument."""
    known: Any = type(array)
    reader = _reader(known)
    if reader is not None and (found := reader(array, device)) is not None:
        return found
    kind = None
    if _of_torch(array):
        if array.is_neg():
            raise InvalidArgument(f"{name} = a tensor that is yet to be negated: what its resolve_neg() returns")
        array = array.detach()
        # Not every torch names bf16 in its array interface.
        if str(array.dtype) == "torch.bfloat16":
            kind, array = "bf16", array.view(sys.modules["torch"].int16)
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
    except KeyError as error:
        # torch has no name for some of its types: 8-bit floats.
        raise InvalidArgument(f"{name} = dtype {array.dtype}: one of those that array interfaces have") from error
    if interface is None:
        if _by_dlpack(array):
            # Its library makes the stream that is CuPy's current one wait for what it has yet to write there.
            with stream.current():
                array = _cupy_array(name, array)
            return view(name, array, device, stream)
        raise InvalidArgument(f"{name} = {type(array).__name__}: an array of CuPy or torch on the device")
    place: Any = getattr(array, "device", None)
    index = place.id if hasattr(place, "id") else getattr(place, "index", None)
    if index not in (None, device):
        raise InvalidArgument(f"{name} = an array on cuda:{index}: on cuda:{device}, the device of the cache")
    try:
        shape, typestr, strides = tuple(interface["shape"]), interface["typestr"], interface.get("strides")
        strides = _contiguous(shape, np.dtype(typestr).itemsize) if strides is None else tuple(strides)
        address, read_only = interface["data"]
        # Kernels would read at address 0, which ends all work on the device, and know nothing of masks.
        fits = _are_sizes(shape, strides) and (0 < address < 1 << 64 or 0 in shape) and interface.get("mask") is None
    except (AttributeError, LookupError, TypeError, ValueError):
        fits = False
    if not fits:
        limit = "shape, typestr, data, no mask, and as many strides as sizes if any"
        raise InvalidArgument(f"{name} = an array whose __cuda_array_interface__ is {interface!r}: {limit}")
    kind = kind or TYPES.get(typestr, str(typestr))
    return View(int(address), shape, strides, kind, not read_only)


class CudaDriver:
    """One GPU."""

    def __init__(self, device: Any) -> None:
        import cupy

        self.device = device
        attributes = device.attributes
        self.multiprocessors = int(attributes["MultiProcessorCount"])
        self.shared_bytes_max = int(attributes["MaxSharedMemoryPerBlockOptin"])
        self._registers = bool(attributes["CanUseHostPointerForRegisteredMem"])
        self.api, self.runtime = cupy.cuda.driver, cupy.cuda.runtime
        self.functions: dict[Kernel, Any] = {}
        """Those that are loaded."""
        self.events: list[Any] = []
        """Those that mark nothing."""
        self.new_event = partial(cupy.cuda.Event, block=True, disable_timing=True)

    def load(self, kernel: Kernel, shared_bytes: int) -> Any:
        """The compiled kernel, as a function of CUDA. Raises KernelCompileError."""
        with self.device:
            compiled = loader.load(kernel)
            compiled.max_dynamic_shared_size_bytes = shared_bytes
            self.functions[kernel] = compiled.kernel
        return self.functions[kernel]

    def memory(self, size: int) -> _Memory:
        """Zeroed bytes on the device."""
        with self.device:
            return _Memory(size)

    def give_back(self) -> None:
        """Else it stays in CuPy's pool, which cuts pieces off for others: it would not be whole when it is wanted again."""
        import cupy

        runtime = cupy.cuda.runtime
        # Refused alone by a device that has failed, and to a forked child.
        with contextlib.suppress(runtime.CUDARuntimeError), self.device:
            runtime.deviceSynchronize()
            cupy.get_default_memory_pool().free_all_blocks()

    def pinned(self, size: int) -> _Pinned:
        """Bytes of the host."""
        with self.device:
            return _Pinned(size)

    def host_arena(self, size: int, piece: int) -> HostArena:
        """Address space of the host."""
        if self._registers:
            return _HostArena(size, piece)
        with self.device:
            return _AllocatedArena(size)

    @cached_property
    def name(self) -> str:
        """Its place on the bus."""
        import cupy

        return str(cupy.cuda.runtime.deviceGetPCIBusId(self.device.id))

    @property
    def free_bytes(self) -> int:
        """As the driver says now."""
        free, _ = self.device.mem_info
        return int(free)

    @cached_property
    def copy_engine_bytes(self) -> int:
        """Measured when it is first asked for."""
        return thresholds.copy_engine_bytes(self)

    @cached_property
    def ring_bytes(self) -> int:
        """Measured when it is first asked for."""
        return thresholds.ring_bytes(self)

    def stream(self) -> _Stream:
        """A new stream."""
        import cupy

        with self.device:
            return _Stream(cupy.cuda.Stream(non_blocking=True), self)

    def caller_stream(self, given: object) -> _Stream:
        """The caller's stream; for None CuPy's current one, or torch's where CuPy's is the default."""
        import cupy

        index = self.device.id
        if given is None:
            stream = cupy.cuda.get_current_stream(index)
            if stream.ptr or not (torch := _torch()):
                return _Stream(stream, self)
            given = torch.cuda.current_stream(index)
        # CuPy's word, then torch's. An address says nothing, and CuPy -1 where it does not know.
        place = getattr(given, "device_id", getattr(given, "device_index", -1))
        if place not in (-1, index):
            raise InvalidArgument(f"stream = a stream of cuda:{place}: of cuda:{index}, the device of the cache")
        if isinstance(given, cupy.cuda.Stream):
            return _Stream(given, self)
        # Of torch, an ExternalStream of CuPy, or an address.
        address = getattr(given, "cuda_stream", getattr(given, "ptr", given))
        if not isinstance(address, int):
            raise InvalidArgument(f"stream = {given!r}: a stream of CuPy or torch, or its address")
        return _Stream(cupy.cuda.Stream.from_external(_Foreign(address)), self)

    def view(self, name: str, array: Any, stream: Stream) -> View:
        """An array on the device."""
        return view(name, array, self.device.id, stream)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        """A new array of the same library; of CuPy for those that are known by DLPack alone."""
        if _of_torch(like):
            import torch

            return torch.empty(shape, dtype=torch.float32 if dtype else like.dtype, device=like.device)
        import cupy

        if not dtype and not hasattr(like, "__cuda_array_interface__"):
            like = _cupy_array("q", like)
        return cupy.empty(shape, cupy.float32 if dtype else like.dtype)
