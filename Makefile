# make demo       sets up .venv and runs a published model with and without drafts, or
#                 the small bundled ones where that one cannot be had
# make test       sets up .venv, then the documentation, ruff, mypy and pytest; says
#                 which tests were slowest
# make docs       builds the documentation into build/site; a warning is an error
# make test-long  the slow tests too, and more examples for each property;
#                 TESTS="tests/caches ..." runs a part of them
# make clean      removes .venv and what tools left behind
#
# On Linux with an NVIDIA GPU: make demo EXTRAS=cuda13

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=

# The backend of mlx: on macOS the plain wheel brings Metal.
ifeq ($(shell uname -s),Darwin)
EXTRAS ?=
else
EXTRAS ?= cpu
endif
comma := ,
BACKEND := $(or $(subst $(comma),-,$(EXTRAS)),metal)
RUN_STAMP := $(VENV)/.installed-$(BACKEND)
TEST_STAMP := $(RUN_STAMP)-test
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -e

BUILD_DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
PYTEST := $(BIN)/pytest -n auto --dist worksteal --durations=10

# Tests start some 40 processes, and each of them would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs test test-long clean system environment
.DEFAULT_GOAL := test

demo: $(RUN_STAMP)
	$(BIN)/mlx-speculation demo --model auto

docs: environment
	$(BUILD_DOCS)

test: environment
	$(BUILD_DOCS)
	$(BIN)/ruff check && $(BIN)/ruff format --check
	$(BIN)/mypy -n auto
	$(PYTEST)

test-long: environment
	$(PYTEST) -m "slow or not slow" --hypothesis-profile=long $(TESTS)

environment: $(TEST_STAMP)
	@sh scripts/precompile_kernels.sh $(VENV)

# What a demo needs, without torch, mypy and the like. Two backends of mlx overwrite each
# other's files, so another EXTRAS starts afresh.
$(RUN_STAMP): pyproject.toml | system
	@others="$(filter-out $(RUN_STAMP) $(TEST_STAMP),$(wildcard $(VENV)/.installed-*))"; \
	if [ -n "$$others" ]; then rm -rf $(VENV); fi
	@if [ ! -x $(BIN)/python ]; then \
		python=$$(sh scripts/setup_system.sh python $(PYTHON)) && \
		echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV); \
	fi
	@echo "installing mlx-speculation[$(EXTRAS)] into $(VENV)"
	@$(PIP_INSTALL) '.$(if $(EXTRAS),[$(EXTRAS)])'
	@sh scripts/precompile_kernels.sh $(VENV)
	@touch $@

$(TEST_STAMP): $(RUN_STAMP)
	@echo "installing what tests need into $(VENV)"
	@$(PIP_INSTALL) '.[$(if $(EXTRAS),$(EXTRAS)$(comma))test]'
	@touch $@

system:
	@sh scripts/setup_system.sh

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
