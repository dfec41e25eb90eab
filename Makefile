# make demo    the main job: a small trained model completes code
# make test    the full tests, those with vLLM included
# make test-slow  tests of many minutes: two ranks, older versions of vLLM, whole sources
# make check   style, types and the fast tests, under 3 minutes
# make format  repair the style
# make compile-all  build every kernel for every chip with the Triton of the environment, and record what came out
# make emulate  run the kernels' tests on emulated chips where the emulator is here, and record what passed
# make readme  bring the table of devices in README.md up to date
# make wheel   build the wheel into dist/
# make clean   remove what these targets made
#
# PYTHON=...  the Python to start from (3.11 or later). If it has torch, that torch is used and never replaced.
# TORCH=...   what pip installs where it has none. A plain `torch` would take the newest build, several GB with CUDA.
# VLLM=...    the vLLM of its tests, which run in an environment of their own, on the CPU

PYTHON ?= python3
TORCH ?= torch==2.13.0
VLLM ?= vllm==0.33.0
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
# The other versions that the plug-in supports.
OLDER_VLLM := 0.32.0 0.31.0 0.30.0 0.29.0
PYTEST_ARGS ?=

# -P keeps the repository root off sys.path, where the folder triton_kernels/ would answer for Triton's package.
# Tools run as modules: in an environment that inherits packages, their scripts may lie elsewhere.
RUN := $(VENV)/bin/python -P
ENVIRONMENT := $(PYTHON) .ci/environment.py $(VENV) --torch '$(TORCH)'
# Whole-model, compilation and server tests, those of broken copies, and attention and memory take minutes;
# `make check` leaves them to `make test`.
LONG_TESTS := tests/model tests/compile tests/vllm_plugin tests/test_memory.py tests/test_emulated.py \
	tests/kernels/test_rel_attention.py tests/kernels/test_rel_attention_decode.py \
	tests/kernels/test_kv_cache.py tests/kernels/test_short_conv.py tests/test_benchmark_gpu.py \
	tests/test_benchmark_emulated.py tests/test_selfcheck.py

.NOTPARALLEL:
.PHONY: help demo test test-vllm test-slow check compile-all emulate lint types format readme wheel clean
.DELETE_ON_ERROR:

help:
	@awk '!/^#/ { exit } { sub(/^# ?/, ""); print }' Makefile

# A stamp says that the environment holds what this pyproject.toml asks for, so nothing is downloaded twice.
$(VENV)/run.stamp: pyproject.toml .ci/environment.py
	$(ENVIRONMENT)
	@touch $@

$(VENV)/test.stamp: pyproject.toml .ci/environment.py
	$(ENVIRONMENT) --extra test
	@touch $@ $(VENV)/run.stamp

demo: $(VENV)/run.stamp
	$(VENV)/bin/inkling demo

$(VLLM_VENV)/test.stamp: pyproject.toml .ci/environment.py .ci/vllm_environment.py
	$(PYTHON) .ci/vllm_environment.py $(VLLM_VENV) --torch '$(TORCH)' --vllm '$(VLLM)'
	@touch $@

test: $(VENV)/test.stamp test-vllm
	$(RUN) -m pytest -m "not gpu and not slow" --ignore=tests/vllm_plugin $(PYTEST_ARGS)

# Tests with vLLM itself, in an environment that has its wheel.
test-vllm: $(VLLM_VENV)/test.stamp
	$(VLLM_VENV)/bin/python -P -m pytest -m "not gpu and not slow" tests/vllm_plugin

test-slow: $(VENV)/test.stamp $(VLLM_VENV)/test.stamp
	$(RUN) -m pytest -m "slow and not gpu" --ignore=tests/vllm_plugin $(PYTEST_ARGS)
	$(VLLM_VENV)/bin/python -P -m pytest -m slow tests/vllm_plugin
	for version in $(OLDER_VLLM); do \
		$(MAKE) test-vllm VLLM=vllm==$$version VLLM_VENV=$(VLLM_VENV)-$$version || exit 1; \
	done

check: lint types
	$(RUN) -m pytest -m "not gpu and not slow" $(addprefix --ignore=,$(LONG_TESTS)) --ignore-glob='*_mutants.py' $(PYTEST_ARGS)

compile-all: $(VENV)/test.stamp
	$(RUN) tests/compile/harness.py --jobs 2

emulate: $(VENV)/test.stamp
	$(RUN) tests/emulate.py

lint: $(VENV)/test.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/test.stamp
	PYTHON=$(VENV)/bin/python bash .ci/typecheck

format: $(VENV)/test.stamp
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

readme: $(VENV)/run.stamp
	@mkdir -p build
	$(VENV)/bin/inkling explain --markdown > build/support.md
	sed -i -e '/support:begin/,/support:end/{//!d}' -e '/support:begin/r build/support.md' README.md

# Setuptools packs whatever an earlier build left under build/, deleted modules included.
wheel: $(VENV)/test.stamp
	rm -rf build
	$(RUN) -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(addprefix $(VLLM_VENV)-,$(OLDER_VLLM)) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
