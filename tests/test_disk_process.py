"""The disk tier and its process: forks, signals, exits, other processes, drives that fill up, and no leaks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import emulator
import pytest
import silence

TESTS = str(Path(__file__).parent)

PRELUDE = f"""
import contextlib, gc, os, signal, sys, threading
sys.path.insert(0, {TESTS!r})
import numpy as np
import pagoda, pytest
from mirror import Mirror, Tokens, layer
spec = pagoda.ModelSpec(layers=[layer(), layer()])
def opened(**changes):
    options = dict(device="cpu", page_size=16, device_memory="4MiB", host_memory="4MiB", disk=sys.argv[1],
                   disk_memory="16MiB", resume=True, threads=2)
    return pagoda.Cache(spec, **(options | changes))
def mirrored(cache, count=800):
    mirror = Mirror(cache)
    tokens = mirror.create()
    mirror.step([tokens], [count])
    return mirror, tokens
def loaded(mirror, key, like):
    sequence = mirror.cache.load(key)
    mirror.live.append(Tokens(sequence, list(like.k), list(like.v)))
    return mirror.live[-1]
"""


def run(script: str, place: Path, *given: str, before: list[str] | None = None) -> None:
    """Runs a script in a separate process, which must succeed."""
    command = [*(before or []), sys.executable, "-c", PRELUDE + script, str(place), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stdout + done.stderr


def test_a_fork_with_transfers_under_way(tmp_path: Path) -> None:
    """Every call in the child raises, its exit frees nothing, and the parent's pages arrive."""
    script = """
cache = opened()
mirror, tokens = mirrored(cache)
sequence = tokens.sequence
cache.save(sequence, "it")
plan = cache.plan(sequence, "host")
for turn in range(4):
    ticket = cache.demote(sequence, to="disk") if turn % 2 == 0 else cache.promote(sequence, to="host")
    child = os.fork()
    if child == 0:
        calls = [
            cache.create, cache.audit, cache.stats, cache.saved, sequence.fork, sequence.__len__, sequence.release,
            ticket.wait, lambda: cache.step([sequence], [1]).__enter__(), lambda: cache.execute(plan),
            lambda: cache.save(sequence, "it"), lambda: cache.load("it"), lambda: cache.forget("it"),
            lambda: cache.demote(sequence, to="disk"),
        ]
        for call in calls:
            with pytest.raises(pagoda.UseAfterRelease):
                call()
        if turn == 0:
            cache.close()
        with pytest.raises(pagoda.TierIOError, match="has it open"):
            opened()
        del sequence, ticket, mirror, tokens, cache, plan
        gc.collect()
        if turn % 2:
            os._exit(0)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ticket.wait(60)
    mirror.look()
    loaded(mirror, "it", tokens)
    mirror.look()
    mirror.release(mirror.live[-1])
cache.close()
opened().close()
print("fine")
"""
    run(script, tmp_path / "kept")


def test_a_child_that_outlives_its_parent_leaves_the_directory_to_others(tmp_path: Path) -> None:
    """An flock belongs to all processes that have the file open, so a forked child closes it at once."""
    script = """
cache = opened()
cache.save(mirrored(cache, 50)[1].sequence, "it")
other = opened(disk=sys.argv[1] + "-other")
if os.fork() == 0:
    other = opened(disk=sys.argv[1] + "-third")
    if os.fork() == 0:
        print("ready", flush=True)
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
    other.close()
    os._exit(0)
signal.pause()
"""
    command = [sys.executable, "-c", PRELUDE + script, str(tmp_path / "kept")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        refused = """
with pytest.raises(pagoda.TierIOError, match="has it open"):
    opened()
print("fine")
"""
        run(refused, tmp_path / "kept")
        parent.kill()
        parent.wait()
        opens = """
for place in ("", "-other"):
    with opened(disk=sys.argv[1] + place) as cache:
        assert sorted(cache.saved()) == ([] if place else ["it"])
with pytest.raises(pagoda.TierIOError, match="has it open"):
    opened(disk=sys.argv[1] + "-third")
print("fine")
"""
        run(opens, tmp_path / "kept")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere children share it until somebody writes to it")
def test_a_child_forked_while_a_directory_is_opened_leaves_it_to_others(tmp_path: Path) -> None:
    """Even if the parent is killed, in which case only closing the file in every process releases the lock."""
    if not silence.is_possible():
        pytest.skip("no system calls can be held up")
    script = """
import time
from silence import answer, asked, silence
drive = silence("fdatasync")
opening = threading.Thread(target=opened)
opening.start()
while not asked(drive):
    time.sleep(0.01)
if os.fork() == 0:
    os.close(drive)
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
answer(drive)
opening.join()
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", PRELUDE + script, str(tmp_path / "kept")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.wait()
        run("opened().close()\nprint('fine')", tmp_path / "kept")


def test_a_child_keeps_no_space_of_a_file_that_its_parent_closes(tmp_path: Path) -> None:
    script = """
cache = opened(resume=False)
mirror, tokens = mirrored(cache)
assert cache.demote(tokens.sequence, to="disk").wait(60)
ready, tell = os.pipe()
child = os.fork()
if child == 0:
    os.write(tell, b"1")
    signal.pause()
os.read(ready, 1)
def held(process):
    folder = f"/proc/{process}/fd"
    files = [f"{folder}/{descriptor}" for descriptor in os.listdir(folder)]
    gone = [file for file in files if os.path.islink(file) and "(deleted)" in os.readlink(file)]
    return sum(os.stat(file).st_blocks for file in gone)
assert held("self") > 0
assert held(child) == 0
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
cache.close()
print("fine")
"""
    run(script, tmp_path / "kept")


def test_a_forked_child_has_nothing_of_the_memory(tmp_path: Path) -> None:
    """Otherwise a drive that reads into shared memory might write to the child's copy."""
    script = """
cache = opened(device_memory="256MiB", host_memory="256MiB")
mirror, tokens = mirrored(cache)
assert cache.demote(tokens.sequence, to="disk").wait(60)
def size():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
def kept_from_children():
    lines = [line.split() for line in open("/proc/self/smaps") if line.startswith(("Size:", "VmFlags:"))]
    return sum(int(size[1]) << 10 for size, flags in zip(lines[::2], lines[1::2]) if "dc" in flags)
before, ours = size(), kept_from_children()
child = os.fork()
if child == 0:
    os._exit(size() > before - (512 << 20) or kept_from_children() > 0)
assert os.waitpid(child, 0)[1] == 0
# Two tiers, and the ring and what each thread of the disk reads into.
assert ours > 512 << 20, ours
mirror.look()
cache.close()
print("fine")
"""
    run(script, tmp_path / "kept")


def test_ctrl_c_while_the_disk_is_waited_for(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGALRM, signal.default_int_handler)
cache = opened()
mirror, tokens = mirrored(cache)
sequence, interrupted = tokens.sequence, 0
while interrupted < 40:
    # Once more after a second: Python drops an interrupt that comes in a finaliser.
    signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.0007 * interrupted, 1)
    try:
        while True:
            cache.demote(sequence, to="disk").wait()
            # The drive has yet to answer for the name.
            with contextlib.suppress(pagoda.TierIOError):
                cache.save(sequence, "it")
            cache.promote(sequence).wait()
            with contextlib.suppress(pagoda.TierIOError):
                cache.forget("it")
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        interrupted += 1
        cache.audit()
