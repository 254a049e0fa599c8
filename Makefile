# make venv | demo | test | test-slow | test-vllm | newcomer | fuzz | lint | gpu | docs | matrix | release      Needs Python 3.11 or newer, pip, make and g++; nothing else.
# make TORCH_INDEX=<url> <target>                      takes torch from that index (a CPU-only one, for example).
# make TORCH=2.11.0 test                               the same in .venv-2.11.0, with the pins of constraints-2.11.0.txt.
# make PY=python3 gpu                                  runs the GPU tests in an interpreter that has everything already.

SHELL := /bin/bash
PYTHON ?= $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))
PINS := $(if $(TORCH),constraints-$(TORCH).txt) constraints.txt
BIN := $(VENV)/bin
PY ?= $(BIN)/python
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.stamp-venv
DOCS_STAMP := $(VENV)/.stamp-docs
NEWCOMER_STAMP := $(VENV)/.stamp-newcomer
READY := $(if $(filter $(BIN)/python,$(PY)),$(STAMP))
TORCH_INDEX ?=
PYTEST_ARGS ?=
GPU_WORKERS ?= 14
HALF ?=
SECONDS ?= 600
SEED ?= 0
JOBS ?= $(shell nproc)
FUZZ_ARGS ?=
MATRIX_ARGS ?=
NEWCOMER_ARGS ?=

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Threads that wait sleep: with anything else on the cores, spinning ones cost a factor of two to five.
export OMP_WAIT_POLICY := passive

.PHONY: help venv demo test test-slow test-vllm vllm engine-tables newcomer fuzz lint gpu docs matrix release clean
help:
	@sed -n '1,4s/^# //p' Makefile

venv: $(STAMP)

# torch comes alone, so that TORCH_INDEX holds for nothing else; the last line brings what torch itself needs.
# Of two pins of one name, the first file's counts.
$(STAMP): $(PINS) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	awk -F== '!seen[$$1]++' $(PINS) > $(VENV)/constraints.txt
	$(PIP) install -q -c $(VENV)/constraints.txt setuptools
	$(PIP) install -q -c $(VENV)/constraints.txt --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) install -q -c $(VENV)/constraints.txt --no-build-isolation -e '.[dev,demo,report,serve]'
	touch $@

demo: $(READY)
	$(PY) -m mmqc.cli demo --out out

# TRITON_INTERPRET has to be set before anything imports triton; the CPU path of torch.compile does not use triton.
# A process a core: threads of their own would only wait for each other.  Workers keep to their files until one has none left,
# so that what a file's tests share is made once.
RUN_TESTS := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist worksteal
test: $(READY)
	$(RUN_TESTS) -m 'not gpu and not slow' $(PYTEST_ARGS)

test-slow: $(READY)
	$(RUN_TESTS) -m 'not gpu and slow' $(PYTEST_ARGS)

# vLLM's Python, without the GPU that its kernels need, on top of this environment: constraints-vllm.txt says what of its requirements.
VLLM ?= 0.32.0 0.33.0
VLLM_PYTHONS := $(foreach version,$(VLLM),.venv-vllm-$(version)/bin/python)
vllm: $(VLLM_PYTHONS:/bin/python=/.stamp)

.venv-vllm-%/.stamp: constraints-vllm.txt $(STAMP)
	$(BIN)/python -m venv --without-pip .venv-vllm-$*
	$(PIP) install -q --no-deps --upgrade --target $$(.venv-vllm-$*/bin/python -c $(PURELIB)) vllm==$* -r constraints-vllm.txt
	$(BIN)/python -c $(PURELIB) > $$(.venv-vllm-$*/bin/python -c $(PURELIB))/below.pth
	touch $@
PURELIB := 'import sysconfig; print(sysconfig.get_path("purelib"))'

# The engine's own config classes, linears and model classes against the tables, against what save_pretrained(engine=...) writes,
# and with mmqc's linears in them.
test-vllm: $(READY) vllm
	MMQC_VLLM="$(abspath $(VLLM_PYTHONS))" TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile \
	    tests/engines_tests/test_real_vllm.py tests/vllm_tests/test_method.py tests/vllm_tests/test_loader.py \
	    tests/vllm_tests/test_lent.py $(PYTEST_ARGS)

# Their tables anew, where a version was added or the questions changed.
engine-tables: $(READY) vllm
	$(PY) -m benchmarks.engines.make_tables $(VLLM_PYTHONS)

# What somebody tries who has just installed it, on a model of their own: every row works, or is refused in one clear line.
# NEWCOMER_ARGS=--write puts them on the page.
newcomer: $(READY) $(if $(READY),$(NEWCOMER_STAMP))
	$(PY) -m tests.newcomer $(NEWCOMER_ARGS)

$(NEWCOMER_STAMP): $(STAMP)
	$(PIP) install -q -c $(VENV)/constraints.txt --no-build-isolation -e '.[eval,formats,lora,newcomer]'
	touch $@

# Random programs against the float model; goes on where the last run of this SEED stopped, and saves what fails in tests/fuzz/cases.
fuzz: $(READY)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m tests.fuzz --seconds $(SECONDS) --seed $(SEED) --jobs $(JOBS) $(FUZZ_ARGS)

lint: $(STAMP)
	@failed=0; \
	for check in 'ruff check .' 'ruff format --check .' lint-imports pyright; do \
	    echo "== $$check"; $(BIN)/$$check || failed=1; \
	done; exit $$failed

# Compute-sanitizer over every kernel is one of the tests.  The last line says how many of all tests ran, also where --seconds,
# Ctrl-C or a SIGTERM ended them.
gpu: $(READY)
	$(PY) -m pytest -m gpu -n $(GPU_WORKERS) --dist worksteal --seed=fresh $(if $(HALF),--half $(HALF)) $(PYTEST_ARGS)

$(DOCS_STAMP): $(STAMP)
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[docs]'
	touch $@

docs: $(DOCS_STAMP)
	$(BIN)/mkdocs build --strict

# The tests in one environment after the other, each built and deleted (gigabytes of CUDA builds, hours): docs/results/versions.md.
matrix:
	$(PYTHON) -m benchmarks.surveys.versions $(MATRIX_ARGS)

# Built, checked, installed where nothing else is, and run there; uploads nothing.
release: $(READY)
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[release]'
	rm -rf dist out/release
	$(PY) -m build --no-isolation --outdir dist
	$(PY) -m twine check --strict dist/*
	@size=$$(stat -c %s dist/*.whl); echo "wheel: $$size bytes"; test $$size -lt 12000000
	$(PYTHON) -m venv out/release
	$(if $(TORCH_INDEX),out/release/bin/python -m pip install -q --no-deps --index-url $(TORCH_INDEX) torch)
	out/release/bin/python -m pip install -q -c constraints.txt "$$(ls dist/*.whl)[demo,report]"
	out/release/bin/python -m pip check
	cd out/release && bin/mmqc --version && bin/mmqc demo --questions 20 --out report

clean:
	rm -rf out site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
