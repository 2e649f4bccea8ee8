"""Forked processes, signals, threads and the end of the interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pagoda
import pytest
from mirror import Mirror, layer

PRELUDE = """
import os, re, signal, sys, time
import numpy as np
import pagoda
spec = pagoda.ModelSpec(layers=[pagoda.AttentionLayer(num_q_heads=4, num_kv_heads=2, head_dim=16)])
cache = pagoda.Cache(spec, threads=2, device_memory="64MiB", host_memory="64MiB")
sequence = cache.create()
def run(count):
    rows = np.ones((count, 2, 16), np.float32)
    with cache.step([sequence], [count]) as step:
        step.forward(0, np.ones((count, 4, 16), np.float32), rows, rows)
run(500)
"""


def run(script: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    command, environ = [sys.executable, "-c", PRELUDE + script], os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environ)


def test_a_forked_child_raises_and_the_parent_goes_on() -> None:
    script = """
child = os.fork()
if child == 0:
    calls = [cache.create, cache.audit, sequence.fork, sequence.__len__, lambda: run(1), sequence.release]
    for call in calls:
        try:
            call()
        except pagoda.UseAfterRelease:
            continue
        os._exit(1)
    cache.close()
    fresh = pagoda.Cache(spec, threads=2)
    fresh.create()
    fresh.close()
    del sequence, cache
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
run(7)
cache.audit()
print(len(sequence))
"""
    done = run(script)
    assert (done.returncode, done.stdout.strip()) == (0, "507"), done.stderr


WORKERS_OF_ONE_CORE = """
def threads(**options):
    before = len(os.listdir("/proc/self/task"))
    with pagoda.Cache(spec, device_memory="1MiB", host_memory=0, **options):
        return len(os.listdir("/proc/self/task")) - before
assert threads(threads=2) > threads(threads=1)
assert threads() == threads(threads=1)
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes run on all cores")
def test_a_cache_has_a_worker_for_each_core_that_the_process_may_run_on() -> None:
    done = run("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])" + WORKERS_OF_ONE_CORE)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


def test_a_cache_has_no_more_workers_than_the_quota_of_a_container() -> None:
    """More threads would use it up before the last of them is done, and all would wait for the next period."""
    refused = "no cgroups"
    for root, limit, value in (("", "cpu.max", "100000 100000"), ("cpu", "cpu.cfs_quota_us", "100000")):
        cgroup = Path("/sys/fs/cgroup", root, f"pagoda-test-{os.getpid()}")
        if not (cgroup.parent / "cgroup.procs").exists():
            continue
        try:
            cgroup.mkdir()
            try:
                (cgroup / limit).write_text(value)
                done = run(f"open('{cgroup}/cgroup.procs', 'w').write(str(os.getpid()))" + WORKERS_OF_ONE_CORE)
            finally:
                cgroup.rmdir()
        except OSError as error:
            refused = str(error)
            continue
        assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr
        return
    pytest.skip(f"no cgroup with a quota can be made: {refused}")


def test_a_forked_child_does_not_hold_on_to_the_files(tmp_path: Path) -> None:
    script = f"""
options = dict(device_memory="1MiB", host_memory="1MiB", disk={str(tmp_path / "kept")!r}, disk_memory="4MiB", resume=True)
cache = pagoda.Cache(spec, threads=2, **options)
waiting, done = os.pipe()
child = os.fork()
if child == 0:
    os.close(done)
    os.read(waiting, 1)
    os._exit(0)
cache.close()
pagoda.Cache(spec, threads=2, **options).close()
os.close(done)
assert os.waitpid(child, 0)[1] == 0
print("fine")
"""
    done = run(script)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


def test_ctrl_c_leaves_no_deadlock() -> None:
    script = """
done = 0
while done < 20:
    # Once more after a second: Python drops an interrupt that comes in a finaliser.
    signal.setitimer(signal.ITIMER_REAL, 0.02 + 0.001 * done, 1)
    try:
        while True:
            run(300)
            cache.demote(sequence).wait()
            sequence.truncate(0)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        done += 1
        cache.audit()
run(1)
print("fine")
"""
    script = "signal.signal(signal.SIGALRM, signal.default_int_handler)" + script
    done = run(script)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


