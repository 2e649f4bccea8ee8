"""Plots the figures of `pagoda bench quality` with matplotlib."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pagoda.errors import BackendUnavailable, InvalidArgument
from pagoda.quality.heads import OUTLIERS, margin, recall


def figure_class() -> Any:
    """matplotlib's class of figures, which opens no window. Raises BackendUnavailable, saying how to install it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendUnavailable('--plot: needs matplotlib; pip install "pagoda-kv[plot]"') from error
    return Figure


def check_path(path: Path) -> None:
    """Raises InvalidArgument for a path that a plot cannot be written to, and BackendUnavailable as `figure_class`."""
    suffixes = figure_class()().canvas.get_supported_filetypes()
    place = path if path.exists() else path.parent
    if path.suffix[1:].lower() not in suffixes or path.is_dir() or not os.access(place, os.W_OK):
        limit = f"a file that can be written, like quality.png, of {', '.join(sorted(suffixes))}"
        raise InvalidArgument(f"--plot = {str(path)!r}: {limit}")


def draw(report: dict[str, Any], path: Path) -> None:
    """Three panels: recall against its law, noise by format and outliers, divergence of the language model by size.

    report: as `pagoda.cli.bench.quality` makes it. The suffix of the path is the format (`check_path`). Raises
    BackendUnavailable, and InvalidArgument for a path that cannot be written.
    """
    figure = figure_class()(figsize=(15, 5), layout="constrained")
    law, noise, language = figure.subplots(1, 3)
    formats = list(dict.fromkeys(row["format"] for row in report["heads"]))
    colours = {name: f"C{index}" for index, name in enumerate(formats)}
    largest = max(row["context"] for row in report["heads"])

    reach = [step / 20 for step in range(81)]
    law.plot(reach, [recall(x, 1.0) for x in reach], color="black", label="Phi(margin / (sqrt(2) sigma))")
    for name in formats:
        rows = [row for row in report["heads"] if row["format"] == name and row["sigma"] > 0]
        points = [
            (margin(int(distance), row["beta"]) / row["sigma"], share)
            for row in rows
            for distance, share in row["recall"].items()
        ]
        seen = [point for point in points if point[0] <= reach[-1]]
        if seen:
            law.scatter([x for x, _ in seen], [y for _, y in seen], s=12, label=name, color=colours[name])
    law.set(xlabel="margin / sigma", ylabel="recall", title="associative recall")
    law.legend()

    for index, outliers in enumerate(OUTLIERS):
        rows = [row for row in report["heads"] if row["outliers"] == outliers and row["context"] == largest]
        at = [formats.index(row["format"]) + (index - 1.5) / 5 for row in rows]
        noise.bar(at, [row["sigma"] for row in rows], width=0.2, label=outliers)
    noise.set_xticks(range(len(formats)), formats, rotation=45, ha="right", rotation_mode="anchor")
    noise.set_axisbelow(True)
    noise.grid(axis="y", alpha=0.3)
    noise.set(yscale="log", ylabel="sigma of a logit", title=f"noise, {largest:,} tokens")
    noise.legend(title="outliers")

    latest = max(row["start"] for row in report["language"])
    rows = [
        row for row in report["language"] if row["retention"] == "all" and row["start"] == latest and row["kld"] > 0
    ]
    below = (0.0, 0.0)
    for row in sorted(rows, key=lambda row: row["kld"]):
        language.scatter(row["bits"], row["kld"], color=colours[row["format"]])
        # Names go to the right of points, unless the name of a point close below is there.
        close = abs(row["bits"] - below[0]) < 2 and row["kld"] < 2 * below[1]
        side, distance = ("right", -6) if close else ("left", 6)
        place = (row["bits"], row["kld"])
        language.annotate(row["format"], place, (distance, 0), textcoords="offset points", ha=side, va="center")
        below = (0.0, 0.0) if close else place
    language.margins(x=0.2)
    language.grid(alpha=0.3)
    title = f"shipped model, token by token after {latest:,}"
    language.set(yscale="log", xlabel="bits an element, K and V", ylabel="mean KLD, nats", title=title)
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidArgument(f"--plot = {str(path)!r}: a file that can be written ({error})") from error
