# make demo    train the digits classifier on every device      make lint     ruff
# make test    every test, some cases of each                    make types    mypy
# make test FILES=tests/trace    the tests of a folder, of a file, or one (file::name)
# make test-all    every case of every test                      make test-lag    faults on asynchronous devices
# make docs    the site, into docs/_build/html
# make bench   the table of bars, in about eight minutes (QUICK=1: two); jax is measured too where it is installed
# make test-gpu    the suite on a GPU, into outputs/gpu (OUTPUT=... is another folder)
#
# The set-up is done once, in .venv. PYTHON=... picks the interpreter; PIP_FLAGS=... is handed to pip, for
# example PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" for torch without CUDA.
#
# TORCH=2.15.0 does all this with another torch, in an environment of its own: .venv-2.15.0, or
# .venv-2.15.0-python3.13 for a PYTHON=... that is one. The other packages are then the newest, not those pinned.
# TORCH=nightly is last night's.

GIVEN_PYTHON := $(filter-out file undefined default,$(origin PYTHON))
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_FLAGS ?=
TORCH ?=
ifeq ($(TORCH),)
VENV := .venv
PINS := -c constraints.txt
else
NIGHTLY := --pre --extra-index-url https://download.pytorch.org/whl/nightly/cpu
NAME_PYTHON := import sys; print("-python%d.%d" % sys.version_info[:2])
VENV := .venv-$(TORCH)$(if $(GIVEN_PYTHON),$(shell $(PYTHON) -c '$(NAME_PYTHON)'))
PINS := $(if $(filter nightly,$(TORCH)),$(NIGHTLY) torch,torch==$(TORCH))
endif
# The tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

PIP = $(VENV)/bin/python -m pip install --quiet $(PIP_FLAGS) $(PINS)

.PHONY: demo hello test test-all test-lag test-gpu bench docs lint types clean

demo: $(VENV)/demo.stamp
	$(VENV)/bin/python examples/data_parallel_digits.py

hello: $(VENV)/demo.stamp
	$(VENV)/bin/python examples/hello_pmap.py
	$(VENV)/bin/python examples/compose.py

FILES ?=
test: $(VENV)/dev.stamp
	$(VENV)/bin/python -m pytest $(FILES)

test-all: export TORCHPMAP_TEST_ALL = 1
test-all: test

# Devices that are asynchronous as a GPU is, on the CPU: calls run later, on a thread of the worker.
test-lag: $(VENV)/dev.stamp
	TORCHPMAP_TEST_LAG=1 $(VENV)/bin/python -m pytest -n 2 tests/faults tests/runtime/test_timeouts.py \
		tests/runtime/test_waits.py tests/runtime/test_torchrun.py tests/transforms/test_donation.py

# Needs torch, numpy, cloudpickle and pytest, and no network: where .venv is not set up, GPU_PYTHON has them.
GPU_PYTHON ?= $(shell test -x $(VENV)/bin/python && echo $(VENV)/bin/python || command -v python3)
OUTPUT ?= outputs/gpu
test-gpu:
	PYTHONPATH=. $(GPU_PYTHON) tests/gpu.py --output $(OUTPUT)

QUICK ?=
bench: $(VENV)/demo.stamp
	$(VENV)/bin/python benchmarks/bars.py $(if $(QUICK),--quick)

# -T shows where an error of the build comes from; any warning is an error.
docs: $(VENV)/docs.stamp
	$(VENV)/bin/python docs/site/pages.py docs/_build/pages
	$(VENV)/bin/python -m sphinx -q -T -W --keep-going -c docs/site docs/_build/pages docs/_build/html

lint: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/dev.stamp
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -q -k mypy tests/programs/test_typing.py

# torch goes first and pinned: without the pin pip takes the newest one, gigabytes of CUDA packages included.
$(VENV)/torch.stamp: constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH),,torch==2.13.0)
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) -e '.[examples]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) -e '.[examples,dev]'
	touch $@ $(VENV)/demo.stamp

$(VENV)/docs.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) -e '.[examples,docs]'
	touch $@ $(VENV)/demo.stamp

clean:
	rm -rf .venv .venv-* outputs build dist docs/_build .pytest_cache .mypy_cache .ruff_cache
