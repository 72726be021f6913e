# The commands of this project; each sets up first (.venv, pinned packages, demo data), which is skipped when up to date;
# the demos without the packages of tests, checkers and documents.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup setup-run demo demo-gpt test test-full test-upstream test-bridge test-oldest check claims docs clean

# Tests and runs start many processes: what one has compiled, the others load.
unexport PYTHONDONTWRITEBYTECODE

PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
# Files of tests side by side, so that what a file's tests share is made once, in the order of tests/conftest.py.
SIDE_BY_SIDE := -n $(or $(WORKERS),2) --dist loadfile --no-loadscope-reorder
# Printed at the end, which the continuous integration keeps with its log: which tests to shorten or to begin with.
LONGEST := --durations 30 --durations-min 1
CALL_TORCH := $(addprefix tests/,cpu data megatron modules patches rehearsal runtime tools)
# At the end of a demo: the same samples padded, packed into rows, and planned.
COMPARE := $(PYTHON) benchmarks/throughput/run.py --demo
# Every warning in the native core's sources is an error; in the headers of Python and nanobind it is not ours to mend.
COMPILER := $(if $(shell command -v $(CXX)),$(CXX),$(PYTHON) -m ziglang c++)
HEADERS = $(shell $(PYTHON) -c 'import nanobind, sysconfig; print("-isystem", nanobind.include_dir(), "-isystem", sysconfig.get_path("include"))')
CORE = $(wildcard csrc/*.* csrc/*/*)
CHECK_CORE = $(COMPILER) -std=c++20 -fvisibility=hidden -fsyntax-only -Wall -Wextra -Werror $(HEADERS) -Icsrc csrc/*.cpp csrc/*/*.cpp
# A link that leads nowhere is an error.
DOCS := $(PYTHON) -m sphinx --fail-on-warning --quiet --conf-dir docs . build/docs
TRAIN := OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 2
# The demos' two ranks share the device of a machine with one GPU, which takes gloo; without a GPU it is gloo anyway.
SHARED := $(if $(filter 0 1,$(shell nvidia-smi -L 2>/dev/null | wc -l)),--distributed-backend gloo)

help:
	@echo "make demo       train a multi-task T5 on two pipeline stages, on this machine"
	@echo "make demo-gpt   the same with Megatron's GPT"
	@echo "make test       the test suite (make test-full: with the slow tests, and more examples)"
	@echo "make test-upstream CHECKOUTS='FOLDER …'   tests of checkouts of Megatron-LM, one after another"
	@echo "make test-bridge   runs inside Megatron-Bridge, in an environment of its own, .venv-bridge"
	@echo "make test-oldest   the tests of whatever calls PyTorch, with the oldest one supported, in .venv-oldest"
	@echo "make check      lint, warnings of the native core, types, import order, size, documents"
	@echo "make claims     runs what benchmarks/claims.md says checks our claims"
	@echo "make docs       the documents as a site, in build/docs"
	@echo "make setup      only set up; make clean: remove what was built, but not .venv"

setup:
	@scripts/setup.sh

setup-run:
	@scripts/setup.sh run

demo: setup-run
	@$(TRAIN) pretrain_t5_multitask.py --dynapipe-config configs/demo_t5.yaml $(SHARED)
	@$(COMPARE) --model t5 --cost-model .demo/report/t5/cost-model.json -- $(SHARED)

demo-gpt: setup-run
	@$(TRAIN) pretrain_gpt_multitask.py --dynapipe-config configs/demo_gpt.yaml $(SHARED)
	@$(COMPARE) --model gpt --cost-model .demo/report/gpt/cost-model.json -- $(SHARED)

test: setup
	$(PYTEST) tests -m "not slow and not gpu" $(SIDE_BY_SIDE) $(LONGEST)

test-full: setup
	$(PYTEST) tests $(SIDE_BY_SIDE) $(LONGEST) --hypothesis-profile night

# CHECKOUTS="FOLDER FOLDER …", of Megatron-LM, one after another, whichever fails.
test-upstream: setup
	@test -n "$(CHECKOUTS)" || { echo 'error: expected CHECKOUTS="FOLDER …", checkouts of Megatron-LM, got none'; exit 2; }
	@for folder in $(CHECKOUTS); do MEGATRON_CHECKOUT=$$folder $(PYTEST) tests/upstream || failed="$$failed $$folder"; done; \
	test -z "$$failed" || { echo "error: failed with$$failed"; exit 1; }

# Beside the everyday suite: Megatron-Bridge brings packages that nothing else here needs.
test-bridge: setup
	@scripts/setup_beside.sh bridge
	.venv-bridge/bin/python -m pytest tests/megatron/bridge -m "bridge and not slow" $(SIDE_BY_SIDE) $(LONGEST)

# What everyday tests run with is the newest PyTorch; these rooms are all that call it.
test-oldest: setup
	@scripts/setup_beside.sh oldest
	.venv-oldest/bin/python -m pytest $(CALL_TORCH) -m "not slow and not gpu" $(SIDE_BY_SIDE)

check: setup
	$(CHECK_CORE)
	.venv/bin/clang-format --dry-run --Werror $(CORE)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTEST) tests/test_architecture.py -q
	$(PYTHON) -W ignore scripts/count_code.py
	$(PYTHON) scripts/count_docs.py
	$(DOCS)

claims: setup
	$(PYTHON) scripts/claims.py

docs: setup
	$(DOCS)

clean:
	rm -rf build dist .demo .venv-bridge .venv-oldest .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find megatron_dynapipe tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find megatron_dynapipe -name '_native*.so' -delete
	rm -f .venv/.setup/project  # the next command builds the native core again
