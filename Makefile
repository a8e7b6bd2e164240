# Every target does its own set-up: a fresh clone needs Python 3.11 or newer and make.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# Other frameworks bring a torch of several gigabytes, so their environments live outside the checkout and are reused.
CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/icmixup
INTEGRATIONS ?= $(CACHE)/integrations
OLDEST ?= $(CACHE)/oldest
WORKERS ?= 2

.PHONY: demo demo-page test check format mutants test-integrations test-integrations-oldest test-floor docs browse dist clean

demo: $(VENV)/ready  ## compare eight methods on long-tailed digits, three seeds each
	$(BIN)/icmixup compare digits --per-class 100 --imbalance 0.01 --seeds 3 --out runs/demo \
	    --methods erm mixup ic-mixup remix ic-remix regmixup ic-regmixup balanced-mixup

demo-page: demo  ## the report of the demo, also on shifted data, as a page of the documentation
	$(BIN)/icmixup evaluate runs/demo --device cpu
	$(BIN)/icmixup report runs/demo/*/ --device cpu --to docs/_extra/demo-report.html

# Worksteal gives each worker consecutive tests, so that what the tests of a file share is made once.
test: $(VENV)/ready  ## every test that needs neither a GPU nor other frameworks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n $(WORKERS) --dist worksteal --ignore tests/integrations

check: $(VENV)/ready  ## format, lint, types, layers of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

mutants: $(VENV)/ready  ## break the library on purpose, one line at a time: a test must notice each
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutate.py

test-integrations: $(INTEGRATIONS)/ready  ## against the newest timm, torchvision, Lightning, Transformers and fastai
	PYTHONPATH=src OMP_NUM_THREADS=2 $(INTEGRATIONS)/bin/python -m pytest tests/integrations

test-integrations-oldest: $(OLDEST)/ready  ## against the oldest versions that we support
	PYTHONPATH=src OMP_NUM_THREADS=2 $(OLDEST)/bin/python -m pytest tests/integrations

test-floor: $(OLDEST)/ready  ## the library's tests with torch 2.6, the lower bound that we declare
	PYTHONPATH=src OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest tests --ignore tests/lab --ignore tests/docs \
	    --ignore tests/tools --ignore tests/hostile --ignore tests/integrations

docs: $(VENV)/ready  ## the documentation site in build/site: warnings are errors, the tutorial runs, links are checked
	$(BIN)/python -m sphinx -W --keep-going -E -q docs build/site
	$(BIN)/python tools/check_site.py build/site

browse: docs  ## open the built site in headless Chromium, with a picture of each page in build/screenshots
	$(BIN)/python tools/browse_site.py build/site --screenshots build/screenshots

dist: $(VENV)/ready  ## wheel and sdist in dist/, checked, and the wheel tried in an environment with torch alone
	rm -rf dist build/clean
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tools/check_dist.py dist
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd build/clean && bin/python ../../tools/smoke.py

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab,hub,dev,docs]'
	touch $@

$(INTEGRATIONS)/ready: tools/integrations.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --upgrade --requirement tools/integrations.txt
	touch $@

$(OLDEST)/ready: tools/integrations.txt tools/oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --requirement tools/integrations.txt --constraint tools/oldest.txt
	touch $@

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
