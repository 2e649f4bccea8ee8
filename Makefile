# One verb a chore. Every target installs what it needs into .venv; nothing else is touched.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-rust test-python test-kernels test-device test-long test-memory test-neon loom sim check check-rust check-python check-macos format kernels bench bench-gpu clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Test suites run side by side: threads of NumPy that wait for work would take the cores of others.
test-python test-kernels test-device test-long: export OPENBLAS_NUM_THREADS := 1
# Of what the emulator runs and NVRTC compiles.
KERNEL_TESTS := tests/test_kernels.py tests/test_ptx.py $(wildcard tests/test_device_*.py)
# Lets tests take fences away, to show that they notice.
FEATURES := pagoda-core/broken-fences
# Where there is a GPU, or must be, tests of the API run on it, and elsewhere on one that is emulated.
GPU := $(shell nvidia-smi -L 2>/dev/null | grep ^GPU)$(filter 1,$(PAGODA_REQUIRE_GPU))
DEVICE := $(if $(GPU),cuda,emulated)
API_TESTS := attention derived_keys arguments disk sessions zeroing tiers errors stateful sequences $(if $(GPU),device_quantised windows)
# What else an emulated device may be; tests/conftest.py says which.
EMULATED := ptx streamed divided
comma := ,
EXTRAS := dev$(if $(GPU),$(comma)cuda13)
# What the demo asks of the folder for temporary files.
DEMO_DISK_KIB := 65536
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find crates -name '*.rs' -o -name Cargo.toml)

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

$(VENV)/built: pyproject.toml $(RUST_SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "maturin>=1.12,<2"
	PIP_QUIET=1 $(BIN)/maturin develop --release --quiet --extras $(EXTRAS)
	@touch $@

setup: $(VENV)/built  ## make .venv and build the module into it

demo: setup  ## a language model reads a long text and continues it, its pages over three tiers
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT INT TERM && \
	set -- generate --read 40k --tokens 400 --temperature 0.7 --device-memory 4MiB && \
	if [ "$$(df -Pk "$$folder" | awk 'NR == 2 {print $$4}')" -ge $(DEMO_DISK_KIB) ]; then \
		set -- "$$@" --host-memory 8MiB --disk "$$folder" --disk-memory $(DEMO_DISK_KIB)KiB; \
	else \
		echo "no disk tier: $(DEMO_DISK_KIB) KiB are not free in $$folder"; \
		set -- "$$@" --host-memory 512MiB; \
	fi && \
	echo pagoda "$$@" && $(BIN)/pagoda "$$@"

# The longest first: with two at once none is left to end alone.
test: test-kernels test-rust test-python test-device  ## every test that fits on two cores

test-rust:  ## the Rust tests
	if cargo nextest --version >/dev/null 2>&1; then \
		cargo nextest run --workspace --exclude pagoda-py --features $(FEATURES) && \
		cargo test --quiet -p pagoda-core -p pagoda-store --doc --features $(FEATURES); \
	else \
		cargo test --quiet --workspace --exclude pagoda-py --features $(FEATURES); \
	fi

test-python: setup  ## the Python tests, but those of kernels
	$(BIN)/python -m pytest -q -m "not long" $(KERNEL_TESTS:%=--ignore=%)

test-kernels: setup  ## the kernels of CUDA, compiled and in the emulator
	$(BIN)/python -m pytest -q -m "not long" $(KERNEL_TESTS)

test-device: $(API_TESTS:%=test-device-%) $(if $(GPU),,$(EMULATED:%=test-stateful-%))  ## the tests of the API once more, on a GPU or one that is emulated

# One process a file, so that they run side by side.
test-device-%: setup
	$(BIN)/python -m pytest -q -m "not long" --device=$(DEVICE) tests/test_$*.py

test-stateful-%: setup
	$(BIN)/python -m pytest -q --device=$* tests/test_stateful.py

test-long: setup  ## the tests that take minutes
	$(BIN)/python -m pytest -q -m long

test-memory: setup  ## every kernel in the emulator, under AddressSanitizer: no byte outside of an array is read
	LD_PRELOAD=$$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m pytest -q --capture=sys -k "not broken" tests/test_device_kernels.py

test-neon:  ## the CPU kernels of arm64, in QEMU; CONTRIBUTING says what it takes
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu" PROPTEST_CASES=4 \
		cargo test -p pagoda-cpu --target aarch64-unknown-linux-gnu --lib -- --skip steady_state

loom:  ## every interleaving of a copying thread with the core
	RUSTFLAGS="--cfg loom" cargo test -q -p pagoda-core --test loom --target-dir target/loom

sim:  ## ten million operations of simulated caches over a disk with faults, counted, and a million flipped bits; docs/reliability.md
	PAGODA_SIM_OPS=$${PAGODA_SIM_OPS:-10000000} \
		cargo test --release -p pagoda-sim --test simulation no_wrong_byte -- --nocapture
	PAGODA_FLIPS=1000000 cargo test --release -p pagoda-store --lib a_flipped_bit

check: check-rust check-python  ## format, lints, types, stubs

check-rust:
	cargo fmt --check
	cargo clippy --workspace --all-targets --features $(FEATURES) -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

check-python: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest pagoda._core

check-macos: setup  ## lints and types for macOS, on any machine; CONTRIBUTING says what it takes
	cargo clippy --target aarch64-apple-darwin -p pagoda-py -- -D warnings
	$(BIN)/mypy --platform darwin python

format:  ## put everything into shape
	cargo fmt
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

kernels: setup  ## compile the device kernels that models ask for, for sm_80 to sm_120; CONTRIBUTING says how long
	$(BIN)/python tools/compile_kernels.py

bench: setup  ## most figures of docs/benchmarks, on this machine
	cargo bench --quiet -p pagoda-cpu --bench decode
	cargo run --quiet --release --manifest-path benches/bookkeeping/Cargo.toml --target-dir target/bookkeeping
	$(BIN)/pagoda bench
	$(BIN)/pagoda bench depth
	$(BIN)/pagoda bench quality

bench-gpu: setup  ## the figures of docs/benchmarks/gpu.md; needs a GPU
	$(BIN)/python -m pip install --quiet "torch>=2.6"
	benches/gpu/run.sh target/gpu

clean:  ## remove what the targets made
	rm -rf $(VENV) target dist python/pagoda/_core.abi3.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
