#!/usr/bin/env bash
# All figures of docs/benchmarks/gpu.md in one go:   benches/gpu/run.sh OUT [program ...]
# Lines of JSON go to OUT/results.jsonl as they come, the tables to OUT/log.txt and the screen. Needs pagoda, CuPy and torch of
# the Python that PYTHON names. PAGODA_PEERS: a folder with wheels of other libraries, and the library of FlashAttention-3 that
# vLLM ships (_vllm_fa3_C.abi3.so or .so.xz). PAGODA_LIMIT: seconds that a program has.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?usage: run.sh OUT [program ...]}"
out=$(cd "$1" && pwd)
shift
python=${PYTHON:-python3} limit=${PAGODA_LIMIT:-600}
export PAGODA_RESULTS=$out/results.jsonl PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ -n "${PAGODA_PEERS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" "$PAGODA_PEERS"/*.whl
    export PYTHONPATH=$PYTHONPATH:$scratch/site PAGODA_FA3=$scratch/_vllm_fa3_C.abi3.so
    export FLASHINFER_DISABLE_VERSION_CHECK=1 TVM_FFI_DISABLE_TORCH_C_DLPACK=1 FLASHINFER_WORKSPACE_BASE=${TMPDIR:-/tmp}
    if [ -e "$PAGODA_PEERS/_vllm_fa3_C.abi3.so.xz" ]; then
        xz -dc "$PAGODA_PEERS/_vllm_fa3_C.abi3.so.xz" > "$PAGODA_FA3"
    else
        cp "$PAGODA_PEERS/_vllm_fa3_C.abi3.so" "$PAGODA_FA3"
    fi
fi
[ $# -gt 0 ] || set -- ceilings decode prefill steps resident gather calibrate streaming longcontext
# What the routes to pages of the host tier carry, by which steps are divided; nothing of the user's is touched.
export XDG_CACHE_HOME=$scratch/cache
failed=0
for name in "$@"; do
    program=("$here/$name.py")
    [ "$name" != calibrate ] || program=(-m pagoda doctor --calibrate --disk "${PAGODA_DISK:-$scratch}")
    [ "$name" != resident ] || program=("$here/../resident_step.py" --device cuda --disk "${PAGODA_DISK:-$scratch}")
    start=$SECONDS
    # A program that fails or hangs takes none of the others with it, nor the lines that it has written.
    timeout --kill-after=10 "$limit" "$python" "${program[@]}" 2>&1 | tee -a "$out/log.txt" ||
        { failed=1 && echo "$name failed" | tee -a "$out/log.txt"; }
    echo "$name: $((SECONDS - start)) s" | tee -a "$out/log.txt"
done
exit $failed