def test_ctrl_c_in_the_first_step_of_a_process() -> None:
    """In Python code outside Pagoda. Each child is a new process, so the step is its first."""
    script = f"""
import os, sys
import numpy as np
import pagoda
sys.path.insert(0, {str(Path(__file__).parent)!r})
from interrupts import interrupted
spec, rows = pagoda.ModelSpec(layers=[pagoda.AttentionLayer(2, 2, 16)]), np.ones((1, 2, 16), np.float32)

def step(cache, sequence):
    with cache.step([sequence], [1]) as step:
        step.forward(0, rows, rows, rows)

def outside(module):
    return module not in ("__main__", "interrupts") and module.split(".")[0] != "pagoda"

after, came = 0, True
while came:
    if not (child := os.fork()):
        cache = pagoda.Cache(spec, threads=1, device_memory="1MiB", host_memory=0)
        sequence = cache.create()
        came = interrupted(lambda: step(cache, sequence), after, where=outside)
        step(cache, sequence)
        os._exit(2 + came)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (2, 3), after
    came, after = status == 3, after + 7
print("fine")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("KeyboardInterrupt", "numpy"),
        ("KeyboardInterrupt", "numpy._core.multiarray"),
        ("ModuleNotFoundError", "numpy"),
    ],
)
def test_what_is_raised_while_numpy_is_imported_comes_through(error: str, name: str) -> None:
    """By Ctrl-C, or because NumPy is missing."""
    script = f"""
import sys
class Finder:
    def find_spec(name, path, target=None):
        if name == {name!r}:
            raise {error}
sys.meta_path.insert(0, Finder)
try:
    import pagoda
except {error}:
    print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


def test_ctrl_c_in_the_middle_of_a_release() -> None:
    """The core has released a sequence, but its handle does not know: the next step raises no error for it."""
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, page_size=16, device_memory="1MiB", host_memory=0, threads=1) as cache:
        sequence, other = cache.create(), cache.create()
        cache._core.release(sequence.id)
        del sequence
        with cache.step([other], [0]):
            pass
        cache.audit()


def test_a_finaliser_that_runs_in_the_middle_of_a_call_does_not_wait_for_it() -> None:
    """The garbage collector may run any finaliser while a call creates its result."""
    script = """
import gc
class Request:
    def __init__(self):
        self.sequence, self.me = cache.create(), self
    def __del__(self):
        self.sequence.release()
gc.disable()
for threshold in range(2, 60):
    gc.collect()
    Request()
    gc.set_threshold(threshold)
    gc.enable()
    cache._core.stats()
    gc.disable()
gc.collect()
run(1)
cache.audit()
print(cache.stats().sequences)
"""
    done = run(script)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_the_interpreter_ends_with_copies_under_way() -> None:
    done = run("ticket = cache.demote(sequence)\nsequence.release()\n")
    assert done.returncode == 0, done.stderr


def test_threads_take_turns() -> None:
    """Calls from several threads on one cache do not disturb each other."""
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, page_size=16, device_memory="8MiB", host_memory="8MiB", threads=2) as cache:
        turn = threading.Lock()
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                mirror = Mirror(cache, np.random.default_rng(seed))
                tokens = mirror.create()
                for _ in range(20):
                    with turn:  # One open step per cache: steps take turns, everything else need not.
                        mirror.step([tokens], [30])
                    ticket = cache.demote(tokens.sequence)
                    cache.audit()
                    tokens.sequence.fork().release()
                    ticket.wait()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
    assert signal.getsignal(signal.SIGINT) is not None


def test_memory_that_the_system_refuses_is_an_error_and_the_next_try_succeeds() -> None:
    script = """
import resource
with open("/proc/self/statm") as statm:
    now = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), resource.RLIM_INFINITY))
for memory in ({"device_memory": "4GiB", "host_memory": 0}, {"device_memory": "1MiB", "host_memory": "4GiB"}):
    for _ in range(20):
        try:
            pagoda.Cache(spec, threads=2, **memory)
        except pagoda.BackendUnavailable as error:
            name = next(name for name, size in memory.items() if size == "4GiB")
            assert str(error).startswith(f"{name} = 4294967296: Cannot allocate memory"), error
        else:
            raise AssertionError("more than the limit")
# Nothing of the caches that could not be was left: there is room for one that can.
with pagoda.Cache(spec, threads=2, device_memory="400MiB", host_memory="200MiB") as other:
    other.create()
run(1)
print(len(sequence))
"""
    done = run(script)
    assert (done.returncode, done.stdout.strip()) == (0, "501"), done.stderr


