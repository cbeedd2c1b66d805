# make demo    train the digits classifier on every device      make lint     ruff
# make test    the whole test-suite                              make types    mypy
# make test-lag    the tests of faults on asynchronous devices
#
# The set-up is done once, in .venv. PYTHON=... picks the interpreter; PIP_FLAGS=... is handed to pip, for
# example PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" for torch without CUDA.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_FLAGS ?=
PIP = .venv/bin/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt

.PHONY: demo test test-lag lint types clean

demo: .venv/demo.stamp
	.venv/bin/python examples/data_parallel_digits.py

test: .venv/dev.stamp
	.venv/bin/python -m pytest

# Devices that are asynchronous as a GPU is, on the CPU: calls run later, on a thread of the worker.
test-lag: .venv/dev.stamp
	TORCHPMAP_TEST_LAG=1 .venv/bin/python -m pytest -n 2 tests/faults tests/runtime/test_timeouts.py \
		tests/runtime/test_waits.py tests/transforms/test_donation.py

lint: .venv/dev.stamp
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/dev.stamp
	.venv/bin/mypy

# torch goes first and pinned: without the pin pip takes the newest one, gigabytes of CUDA packages included.
.venv/torch.stamp: constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	touch $@

.venv/demo.stamp: .venv/torch.stamp pyproject.toml
	$(PIP) -e '.[examples]'
	touch $@

.venv/dev.stamp: .venv/torch.stamp pyproject.toml
	$(PIP) -e '.[examples,dev]'
	touch $@ .venv/demo.stamp

clean:
	rm -rf .venv outputs build dist .pytest_cache .mypy_cache .ruff_cache