while cache.plan(sequence, "disk").copies or not cache.plan(sequence, "device").copies:
    cache.demote(sequence, to="disk").wait()
mirror.look()
while True:
    try:
        cache.save(sequence, "it")
        break
    except pagoda.TierIOError as error:
        assert "yet to answer" in str(error)
loaded(mirror, "it", tokens)
mirror.look()
cache.close()
with opened() as cache:
    assert cache.load("it") is not None
print("fine")
"""
    run(script, tmp_path / "kept")


def test_the_interpreter_ends_with_disk_transfers_under_way(tmp_path: Path) -> None:
    script = """
cache = opened()
mirror, tokens = mirrored(cache)
cache.save(tokens.sequence, "it")
cache.demote(tokens.sequence).wait()
ticket = cache.promote(tokens.sequence)
others = [mirror.create() for _ in range(3)]
mirror.step(others, [300] * 3)
tickets = [cache.demote(other.sequence, to="disk") for other in others]
print("fine")
"""
    for _ in range(3):
        run(script, tmp_path / "kept")
    check = """
with opened() as cache:
    assert len(cache.load("it")) == 800
print("fine")
"""
    run(check, tmp_path / "kept")


def test_two_processes_take_turns(tmp_path: Path) -> None:
    script = f"""
import subprocess
other = [sys.executable, "-c", {PRELUDE!r} + '''
try:
    with opened() as cache:
        print(sorted(cache.saved()))
except pagoda.TierIOError as error:
    print(error)
''', sys.argv[1]]
with opened() as cache:
    cache.save(mirrored(cache, 50)[1].sequence, "it")
    assert "has it open" in subprocess.run(other, capture_output=True, text=True, timeout=60).stdout
    assert len(cache.load("it")) == 50
assert subprocess.run(other, capture_output=True, text=True, timeout=60).stdout == "['it']\\n"
print("fine")
"""
    run(script, tmp_path / "kept")


def small_drive(place: Path) -> list[str]:
    """A command prefix that mounts a drive of 1 MiB at `place`."""
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"']
    if shutil.which("unshare") is None or subprocess.run([*mount, str(place), "true"], capture_output=True).returncode:
        pytest.skip("no drive of its own can be mounted")
    return [*mount, str(place)]


def test_a_drive_that_is_full_and_has_space_again(tmp_path: Path) -> None:
    """On a drive of 1 MiB: pages that cannot be written stay in memory, written ones are read, and later writes succeed."""
    script = """
cache = opened()
mirror, small = mirrored(cache, 200)
cache.save(small.sequence, "small")
assert cache.demote(small.sequence, to="disk").wait(60)
large = mirror.create()
mirror.step([large], [1500])
for turn in range(3):
    with pytest.raises(pagoda.TierIOError, match="disk = .*: No space left"):
        cache.demote(large.sequence, to="disk").wait(60)
    with pytest.raises(pagoda.TierIOError, match="disk = .*: No space left"):
        cache.save(large.sequence, "large")
    mirror.look()
    loaded(mirror, "small", small)
    mirror.look()
    mirror.release(mirror.live[-1])
    cache.audit()
assert sorted(cache.saved()) == ["small"]
mirror.truncate(large, 300)
cache.save(large.sequence, "large")
assert cache.demote(large.sequence, to="disk").wait(60)
mirror.look()
cache.close()
with opened() as cache:
    assert sorted(cache.saved()) == ["large", "small"]
    mirror = Mirror(cache, np.random.default_rng(1))
    loaded(mirror, "large", large)
    mirror.look()
print("fine")
"""
    run(script, tmp_path / "kept", before=small_drive(tmp_path))


def test_a_drive_that_was_full_is_used_as_fast_as_before(tmp_path: Path) -> None:
    """Opening the directory finds out what the drive can do, even if there is no room for trial writes."""
    script = """
