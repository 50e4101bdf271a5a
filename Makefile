# Everything a fresh machine needs: Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := .venv-release
INSTALLED := $(VENV)/.installed
IN_C := cache_store/cache/_gather

define CHECK_PYTHON
import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; run: make PYTHON=python3.11")
endef

.PHONY: demo test test-all lint docs dist clean

demo: $(INSTALLED)
	$(BIN)/python -m demo

PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -q

test: lint
	$(PYTEST) -m "not slow"

# Also what takes long: every family of models, the guides and examples, programs killed again and again.
test-all: test
	$(PYTEST) -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "to read it: $(BIN)/python -m http.server --directory site, then open http://localhost:8000"

# Everything that a release consists of, checked; what it uploads lies in dist/.
CHECK_SCHEMA := $(TOOLS)/bin/check-jsonschema --builtin-schema
dist:
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet '.[release]'
	rm -rf build dist
	$(TOOLS)/bin/check-manifest
	$(TOOLS)/bin/python -m build
	$(TOOLS)/bin/twine check --strict dist/*
	$(TOOLS)/bin/check-wheel-contents dist/*.whl
	$(CHECK_SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(CHECK_SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(CHECK_SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(CHECK_SCHEMA) vendor.citation-file-format CITATION.cff
	$(TOOLS)/bin/zizmor --offline --quiet .github
	$(TOOLS)/bin/hadolint Dockerfile
	$(TOOLS)/bin/kubernetes-validate --strict deploy/kubernetes/*.yaml

# A half-made environment, or one of an older Python, is made again.
# torch first and by exact version: a build of it that is there, or that pip is pointed to, is then kept.
$(INSTALLED): setup.cfg setup.py $(IN_C:=.c) constraints.txt
	@$(BIN)/python -c 'import pip; $(CHECK_PYTHON)' 2>/dev/null || \
	{ $(PYTHON) -c '$(CHECK_PYTHON)' && $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	rm -rf build $(IN_C:=*.so)  # pip would take an old one for the new
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -c 'import cache_store.cache._gather' 2>/dev/null || echo "note: without a C compiler and Python's headers" \
	"caches are read as right, at 60 to 85 % of the speed; install them, then: make clean, and make again"
	touch $@

clean:
	rm -rf $(VENV) $(TOOLS) demo-run build dist site $(IN_C:=*.so)