def test_memory_for_results_that_the_system_refuses_is_an_error_and_nothing_is_half_done() -> None:
    script = """
import resource
from pagoda import formats
rows = np.ones((1 << 16, 1, 8), np.float32)
q = np.ones((1 << 12, 128, 8), np.float32)
out = np.empty(q.shape, np.float32)
packed = formats.encode(rows[:, 0], "f32")
narrow = pagoda.ModelSpec(layers=[pagoda.AttentionLayer(num_q_heads=128, num_kv_heads=1, head_dim=8)])
many = pagoda.Cache(narrow, page_size=8, threads=1, device_memory="256MiB", host_memory=0)
one, all_pages = many.create(), many.create()
with many.step([one], [8]) as step:
    assert step.table(0).block_table.shape == (1, 1)
# A thread that begins takes memory of its own.
def begins(task):
    with open(f"/proc/self/task/{task}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "S"
while any(begins(task) for task in os.listdir("/proc/self/task") if int(task) != os.getpid()):
    time.sleep(0.001)
def refused(call):
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now, resource.RLIM_INFINITY))
    try:
        call()
    except MemoryError:
        pass
    else:
        raise AssertionError("there was memory")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
refused(lambda: formats.encode(rows[:, 0], "f32"))
refused(lambda: formats.decode(packed, "f32", (1 << 16, 8)))
one.truncate(0)
with many.step([one], [1 << 12]) as step:
    step.append(0, rows[: 1 << 12], rows[: 1 << 12])
    refused(lambda: step.attend(0, q, out=out, return_lse=True))
    assert np.allclose(step.attend(0, q, out=out), 1)
with many.step([all_pages], [1 << 20]) as step:
    refused(lambda: step.positions)
    # Of 2**17 pages.
    refused(lambda: step.table(0))
    try:
        step.commit()
    except pagoda.InvalidArgument as error:
        assert "appended to before commit" in str(error)
    else:
        raise AssertionError("nobody has written the rows")
    table = step.table(0)
    assert table.block_table.shape == table.pointers.shape == (1, 1 << 17)
    assert len(np.unique(table.block_table)) == 1 << 17 and (table.pointers > 0).all()
    # What is left to make are its slots.
    refused(lambda: step.table(0))
    assert len(np.unique(table.slot_mapping)) == 1 << 20 and (step.positions == np.arange(1 << 20)).all()
    step.rollback()
many.audit()
print(len(one))
"""
    # Memory that is given back returns to the system, so it cannot be reused.
    done = run(script, MALLOC_MMAP_THRESHOLD_="262144")
    assert (done.returncode, done.stdout.strip()) == (0, "4096"), done.stderr


def test_after_a_panic_a_cache_is_closed_and_does_nothing_else() -> None:
    """A panic means a bug in Pagoda. Here a call with an invalid layer, which the Python code never passes on, causes one."""
    script = """
try:
    with cache.step([sequence], [1]) as step:
        cache._core.appended(99)
except BaseException as error:
    assert type(error).__name__ == "PanicException", error
for call in (cache.create, cache.audit, lambda: run(1), sequence.__len__):
    try:
        call()
    except pagoda.InvariantError as error:
        assert str(error).endswith("close it"), error
    else:
        raise AssertionError("what is half done was gone on with")
cache.close()
del sequence, step
print("fine")
"""
    done = run(script, timeout=30)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


def test_threads_that_the_system_refuses_are_an_error_and_none_stays() -> None:
    """Stacks of 1 GiB, with room for a few threads."""
    script = """
import resource
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()
with open("/proc/self/statm") as statm:
    now = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (7 << 29), resource.RLIM_INFINITY))
for _ in range(5):
    try:
        pagoda.Cache(spec, threads=64, device_memory="1MiB", host_memory=0)
    except pagoda.BackendUnavailable as error:
        assert re.match(r"threads = 64: the system starts at most [234] \\(", str(error)), error
    else:
        raise AssertionError("more than the limit")
    assert threads() == before
with pagoda.Cache(spec, threads=2, device_memory="1MiB", host_memory=0):
    assert threads() > before
assert threads() == before
run(1)
print(len(sequence))
"""
    # 1 GiB instead of 2 MiB: when a stack is refused, the remaining memory is enough for everything else.
    done = run(script, RUST_MIN_STACK=str(1 << 30))
    assert (done.returncode, done.stdout.strip()) == (0, "501"), done.stderr
