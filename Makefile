# Two commands on a fresh machine with Python 3.11+ and nothing else: `make demo` and `make test`.
PYTHON ?= python3
EXTRAS ?=
VENV := .venv
BIN := $(VENV)/bin
comma := ,

.PHONY: demo test test-vllm vllm-env lint check bench train-tiny clean

# Numba's threads are not used; BLAS threads only fight the layers' own.
export OMP_NUM_THREADS ?= 1

$(VENV)/.installed-%: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing coterie into $(VENV) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$*$(if $(EXTRAS),$(comma)$(EXTRAS))]"
	@touch $@

demo: $(VENV)/.installed-models
	@$(BIN)/coterie demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# An environment of its own for vLLM (2.5 GB), which the tests of the plugin start; without it they are skipped.
VLLM_VENV := .venv-vllm

$(VLLM_VENV)/.installed: pyproject.toml tests/integration/constraints-vllm.txt tests/integration/vllm_env.py
	@$(PYTHON) tests/integration/vllm_env.py $(VLLM_VENV)
	@touch $@

vllm-env: $(VLLM_VENV)/.installed

test-vllm: $(VENV)/.installed-test $(VENV)/.installed-models vllm-env
	$(BIN)/python -m pytest -n 0 tests/integration/test_vllm.py  # in one process, so that engines start once

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/placement.py
	$(BIN)/python benchmarks/pruning.py
	$(BIN)/python benchmarks/partitioner.py
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/synthetic.py
	$(BIN)/python benchmarks/offload_policies.py

# Trains the two models that ship (src/coterie/data/models) and the dense ones they are compared with; MINUTES for each.
MINUTES ?= 60
train-tiny: $(VENV)/.installed-models
	MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8589934592 OMP_WAIT_POLICY=PASSIVE \
		$(BIN)/python -m training.train_tiny all --minutes $(MINUTES)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist coterie-demo
