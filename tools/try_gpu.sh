#!/usr/bin/env bash
# A GPU that pagoda has not run on, from the first kernel to the figures:   tools/try_gpu.sh OUT PART ...
#
#   here       what there is: driver, GPU, Python, pagoda's place, `pagoda doctor`
#   kernels    every kind of kernel against float64, on several processes: what they compile is kept for what comes later
#   gpu        the other tests that need a GPU, each on its own
#   api        the tests of the API on the GPU, on several processes
#   figures    benches/gpu/run.sh: what docs/benchmarks/gpu.md shows; programs in PROGRAMS, the seconds of each in PAGODA_LIMIT
#   memcheck, racecheck, synccheck, initcheck: compute-sanitizer over some kinds of kernels
#
# Parts run in the order given. None takes others with it: each has a limit, and PAGODA_SECONDS is one for all together; what
# it prints is in OUT as it comes, and OUT/summary.txt has a line for each. Pagoda is the one that is installed for the Python
# that PYTHON names; pytest-xdist and pytest-timeout make parts shorter, and tests that hang harmless.
set -uo pipefail
mkdir -p "${1:?usage: try_gpu.sh OUT PART ...}"
out=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHON=$python PYTHONUNBUFFERED=1 PAGODA_REQUIRE_GPU=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
deadline=$((SECONDS + ${PAGODA_SECONDS:-86400}))
jobs=$(($(nproc) < 8 ? $(nproc) : 8))

api="tests/test_attention.py tests/test_sequences.py tests/test_tiers.py tests/test_device_quantised.py tests/test_derived_keys.py
    tests/test_windows.py tests/test_arguments.py tests/test_sessions.py tests/test_zeroing.py tests/test_disk.py tests/test_errors.py
    tests/test_stateful.py"
gpu="tests/test_gpu.py tests/test_lm_device.py tests/test_loader.py tests/test_doctor.py tests/test_shipped_model.py"
checked=()
for kind in "bf16/bf16 bf16" "q4_0/q4_0 bf16" f32 deterministic; do
    checked+=("tests/test_gpu_kernels.py::test_kinds_of_kernels[$kind]")
done

sanitizer=$(command -v compute-sanitizer || echo "${CUDA_PATH:-/usr/local/cuda}/bin/compute-sanitizer")

has() { "$python" -c "import $1" 2>/dev/null; }

# part SECONDS LOG COMMAND ...
part() {
    local limit=$1 log=$2 start=$SECONDS status said
    shift 2
    limit=$((limit < deadline - SECONDS ? limit : deadline - SECONDS))
    if [ "$limit" -lt 1 ]; then
        echo "$name: left out, no time" | tee -a "$out/summary.txt"
        return
    fi
    echo "== $name: $*" >> "$log"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$log"
    status=${PIPESTATUS[0]}
    case $status in 0) said=passed ;; 124 | 137) said="ran out of its $limit s" ;; *) said="failed ($status)" ;; esac
    echo "$name: $said, $((SECONDS - start)) s; $(tail -n 1 "$log")" | tee -a "$out/summary.txt"
}

# tests PROCESSES SECONDS LOG ARGUMENT ...
tests() {
    local processes=$1 limit=$2 log=$3 plugins=()
    shift 3
    # A process that hangs, or whose GPU is broken by a kernel, is replaced by another.
    has xdist && plugins+=(-p xdist.plugin -n "$processes" --max-worker-restart=30)
    has pytest_timeout && plugins+=(-p pytest_timeout --timeout=200 --timeout-method=thread)
    has hypothesis && plugins+=(-p _hypothesis_pytestplugin)
    part "$limit" "$log" "$python" -m pytest -v --tb=short -p no:cacheprovider --continue-on-collection-errors "${plugins[@]}" "$@"
}

here() {
    nvidia-smi
    "$python" -c 'import sys, numpy, cupy, pagoda; print(sys.version, numpy.__version__, cupy.__version__, pagoda.__file__)'
    "$python" -c 'import torch; print(torch.__version__, torch.cuda.is_available())'
    "$python" -m pagoda doctor --json
}

for name in "$@"; do
    # shellcheck disable=SC2086
    case $name in
        here) part 120 "$out/here.log" bash -c "$(declare -f here); python=$python; here" ;;
        kernels) tests "$jobs" 180 "$out/kernels.log" -m gpu tests/test_gpu_kernels.py ;;
        gpu) tests 1 330 "$out/gpu.log" -m "gpu and not long" $gpu ;;
        api) tests "$jobs" 300 "$out/api.log" -m "not long" --device=cuda $api ;;
        figures) part 570 /dev/null benches/gpu/run.sh "$out" ${PROGRAMS:-} ;;
        memcheck | racecheck | synccheck | initcheck)
            options=(--tool "$name" --error-exitcode 9 --print-limit 20)
            # CuPy asks for what a device may not have, and copes with the answer.
            [[ $name == memcheck ]] && options+=(--report-api-errors no)
            part 240 "$out/sanitizer.log" "$sanitizer" "${options[@]}" "$python" -m pytest -v --tb=short -p no:cacheprovider \
                -m gpu "${checked[@]}"
            ;;
        *) echo "$name: no such part" >&2 && exit 2 ;;
    esac
done
cat "$out/summary.txt"
