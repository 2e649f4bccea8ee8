"""Every parameter of every public call, given invalid values: a typed error that names it, and nothing is changed."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pagoda
import pytest
from mirror import layer, settled
from pagoda import formats, lm, planner, report, rope, sizes, spec
from pagoda.checks import FACTOR_MAX, FACTOR_MIN
from pagoda.models import SHIPPED_MODEL

VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "-1": -1,
    "0": 0,
    "1": 1,
    "2**31": 1 << 31,
    "2**63": 1 << 63,
    "2**64": 1 << 64,
    "10**400": 10**400,
    "0.5": 0.5,
    "-0.5": -0.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "1e300": 1e300,
    "1e-300": 1e-300,
    "int64(-1)": np.int64(-1),
    "float32(nan)": np.float32("nan"),
    "text": "text",
    "''": "",
    "nul": "\0",
    "surrogate": "\ud800",
    "long": "x" * 5000,
    "bytes": b"text",
    "[]": [],
    "[True]": [True],
    "[None]": [None],
    "[0.5]": [0.5],
    "[-1]": [-1],
    "[2**31]": [1 << 31],
    "[2**63]": [1 << 63],
    "[2**64]": [1 << 64],
    "[True,2]": [True, 2],
    "[2,bool_]": [2, np.True_],
    "[True,2.0]": [True, 2.0],
    "['text']": ["text"],
    "[[]]": [[]],
    "(2,1)": (2, 1),
    "(0,1,2)": (0, 1, 2),
    "ragged": [[1], [1, 2]],
    "{}": {},
    "object": object(),
    "type": float,
    "iterator": iter(()),
    "zeros(3)": np.zeros(3),
    "zeros()": np.zeros(()),
    "complex": np.zeros(32, complex),
    "objects": np.array([None, object()]),
}
"""Values that callers pass by mistake."""

SPEC = pagoda.ModelSpec(layers=[layer(), layer(window=24)])
ONE = pagoda.ModelSpec(layers=[layer(head_dim=32)])
DERIVED = pagoda.ModelSpec(layers=[layer(k_eq_v=True)])


class World:
    """A cache with a sequence, and helpers for calls."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.place = place
        disk: dict[str, Any] = {"disk": place / "pages", "disk_memory": "1MiB", "resume": True}
        self.cache = pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1, **disk)
        self.sequence = self.cache.create()
        with self.step(40) as step:
            for index in range(len(SPEC.layers)):
                step.append(index, *self.kv(40))
        self.ticket = self.cache.demote(self.sequence, (0, 16))
        assert self.ticket.wait(60)
        self.before = self.state()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    @contextlib.contextmanager
    def step(self, tokens: int = 2) -> Iterator[pagoda.Step]:
        with self.cache.step([self.sequence], [tokens]) as step:
            yield step

    @contextlib.contextmanager
    def appended(self) -> Iterator[pagoda.Step]:
        with self.step() as step:
            for index in range(len(SPEC.layers)):
                step.append(index, *self.kv())
            yield step

    def state(self) -> Any:
        self.cache.audit()
        return settled(self.cache), len(self.sequence), self.cache.saved(), sorted(self.place.iterdir())

    @staticmethod
    def kv(tokens: int = 2) -> tuple[Any, Any]:
        return np.ones((tokens, 2, 16), np.float32), np.ones((tokens, 2, 16), np.float32)

    @staticmethod
    def q() -> Any:
        return np.ones((2, 4, 16), np.float32)


@dataclass
class Parameter:
    """A good value, or a function that makes one from a world; and the keys of `VALUES` that are also accepted."""

    good: Any
    takes: str = ""

    def of(self, world: World) -> Any:
        return self.good(world) if inspect.isfunction(self.good) else self.good


P = Parameter
Calls = dict[str, tuple[Callable[..., Any], dict[str, Parameter]]]
"""By name: a function that makes the call, with a world as first argument, and the call's parameters."""


