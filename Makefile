# Everything that a checkout needs; `make help` lists it. The first target called sets up .venv.
PYTHON ?= python3
JOBS ?= 2

BIN := .venv/bin
PY := $(BIN)/python
STAMP := .venv/.installed
INSTALL := -m pip --disable-pip-version-check --no-input install -qq
PIP := $(PY) $(INSTALL) -c constraints.txt
TORCH = $(shell grep '^torch==' constraints.txt)
NEW_ENOUGH = $(shell $(PYTHON) -c 'import sys; print("yes" if sys.version_info >= (3, 11) else "")' 2>/dev/null)

# One thread a process: with more, the processes wait for each other and take several times as long.
export OMP_NUM_THREADS := 1
# Where nothing may be compiled ahead, every process that the tests start compiles the library once more.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-torch test-pythons golden bench papers board lint types docs readme api clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

setup: $(STAMP) ## install everything into .venv

# Set up again when what is to be installed has changed. torch goes first, by its pin: resolved freely, it may
# bring gigabytes of CUDA. The stamp is written last, so that a setup cut short is done again.
$(STAMP): pyproject.toml constraints.txt
	$(if $(NEW_ENOUGH),,$(error PYTHON=$(PYTHON) is missing or older than 3.11; try: make PYTHON=python3.11))
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "installing into .venv (some minutes the first time)"
	@$(PIP) '$(TORCH)'
	@$(PIP) -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP) ## train, defend, attack and report, in a minute
	@$(BIN)/splitfed demo

test: lint types ## lint, types and tests
	@$(PY) -m pytest -q -m "not exhaustive" -n $(JOBS) --dist loadgroup --max-worker-restart 0

# The second pass computes without vector instructions, as a processor of another make sums in another order. Each of
# the three libraries that compute has a switch of its own: torch, MKL and oneDNN.
PLAIN := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41

test-all: lint types ## test, with the slow proofs, again without vector instructions, test-torch, test-pythons
	@$(PY) -m pytest -q -n $(JOBS) --dist loadgroup --max-worker-restart 0
	@$(PLAIN) $(PY) -m pytest -q -n $(JOBS) --dist loadgroup --max-worker-restart 0
	@$(MAKE) --no-print-directory test-torch
	@$(MAKE) --no-print-directory test-pythons

# The oldest torch that pyproject.toml allows, and the newest: the cutters use parts of it that change without notice.
# Each has an environment of its own, which takes gigabytes where there are only builds with CUDA.
TORCHES := 2.6.0 2.15.0

test-torch: $(TORCHES:%=.venv-torch-%/.installed) ## the tests of the cutters on the oldest and the newest torch
	@for torch in $(TORCHES); do echo "torch $$torch"; \
		.venv-torch-$$torch/bin/python -m pytest -q -m "not exhaustive" -n $(JOBS) --dist loadgroup \
		--max-worker-restart 0 tests/core || exit 1; done

# sympy and setuptools are pinned by torch itself.
.venv-torch-%/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(@D)
	@echo "installing torch $* into $(@D) (some minutes the first time)"
	@grep -v -e '^torch==' -e '^sympy==' -e '^setuptools==' constraints.txt > $(@D)/constraints.txt
	@$(@D)/bin/python $(INSTALL) 'torch==$*+cpu' 2>/dev/null || $(@D)/bin/python $(INSTALL) 'torch==$*'
	@$(@D)/bin/python $(INSTALL) -c $(@D)/constraints.txt 'torch==$*' -e . pytest pytest-xdist hypothesis transformers
	@touch $@

# The versions of Python that pyproject.toml names, but that of .venv. Each has an environment of its own; one that is
# neither on the path nor among pyenv's is said and left out.
PYTHONS := 3.11 3.12 3.13
python = $(shell for try in python$(1) $$(ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(1).*/bin/python 2>/dev/null | \
	sort -rV); do $$try -c 'import ensurepip, ssl, sqlite3' 2>/dev/null && echo $$try && break; done)

test-pythons: $(STAMP) ## all tests on the other versions of Python that are supported and found here
	@own=$$($(PY) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	$(foreach one,$(PYTHONS),[ $(one) = $$own ] || $(MAKE) --no-print-directory test-python-$(one) || exit 1;)

test-python-%:
	@$(if $(call python,$*),$(MAKE) --no-print-directory .venv-python-$*/.installed)
	@$(if $(call python,$*),echo "Python $*" && .venv-python-$*/bin/python -m pytest -q -m "not exhaustive" \
		-n $(JOBS) --dist loadgroup --max-worker-restart 0,echo "Python $* is not found: left out")

.venv-python-%/.installed: pyproject.toml constraints.txt
	@$(call python,$*) -m venv $(@D)
	@echo "installing into $(@D) (some minutes the first time)"
	@$(@D)/bin/python $(INSTALL) -c constraints.txt '$(TORCH)'
	@$(@D)/bin/python $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

golden: $(STAMP) ## compare every small run with those of BASE=commit, in minutes; ONLY=text for some of them
	$(if $(BASE),,$(error BASE is missing: the commit to compare with; try: make golden BASE=HEAD))
	@$(PY) -m tests.golden.compare $(BASE) --only '$(ONLY)'

bench: $(STAMP) ## time the split step against the uncut one
	@$(PY) -m experiments.benchmarks.steps

papers: $(STAMP) ## published figures beside ours, for hours; resumable; TABLE=name for one of them
	@$(PY) -m experiments.papers $(TABLE)

board: $(STAMP) ## which defense buys what (docs/board), for hours; resumable; STUDY=name, SHOW=1, RETRY=1
	@$(PY) -m experiments.board $(STUDY) $(if $(SHOW),--show) $(if $(RETRY),--retry)

lint: $(STAMP) ## ruff: rules and format; the floors that imports may cross
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/lint-imports > .venv/.imports || { cat .venv/.imports; exit 1; }

types: $(STAMP) ## mypy, strict
	@$(BIN)/mypy --no-error-summary

docs: $(STAMP) ## write the tables of README.md and docs/ from the registries
	@$(PY) -m tests.pages
	@$(PY) -m tests.federated.leak_table

# The name that `docs` had while README was the only page.
readme: docs

api: $(STAMP) ## write the public names and signatures into tests/api.txt
	@$(PY) -m tests.api --write

clean: ## remove what was built, measured and cached, but not .venv
	@rm -rf build dist runs demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find splitfed attacks topologies tests -name __pycache__ -type d -prune -exec rm -rf {} +
