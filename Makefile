# One virtual environment, .venv, serves the demo, the tests and development.
#
#   make demo     build, fetch the default model, let it write
#   make test     the test suite
#   make test-all  every combination of the tests' parameters, and what takes long
#   make test-fast  the quick tests, for every edit
#   make test-isas  the CPU's tests once per instruction set that this machine has
#   make lint     formatting, linting, types
#   make docs     the documentation's pages, into build/docs
#   make figures  the figures of the documentation: charts, diagrams, terminal pictures
#   make cuda     compile the CUDA kernels (needs nvcc, no GPU), check registers, spills, instructions and bounds
#   make emulation  run the CUDA kernels on the CPU under the address and thread sanitizers
#   make sanitize   run the CPU kernels under the address, undefined-behaviour and thread sanitizers
#   make fuzz       read mutated files and requests, each kind for FUZZ_SECONDS (60)
#   make traces   random traces of the engine, TRACES (10000) of them
#   make clients    other people's clients against the server; needs the package registries, Node if it is there
#   make converter  read the GGUF files that llama.cpp's own converter makes; needs the package registries
#   make ray      the application of Ray Serve in a Ray of this machine; needs the package registries
#   make gpu-check  build, test and measure on a GPU; results in bench/out
#   make bench    end-to-end speed of this machine

PYTHON ?= python3
# The version the suite is run with; any torch from 2.11 on works. Set TORCH= to keep what is installed.
TORCH ?= torch==2.13.0
CUDA_ARCHS ?= 80;90a
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 0
TRACES ?= 10000
WORKERS := -n auto --dist worksteal

VENV := .venv
BIN := $(VENV)/bin
# The environment's own cmake and ninja, not older ones of the system.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Modules are compiled when they are first imported, and kept; most of torch's and transformers' never are.
export PIP_COMPILE := 0
# Some environments forbid Python to keep what it compiled: each process would then compile all of torch again.
export PYTHONDONTWRITEBYTECODE :=
SOURCES := setup.py CMakeLists.txt pyproject.toml $(shell find csrc -type f)

.PHONY: demo test test-all test-fast test-isas lint format docs figures cuda emulation sanitize fuzz traces clients converter ray gpu-check bench clean

demo: $(VENV)/.installed
	$(BIN)/fastinfer pull smollm2-135m-instruct
	$(BIN)/fastinfer generate "Why is the sky blue?" --temperature 0 --max-tokens 128

# The number of workers is chosen in tests/conftest.py; PYTEST_ARGS="-n 0" runs all in one process.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test
	FASTINFER_CASES=all $(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

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

# Each target has FUZZ_SECONDS, and as many run at a time as there are cores; another FUZZ_SEED gives other cases.
fuzz: $(VENV)/.installed-test
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

# The clients' environment lies on top of .venv, so that torch is not installed again, and clients may need other versions
# of what both have.
CLIENTS := build/clients
clients: $(CLIENTS)/.installed
	FASTINFER_NODE_PACKAGES=$(abspath $(CLIENTS)) $(CLIENTS)/venv/bin/python -m pytest -n 0 -W ignore tests/server/clients $(PYTEST_ARGS)

$(CLIENTS)/.installed: $(VENV)/.installed-test tests/server/clients/requirements.txt tests/server/clients/node/package.json
	mkdir -p $(CLIENTS)
	test -x $(CLIENTS)/venv/bin/python || $(BIN)/python -m venv $(CLIENTS)/venv
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	  > "$$($(CLIENTS)/venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth"
	$(CLIENTS)/venv/bin/pip install --quiet -r tests/server/clients/requirements.txt
	cp tests/server/clients/node/package.json $(CLIENTS)
	if command -v npm > /dev/null; then npm install --silent --no-audit --no-fund --prefix $(CLIENTS); fi
	touch $@

# llama.cpp's converter, whose source comes with llama-cpp-python.
CONVERTER := build/converter
converter: $(CONVERTER)/.installed
	PYTHONPATH=$(CONVERTER)/llama.cpp:$(CONVERTER)/llama.cpp/gguf-py \
	  $(BIN)/python -m pytest -n 0 tests/models/test_gguf_converter.py $(PYTEST_ARGS)

$(CONVERTER)/.installed: $(VENV)/.installed-test
	mkdir -p $(CONVERTER)/llama.cpp
	$(BIN)/pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(CONVERTER) llama-cpp-python==0.3.36
	tar -xzf $(CONVERTER)/llama_cpp_python-0.3.36.tar.gz --directory $(CONVERTER)/llama.cpp --strip-components 3 \
	  llama_cpp_python-0.3.36/vendor/llama.cpp/conversion llama_cpp_python-0.3.36/vendor/llama.cpp/gguf-py
	touch $@

# Ray's environment likewise lies on top of .venv.
RAY := build/ray
ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest -n 0 -W ignore tests/ray_serve $(PYTEST_ARGS)

$(RAY)/.installed: $(VENV)/.installed-test
	test -x $(RAY)/bin/python || $(BIN)/python -m venv $(RAY)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	  > "$$($(RAY)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth"
	$(RAY)/bin/pip install --quiet "fastinfer[ray]"
	touch $@

# Each request must get the text that it gets alone; 10,000 traces are about 100,000 steps.
traces: $(VENV)/.installed-test
	FASTINFER_TRACES=$(TRACES) $(BIN)/python -m pytest $(WORKERS) tests/engine/test_engine_traces.py $(PYTEST_ARGS)

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
