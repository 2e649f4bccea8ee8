"""Measures a machine with a GPU: the bandwidth of each route to pages of the host tier, alone and together with others, and
how fast the device reads its own memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import combinations
from typing import NamedTuple

from pagoda.device.driver import Driver, Event, Pending, Stream
from pagoda.device.mover import KERNEL_THREADS, RUN_BYTES, WORD, list_runs
from pagoda.device.thresholds import seconds
from pagoda.kernels import arguments, instances
from pagoda.rates import Routes

PIECE_BYTES = 256 << 20
"""Size of a copy, or of a kernel's read: it takes longer than `POLL_SECONDS` on any link."""

SECONDS = 0.3
"""How long each set of routes is used."""

POLL_SECONDS = 2e-4
"""Sleep between two queries of what is under way: the CPU has attention to compute."""

READ_BYTES = 1 << 30
"""Size of the device memory that is read: many times what its caches hold."""

READ_REPEATS = 32
"""Reads without a wait in between: together milliseconds, so that the cost of launches and the wait is negligible."""

READ_THREADS, READ_BLOCKS = 512, 2
"""Threads of a thread block of the kernel `read`, and thread blocks per multiprocessor, together with 128 KiB under way."""


class Way(NamedTuple):
    """How a route is used: `begin` starts to transfer or read `bytes`."""

    begin: Callable[[], Pending]
    bytes: int


class Read(NamedTuple):
    """A pass of the CPU over its pages."""

    future: Future[object]

    def done(self) -> bool:
        """Whether it has ended."""
        return self.future.done()

    def wait(self) -> None:
        """Sleeps until it has ended. Raises the errors of the pass."""
        self.future.result()


class Reader:
    """Reads device memory as fast as possible, and does nothing with it."""

    def __init__(self, driver: Driver) -> None:
        self._blocks = READ_BLOCKS * driver.multiprocessors
        self._found = driver.memory(4)

    def read(self, stream: Stream, address: int, size: int) -> None:
        """Starts to read bytes; both numbers are multiples of 16."""
        call = arguments.Read(address, size // WORD, self._found.address, 1)
        stream.launch(instances.READ, self._blocks, READ_THREADS, call)


def ceilings(driver: Driver) -> dict[str, float]:
    """Bytes a second of "device" (reads of its memory) and of "pcie" (one large copy to the device), each alone."""
    stream, reader = driver.stream(), Reader(driver)
    host, device = driver.pinned(PIECE_BYTES), driver.memory(max(PIECE_BYTES, READ_BYTES))

    def read() -> None:
        for _ in range(READ_REPEATS):
            reader.read(stream, device.address, READ_BYTES)

    def copy() -> None:
        stream.copy(device.address, host.address, PIECE_BYTES)

    return {"device": READ_REPEATS * READ_BYTES / seconds(stream, read), "pcie": PIECE_BYTES / seconds(stream, copy)}


def measure(driver: Driver, threads: int, read: Callable[[], object], size: int) -> Routes:
    """Measures every set of routes, which takes seconds. read: attends to `size` bytes with this many threads."""
    host, ring, sink = driver.pinned(PIECE_BYTES), driver.memory(PIECE_BYTES), driver.memory(PIECE_BYTES)
    copying, reading = driver.stream(), driver.stream()
    # One piece for each thread block.
    piece = -(-PIECE_BYTES // driver.multiprocessors // WORD) * WORD
    runs = [(host.address + at, sink.address + at, min(piece, PIECE_BYTES - at)) for at in range(0, PIECE_BYTES, piece)]
    listed = driver.pinned(RUN_BYTES * (len(runs) + 1))
    list_runs(listed, [*runs, (host.address, sink.address, WORD)])
    all_of_it = arguments.Move(listed.address, len(runs))
    a_word = arguments.Move(listed.address + RUN_BYTES * len(runs), 1)

    def copy() -> Event:
        copying.copy(ring.address, host.address, PIECE_BYTES)
        return copying.record()

    def read_in_place() -> Event:
        reading.launch(instances.MOVE, driver.multiprocessors, KERNEL_THREADS, all_of_it)
        return reading.record()

    def look() -> None:
        reading.launch(instances.MOVE, 1, KERNEL_THREADS, a_word)

    def bring() -> None:
        copying.copy(ring.address, host.address, WORD)
        reading.follow(copying.record())
        look()

    def hand_over() -> None:
        reading.copy(host.address, ring.address, WORD)
        reading.record().wait()
        look()

    with ThreadPoolExecutor(1) as pool:
        ways = {
            "ring": Way(copy, PIECE_BYTES),
            "mapped": Way(read_in_place, PIECE_BYTES),
            "memory": Way(lambda: Read(pool.submit(read)), size),
        }
        sets = [chosen for count in range(1, len(ways) + 1) for chosen in combinations(ways, count)]
        rates = [at_once({route: ways[route] for route in chosen}) for chosen in sets]
    return Routes(threads, rates, _start(reading, {"ring": bring, "mapped": look, "memory": hand_over}))


def at_once(ways: Mapping[str, Way]) -> dict[str, float]:
    """Bytes a second of each way, all used at once. A second piece is always queued; the first one does not count."""
    under_way = {route: deque([way.begin(), way.begin()]) for route, way in ways.items()}
    first, last, pieces = dict[str, float](), dict[str, float](), dict.fromkeys(ways, 0)
    stop = time.perf_counter() + SECONDS
    while time.perf_counter() < stop or not all(pieces.values()):
        for route, way in ways.items():
            if under_way[route][0].done():
                under_way[route].popleft()
                under_way[route].append(way.begin())
                last[route] = time.perf_counter()
                pieces[route] += route in first
                first.setdefault(route, last[route])
        time.sleep(POLL_SECONDS)
    for pending in under_way.values():
        for one in pending:
            one.wait()
    return {route: pieces[route] * way.bytes / (last[route] - first[route]) for route, way in ways.items()}


def _start(stream: Stream, calls: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds that each way takes for almost no bytes, minus those of the quickest."""
    taken = {route: seconds(stream, call) for route, call in calls.items()}
    return {route: each - min(taken.values()) for route, each in taken.items()}
