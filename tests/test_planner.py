"""The planner's arithmetic, and the command that prints it."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pagoda
import pytest
from emulator.driver import EmulatedDriver, HostArena, Memory
from pagoda._core import TOKENS_MAX
from pagoda.cli import COMMANDS, main
from pagoda.cli.console import results
from pagoda.cli.plan import describe, draw
from pagoda.device import cuda
from pagoda.errors import InvalidArgument
from pagoda.formats import FORMATS
from pagoda.planner import Planner, Rings
from pagoda.spec import AttentionLayer, ModelSpec, StateLayer
from rich.console import Console

GIB = 1 << 30


def test_llama_2_7b_takes_one_gibibyte_for_2048_tokens() -> None:
    assert Planner(ModelSpec.preset("llama-2-7b")).footprint(2048).total_bytes == GIB


@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("llama-3.1-8b", 131_072, 16 * GIB),
        ("qwen3.5-0.8b", 1 << 20, 12 * GIB + 19_537_920),
        ("gemma-3-1b", 32_768, 32_768 * 4096 + 10 * 64 * 22_528),
    ],
)
def test_contexts(name: str, tokens: int, expected: int) -> None:
    assert Planner(ModelSpec.preset(name)).footprint(tokens).total_bytes == expected


def test_pages_are_whole_and_windows_hold_what_they_see() -> None:
    planner = Planner(ModelSpec.preset("gemma-3-1b"), page_size=128)
    footprint = planner.footprint(1001, batch=2)
    assert footprint.paged_bytes == 2 * 128 * (8 * 4096 + 6 * 22_528), "512 tokens, 128 of headroom, the rest of a page"
    assert planner.footprint(0).paged_bytes == 0
    streaming = Planner(ModelSpec.preset("llama-2-7b"), retention=pagoda.SinkWindow(64, 16384), headroom=0)
    assert streaming.footprint(1 << 30) == replace(streaming.footprint(1 << 20), tokens=1 << 30)
    assert streaming.longest_context(9 * GIB) == (1 << 31) - 64
    assert streaming.longest_context(8 * GIB) == 16384


def test_a_cache_holds_no_more_than_the_planner_says() -> None:
    layers = [AttentionLayer(2, 1, 8, window=window) for window in (None, 100, 33)]
    options: dict[str, Any] = {"retention": pagoda.SinkWindow(20, 50), "headroom": 30, "page_size": 16}
    with pagoda.Cache(ModelSpec(layers), device_memory="1MiB", host_memory=0, threads=1, **options) as cache:
        planner, sequence, most = Planner(ModelSpec(layers), **options), cache.create(), 0
        for tokens in range(1, 500):
            with cache.step([sequence], [1]) as step:
                for layer in range(3):
                    step.append(layer, *[np.zeros((1, 1, 8), np.float32)] * 2)
            used, planned = cache.stats().used_bytes("device"), planner.footprint(tokens).paged_bytes
            assert used <= planned
            most = max(most, used)
        assert most == planned


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (ModelSpec.preset("smollm2-135m"), {"page_size": 32}),
        # Scales of 8 rows take 24 bytes, padded to 32.
        (ModelSpec([AttentionLayer(2, 1, 96)] * 2), {"page_size": 8, "k_dtype": "mxfp4", "v_dtype": "f32"}),
    ],
    ids=["smollm2-135m", "padded scales"],
)
def test_the_cache_holds_what_the_planner_says(spec: ModelSpec, options: dict[str, Any]) -> None:
    footprint = Planner(spec, **options).footprint(1000)
    with pagoda.Cache(spec, device_memory="64MiB", host_memory=0, threads=1, **options) as cache:
        cache.step([cache.create()], [1000]).__enter__()
        assert cache.stats().used_bytes("device") == footprint.paged_bytes


@pytest.mark.parametrize("store_k", [False, True])
def test_128k_tokens_of_gemma_4_12b_in_q8_0_fit_12_gb(store_k: bool) -> None:
    """Measured with one full and one windowed layer of the model's shape, which has 8 and 40 of them."""
    spec, tokens = ModelSpec.preset("gemma-4-12b"), 131_072
    spec = spec.storing_k() if store_k else spec
    footprint = Planner(spec, "q8_0", "q8_0").footprint(tokens)
    assert footprint.total_bytes < 12 * GIB / 8, "most is left for the model's weights"
    windowed, full = layers = spec.attention_layers[4:6]
    assert [sum(layer == other for layer in spec.layers) for other in layers] == [40, 8]
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((8192, layer.num_kv_heads, layer.head_dim), np.float32) for layer in layers]
    with pagoda.Cache(
        ModelSpec([windowed, full]),
        k_dtype="q8_0",
        v_dtype="q8_0",
        k_norms=None if store_k else [None, np.ones(512)],
        device="cpu",
        device_memory="512MiB",
        host_memory=0,
    ) as cache:
        sequence = cache.create()
        for chunk in range(tokens // 8192):
            with cache.step([sequence], [8192]) as step:
                if chunk < tokens // 8192 - 1:
                    step.table(0)  # Rows that will have left the window need not be written.
                else:
                    step.append(0, rows[0], rows[0])
                step.append(1, rows[1] if store_k else None, rows[1])
        stats = cache.stats()
        held = [count.used * size for count, size in zip(stats.device, stats.block_bytes, strict=True)]
        assert held[1] == tokens * full.bytes_per_token("q8_0", "q8_0")
        # The planner allows for a window that ends inside a page.
        assert footprint.total_bytes - 40 * 64 * windowed.bytes_per_token("q8_0", "q8_0") <= 40 * held[0] + 8 * held[1]
        assert 40 * held[0] + 8 * held[1] <= footprint.total_bytes
        with cache.step([sequence], [1]) as step:
            for index, layer in enumerate(layers):
                last = rows[index][:1]
                q = np.zeros((1, layer.num_q_heads, layer.head_dim), np.float32)
                out = step.forward(index, q, None if layer.k_eq_v else last, last)
                # All weights are equal: the result is the mean of all visible rows.
                seen = layer.window or tokens + 1
                times = np.bincount(np.arange(tokens + 1 - seen, tokens + 1) % 8192, minlength=8192)
                mean = np.tensordot(times / seen, rows[index].astype(np.float64), 1)
                result = out[0].reshape(layer.num_kv_heads, -1, layer.head_dim)
                np.testing.assert_allclose(result, np.broadcast_to(mean[:, None], result.shape), atol=1e-3)


def test_tiers_fill_in_order() -> None:
    planner = Planner(ModelSpec.preset("qwen3.5-0.8b"))
    footprint = planner.footprint(1 << 20)
    split = planner.split(footprint, 4 * GIB, 6 * GIB, 1 * GIB)
    assert split.device_bytes == 4 * GIB
    assert (split.host_bytes, split.disk_bytes) == (6 * GIB, 1 * GIB)
    assert split.lacking_bytes == footprint.total_bytes - 11 * GIB
    longest = planner.longest_context(11 * GIB)
    assert planner.footprint(longest).total_bytes <= 11 * GIB < planner.footprint(longest + 64).total_bytes


@pytest.mark.parametrize("state", [0, 1, -1], ids=["fits", "has room for a page", "does not fit"])
def test_states_go_to_the_device_alone(state: int) -> None:
    """If they do not fit there, the longest context is 0, whatever the host has."""
    planner = Planner(ModelSpec.preset("qwen3-next-80b-a3b"))
    page = planner.footprint(64).paged_bytes
    device = 2 * planner.spec.state_bytes() + state * page
    longest = planner.longest_context(device, 10 * page, batch=2)
    assert longest == (0 if state < 0 else (10 + state) // 2 * 64)
    document = describe(planner, [64], 2, {"device": device, "host": 10 * page, "disk": 0})
    (said,), (split,) = document["longest_context"].values(), document["contexts"][0]["budgets"].values()
    assert said == longest
    assert (split["lacking_bytes"] > 0) == (longest == 0)


def test_without_attention_there_are_no_pages() -> None:
    planner = Planner(ModelSpec(layers=[StateLayer(1000)]))
    assert planner.rings(1 << 30, host=True, disk=True, on_gpu=True) == Rings()
    assert planner.room(1 << 30) == planner.room_on_disk(1 << 30) == 0
    assert planner.longest_context(4000) == TOKENS_MAX // 64 * 64


def test_a_part_of_the_stage_holds_a_block_of_any_size() -> None:
    """And at most as many pages as the device has."""
    layers = [AttentionLayer(32, 32, 256)] * 40
    for count, device, part in ((40, 1 << 40, 80), (4, 1 << 40, 16), (4, 10 << 20, 10), (4, 1 << 20, 8)):
        planner = Planner(ModelSpec(layers=layers[:count]))
        rings = planner.rings(device, host=False, disk=True, on_gpu=True)
        assert rings.stage_bytes == 5 * part << 20, "four parts for plans, one for calls that wait"


SHAPES: dict[str, tuple[list[AttentionLayer], dict[str, Any]]] = {
    "small": ([AttentionLayer(2, 1, 16), AttentionLayer(4, 4, 64)], {"page_size": 16}),
    "large": ([AttentionLayer(8, 8, 128), AttentionLayer(8, 2, 64)], {"k_dtype": "f32", "v_dtype": "f32"}),
    "very large": ([AttentionLayer(64, 64, 128)], {}),
    "quantised": ([AttentionLayer(8, 8, 128)], {"k_dtype": "q8_0", "v_dtype": "q4_0", "page_size": 128}),
    "latent": ([AttentionLayer(16, 1, 576, v_head_dim=512, v_alias=True)], {}),
    "shared": ([AttentionLayer(8, 4, 128), AttentionLayer(8, 4, 128, kv_owner=0)], {}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_disk_tier_has_the_ring_that_the_planner_says(name: str, tmp_path: Path) -> None:
    layers, options = SHAPES[name]
    tiers = {"device": "cpu", "device_memory": "64MiB", "host_memory": 0, "disk": tmp_path / "pages"}
    with pagoda.Cache(ModelSpec(layers), disk_memory="64MiB", **options, **tiers) as cache:  # type: ignore[arg-type]
        stats = cache.stats().disk_io
        assert stats is not None
        planned = Planner(ModelSpec(layers), **options).rings(64 << 20, host=False, disk=True, on_gpu=False)
        assert planned == Rings(disk_bytes=stats.ring_bytes)


@pytest.mark.parametrize(("device", "host"), [(5 * 512, 3 * 512), (5 * 512 + 300, 3 * 512 + 300), (6 * 512 - 1, 511)])
def test_no_page_lies_in_two_tiers(device: int, host: int) -> None:
    """A page has 512 bytes; a smaller host tier is refused."""
    spec, page_size = ModelSpec([AttentionLayer(1, 1, 16)]), 8
    document = describe(Planner(spec, page_size=page_size), [100], 1, {"device": device, "host": host, "disk": 0})
    (longest,) = document["longest_context"].values()
    tiers: dict[str, Any] = {"device_memory": device, "host_memory": host if host > 511 else 0}
    with pagoda.Cache(spec, page_size=page_size, device="cpu", threads=1, **tiers) as cache:
        assert fill(cache) == longest


def fill(cache: pagoda.Cache) -> int:
    """Appends page by page until the cache is full; returns the number of tokens."""
    sequence = cache.create()
    with pytest.raises(pagoda.OutOfBlocks):
        while True:
            with cache.step([sequence], [cache.page_size]) as step:
                for index, layer in enumerate(cache.spec.attention_layers):
                    rows = np.zeros((cache.page_size, layer.num_kv_heads, layer.head_dim), np.float32)
                    step.append(index, rows, rows)
    return len(sequence)


@pytest.mark.parametrize("layers", [1, 3])
def test_as_much_fits_the_disk_as_the_planner_says(layers: int, tmp_path: Path) -> None:
    """A layer of a page has 512 bytes, padded to 4096 on disk, where each page also has a header of 4096."""
    spec, page_size, device_memory, disk_memory = ModelSpec([AttentionLayer(1, 1, 16)] * layers), 8, 64 << 10, 2 << 20
    planner = Planner(spec, page_size=page_size)
    room = planner.room_on_disk(disk_memory)
    assert room == disk_memory // (4096 * (1 + layers)) * 512 * layers
    longest = planner.longest_context(device_memory + room)
    tiers: dict[str, Any] = {"device_memory": device_memory, "host_memory": 0, "disk_memory": disk_memory}
    with pagoda.Cache(spec, page_size=page_size, device="cpu", threads=1, disk=tmp_path / "pages", **tiers) as cache:
        assert fill(cache) == longest


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_a_device_takes_the_memory_that_the_planner_says(
    name: str, host: bool, disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an emulated device: pages and ring, and pinned memory for the host tier and for the disk's stage and ring."""
    emulator.require()
    layers, options = SHAPES[name]
    has_ring = []
    for budget in (1 << 20, 9 << 20, 40 << 20):
        driver = Ledger()
        monkeypatch.setattr(cuda, "open_driver", lambda index, driver=driver: driver)
        tiers: dict[str, Any] = {"device_memory": budget, "host_memory": "5MiB" if host else 0}
        tiers |= {"disk": tmp_path / "pages", "disk_memory": "32MiB"} if disk else {}
        try:
            cache = pagoda.Cache(ModelSpec(layers), device="cuda", **options, **tiers)
        except InvalidArgument:
            continue  # A page is larger.
        rings = Planner(ModelSpec(layers), **options).rings(budget, host=host, disk=disk, on_gpu=True)
        with cache:
            assert cache._device is not None
            on_device = [budget - rings.device_bytes, *([rings.device_bytes] if rings.device_bytes else [])]
            assert [size for size in driver.asked if size in on_device] == on_device
            beside = rings.disk_bytes + rings.stage_bytes
            assert driver.pinned_arenas == [*([5 << 20] if host else []), *([beside] if disk else [])]
            disk_io = cache.stats().disk_io
            assert rings.disk_bytes == (disk_io.ring_bytes if disk_io else 0)
            assert rings.reaches_disk == (cache._device.attends_to_disk or not disk)
        has_ring.append(rings.device_bytes > 0)
    assert any(has_ring) == (host or disk)


class Ledger(EmulatedDriver):
    """Records requests for memory."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.pinned_arenas: list[int] = []

    def memory(self, size: int) -> Memory:
        self.asked.append(size)
        return super().memory(size)

    def host_arena(self, size: int, piece: int) -> HostArena:
        self.pinned_arenas.append(size)
        return super().host_arena(size, piece)


def test_command_counts_rings_where_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama-2-7b", "--context", "32k", "--device-memory", "1GiB", "--host-memory", "15GiB"]
    rings, split = {}, {}
    for device in ("cpu", "cuda"):
        assert main([*command, "--disk-memory", "1GiB", "--device", device, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        rings[device], split[device] = document["rings"], document["contexts"][0]["budgets"]["1.0 GiB"]
    run = 2 * 32 * 128 * 2 * 64
    nothing = {"device_bytes": 0, "disk_bytes": 0, "stage_bytes": 0, "reaches_disk": True}
    assert rings["cpu"] == {"1.0 GiB": nothing | {"disk_bytes": 4 * 64 * run}}
    # A slot of 16 MiB holds 16 layers of pages, and 16 slots take 256 MiB; a page of all 32 layers is more than 16 MiB.
    on_gpu = nothing | {"device_bytes": 32 << 20, "disk_bytes": 16 * 16 * run, "stage_bytes": 5 * 32 * run}
    assert rings["cuda"] == {"1.0 GiB": on_gpu}
    assert split["cpu"] == {"device_bytes": GIB, "host_bytes": 15 * GIB, "disk_bytes": 0, "lacking_bytes": 0}
    assert split["cuda"]["device_bytes"] == GIB - (32 << 20)
    assert split["cuda"]["disk_bytes"] == 32 << 20
    assert main([*command, "--disk-memory", "1GiB", "--device", "cuda"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "to attention through memory beside the budgets: 256.0 MiB." in out
    assert "between disk and device through memory beside the budgets: 160.0 MiB." in out
    assert "which holds none: 32.0 MiB." in out


def test_command_counts_what_pages_on_disk_have_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of a page has 16 x 2 x 144 bytes, padded to 8192; each page, of 22 or 4 layers, has a header of 4096."""
    command = ["plan", "gemma-3-1b", "--page-size", "16", "--cache-type-k", "q4_0", "--cache-type-v", "q4_0"]
    assert main([*command, "--device-memory", "1GiB", "--disk-memory", "8GiB", "--context", "16m", "--json"]) == 0
    (split,) = json.loads(capsys.readouterr().out)["contexts"][0]["budgets"].values()
    assert split["disk_bytes"] == pytest.approx(8 * GIB * 4 * 4608 / (4 * 8192 + 4096), rel=0.01)
    assert split["lacking_bytes"] > 0


def test_command_counts_a_disk_that_nothing_reaches_for_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A layer of a page is 1 MiB; steps over pages on disk need a device tier of at least 16 of them."""
    model = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(model))
    command = ["plan", str(tmp_path), "--context", "32k", "--disk-memory", "100GiB", "--device", "cuda"]
    for memory, lacks in (("15MiB", True), ("16MiB", False)):
        assert main([*command, "--device-memory", memory, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        (split,) = document["contexts"][0]["budgets"].values()
        assert (split["lacking_bytes"] > 0, split["disk_bytes"] == 0) == (lacks, lacks)
        assert main([*command, "--device-memory", memory]) == 0
        assert ("No page goes to disk with 15.0 MiB" in " ".join(capsys.readouterr().out.split())) == lacks


@pytest.mark.parametrize("options", [{"page_size": 100}, {"page_size": 8192}, {"k_dtype": "f8"}, {"v_dtype": "q3"}])
def test_plans_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Planner(ModelSpec.preset("qwen3-8b"), **options)  # type: ignore[arg-type]


HEADS_OF_80 = {
    "model_type": "mistral",
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 2560,
}
"""80 elements are not a multiple of 32, the block size."""


@pytest.mark.parametrize("name", FORMATS)
def test_the_planner_refuses_formats_that_a_cache_refuses(name: str) -> None:
    spec = ModelSpec.from_config(HEADS_OF_80)
    if FORMATS[name].block is None:
        pagoda.Cache(spec, k_dtype=name, v_dtype=name, threads=1, device_memory="64MiB", host_memory=0).close()
        Planner(spec, name, name)
        return
    with pytest.raises(InvalidArgument, match=f"head_dim = 80: a multiple of 32, for {name}") as refused:
        pagoda.Cache(spec, k_dtype=name, v_dtype=name, threads=1, device_memory="64MiB", host_memory=0)
    with pytest.raises(InvalidArgument, match=re.escape(str(refused.value))):
        Planner(spec, name, name)


def test_command_counts_formats_that_rows_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HEADS_OF_80))
    command = ["plan", str(tmp_path), "--context", "1k"]
    assert main([*command, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["contexts"]
    assert list(row["by_format"]) == ["f32", "f16", "bf16", "fp8_e4m3", "int8"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert ("int8" in printed, "q4_0" in printed) == (True, False)


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                "llama-2-7b",
                "--context",
                "2k,32k",
                "--device-memory",
                "1GiB",
                "--host-memory",
                "15GiB",
                "--json",
            ]
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["bytes_per_token"] == 524_288
    assert [row["total_bytes"] for row in document["contexts"]] == [GIB, 16 * GIB]
    assert document["contexts"][1]["by_format"]["q8_0"] == 16 * GIB * 34 // 64
    budget = document["contexts"][1]["budgets"]["1.0 GiB"]
    assert budget == {"device_bytes": GIB, "host_bytes": 15 * GIB, "disk_bytes": 0, "lacking_bytes": 0}


def test_command_prints_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """2,048 tokens take a gibibyte."""
    budgets = ["--device-memory", "1GiB", "--host-memory", "1GiB"]
    assert main(["plan", "llama-2-7b", "--context", "64,2k,3k,4k,8k", *budgets]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "llama-2-7b: 32 full layers; K f16, V f16, pages of 64 tokens"
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert rows[:6] == [
        ["64", "32.0 MiB", "fits"],
        ["2k", "1.0 GiB", "fits"],
        ["3k", "1.5 GiB", "1.0 GiB + 512.0 MiB on host"],
        ["4k", "2.0 GiB", "1.0 GiB + 1.0 GiB on host"],
        ["8k", "4.0 GiB", "lacks 2.0 GiB"],
        ["longest", "", "4,096"],
    ]
    assert [line.count("█") for line in lines if "█" in line] == [1, 10, 15, 20, 40]


@pytest.mark.usefixtures("capsys")
def test_tables_are_not_as_narrow_as_a_terminal_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert results().width == 200


def test_layers_are_counted_by_what_they_keep() -> None:
    full, windowed = AttentionLayer(2, 1, 16), AttentionLayer(2, 1, 16, window=64)
    sharing = [replace(full, kv_owner=0), replace(windowed, kv_owner=1)]
    spec = ModelSpec([full, windowed, *sharing, windowed, StateLayer(8)])
    document = describe(Planner(spec), [1], 1, {"host": 0, "disk": 0})
    assert document["layers"] == {"full": 1, "windowed": 2, "sharing": 2, "recurrent": 1}


def test_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gemma-3-12b"]) == 0
    out = capsys.readouterr().out
    assert "their older pages are freed" in out.replace("\n", " ")
    assert "393,216 bytes a token" in out
    assert "recurrent" not in out
    assert main(["plan", "qwen3.5-0.8b"]) == 0
    assert "\n18.6 MiB of recurrent state a sequence\n" in capsys.readouterr().out


def test_command_says_whether_k_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gemma-4-12b"]) == 0
    derived = capsys.readouterr().out.replace("\n", " ")
    assert "8 layers store V alone" in derived
    assert "8,192 of them in layers without a window" in derived
    assert main(["plan", "gemma-4-12b", "--store-k"]) == 0
    stored = capsys.readouterr().out.replace("\n", " ")
    assert "V alone" not in stored
    assert "16,384 of them in layers without a window" in stored


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "no-such-model"],
        ["plan", "qwen3-8b", "--context", "0"],
        ["plan", "qwen3-8b", "--context", "x"],
        ["plan", "qwen3-8b", "--context", "4000m"],
        ["plan", "qwen3-8b", "--page-size", "100"],
        ["plan", "qwen3-8b", "--device-memory", "0"],
        ["plan", "qwen3-8b", "--device-memory", ""],
        ["plan", "qwen3-8b", "--host-memory", "4000000TiB"],
        ["plan", "qwen3-8b", "--cache-type-k", "f32", "--cache-type-v", "q5_0", "--device", "cuda"],
        ["plan", ""],
    ],
)
def test_command_refuses_in_one_line(arguments: list[str], refused: Callable[..., str]) -> None:
    refused(*arguments)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_budget_that_no_cache_takes_is_refused_by_its_option(
    tier: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    disk = {"disk": tmp_path / "pages"} if tier == "disk" else {}
    with pytest.raises(InvalidArgument) as by_cache:
        pagoda.Cache(ModelSpec.preset("qwen3-8b"), **disk, **{f"{tier}_memory": 1000})  # type: ignore[arg-type]
    said = refused("plan", "qwen3-8b", f"--{tier}-memory", "1000")
    assert said == str(by_cache.value).replace(f"{tier}_memory", f"--{tier}-memory")


def test_doctor_sees_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert pagoda.__version__ in findings["module"]["found"]
    isa = os.environ.get("PAGODA_CPU_ISA") or pagoda.build_info()["isa"]
    assert findings["CPU kernels"]["found"].startswith(f"{isa} of ")


def test_what_is_said_of_the_cpu_is_what_caches_compute_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_CPU_ISA", "scalar")
    bench = ["bench", "depth", "--models", "shipped", "--formats", "f16", "--depths", "64", "--tokens", "1", "--json"]
    assert main(bench) == 0
    assert json.loads(capsys.readouterr().out)["build"]["isa"] == "scalar"
    assert main(["doctor", "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["CPU kernels"]["found"].startswith("scalar of ")
    assert not findings["CPU kernels"]["fine"]


@pytest.mark.parametrize("path", ["/no/such/folder", "./folder", "missing.json"])
def test_a_path_that_is_not_there_is_no_preset(path: str, refused: Callable[..., str]) -> None:
    assert refused("plan", path).startswith("config = ")


@pytest.mark.parametrize("command", [["plan"], ["bench", "depth", "--models"]])
def test_a_name_too_long_for_a_path_is_no_preset_either(command: list[str], refused: Callable[..., str]) -> None:
    assert refused(*command, "x" * 300).startswith(f"name = {'x' * 300!r}: a preset")


def test_who_reads_may_go_away_and_devices_may_be_full() -> None:
    """In separate processes, since Python writes the rest of a buffer as it exits."""
    command = [sys.executable, "-m", "pagoda", "plan", "qwen3-8b", "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (1, "")
    with Path("/dev/full").open("w") as full:
        failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("pagoda: [Errno 28]")
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize("errors", ["", "2>&-"])
def test_standard_output_may_be_closed(errors: str) -> None:
    command = f'"{sys.executable}" -m pagoda plan qwen3-8b >&- {errors}'
    ran = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, "" if errors else "pagoda: standard output is closed\n")


def test_an_error_does_not_go_to_standard_output() -> None:
    """If standard error is closed, `print` would use standard output instead."""
    command = f'"{sys.executable}" -m pagoda plan no-such-model --json 2>&-'
    ran = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")


def test_terminals_without_blocks_get_a_plan() -> None:
    command = [sys.executable, "-m", "pagoda", "plan", "qwen3-8b"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    plan = subprocess.run(command, env=ascii_only, capture_output=True, check=True).stdout
    assert b"144.0 GiB" in plan.splitlines()[-1]


def test_a_terminal_of_80_columns_has_room_for_every_number() -> None:
    printed = io.StringIO()
    contexts = [32 << 10, 200 << 10, 1 << 20]
    document = describe(Planner(ModelSpec.preset("llama-3.1-8b")), contexts, 1, {"host": 0, "disk": 0})
    draw(document, Console(file=printed, width=80))
    assert "…" not in printed.getvalue()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.getvalue().splitlines()]
    # A token has 512 rows: of 128 bytes and a scale of 4 bytes, or of 128 times 4 bytes.
    assert ["fp8_e4m3", "2.1 GiB", "12.9 GiB", "66.0 GiB"] in rows
    assert ["f32", "8.0 GiB", "50.0 GiB", "256.0 GiB"] in rows


def test_every_option_says_what_it_is_and_what_it_is_by_default() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for module in COMMANDS:
        module.register(commands)
    parsers, seen = [parser], 0
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers.extend(action.choices.values())
            elif action.option_strings and not isinstance(action, argparse._HelpAction):
                assert action.help, action.option_strings
                assert action.default in (None, False, argparse.SUPPRESS) or "default" in action.help, (
                    action.option_strings
                )
                seen += 1
    assert seen > 50