from pathlib import Path
def ways(cache):
    disk = cache.stats().disk_io
    return disk.direct, disk.io_uring, [why for why in disk.refused if "index" not in why]
with opened() as cache:
    small = mirrored(cache, 50)[1]
    cache.save(small.sequence, "small")
    before = ways(cache)
filling = Path(sys.argv[1]).parent / "filling"
for left in (0, 1):
    with filling.open("ab", buffering=0) as file:
        with pytest.raises(OSError, match="No space left"):
            while file.write(bytes(4096)):
                pass
        file.truncate(file.tell() - 4096 * left)
    with opened() as cache:
        assert ways(cache) == before
        loaded(Mirror(cache, np.random.default_rng(1)), "small", small)
        filling.unlink()
        cache.save(mirrored(cache, 200)[1].sequence, "large")
        cache.forget("large")
print("fine")
"""
    run(script, tmp_path / "kept", before=small_drive(tmp_path))


GROWTH = """
import time
def things():
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    # The kernel starts and ends threads of its own for the rings.
    threads = sum(not name.startswith("iou-") for name in names)
    return resident, len(os.listdir("/proc/self/fd")), threads
def grown(before):
    # A thread that has been waited for may be on the list a while longer.
    deadline = time.monotonic() + 60
    gc.collect()
    while (after := things())[1:] != before[1:] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after[1:] == before[1:], (before, after)
    return after[0] - before[0]
"""


SEQUENCES = """
cache = opened(threads=1)
rows = np.ones((20, 2, 16), np.float16)
def cycle(turn):
    with cache.create() as sequence:
        with cache.step([sequence], [20]) as step:
            step.append(0, rows, rows)
            step.append(1, rows, rows)
        cache.save(sequence, str(turn % 5))
    with cache.load(str(turn % 5)) as sequence:
        assert len(sequence) == 20
"""


CACHES = """
def cycle(turn):
    with opened(threads=2) as cache, cache.create() as sequence:
        cache.save(sequence, "it")
"""


IN_MEMORY = """
rows, q = np.ones((20, 2, 16), np.float16), np.ones((20, 4, 16), np.float32)
def cycle(turn):
    # Every other one is left to whoever collects what nobody holds, with a move under way.
    cache = pagoda.Cache(spec, device="cpu", page_size=16, device_memory="64KiB", host_memory="64KiB", threads=2)
    sequence = cache.create()
    with cache.step([sequence], [20]) as step:
        assert step.forward(0, q, rows, rows).any()
        step.append(1, rows, rows)
    cache.demote(sequence)
    if turn % 2:
        cache.close()
