#!/usr/bin/env bash
# All figures of docs/benchmarks/gpu.md in one go:   benches/gpu/run.sh OUT [program ...]
# Lines of JSON go to OUT/results.jsonl, the tables to OUT/log.txt and the screen. Needs CuPy and torch. PAGODA_PEERS: a folder with
# wheels of other libraries, and the library of FlashAttention-3 that vLLM ships (_vllm_fa3_C.abi3.so or .so.xz).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?usage: run.sh OUT [program ...]}"
out=$(cd "$1" && pwd)
shift
export PAGODA_RESULTS=$out/results.jsonl PYTHONPATH=$here/../../python:$here${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ -n "${PAGODA_PEERS:-}" ]; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" "$PAGODA_PEERS"/*.whl
    export PYTHONPATH=$PYTHONPATH:$scratch/site PAGODA_FA3=$scratch/_vllm_fa3_C.abi3.so
    export FLASHINFER_DISABLE_VERSION_CHECK=1 TVM_FFI_DISABLE_TORCH_C_DLPACK=1 FLASHINFER_WORKSPACE_BASE=${TMPDIR:-/tmp}
    if [ -e "$PAGODA_PEERS/_vllm_fa3_C.abi3.so.xz" ]; then
        xz -dc "$PAGODA_PEERS/_vllm_fa3_C.abi3.so.xz" > "$PAGODA_FA3"
    else
        cp "$PAGODA_PEERS/_vllm_fa3_C.abi3.so" "$PAGODA_FA3"
    fi
fi
[ $# -gt 0 ] || set -- ceilings steps gather streaming longcontext decode prefill
# What the routes to pages of the host tier carry, by which steps are divided; nothing of the user's is touched.
export XDG_CACHE_HOME=$scratch/cache
python3 -m pagoda doctor --calibrate --disk "$scratch" 2>&1 | tee -a "$out/log.txt" || echo "no calibration" | tee -a "$out/log.txt"
for name in "$@"; do
    python3 "$here/$name.py" 2>&1 | tee -a "$out/log.txt" || echo "$name failed" | tee -a "$out/log.txt"
done
