# `make demo` and `make test` set up .venv by themselves. `make ci` does what .ci/run does.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINE := build/pystd.engine
PROMPT ?= def fib(n):
PYTEST_ARGS ?=
# Tests start hundreds of processes: none of them compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

# pip takes more arguments from PIP_ARGS, for example an index with the CPU build of torch.
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt $(PIP_ARGS)

.PHONY: demo gpu-visit test rare soak museum fuzz creep overload identity scripts lowest lint types contracts docs ci clean clients bench-cpu

demo: $(VENV)/.compile
	@mkdir -p build
	$(BIN)/icc compile samples/pystd -o $(ENGINE) --target cpu --quant awq4 --force
	$(BIN)/icc run $(ENGINE) -p '$(PROMPT)' --max-tokens 96

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -q $(PYTEST_ARGS)

# Which tests are rare, so that `make test` takes minutes (tests/rare.py): chosen anew by what a run of all of them takes,
# or, with RARE= (empty), among those that `make test` runs, in its time.
RARE ?= all
rare: $(VENV)/.dev
	rm -rf build/cpu_seconds
	ICC_RARE=$(RARE) ICC_CPU_SECONDS=build/cpu_seconds PYTHONPATH=tests $(MAKE) test 'PYTEST_ARGS=-p cpu_seconds'
	$(BIN)/python tests/rare.py build/cpu_seconds

# All tests at the sizes of a night (tests/sizes.py): 10,000 requests of which a third are aborted, 5,000 examples per
# operation, the server's real time limits, every family on every target, libraries as they are shipped. In pieces of
# MINUTES: call it again until it says that every file has passed; it goes on where it stopped, by build/soak.json.
MINUTES ?= 20
soak: $(VENV)/.dev
	$(BIN)/python tests/soak.py --minutes $(MINUTES) $(SOAK_FILES)

# Bugs that are put in, each with the test that must find it (tests/museum). SHARD=1/4 is every fourth of them.
SHARD ?= 1/1
museum: $(VENV)/.dev
	$(BIN)/python tests/museum/museum.py --minutes $(MINUTES) --shard $(SHARD) --out benchmarks/results/museum.md

# Inputs nobody meant, for MINUTES, to the parser TARGET, or to each in turn (tests/fuzz).
TARGET ?=
fuzz: $(VENV)/.dev
	$(BIN)/python tests/fuzz/fuzz.py $(TARGET) --minutes $(MINUTES)

# A server under load for MINUTES: do memory, files, threads or KV blocks creep? CREEP_ENGINE is another engine.
CREEP_ENGINE ?= $(ENGINE)
creep: $(VENV)/.dev
	@mkdir -p build
	test -e $(CREEP_ENGINE) || $(BIN)/icc compile samples/pystd -o $(ENGINE) --target native --quant rtn4
	$(BIN)/python benchmarks/serve/creep.py $(CREEP_ENGINE) --minutes $(MINUTES) --check

# Ten minutes of each overload, against the goals.
overload: $(VENV)/.dev
	@mkdir -p build
	$(BIN)/icc compile samples/pystd -o $(ENGINE) --target native --quant rtn4 --force
	$(BIN)/python benchmarks/serve/limits.py $(ENGINE) --seconds 600 --turns 20 --max-wait 0.05 --attacks 3000 --check

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/lint_docstrings.py

types: $(VENV)/.dev
	$(BIN)/python tests/lint_types.py

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

# Reads only the packages of the checkout: a search of build/ and .venv takes gigabytes.
docs: $(VENV)/.dev
	$(INSTALL) mkdocs-material 'mkdocstrings[python]'
	@rm -rf build/api && mkdir -p build/api/icc
	@ln -s $(addprefix $(CURDIR)/,__init__.py compiler passes runtime) build/api/icc
	$(BIN)/python -m mkdocs build --strict