"""


ON_A_DEVICE = """
from emulator.driver import EmulatedDriver
from pagoda.device import cuda
cuda.open_driver = lambda index: EmulatedDriver()
rows = np.ones((20, 2, 16), np.float16)
def cycle(turn):
    with opened(device="cuda", device_memory="64KiB", host_memory="64KiB", disk_memory="1MiB") as cache:
        sequence = cache.create()
        with cache.step([sequence], [20]) as step:
            step.append(0, rows, rows)
            step.append(1, rows, rows)
        cache.demote(sequence, to="disk" if turn % 2 else "host").wait()
        cache.save(sequence, "it")
    # It has cycles.
    del cache, sequence, step
    gc.collect()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("cycle", "turns"),
    [(SEQUENCES, 10_000), (CACHES, 1500), (IN_MEMORY, 1500), (ON_A_DEVICE, 200)],
    ids=["sequences", "caches", "caches in memory", "caches on a device"],
)
def test_nothing_piles_up(cycle: str, turns: int, tmp_path: Path) -> None:
    """Memory, open files and threads of a process are the same after many turns as after a few."""
    if cycle == ON_A_DEVICE:
        emulator.require()
    script = f"""
{GROWTH}
{cycle}
for turn in range({turns // 10}):
    cycle(turn)
gc.collect()
before = things()
for turn in range({turns}):
    cycle(turn)
growth = grown(before)
print(f"{{growth >> 10}} KiB more", file=sys.stderr)
assert growth < 4 << 20, growth
print("fine")
"""
    memory = Path("/dev/shm")
    place = memory / f"pagoda-test-{os.getpid()}" if os.access(memory, os.W_OK) else tmp_path / "kept"
    try:
        run(script, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


SILENT = """
import fcntl, threading, time
from interrupts import alarms
from silence import answer, asked, silence
device = {"device": sys.argv[2]}
if sys.argv[2] == "cuda":
    from emulator.driver import EmulatedDriver
    from pagoda.device import cuda
    driver = EmulatedDriver()
    cuda.open_driver = lambda index: driver
PAGES = "io_uring_enter", "pread64", "pwrite64"
GIVEN_UP = "disk = .*kept: disk_timeout = 0.2: the drive did nothing for longer"
def soon(call):
    # Other things than a silent drive may take as long as that, and are tried again.
    deadline = time.monotonic() + 60
    while True:
        try:
            if result := call():
                return result
        except pagoda.TierIOError:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline
        time.sleep(0.01)
def reopened(**changes):
    return soon(lambda: opened(**(device | changes)))
def closes():
    with contextlib.suppress(pagoda.TierIOError):
        cache.close()
    soon(is_free)
def loads(key):
    return len(cache.load(key)) == 100
def is_free():
    with open(sys.argv[1] + "/pages", "r+b") as pages:
        try:
            fcntl.flock(pages, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
def ended():
    with pytest.raises(pagoda.TierIOError, match=GIVEN_UP + "; the cache is closed, and its memory and files are given back"):
        cache.close()
    with pytest.raises(pagoda.UseAfterRelease, match="cache: closed"):
        cache.create()
    cache.close()
    assert not is_free()
cache = reopened(disk_timeout=0.2)
mirror, tokens = mirrored(cache, 100)
cache.save(tokens.sequence, "it", meta=b"1")
cache.save(tokens.sequence, "other", meta=b"2")
SAVED = {"it": b"1", "other": b"2"}
"""

FORGOTTEN = """
drive, left = silence("fdatasync"), dict(SAVED)
for key in ("it", "other"):
    with pytest.raises(pagoda.TierIOError, match=GIVEN_UP):
        cache.forget(key)
    # The line of one is on its way, so that it goes when the drive answers; the other has yet to have its turn.
    if asked(drive) and left == SAVED:
        del left[key]
    with pytest.raises(pagoda.TierIOError, match=f".{key}.: the drive has yet to answer an earlier save or forget"):
        cache.load(key)
assert cache.saved() == SAVED
cache.audit()
mirror.step([tokens], [3])
if sys.argv[3] == "answered":
    answer(drive)
    soon(lambda: cache.saved() == left)
    for key in left:
        soon(lambda: loads(key))
        soon(lambda: cache.forget(key) or key not in cache.saved())
    left = {}
    closes()
else:
    ended()
    answer(drive)
    soon(is_free)
with opened(**device) as cache:
    assert cache.saved() == left
print("fine")
"""

SAVED = """
drive, then = silence("pwrite64"), dict(SAVED)
with cache.create() as nothing:
    for key in ("it", "other"):
        # Of an empty sequence no page is written: there is nothing but to sync, and to write the line.
        with pytest.raises(pagoda.TierIOError, match=GIVEN_UP):
            cache.save(nothing, key, meta=b"3")
        if asked(drive) and then == SAVED:
            then[key] = b"3"
        with pytest.raises(pagoda.TierIOError, match="the drive has yet to answer"):
            cache.load(key)
fresh, written = mirror.create(), cache.stats().disk_io.bytes_written
mirror.step([fresh], [40])
with pytest.raises(pagoda.TierIOError, match="the drive has yet to answer"):
    cache.save(fresh.sequence, "it")
assert cache.stats().disk_io.bytes_written == written, "no page is written for nothing"
assert cache.saved() == SAVED
cache.audit()
answer(drive)
for key, meta in then.items():
    found = []
    soon(lambda: found.append(cache.load(key)) or True)
    assert len(found[0]) == (0 if meta == b"3" else 100)
assert cache.saved() == then
mirror.look()
cache.audit()
closes()
with opened(**device) as cache:
    assert cache.saved() == then
print("fine")
"""

WAITED = """
closes()
cache = reopened(disk_timeout=0.2, spill=False)
mirror = Mirror(cache, np.random.default_rng(1))
short, full, tail, away = [mirror.create() for _ in range(4)]
mirror.step([short, full, tail, away], [10, 40, 40, 80])
for moved in (tail, away):
    assert cache.demote(moved.sequence, to="disk").wait(60)
mirror.truncate(tail, 20)
lengths, free = [len(tokens) for tokens in mirror.live], cache.stats().device[0].free
drive = silence(*PAGES)
refused = [
    # Its last page is read; an open page is written, then full ones; the page that a step appends to is read, then all pages.
    (lambda: cache.load("it"), GIVEN_UP),
    (lambda: cache.save(short.sequence, "it", meta=b"3"), GIVEN_UP),
    (lambda: cache.save(full.sequence, "full"), GIVEN_UP),
    (lambda: mirror.step([tail], [1]), GIVEN_UP),
    (lambda: mirror.step([away], [1]), "disk = .*kept: disk_timeout = 0.2: a read took longer"),
]
for call, error in refused:
    with pytest.raises(pagoda.TierIOError, match=error):
        call()
    cache.audit()
    assert cache.saved() == SAVED
    assert [len(tokens.sequence) for tokens in mirror.live] == lengths
    assert cache.stats().device[0].free < free, "a block that is still read into is handed out to nobody"
mirror.step([short, full], [1, 1])
answer(drive)
soon(lambda: not mirror.look())
soon(lambda: loads("it"))
cache.save(full.sequence, "full")
for tokens in list(mirror.live):
    mirror.release(tokens)
for key in ("it", "other", "full"):
    soon(lambda: cache.forget(key) or key not in cache.saved())
def empty():
    stats = cache.stats()
    return not any(counts.used or counts.draining for counts in (*stats.device, *stats.host, *stats.disk))
# What was loaded and is held by nobody is released by the next step.
with cache.create() as nothing, cache.step([nothing], [0]):
    pass
soon(empty)
cache.audit()
closes()
print("fine")
"""

MOVED = """
drive = silence(*PAGES)
mirror.step([tokens], [300])
ticket = cache.demote(tokens.sequence, to="disk")
assert not ticket.wait(0.1)
assert not ticket.done()
child = os.fork()
if child == 0:
    with pytest.raises(pagoda.UseAfterRelease, match="another process"):
        ticket.done()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
if sys.argv[3] == "dropped":
    del mirror, tokens, ticket, cache
    gc.collect()
    assert not is_free()
else:
    ended()
    with pytest.raises(pagoda.UseAfterRelease, match="cache: closed"):
        ticket.done()
answer(drive)
soon(is_free)
with opened(**device) as cache:
    assert sorted(cache.saved()) == ["it", "other"]
print("fine")
"""

LEFT_ALONE = """
closes()
cache = reopened(disk_timeout=5)
mirror, tokens = mirrored(cache, 100)
drive, go = silence(*PAGES), threading.Event()
def answers():
    go.wait()
    answer(drive)
threading.Thread(target=answers).start()
ticket = cache.demote(tokens.sequence, to="disk")
# The other thread goes on only where this one lets it.
sys.setswitchinterval(1000)
go.set()
del mirror, tokens, ticket, cache
gc.collect()
assert is_free(), "nobody could answer"
print("fine")
"""

GIVEN_BACK = """
closes()
cache = reopened(disk_timeout=0.2)
for key in SAVED:
    soon(lambda: cache.forget(key) or key not in cache.saved())
mirror, tokens = mirrored(cache)
assert soon(lambda: cache.demote(tokens.sequence, to="disk").wait(60))
drive = silence("fallocate")
mirror.release(tokens)
soon(lambda: asked(drive))
tokens = mirror.create()
mirror.step([tokens], [800])
ticket = cache.demote(tokens.sequence, to="disk")
assert not ticket.wait(0.3), "what is written there waits"
mirror.look()
cache.audit()
if sys.argv[3] == "answered":
    answer(drive)
    assert ticket.wait(60)
    mirror.look()
    closes()
else:
    ended()
    answer(drive)
    soon(is_free)
with opened(**device) as cache:
    assert cache.saved() == {}
print("fine")
"""

ZEROED = """
closes()
cache = reopened(disk_timeout=60 if sys.argv[3] == "interrupted" else 0.2, zero_on_free=True)
mirror = Mirror(cache, np.random.default_rng(1))
tokens, kept = mirror.create(), mirror.create()
mirror.step([tokens, kept], [100, 40])
for moved in (tokens, kept):
    assert soon(lambda: cache.demote(moved.sequence, to="disk").wait(60))
held = cache.stats().disk[0].used - 8
rows = [tokens.k[0][16 * page, 0].astype(np.float16).tobytes() for page in range(6)]
def left():
    with open(sys.argv[1] + "/pages", "rb") as pages:
        data = pages.read()
    return sum(row in data for row in rows)
assert left() == 6
drive = silence("fallocate")
mirror.live.remove(tokens)
def lets_go():
    tokens.sequence.release()
    # A device is told with the next call.
    cache.stats()
if sys.argv[3] == "interrupted":
    with alarms() as alarm, pytest.raises(KeyboardInterrupt):
        alarm(0.2)
        lets_go()
else:
    lets_go()
assert asked(drive)
assert left() == 6
counts = cache.stats().disk[0]
assert (counts.used, counts.draining) == (held + 2, 6), "handed out to nobody"
other = mirror.create()
mirror.step([other], [100])
ticket = cache.demote(other.sequence, to="disk")
assert ticket.wait(60)
assert cache.stats().disk[0].used == held + 8
mirror.look()
cache.audit()
if sys.argv[3] == "unanswered":
    ended()
    answer(drive)
    soon(is_free)
    with opened(**device, zero_on_free=True) as cache:
        assert sorted(cache.saved()) == ["it", "other"]
else:
    answer(drive)
    soon(lambda: cache.stats().disk[0].draining == 0)
    cache.audit()
    closes()
assert left() == 0
print("fine")
"""

OPENED = """
closes()
options = device | ({"zero_on_free": True} if sys.argv[3] == "fallocate" else {})
drive = silence(sys.argv[3])
with pytest.raises(pagoda.TierIOError, match=GIVEN_UP + "; the directory is let go of when it has answered"):
    opened(disk_timeout=0.2, **options)
if sys.argv[3] == "pwrite64":
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        opened(**options)
else:
    with pytest.raises(pagoda.TierIOError, match="has it open"):
        opened(**options)
    assert not is_free()
answer(drive)
soon(is_free)
with opened(**options) as cache:
    assert cache.saved() == SAVED
    soon(lambda: loads("it"))
print("fine")
"""

SLOWLY = """
closes()
def refused():
    try:
        opened(disk_timeout=0.2, **device).close()
    except pagoda.TierIOError as error:
        return "has it open" in str(error)
with open(sys.argv[1] + "/pages", "r+b") as pages:
    fcntl.flock(pages, fcntl.LOCK_EX)
    soon(refused)
answer(silence(*PAGES, "fdatasync"), 0.05)
start = time.monotonic()
cache = reopened(disk_timeout=0.2)
assert time.monotonic() - start > 0.2
assert cache.saved() == SAVED
closes()
print("fine")
"""

ASKED = """
from pathlib import Path
from pagoda.cli import doctor
from pagoda.measuring import calibration
closes()
place = Path(sys.argv[1] + "-other")
place.mkdir()
doctor.DISK_TIMEOUT = calibration.DISK_TIMEOUT = 0.2
calibration.DISK_BYTES, calibration.SECONDS = 1, 0.1
drive = silence(*PAGES, "fdatasync", "unlinkat", "rmdir")
given_up = GIVEN_UP.replace("kept", "kept-other")
for _ in range(2):
    finding = doctor._disk(place)
    assert not finding.fine
    with pytest.raises(pagoda.TierIOError, match=given_up):
        raise pagoda.TierIOError(finding.found)
    with pytest.raises(pagoda.TierIOError, match=given_up):
        calibration._read_disk(place)
answer(drive)
doctor.DISK_TIMEOUT = calibration.DISK_TIMEOUT = 60
assert calibration._read_disk(place).bytes
assert "free of" in doctor._disk(place).found
soon(lambda: os.listdir(place) == [])
print("fine")
"""

SPACE = """
from pathlib import Path
from pagoda.cli import doctor
closes()
doctor.DISK_TIMEOUT = 0.2
drive = silence("statfs")
with pytest.raises(pagoda.TierIOError, match=GIVEN_UP):
    raise pagoda.TierIOError(doctor._disk(Path(sys.argv[1])).found)
answer(drive)
doctor.DISK_TIMEOUT = 60
assert "free of" in doctor._disk(Path(sys.argv[1])).found
print("fine")
"""

LOCKED = """
closes()
drive = silence("flock")
for _ in range(2):
    with pytest.raises(pagoda.TierIOError, match=GIVEN_UP):
        opened(disk_timeout=0.2, **device)
answer(drive)
with reopened() as cache:
    assert cache.saved() == SAVED
print("fine")
"""

SLOW_INDEX = """
closes()
cache = reopened(disk_timeout=0.2)
mirror, tokens = mirrored(cache, 100)
cache.save(tokens.sequence, "it")
# A line of 16 MiB is written 1 MiB at a time.
answer(silence("pwrite64"), 0.02)
cache.save(tokens.sequence, "it", meta=bytes(16 << 20))
assert len(cache.saved()["it"]) == 16 << 20
closes()
print("fine")
"""

SLOW_READS = """
closes()
spec = pagoda.ModelSpec(layers=[layer()] * 64)
cache = opened(disk=sys.argv[1] + "-deep", device_memory="2MiB", spill=False, disk_timeout=0.2, **device)
room = cache.stats().device[0].free
mirror, tokens = mirrored(cache, 64)
assert cache.demote(tokens.sequence, to="disk").wait(60)
other = mirror.create()
mirror.step([other], [16 * (room - 2)])
# Every layer is read ahead again, for a step that does not come; who wants the blocks waits for all of these reads.
mirror.step([tokens], [1])
answer(silence(*PAGES), 0.012)
mirror.step([tokens], [1])
mirror.release(other)
other = mirror.create()
mirror.step([other], [16 * (room - 2)])
closes()
print("fine")
"""

STALE = """
import errno
from silence import let, next_call
closes()
cache = reopened(disk_timeout=60)
mirror, tokens = mirrored(cache, 100)
drive, calls = silence("fdatasync"), []
signal.signal(signal.SIGUSR1, signal.default_int_handler)
def while_the_drive(does, call, raises, match=None):
    thread = threading.Thread(target=does)
    thread.start()
    with pytest.raises(raises, match=match):
        call()
    thread.join()
def says_nothing():
    calls.append(next_call(drive))
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
while_the_drive(says_nothing, lambda: cache.forget("it"), KeyboardInterrupt)
def answers_one_and_fails_the_other():
    calls.append(next_call(drive))
    let(drive, calls[0])
    while os.path.exists(f"/proc/self/task/{calls[0].thread}"):
        time.sleep(0.001)
    let(drive, calls[1])
    calls.append(next_call(drive))
    let(drive, calls[2], errno.EIO)
save = lambda: cache.save(tokens.sequence, "late")
while_the_drive(answers_one_and_fails_the_other, save, pagoda.TierIOError, "syncing the index")
assert [call.file for call in calls] == ["index", "pages", "index"]
assert sorted(cache.saved()) == ["other"]
mirror.release(tokens)
if sys.argv[3] == "goes on":
    held = cache.stats().disk[0].used
    answer(drive)
    cache.save(cache.load("other"), "other")
    assert cache.stats().disk[0].used < held
    closes()
else:
    # Pages of another sequence go wherever there is room.
    mirror, tokens = mirrored(cache, 200)
    assert cache.demote(tokens.sequence, to="disk").wait(60)
print("fine", flush=True)
os._exit(0)
"""

FOUND = """
with opened() as cache:
    assert sorted(cache.saved()) == sys.argv[2:]
    mirror, tokens = mirrored(cache, 100)
    for key in sys.argv[2:]:
        loaded(mirror, key, tokens)
    mirror.look()
print("fine")
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("script", "how"),
    [
        (FORGOTTEN, "answered"),
        (FORGOTTEN, "unanswered"),
        (SAVED, ""),
        (WAITED, ""),
        (MOVED, "closed"),
        (MOVED, "dropped"),
        (GIVEN_BACK, "answered"),
        (GIVEN_BACK, "unanswered"),
        (ZEROED, "answered"),
        (ZEROED, "unanswered"),
        (ZEROED, "interrupted"),
        (OPENED, "pwrite64"),
        (OPENED, "fdatasync"),
        (OPENED, "fallocate"),
        (SLOWLY, ""),
        (ASKED, ""),
        (SPACE, ""),
        (LOCKED, ""),
        (SLOW_INDEX, ""),
        (SLOW_READS, ""),
    ],
    ids=[
        "forget",
        "forget and close",
        "save",
        "all that waits",
        "close",
        "dropped",
        "give space back",
        "give space back and close",
        "zero",
        "zero and close",
        "interrupt zeroing",
        "open",
        "open the index",
        "open and zero",
        "open slowly",
        "measure",
        "free space",
        "lock",
        "write the index slowly",
        "read slowly",
    ],
)
def test_nobody_waits_forever_for_a_drive_that_does_not_answer(
    device: str, script: str, how: str, tmp_path: Path
) -> None:
    """Calls give up waiting, nothing is lost, and everything left is released once the drive answers after all. A drive that
    is only slow is waited for."""
    if not silence.is_possible():
        pytest.skip("no system calls can be held up")
    if device == "cuda":
        emulator.require()
    run(SILENT + script, tmp_path / "kept", device, how)


def test_other_threads_go_on_while_a_cache_that_is_forgotten_waits_for_its_drive(tmp_path: Path) -> None:
    if not silence.is_possible():
        pytest.skip("no system calls can be held up")
    run(SILENT + LEFT_ALONE, tmp_path / "kept", "cpu")


DRAINING = """
closes()
cache = opened(disk=sys.argv[1] + "-small", disk_memory="256KiB", spill=False)
room = cache.stats().disk[0].free
mirror, tokens = mirrored(cache, 16 * room)
assert cache.demote(tokens.sequence, to="disk").wait(60)
mirror.step([tokens], [1])
# Both layers were read, and then again for the next step.
soon(lambda: cache.stats().disk_io.bytes_read == 2 * 2 * 4096 * room)
drive = silence(*PAGES)
mirror.step([tokens], [1])
mirror.release(tokens)
assert cache.stats().disk[0] == pagoda.stats.BlockCounts(0, 0, room), "read for a step that never comes"
tokens = mirror.create()
mirror.step([tokens], [16 * room])
threading.Timer(0.3, answer, [drive]).start()
cache.save(tokens.sequence, "it")
loaded(mirror, "it", tokens)
mirror.look()
cache.audit()
closes()
print("fine")
"""


def test_a_save_waits_for_blocks_that_drain(tmp_path: Path) -> None:
    if not silence.is_possible():
        pytest.skip("no system calls can be held up")
    run(SILENT + DRAINING, tmp_path / "kept", "cpu")


REPLACED = """
from silence import let, next_call
closes()
cache = reopened(disk_timeout=0.2)
drive, reads = silence(*PAGES), []
def supervise():
    reads.append(next_call(drive))
    answer(drive)
threading.Thread(target=supervise).start()
with pytest.raises(pagoda.TierIOError, match=GIVEN_UP):
    cache.load("it")
if sys.argv[3] == "forgotten":
    soon(lambda: cache.forget("it") or "it" not in cache.saved())
else:
    soon(lambda: cache.save(cache.create(), "it") or True)
# Pages of another sequence go wherever there is room.
mirror, tokens = mirrored(cache, 200)
assert cache.demote(tokens.sequence, to="disk").wait(60)
before = cache.stats()
let(drive, reads[0])
soon(lambda: cache.stats().sequences < before.sequences)
mirror.look()
cache.audit()
assert cache.stats().disk_io.corrupt == 0, "a block was written to under a read"
assert cache.stats().disk[0].used < before.disk[0].used
closes()
print("fine")
"""


@pytest.mark.parametrize(("device", "what"), [("cpu", "forgotten"), ("cpu", "replaced"), ("cuda", "forgotten")])
def test_what_a_late_load_reads_is_not_written_to(device: str, what: str, tmp_path: Path) -> None:
    """The call has given up; its read goes on, and what is kept under its key is forgotten meanwhile."""
    if not silence.is_possible():
        pytest.skip("no system calls can be held up")
    if device == "cuda":
        emulator.require()
    run(SILENT + REPLACED, tmp_path / "kept", device, what)


GIVES_BACK = """
import faulthandler
from silence import let, next_call
closes()
# The first page is refused, and gives space back that it does not have.
cache = opened(disk=sys.argv[1] + "-small", resume=False, disk_writes_per_day=4096, spill=False, **device)
mirror, tokens = mirrored(cache, 40)
drive, threads = silence("fallocate"), []
def supervise():
    while True:
        call = next_call(drive)
        threads.append(call.thread)
        let(drive, call)
threading.Thread(target=supervise, daemon=True).start()
# It cannot answer a thread that calls with the interpreter's lock held.
faulthandler.dump_traceback_later(60, exit=True)
for _ in range(100):
    with pytest.raises(pagoda.TierIOError, match="4096 a day"):
        cache.demote(tokens.sequence, to="disk").wait()
assert len(threads) >= 200
assert os.getpid() not in threads
mirror.look()
cache.audit()
closes()
print("fine")
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_space_of_pages_that_were_not_written_is_given_back_in_the_background(device: str, tmp_path: Path) -> None:
    """The drive may take any time for it, and the caller has the locks of the cache and of the interpreter."""
    if not silence.is_possible():
        pytest.skip("no system calls can be held up")
    if device == "cuda":
        emulator.require()
    run(SILENT + GIVES_BACK, tmp_path / "kept", device)


LIMITED = """
import resource
from datetime import timedelta
from pagoda import _core
def limit(spare):
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + spare, resource.RLIM_INFINITY))
"""

HUGE_INDEX = """
os.mkdir(sys.argv[1])
with open(os.open(sys.argv[1] + "/index", os.O_CREAT | os.O_WRONLY, 0o600), "wb") as index:
    index.truncate(3 << 30)
limit(1 << 30)
with pytest.raises(pagoda.TierIOError, match="reading the index: "):
    opened()
print("fine")
"""

FEW_THREADS = """
os.mkdir(sys.argv[1])
limit(5 << 29)
with pytest.raises(pagoda.TierIOError, match="timing the disk: Resource temporarily unavailable"):
    _core.time_disk_reads(sys.argv[1], 1, timedelta(0), timedelta(seconds=60))
print("fine")
"""


@pytest.mark.parametrize("script", [HUGE_INDEX, FEW_THREADS], ids=["memory for an index", "threads that measure"])
def test_what_the_system_refuses_to_who_reads_a_directory(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stacks of 1 GiB, with room for one or two threads.
    monkeypatch.setenv("RUST_MIN_STACK", str((1 << 30) if script == FEW_THREADS else 2 << 20))
    run(LIMITED + script, tmp_path / "kept")


@pytest.mark.parametrize(("then", "found"), [("is killed", ["late", "other"]), ("goes on", ["other"])])
def test_a_save_that_failed_keeps_its_pages_until_no_index_names_them(
    then: str, found: list[str], tmp_path: Path
) -> None:
    """An earlier confirmation that the index is durable, processed after the failure, does not apply to these pages."""
    if not silence.is_possible():
        pytest.skip("no system calls can be held up")
    run(SILENT + STALE, tmp_path / "kept", "cpu", then)
    run(FOUND, tmp_path / "kept", *found)


LOST = """
import errno
from silence import let, next_call
closes()
cache = reopened()
mirror, tokens = mirrored(cache, 100)
resting = mirror.create()
mirror.step([resting], [100])
assert cache.demote(resting.sequence, to="disk").wait(60)
drive, files = silence("fdatasync"), []
def fails():
    call = next_call(drive)
    files.append(call.file)
    let(drive, call, errno.EIO)
def written_by(call):
    before = cache.stats().disk_io.bytes_written
    call()
    return cache.stats().disk_io.bytes_written - before
def fails_to_save():
    thread = threading.Thread(target=fails)
    thread.start()
    with pytest.raises(pagoda.TierIOError, match="syncing the pages"):
        cache.save(tokens.sequence, "new")
    thread.join()
once = written_by(fails_to_save)
assert files == ["pages"]
answer(drive)
assert written_by(lambda: cache.save(tokens.sequence, "new")) == once
with pytest.raises(pagoda.TierIOError, match="6 page.s. may have been lost by a sync that failed: promote them"):
    cache.save(resting.sequence, "resting")
assert sorted(cache.saved()) == ["it", "new", "other"]
assert cache.promote(resting.sequence).wait(60)
assert written_by(lambda: cache.save(resting.sequence, "resting")) == once
closes()
with reopened() as cache:
    mirror = Mirror(cache)
    loaded(mirror, "new", tokens)
    loaded(mirror, "resting", resting)
    mirror.look()
print("fine")
"""


UNLUCKY = """
import errno
from silence import let, next_call
closes()
cache = reopened()
mirror, tokens = mirrored(cache, 100)
drive = silence("fdatasync")
def supervise():
    for file in ("index", "pages"):
        while (call := next_call(drive)).file != file:
            let(drive, call)
        let(drive, call, errno.EIO)
    answer(drive)
threading.Thread(target=supervise, daemon=True).start()
for match in ("syncing the index", "syncing the pages"):
    with pytest.raises(pagoda.TierIOError, match=match):
        cache.save(tokens.sequence, "new")
cache.save(tokens.sequence, "new")
loaded(mirror, "new", tokens)
mirror.look()
cache.audit()
closes()
with reopened() as cache:
    mirror = Mirror(cache)
    loaded(mirror, "new", tokens)
    mirror.look()
print("fine")
"""

FULL = """
import errno
from silence import let, next_call
closes()
cache = opened(disk=sys.argv[1] + "-small", disk_memory="1MiB")
mirror = Mirror(cache)
drive, lines = silence("fdatasync", "pwrite64"), []
def supervise():
    while True:
        call = next_call(drive)
        lines.extend([call] if call.file == "index" else [])
        # The sync of the first line fails, and then there is no room for a new index.
        failed = call.file == "index" and len(lines) == 2
        let(drive, call, errno.EIO if failed else errno.ENOSPC if call.file == "index.new" else 0)
threading.Thread(target=supervise, daemon=True).start()
used = []
for turn in range(4):
    tokens = mirror.create()
    mirror.step([tokens], [320])
    with pytest.raises(pagoda.TierIOError, match="writing the index" if turn else "syncing the index"):
        cache.save(tokens.sequence, "it")
    mirror.release(tokens)
    used.append(cache.stats().disk[0].used)
# What the drive may have the line of; of the others it has none.
assert used == [20] * 4, used
cache.audit()
print("fine", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("script", [UNLUCKY, FULL], ids=["pages after index", "no room for an index"])
def test_saves_that_fail_leave_nothing_behind_for_good(script: str, tmp_path: Path) -> None:
    if not silence.is_possible():
        pytest.skip("no system calls can be held up")
    run(SILENT + script, tmp_path / "kept", "cpu")


RING = """
import errno
from silence import let, next_call
had_it = cache.stats().disk_io.io_uring
closes()
drive = silence("io_uring_enter")
def supervise():
    while True:
        let(drive, next_call(drive), errno.EPERM)
threading.Thread(target=supervise, daemon=True).start()
cache = reopened()
io = cache.stats().disk_io
assert not io.io_uring
assert not had_it or any("io_uring: Operation not permitted" in why for why in io.refused)
assert loads("it")
closes()
print("fine")
"""


def test_a_ring_that_may_not_be_entered_is_not_used(tmp_path: Path) -> None:
    """A container's filter may allow creating a ring, but not using it."""
    if not silence.is_possible():
        pytest.skip("no system calls can be held up")
    run(SILENT + RING, tmp_path / "kept", "cpu")


def test_what_a_sync_that_failed_may_have_lost_is_written_anew(tmp_path: Path) -> None:
    """The system may treat data that it could not write as written: the next sync succeeds, but pages are lost with power."""
    if not silence.is_possible():
        pytest.skip("no system calls can be held up")
    run(SILENT + LOST, tmp_path / "kept", "cpu")