def plain(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that needs no world."""
    return lambda world, **given: call(**given)


def entered(world: World, **given: Any) -> None:
    with world.cache.step(**given) as step:
        for index in range(len(SPEC.layers)):
            step.table(index)


def in_step(name: str, entered: Callable[[World], Any]) -> Callable[..., Any]:
    def call(world: World, **given: Any) -> None:
        with entered(world) as step:
            getattr(step, name)(**given)
            if name in ("append", "forward"):
                step.append(1, *world.kv())

    return call


def new_cache(world: World, **given: Any) -> None:
    small: dict[str, Any] = {"device_memory": "1MiB", "host_memory": 0, "threads": 1}
    pagoda.Cache(**({"spec": ONE} | small | given)).close()


def on_disk(world: World, **given: Any) -> None:
    new_cache(world, **({"disk": world.place / "other", "disk_memory": "1MiB"} | given))


def forwarded(world: World, **given: Any) -> None:
    with CONTIGUOUS.step([CONTIGUOUS.create()], [2]) as step:
        MODEL.forward(given["tokens"], step, given["logits"])


def generated(world: World, **given: Any) -> None:
    for _ in lm.generate(MODEL, CONTIGUOUS, CONTIGUOUS.create(), **given):
        pass


def graphs(call: Callable[[World], Any]) -> Callable[..., Any]:
    """A call that only a GPU supports."""

    def called(world: World, **given: Any) -> None:
        with (
            contextlib.suppress(pagoda.BackendUnavailable) if world.cache._device is None else contextlib.nullcontext()
        ):
            call(world)(**given)

    return called


def replayed(world: World, **given: Any) -> None:
    """Replays as far as possible without a GPU and without declared maxima."""
    with world.appended() as step:
        try:
            step.replay(**given)
        except pagoda.PagodaError as error:
            if "launch" in str(error):
                raise


FLAG = P(False, "True False")
POSITIVE_INTEGERS = "1 2**31"
SIZES = "0 1 2**31"
FACTOR = P(2.0, "0.5 1 2**31")

AN_ATTENTION_LAYER = {
    "num_q_heads": P(4),
    "num_kv_heads": P(2, "1"),
    "head_dim": P(16),
    "v_head_dim": P(16, "None"),
    "window": P(100, "None 1"),
    "scale": P(0.25, "None 0.5 1 2**31"),
    "rope": P(rope.Rope(), "None"),
    "softcap": P(30.0, "None 0.5 1 2**31"),
    "sinks": FLAG,
    "kv_owner": P(0, "None 0 1"),
    "v_alias": FLAG,
    "k_eq_v": FLAG,
}
BYTES = {"k_dtype": P("f16"), "v_dtype": P("f16")}
MODEL = lm.LanguageModel.load(SHIPPED_MODEL)
CONTIGUOUS = lm.ContiguousCache(MODEL.spec)

CALLS: Calls = {
    "AttentionLayer": (plain(pagoda.AttentionLayer), AN_ATTENTION_LAYER),
    "AttentionLayer.bytes_per_token": (plain(layer().bytes_per_token), BYTES),
    "StateLayer": (
        plain(spec.StateLayer),
        {"state_elements": P(8, POSITIVE_INTEGERS), "conv_elements": P(8, "0 " + POSITIVE_INTEGERS)},
    ),
    "ModelSpec": (plain(pagoda.ModelSpec), {"layers": P([layer()]), "name": P("", "text '' nul surrogate long")}),
    "ModelSpec.preset": (plain(pagoda.ModelSpec.preset), {"name": P("qwen3-8b")}),
    "ModelSpec.from_config": (
        plain(pagoda.ModelSpec.from_config),
        {
            "config": P({"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}),
            "name": P("", "text '' nul surrogate long"),
        },
    ),
    "ModelSpec.bytes_per_token": (plain(SPEC.bytes_per_token), BYTES),
    "ModelSpec.full_bytes_per_token": (plain(SPEC.full_bytes_per_token), BYTES),
    "ModelSpec.window_bytes": (plain(SPEC.window_bytes), BYTES),
    "Rope": (
        plain(rope.Rope),
        {
            "theta": P(1e4, "2**31"),
            "rotary_dim": P(8, "None"),
            "interleaved": FLAG,
            "scaling": P(None, "None"),
        },
    ),
    "Rope.dim_of": (plain(rope.Rope().dim_of), {"head_dim": P(16)}),
    "Rope.inv_freq": (plain(rope.Rope().inv_freq), {"head_dim": P(16)}),
    "LinearScaling": (plain(rope.LinearScaling), {"factor": FACTOR}),
    "LongRopeScaling": (
        plain(rope.LongRopeScaling),
        {"factors": P((1.0, 2.0), "(2,1)"), "attention_factor": FACTOR},
    ),
    "ProportionalScaling": (plain(rope.ProportionalScaling), {"partial": P(0.5, "0.5 1"), "factor": FACTOR}),
    "Llama3Scaling": (
        plain(rope.Llama3Scaling),
        {
            "factor": FACTOR,
            "low_freq_factor": P(1.0, "0.5 1"),
            "high_freq_factor": P(4.0, "2**31"),
            "original_context": P(8192, "1"),
        },
    ),
    "YarnScaling": (
        plain(rope.YarnScaling),
        {
            "factor": FACTOR,
            "original_context": P(8192, "1"),
            "beta_fast": FACTOR,
            "beta_slow": FACTOR,
            "truncate": FLAG,
            "magnitude": P(1.5, "None 0.5 1 2**31"),
        },
    ),
    "SinkWindow": (
        plain(pagoda.SinkWindow),
        {"sinks": P(4, "0 1"), "window": P(100, "1"), "positions": P("cache")},
    ),
    "Cache": (
        new_cache,
        {
            "spec": P(ONE),
            "page_size": P(16),
            "k_dtype": P("f16"),
            "v_dtype": P("f16"),
            "center": P("auto", "None [None]"),
            "rotate": P("auto", "True False"),
            "k_norms": P(None, "None [None]"),
            "device": P("auto"),
            "device_memory": P("1MiB", "2**31"),
            "host_memory": P(0, "0 2**31"),
            "disk": P(None, "None"),
            "disk_memory": P(0, "0"),
            "resume": P(False, "False"),
            "disk_writes_per_day": P(None, "None 0"),
            "disk_timeout": P(60, "0.5 1"),
            "model": P(None, "None"),
            "zero_on_free": FLAG,
            "threads": P(1, "None 1"),
            "deterministic": FLAG,
            "checked": FLAG,
            "spill": P(True, "True False"),
            "retention": P(None, "None"),
            "headroom": P(16, "None 0 1"),
        },
    ),
    "Cache with a disk": (
        on_disk,
        {
            "disk": P(lambda world: world.place / "other", "text"),
            "disk_memory": P("1MiB", "2**31"),
            "resume": P(False, "True False"),
            "disk_writes_per_day": P("1GiB", "None " + SIZES),
            "disk_timeout": P(60, "0.5 1"),
            "model": P("text", "None text nul surrogate long"),
        },
    ),
    "Cache of quantised rows": (
        new_cache,
        {
            "k_dtype": P("q8_0"),
            "center": P([np.zeros((2, 32))], "None [None]"),
            "rotate": P("auto", "True False"),
        },
    ),
    "Cache of derived keys": (
        lambda world, **given: new_cache(world, spec=DERIVED, **given),
        {"k_norms": P([np.ones(16)])},
    ),
    "Cache.batch": (lambda world, **given: world.cache.batch(**given), {"sequences": P([], "[]")}),
    "Cache.step": (
        entered,
        {
            "batch": P(lambda world: [world.sequence]),
            "new_tokens": P([1]),
            "stream": P(None, "None"),
        },
    ),
    "Cache.declare": (
        graphs(lambda world: world.cache.declare),
        {"sequences": P(2, "1"), "new_tokens": P(1, "1"), "context": P(1000, "1"), "tokens": P(2, "None 1")},
    ),
    "Cache.plan": (
        lambda world, **given: world.cache.plan(**given),
        {
            "sequence": P(lambda world: world.sequence),
            "to": P("host"),
            "tokens": P((0, 40), "None"),
            "layers": P([0], "None []"),
            "keep": FLAG,
        },
    ),
    "Cache.execute": (
        lambda world, **given: world.cache.execute(**given).wait(60),
        {"plan": P(lambda world: world.cache.plan(world.sequence, "host"))},
    ),
    "Cache.demote": (
        lambda world, **given: world.cache.demote(**given).wait(60),
        {"sequence": P(lambda world: world.sequence), "tokens": P((0, 40), "None"), "to": P("host")},
    ),
    "Cache.promote": (
        lambda world, **given: world.cache.promote(**given).wait(60),
        {"sequence": P(lambda world: world.sequence), "tokens": P((0, 40), "None"), "to": P("host")},
    ),
    "Cache.prefetch": (
        lambda world, **given: world.cache.prefetch(**given).wait(60),
        {"sequence": P(lambda world: world.sequence)},
    ),
    "Cache.save": (
        lambda world, **given: world.cache.save(**given),
        {
            "sequence": P(lambda world: world.sequence),
            "key": P("key", "text nul"),
            "tokens": P(None, "None"),
            "meta": P(b"", "bytes"),
        },
    ),
    "Cache.load": (lambda world, **given: world.cache.load(**given), {"key": P("key", "text nul")}),
    "Cache.forget": (lambda world, **given: world.cache.forget(**given), {"key": P("key", "text nul")}),
    "Cache.meta": (lambda world, **given: world.cache.meta(**given), {"key": P("key", "text nul")}),
    "Sequence.truncate": (
        lambda world, **given: world.sequence.truncate(**given),
        {"length": P(40, "0 1")},
    ),
    "Sequence.drop": (
        lambda world, **given: world.sequence.drop(**given),
        {"start": P(0, "0 1"), "stop": P(2, "0 1")},
    ),
    "Ticket.wait": (
        lambda world, **given: world.ticket.wait(**given),
        {"timeout": P(1.0, "None 0 1 0.5 1e-300")},
    ),
    "Step.append": (
        in_step("append", World.step),
        {
            "layer": P(0, "0"),
            "k": P(World.kv()[0]),
            "v": P(World.kv()[1]),
            "dtype": P(None, "None"),
        },
    ),
    "Step.attend": (
        in_step("attend", World.appended),
        {
            "layer": P(0, "0 1"),
            "q": P(World.q()),
            "out": P(None, "None"),
            "return_lse": FLAG,
            "sink_logits": P(None, "None"),
            "dtype": P(None, "None"),
        },
    ),
    "Step.forward": (
        in_step("forward", World.step),
        {
            "layer": P(0, "0"),
            "q": P(World.q()),
            "k": P(World.kv()[0]),
            "v": P(World.kv()[1]),
            "out": P(None, "None"),
            "return_lse": FLAG,
            "sink_logits": P(None, "None"),
            "dtype": P(None, "None"),
        },
    ),
    "Step.table": (in_step("table", World.appended), {"layer": P(0, "0 1")}),
    "Step.replay": (
        replayed,
        {"launch": P(lambda world: lambda: None, "type")},
    ),
    "Step.commit": (in_step("commit", World.appended), {"accepted": P([1], "None")}),
    "Stats.used_bytes": (lambda world, **given: world.cache.stats().used_bytes(**given), {"tier": P("host")}),
    "formats.encode": (
        plain(formats.encode),
        {"x": P(np.zeros((2, 32))), "name": P("q8_0")},
    ),
    "formats.decode": (
        plain(formats.decode),
        {"rows": P(np.zeros((2, 64), np.uint8)), "name": P("f16"), "shape": P((2, 32))},
    ),
    "Planner": (
        plain(planner.Planner),
        {
            "spec": P(SPEC),
            "k_dtype": P("f16"),
            "v_dtype": P("f16"),
            "page_size": P(64),
            "retention": P(None, "None"),
            "headroom": P(0, "None 0 1"),
        },
    ),
    "Planner.footprint": (
        plain(planner.Planner(SPEC).footprint),
        {"tokens": P(100, "0 " + POSITIVE_INTEGERS), "batch": P(1, POSITIVE_INTEGERS)},
    ),
    "Planner.rings": (
        plain(planner.Planner(SPEC).rings),
        {"device_bytes": P(1 << 30, SIZES), "host": FLAG, "disk": FLAG, "on_gpu": FLAG},
    ),
    "Planner.room": (plain(planner.Planner(SPEC).room), {"size": P(1 << 30, SIZES)}),
    "Planner.room_on_disk": (plain(planner.Planner(SPEC).room_on_disk), {"disk_memory": P(1 << 30, "0 2**31")}),
    "Planner.split": (
        plain(planner.Planner(SPEC).split),
        {
            "footprint": P(planner.Footprint(1, 1, 1, 1)),
            "device_bytes": P(1, SIZES),
            "host_bytes": P(1, SIZES),
            "disk_bytes": P(1, SIZES),
        },
    ),
    "Planner.longest_context": (
        plain(planner.Planner(SPEC).longest_context),
        {
            "device_bytes": P(1 << 30, SIZES),
            "host_bytes": P(1, SIZES),
            "disk_bytes": P(1, SIZES),
            "batch": P(1, POSITIVE_INTEGERS),
        },
    ),
    "sizes.parse_size": (lambda world, value: sizes.parse_size(value, "value"), {"value": P("1MiB", SIZES)}),
    "sizes.parse_tokens": (lambda world, value: sizes.parse_tokens(value, "value"), {"value": P("1k", SIZES)}),
    "Sampler": (
        plain(lm.Sampler),
        {
            "temperature": P(1.0, "0 0.5 1 2**31 1e-300"),
            "top_k": P(None, "None 1"),
            "top_p": P(1.0, "0.5 1 1e-300"),
            "seed": P(0, "0 1 2**31 2**63"),
        },
    ),
    "LanguageModel.load": (
        plain(lm.LanguageModel.load),
        {"folder": P(SHIPPED_MODEL), "device": P("cpu")},
    ),
    "LanguageModel.forward": (
        forwarded,
        {"tokens": P([65, 66], "(2,1)"), "logits": P("all")},
    ),
    "ContiguousCache": (plain(lm.ContiguousCache), {"spec": P(SPEC), **BYTES}),
    "ContiguousCache.step": (
        plain(CONTIGUOUS.step),
        {"batch": P([CONTIGUOUS.create()]), "new_tokens": P([1])},
    ),
    "generate": (
        generated,
        {
            "prompt": P([65, 66], "(2,1) (0,1,2)"),
            "new_tokens": P(1, "0 1"),
            "sampler": P(lm.Sampler()),
            "chunk": P(512, "1"),
            "stop": P(None, "None [] [-1] [2**31] (2,1) (0,1,2)"),
        },
    ),
    "Sampler.pick": (plain(lm.Sampler().pick), {"logits": P(np.zeros(3, np.float32), "zeros(3)")}),
    "Sampler.distribution": (plain(lm.Sampler(1.0).distribution), {"logits": P(np.zeros(3, np.float32), "zeros(3)")}),
    "StepReport.fractions": (plain(report.StepReport(1.0, 0.0, {}).fractions), {"rates": P({"disk": 1e9}, "{}")}),
}

PUBLIC: dict[str, Any] = {
    **{name: getattr(pagoda, name) for name in pagoda.__all__},
    **{name: getattr(lm, name) for name in lm.__all__},
    **{kind.__name__: kind for kind in (spec.StateLayer, *rope.Scaling.__args__, planner.Planner, report.StepReport)},
    "formats.encode": formats.encode,
    "formats.decode": formats.decode,
}
"""The public calls."""

MADE_BY_CALLS = {"Batch", "Plan", "Sequence", "Step", "Table", "Ticket", "Stats", "StepReport", "Read", "Written"}
"""Classes whose instances only calls return. A `LanguageModel` comes only from `load`."""

NOT_CHECKED = {
    # Their callers have checked everything.
    *(f"{kind.__name__}.apply.{name}" for kind in rope.Scaling.__args__ for name in ("inv_freq", "theta", "dim")),
    "Stats.from_core.stats",
    *(f"LanguageModel.{name}" for name in ("config", "checkpoint", "tokenizer", "arrays")),
    # Any object with the methods that are called.
    "LanguageModel.forward.step",
    *(f"generate.{name}" for name in ("model", "cache", "sequence")),
}
"""Parameters that are not checked, and why."""


def parameters_of(name: str, call: Any) -> Iterator[str]:
    """Parameters of a public call, or of a class and its methods."""
    if not inspect.isclass(call):
        yield from (f"{name}.{parameter}" for parameter in inspect.signature(call).parameters)
    elif not issubclass(call, Exception):
        if name not in MADE_BY_CALLS:
            yield from (f"{name}.{parameter}" for parameter in inspect.signature(call).parameters)
        for method in dir(call):
            if not method.startswith("_") and callable(bound := getattr(call, method)):
                names = list(inspect.signature(bound).parameters)
                yield from (f"{name}.{method}.{parameter}" for parameter in names if parameter != "self")


def test_no_parameter_is_left_out() -> None:
    public = {parameter for name, call in PUBLIC.items() if callable(call) for parameter in parameters_of(name, call)}
    tried = {f"{name}.{parameter}" for name, (_, parameters) in CALLS.items() for parameter in parameters}
    assert sorted(public - tried - NOT_CHECKED) == []


EVERY = pytest.mark.parametrize(
    ("name", "parameter"), [(name, parameter) for name, (_, parameters) in CALLS.items() for parameter in parameters]
)


@EVERY
def test_what_is_refused(name: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, parameters = CALLS[name]
    taken = parameters[parameter].takes.split()
    with World(tmp_path / "world") as world:
        for label in [label for label in VALUES if label not in taken]:
            given = {each: parameters[each].of(world) for each in parameters} | {parameter: VALUES[label]}
            with pytest.raises(pagoda.PagodaError, match=rf"\b{parameter}\b"):
                call(world, **given)
                pytest.fail(f"{label} is taken")
            assert world.state() == world.before, label
    assert list(tmp_path.iterdir()) == [tmp_path / "world"]


@EVERY
def test_what_is_taken(name: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the refusals of the other test are due to the value itself."""
    monkeypatch.chdir(tmp_path)
    call, parameters = CALLS[name]
    for number, label in enumerate([None, *parameters[parameter].takes.split()]):
        with World(tmp_path / str(number)) as world:
            given = {each: parameters[each].of(world) for each in parameters}
            call(world, **(given if label is None else given | {parameter: VALUES[label]}))


@EVERY
def test_integers_of_numpy_are_taken_as_others_are(
    name: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every int that a call takes may be NumPy's: the result is the same, with Python ints in it."""
    monkeypatch.chdir(tmp_path)
    call, parameters = CALLS[name]
    taken = [parameters[parameter].good, *(VALUES[label] for label in parameters[parameter].takes.split())]
    for number, value in enumerate(value for value in taken if type(value) is int and value < 1 << 63):
        results = []
        for kind in (int, np.int64):
            with World(tmp_path / f"{number} {kind.__name__}") as world:
                given = {each: parameters[each].of(world) for each in parameters}
                results.append(call(world, **(given | {parameter: kind(value)})))
        if not isinstance(results[0], np.ndarray | pagoda.Sequence | lm.ContiguousCache):
            assert repr(results[0]) == repr(results[1])


def test_seconds_may_be_what_stands_for_an_integer(tmp_path: Path) -> None:
    """Even if it cannot be compared with one."""

    class Three:
        def __index__(self) -> int:
            return 3

    seconds: Any = Three()
    with World(tmp_path / "world") as world:
        assert world.ticket.wait(seconds)


@pytest.mark.parametrize("dtype", ["i4,i4", bool, "M8[s]", "U1"])
def test_an_empty_array_is_of_integers_too(dtype: Any) -> None:
    """Arrays of integers, or of floats, as NumPy makes an empty list."""
    empty: Any = np.empty(0, dtype)
    with pagoda.Cache(ONE, device_memory="1MiB", host_memory=0) as cache:
        none: Any
        for none in ([], np.zeros(0), np.zeros(0, np.uint8)):
            cache.step([], none)
        with pytest.raises(pagoda.InvalidArgument, match=r"^new_tokens = .* \[0\]: a list of integers"):
            cache.step([], empty)


def test_a_config_may_have_integers_of_numpy() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
        "rope_theta": 5000,
    }
    of_numpy = {key: np.int16(value) if isinstance(value, int) else value for key, value in config.items()}
    assert repr(pagoda.ModelSpec.from_config(of_numpy)) == repr(pagoda.ModelSpec.from_config(config))


def test_factors_of_kernels_are_normal_numbers_of_float32() -> None:
    """Alone, divided by each other, and multiplied by log2(e)."""
    normal = np.finfo(np.float32)
    for scale in (FACTOR_MIN, FACTOR_MAX):
        for softcap in (FACTOR_MIN, FACTOR_MAX):
            pagoda.AttentionLayer(4, 2, 16, scale=scale, softcap=softcap)
            for factor in (scale, softcap, scale * np.log2(np.e), softcap * np.log2(np.e), scale / softcap):
                assert normal.smallest_normal <= factor <= normal.max


@pytest.mark.usefixtures("names_the_cpu")
def test_the_environment_is_an_argument_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PAGODA_CPU_ISA", "sse9"), ("PAGODA_KV_DTYPE", "f15")):
        monkeypatch.setenv(name, value)
        with pytest.raises(pagoda.InvalidArgument, match=name):
            pagoda.Cache(ONE)
        monkeypatch.setenv(name, "")
        pagoda.Cache(ONE).close()


@pytest.mark.usefixtures("names_the_cpu")
def test_the_names_of_kernels_that_a_message_gives_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_CPU_ISA", "sse9")
    with pytest.raises(pagoda.InvalidArgument, match="one of") as refused:
        pagoda.Cache(ONE)
    names = str(refused.value).split("one of ")[1].split(", ")
    assert {pagoda.build_info()["isa"], "scalar"} <= set(names)
    refusals = 0
    for name in names:
        monkeypatch.setenv("PAGODA_CPU_ISA", name)
        try:
            pagoda.Cache(ONE).close()
        except pagoda.BackendUnavailable:
            refusals += 1
    assert refusals >= 2, "no CPU has both AVX2 and NEON"


def test_a_list_may_be_an_array() -> None:
    """Lists of sequences, of layers and of numbers."""
    layers: Any = np.array([layer(k_eq_v=True)] * 2)
    norms = np.ones((2, 16))
    counts: Any = np.array([1, 2], np.uint64)
    large: Any = np.array([1, 1 << 63], np.uint64)
    options: dict[str, Any] = {"device_memory": "1MiB", "host_memory": 0, "k_norms": norms}
    with pagoda.Cache(pagoda.ModelSpec(layers), **options) as cache:
        sequences: Any = np.array([cache.create(), cache.create()])
        with cache.step(sequences, counts) as step:
            assert step.cu_seqlens.tolist() == [0, 1, 3]
            for index in range(2):
                step.table(index)
        with pytest.raises(pagoda.InvalidArgument, match=r"new_tokens = .*9223372036854775808"):
            cache.step(sequences, large)


def test_counts_at_an_odd_address() -> None:
    counts = np.frombuffer(b"?" + np.array([1, 2]).tobytes(), np.int64, offset=1)
    assert not counts.flags.aligned
    with pagoda.Cache(ONE, device_memory="1MiB", host_memory=0) as cache:
        with cache.step([cache.create(), cache.create()], counts) as step:
            assert step.cu_seqlens.tolist() == [0, 1, 3]
            step.table(0)
            step.commit(counts)


def test_an_array_that_its_library_does_not_hand_out() -> None:
    """Like a torch tensor with a gradient, or a deleted JAX array, whose `repr` fails too."""

    class Refused:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            raise RuntimeError("detach it first")

        def __repr__(self) -> str:
            raise RuntimeError("detach it first")

    refused: Any = Refused()
    with pagoda.Cache(DERIVED, k_norms=[np.ones(16)], device_memory="1MiB", host_memory=0) as cache:
        calls: dict[str, Callable[[], object]] = {
            "new_tokens": lambda: cache.step([cache.create()], refused),
            "x": lambda: formats.encode(refused, "f16"),
            "k_norms[0]": lambda: pagoda.Cache(DERIVED, k_norms=[refused]),
        }
        for name, call in calls.items():
            with pytest.raises(pagoda.InvalidArgument, match=rf"^{re.escape(name)} = Refused: .* \(detach it first\)$"):
                call()


def test_bytes_and_numbers_in_other_kinds_of_arrays() -> None:
    """Kinds that NumPy converts, and subclasses of its arrays with other behaviour."""
    x = np.random.default_rng(0).standard_normal((2, 64), np.float32)
    blocks = formats.encode(x, "q5_0")
    assert (formats.encode(memoryview(x.tobytes()).cast("f", x.shape), "q5_0") == blocks).all()
    stored, matrix = formats.from_ggml(blocks, "q5_0"), blocks.view(np.matrix)
    for array, plain in zip(formats.from_ggml(matrix, "q5_0"), stored, strict=True):
        assert type(array) is np.ndarray
        assert (array == plain).all()
    rows, scales = (part.view(np.matrix) for part in stored)
    assert (formats.to_ggml(rows, scales, "q5_0") == blocks).all()
    assert (formats.decode(matrix, "q5_0", x.shape) == formats.decode(blocks, "q5_0", x.shape)).all()


def test_logits_that_no_token_is_picked_by() -> None:
    floats = np.zeros(3, np.float32)
    refused: dict[str, Any] = {
        "MaskedArray": np.ma.masked_array(floats, mask=[True, False, False]),
        "float32 [1, 3]": floats[None],
        "int64 [3]": np.arange(3),
    }
    for sampler in (lm.Sampler(), lm.Sampler(1.0)):
        for shown, logits in refused.items():
            with pytest.raises(pagoda.InvalidArgument, match=rf"^logits = {re.escape(shown)}: an array of floats"):
                sampler.pick(logits)


@pytest.mark.parametrize("what", [True, np.False_])
def test_true_is_no_number_beside_others(what: Any) -> None:
    """NumPy would convert it to one."""
    options: dict[str, Any] = {"device_memory": "1MiB", "host_memory": 0}
    row = [2.0] * 15
    calls: dict[str, Callable[[Any], object]] = {
        "x": lambda rows: formats.encode(rows[0], "f16"),
        "k_norms[0]": lambda rows: pagoda.Cache(DERIVED, k_norms=rows[:1], **options).close(),
        "center[0]": lambda rows: pagoda.Cache(pagoda.ModelSpec([layer()]), center=[rows], **options).close(),
    }
    for name, call in calls.items():
        call([[1, *row], [*row, 0]])
        with pytest.raises(pagoda.InvalidArgument, match=rf"{re.escape(name)} = a list with True or False"):
            call([[what, *row], [*row, what]])


def test_a_rope_turns_no_more_than_a_row() -> None:
    """The error comes when the layer is described, not when a cache is created."""
    wide = pagoda.Rope(rotary_dim=32)
    with pytest.raises(pagoda.InvalidArgument, match=r"rope\.rotary_dim = 31: even"):
        pagoda.Rope(rotary_dim=31)
    assert layer(head_dim=32, rope=wide).rope == wide
    for describe in (lambda: layer(head_dim=24, rope=wide), lambda: wide.inv_freq(24)):
        with pytest.raises(pagoda.InvalidArgument, match=r"rope\.rotary_dim = 32: at most head_dim = 24"):
            describe()


def test_more_groups_of_layers_than_a_cache_has() -> None:
    for groups, error in ((64, None), (65, "spec = layers of 65 shapes"), (300, "spec = layers of 300 shapes")):
        many = pagoda.ModelSpec([layer(window=8 * (group + 1)) for group in range(groups)])
        with contextlib.nullcontext() if error is None else pytest.raises(pagoda.InvalidArgument, match=error):
            pagoda.Cache(many, page_size=8, device_memory="8MiB", host_memory=0).close()