# Are kernels, packed weights and tokens what they were? CASES are patterns; all are 300 engines.
CASES ?= '*'
identity: $(VENV)/.dev
	$(BIN)/python benchmarks/identity.py check $(CASES)

# Does every script of benchmarks/ still start?
scripts: $(VENV)/.dev
	$(BIN)/python benchmarks/start_all.py

# The sample is compiled, run and served with the lowest versions that pyproject.toml allows.
lowest:
	tests/packaging/lowest.sh $(PYTHON) build/lowest

ci:
	.ci/run

# Other people's clients, each in an environment of its own in build/clients, against a scripted model.
clients: $(VENV)/.dev
	$(BIN)/python benchmarks/clients/run.py

# All that only a GPU can tell, in order of worth, on a machine that has one: with its own Python, torch and Triton.
# `make visit-objects TARGET=h200` beforehand, on any machine, makes the kernels and gathers the packages that the GPU
# machine may lack (for its Python, VISIT_PYTHON): .whl and build/visit-objects travel along.
VISIT_PYTHON ?= 3.12
VISIT_WHEELS := msgspec minijinja gguf expecttest
gpu-visit:
	@if [ -d .whl ]; then $(PYTHON) -m pip install -q --no-index --no-deps --upgrade --target build/visit-site .whl/*.whl; fi
	PYTHONPATH=$(CURDIR)/build/visit-site ICC_CARRIED_OBJECTS=$(CURDIR)/build/visit-objects \
	    $(PYTHON) benchmarks/gpu_visit.py --minutes $(MINUTES) $(VISIT_ARGS)

visit-objects: $(VENV)/.dev
	$(PIP) download -q --no-deps --only-binary=:all: --python-version $(VISIT_PYTHON) --implementation cp \
	    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	    -c constraints.txt -d .whl $(VISIT_WHEELS)
	$(BIN)/python benchmarks/gpu_visit.py --target $(TARGET) --prepare build/visit-objects

# The peers have an environment of their own; torch 2.13.0 because a newer one brings CUDA. Takes about 20 minutes.
PEERS := build/peers
ROUNDS ?= 5
AVX2 := -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF
bench-cpu: $(VENV)/.dev $(PEERS)/.made $(PEERS)-avx2/.made
	$(BIN)/python benchmarks/cpu/prepare.py build/cpu --peers $(PEERS) --avx2 $(PEERS)-avx2
	$(INSTALL) matplotlib==3.11.2
	$(BIN)/python benchmarks/cpu/bench.py build/cpu/bench.json --rounds $(ROUNDS) --out benchmarks/results/cpu

$(PEERS)/.made: benchmarks/cpu/peers.txt
	$(PYTHON) -m venv $(PEERS)
	CMAKE_ARGS='-DGGML_NATIVE=ON' $(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) -r benchmarks/cpu/peers.txt
	$(PEERS)/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

# Not from pip's cache, which would give the native build again.
$(PEERS)-avx2/.made: benchmarks/cpu/peers.txt
	$(PYTHON) -m venv $(PEERS)-avx2
	CMAKE_ARGS='$(AVX2)' $(PEERS)-avx2/bin/python -m pip --disable-pip-version-check install --quiet --no-cache-dir --no-binary llama-cpp-python \
	    $(PIP_ARGS) `grep llama-cpp-python $<`
	@touch $@

clean:
	rm -rf build $(VENV)

# Kernels are compiled by g++, or by the clang of PyPI's ziglang where there is none.
comma := ,
CXX_EXTRA := $(if $(shell command -v g++),,$(comma)zig)
# The stamps say what is installed; a change of the dependencies makes them old.
$(VENV)/.compile: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing icc and what it needs into $(VENV) (once)'
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation --editable '.[compile$(CXX_EXTRA)]'
	@touch $@

$(VENV)/.dev: $(VENV)/.compile
	$(INSTALL) --no-build-isolation --editable '.[compile,serve,dev]'
	@touch $@
