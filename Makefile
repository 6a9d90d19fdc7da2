# make verify and make test set up what they need in .venv and then run. make verify needs less, so it is soon done on a fresh machine.
#
# With an interpreter that already has what is needed (a GPU image without network, say):
#   make test PYTHON=python3 VENV=
# uses it as it is: nothing is made, nothing is installed, and lint is left out if ruff and mypy are not there.

PYTHON ?= python3
VENV ?= .venv

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
READY :=
LEAN :=
LINT := $(shell $(PYTHON) -c "import ruff, mypy; print('lint')" 2>/dev/null)
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
LEAN := $(VENV)/.ready-to-verify
LINT := lint
endif

CLI := $(RUN) -m pycuda_conv

# Tests start hundreds of processes. Where the environment forbids Python to keep what it compiled, each would compile all packages again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup launcher verify test lint bench ladder results check-results release docs wheel sdist clean
help:
	@echo "make verify   compute every kind of convolution here and compare with a float64 reference"
	@echo "make test     ruff, mypy, pytest"
	@echo "make bench    measure against torch; the figures go to build/"
	@echo "make ladder   time the steps of the course on this machine, on a GPU or on PoCL, and draw them in build/ladder.svg"
	@echo "make results  on a GPU, 20 minutes: measure all that the pages show, and write it into them; make check-results lists what is of other kernels"
	@echo "make release  on a GPU: tests, sanitizer, verify and all of make results on this commit, kept as docs/results/VERSION.json"
	@echo "make docs     build the documentation in build/docs; a warning is an error"
	@echo "make wheel    a wheel in dist/; make wheel GPU=sm_90a,sm_80 compiles the most used kernels for those GPUs into it"
	@echo "make sdist    the sources, with the tests and all that they need, in dist/"
	@echo "make lint     ruff and mypy only"
	@echo "make launcher build the launcher in C in place, for a checkout that is not installed; make setup builds it too"
	@echo "make setup    only make $(or $(VENV),the environment), with all that contributors need (some minutes, 2 GB);"
	@echo "              the others do it when setup.cfg or constraints.txt changed"
	@echo "make clean    remove $(or $(VENV),build files) and what builds and tests leave behind"
	@echo "ARGS=...      is passed on to verify, bench and pytest: make test ARGS='-k dgrad'"

setup: $(READY)

ifneq ($(READY),)
MADE_OF := setup.cfg setup.py $(wildcard pycuda_conv/runtime/*.c pycuda_conv/runtime/launch/*) pyproject.toml constraints.txt scripts/setup_env.sh
$(READY): $(MADE_OF)
	@PYTHON="$(PYTHON)" scripts/setup_env.sh "$(VENV)" test
	@touch $@ $(LEAN)
$(LEAN): $(MADE_OF)
	@PYTHON="$(PYTHON)" scripts/setup_env.sh "$(VENV)" verify
	@touch $@
endif

launcher: $(READY)
	$(RUN) setup.py -q build_ext --inplace

verify: $(LEAN)
	$(CLI) verify $(ARGS)

ladder: $(READY)
	$(RUN) scripts/ladder.py --plot build/ladder.svg $(ARGS)

bench: $(READY)
	@mkdir -p build
	$(CLI) bench --json build/bench.json --csv build/bench.csv $(if $(strip $(VENV)),--plots build) $(ARGS)

results: $(READY)
	$(RUN) -m pycuda_conv.tools.benchmarks.pages measure

check-results: $(LEAN)
	$(RUN) -m pycuda_conv.tools.benchmarks.pages

release: $(READY)
	$(RUN) scripts/release.py measure build/release
	$(RUN) scripts/release.py join build/release

SHIPPED := pycuda_conv/shipped
sdist: $(READY)
	$(RUN) -c "from setuptools.build_meta import build_sdist; print(build_sdist('dist'))"

wheel: $(READY)
	@rm -rf build/lib $(SHIPPED)
	$(if $(GPU),PYTHONPATH=. $(RUN) scripts/ship_kernels.py $(GPU) $(ARGS))
	$(RUN) -m pip wheel -q --no-deps --no-build-isolation -w dist . ; status=$$?; rm -rf build/lib $(SHIPPED); exit $$status
	@ls -l dist/*.whl

lint: $(READY)
	$(RUN) -m ruff check pycuda_conv scripts tests examples
	$(RUN) -m mypy

test: $(READY) $(LINT)
	$(RUN) -m pytest $(ARGS)

docs: $(READY)
	$(RUN) -m sphinx -q -W --keep-going -j auto docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf $(VENV) build dist *.egg-info pycuda_conv/runtime/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
