"""`pagoda bench longcontext` after 200K and 1M tokens, with 384 MB for K and V on the device, the ring included.

Pages that the device cannot hold are on the host, half on the host and half on disk, or all on disk: in the folder that
PAGODA_DISK names, or where temporary files are. "divided": as `pagoda doctor --calibrate` has measured; without that the CPU
has no part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from harness import Report

COMMAND = [sys.executable, "-m", "pagoda", "bench", "longcontext", "--device", "cuda", "--json"]
BUDGET = ["--device-memory", "384MB", "--tokens", "20"]
HALF = {"200k": "1.1GB", "1m": "6.3GB"}
"""Of what is left of a context in f16."""


def main() -> None:
    report = Report("longcontext")
    with (
        tempfile.TemporaryDirectory() as nothing,
        tempfile.TemporaryDirectory(dir=os.environ.get("PAGODA_DISK")) as disk,
    ):
        alone = os.environ | {"XDG_CACHE_HOME": nothing}
        for context, half in HALF.items():
            cases = [
                ("f16", [], alone),
                ("q8_0", ["--format", "q8_0"], alone),
                ("f16, divided", [], os.environ),
                ("f16, half on disk", ["--host-memory", half, "--disk", disk], alone),
                ("f16, on disk", ["--host-memory", "0", "--disk", disk], alone),
            ]
            for what, options, environment in cases:
                command = [*COMMAND, *BUDGET, "--contexts", context, *options]
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
                if done.returncode:
                    print(f"{context}, {what}: failed", flush=True)
                    continue
                document = json.loads(done.stdout)
                (row,) = document["longcontext"]
                rate = row["tokens_per_second"]
                moved = {f"{link}_GBs": size * rate / 1e9 for link, size in row["bytes_per_token"].items()}
                ceilings = {f"{link}_ceiling_GBs": size / 1e9 for link, size in row["ceilings"].items()}
                report.line(
                    context,
                    what,
                    tok_s=rate,
                    roofline=row["roofline_tokens_per_second"],
                    of_roofline=row["achieved"],
                    **moved,
                    **ceilings,
                    waited_s=row["waited_seconds_per_token"],
                    fill_s=row["fill_seconds"],
                )


if __name__ == "__main__":
    main()
