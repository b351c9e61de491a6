# One virtual environment, .venv, serves the demo, the tests and development.
#
#   make demo     build, fetch the default model, let it write
#   make test     the whole test suite
#   make test-fast  the quick tests, for every edit
#   make test-isas  the CPU's tests once per instruction set that this machine has
#   make lint     formatting, linting, types
#   make docs     the documentation's pages, into build/docs
#   make figures  the figures of the documentation: charts, diagrams, terminal pictures
#   make cuda     compile the CUDA kernels (needs nvcc, no GPU), check registers, spills and instructions
#   make emulation  run the CUDA kernels on the CPU under the address and thread sanitizers
#   make sanitize   run the CPU kernels under the address, undefined-behaviour and thread sanitizers
#   make fuzz       read mutated files and requests for FUZZ_SECONDS (60)
#   make gpu-check  build, test and measure on a GPU; results in bench/out
#   make bench    end-to-end speed of this machine

PYTHON ?= python3
# The version the suite is run with; any torch from 2.11 on works. Set TORCH= to keep what is installed.
TORCH ?= torch==2.13.0
CUDA_ARCHS ?= 80;90a
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 0
WORKERS := -n auto --dist worksteal

VENV := .venv
BIN := $(VENV)/bin
# The environment's own cmake and ninja, not older ones of the system.
export PATH := $(CURDIR)/$(BIN):$(PATH)
SOURCES := setup.py CMakeLists.txt pyproject.toml $(shell find csrc -type f)

.PHONY: demo test test-fast test-isas lint format docs figures cuda emulation sanitize fuzz gpu-check bench clean

demo: $(VENV)/.installed
	$(BIN)/fastinfer pull smollm2-135m-instruct
	$(BIN)/fastinfer generate "Why is the sky blue?" --temperature 0 --max-tokens 128

# As many workers as there are cores and memory for (tests/conftest.py); PYTEST_ARGS="-n 0" runs all in one process.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(WORKERS) -m "not emulated and not avx512 and not slow" $(PYTEST_ARGS)

test-isas: $(VENV)/.installed-test
	$(BIN)/python tests/run_isas.py $(WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc examples tests/emulation tests/sanitizers -name '*.h' -o -name '*.cpp' -o -name '*.cu')

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find csrc examples tests/emulation tests/sanitizers -name '*.h' -o -name '*.cpp' -o -name '*.cu')

# Offline, but for the tools' own installation.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Charts need matplotlib, diagrams npx and a Chromium; the terminal pictures show the speed of this machine.
figures: $(VENV)/.installed-test
	$(BIN)/python docs/make_figures.py

# Proves that the CUDA half compiles, links and imports; the result is a wheel in build/cuda. The CPU kernels are those
# of the build in place.
cuda: $(VENV)/.installed-cuda
	FASTINFER_CUDA_ARCHS="$(CUDA_ARCHS)" FASTINFER_BUILD=cuda FASTINFER_CPU_OBJECTS=1 $(BIN)/pip wheel . --no-deps --no-build-isolation -w build/cuda
	$(BIN)/python -m zipfile -e build/cuda/fastinfer-*.whl build/cuda/unpacked
	PYTHONPATH=build/cuda/unpacked $(BIN)/python -c "import torch; from fastinfer import _C; print(_C.build_info())"
	$(BIN)/python cmake/check_cuda_build.py

# The emulated tests in the builds with sanitizers; `make test` runs those of the plain build.
emulation: $(VENV)/.installed-test
	$(BIN)/python tests/emulation/sanitize.py

# FASTINFER_CPU_ISA names the instruction set; AVX2 if it is not set.
sanitize: $(VENV)/.installed-test
	$(BIN)/python tests/sanitizers/run.py $(PYTEST_ARGS)

# All targets share FUZZ_SECONDS; another FUZZ_SEED gives other cases.
fuzz: $(VENV)/.installed-test
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

# Uses the python, torch and toolkit that are there, offline; see bench/gpu_check.py for its stages.
gpu-check:
	$(PYTHON) bench/gpu_check.py --out bench/out

bench: $(VENV)/.installed
	$(BIN)/fastinfer bench

clean:
	rm -rf build $(VENV) python/fastinfer/_C.*.so python/fastinfer/include python/fastinfer/lib python/*.egg-info

# The extension is built in place against the torch of the environment, so that a second build is incremental.
$(VENV)/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH) "setuptools>=77" cmake ninja pybind11
	$(BIN)/pip install --quiet --no-build-isolation --editable .
	touch $@

# The package is installed, so that only what an extra adds is.
$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet "fastinfer[test]"
	touch $@

$(VENV)/.installed-cuda: $(VENV)/.installed
	$(BIN)/pip install --quiet "fastinfer[cuda]"
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/pip install --quiet "fastinfer[lint]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/pip install --quiet "fastinfer[docs]"
	touch $@
