# make run: talk to a real model. make test: run every test. Variables can be set on the command line.

# The first interpreter that is new enough; `make PYTHON=...` takes another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; exit; }; done; echo python3)
PYTHON := $(PYTHON)
VENV ?= .venv
# Where the tests' torch comes from; empty is pip's own index. If your pip would fetch several GB of
# CUDA libraries, set this to PyTorch's index of CPU builds: make test TORCH_INDEX=...
TORCH_INDEX ?=
# Extra arguments for pytest: make test PYTEST_ARGS="-k client"
PYTEST_ARGS ?=
# Tests that run at a time; 0 is one by one in a single process. Each takes some 1.5 GB for its copy of torch.
TEST_WORKERS ?= 2

# make asan: what to look for, and where.
SANITIZE ?= address,undefined
ASAN_TESTS ?= tests/disk tests/kernels tests/store

SHELL := /bin/sh
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
# A change of one of these needs a new build; Python files are used where they are.
BUILT_FROM := pyproject.toml CMakeLists.txt $(wildcard flashd/*/native/* flashd/*/native/*/*)
SOURCES := flashd clients tests ops

MODELS := models
GGUF := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
BUNDLE := $(MODELS)/smollm2-135m
# make relu-model: how long to train, and where texts, checkpoints and log are kept between runs.
RELU_HOURS ?= 1.2
RELU := $(MODELS)/relu
QUESTION := What is the capital of France?

# Megabytes: environment, model and bundle; for tests also torch, transformers and converted models.
RUN_SPACE_MB := 1000
TEST_SPACE_MB := 5000
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help apt-deps check check-test venv venv-test model relu-model run stop test asan lint format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

apt-deps: ## Install from apt what build and tests need and this machine lacks (Debian, Ubuntu)
	@missing=$$(sh ops/demo/missing.sh "$(PYTHON)" test | cut -f 1); \
	if [ -z "$$missing" ]; then echo "nothing is missing"; exit 0; fi; \
	set -- $$missing; \
	command -v apt-get >/dev/null || { echo "no apt-get here; install what provides: $$*" >&2; exit 1; }; \
	$(SUDO) apt-get update -q && \
	$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$$@"

# $(call check,PURPOSE,MEGABYTES,STAMP): one line for each thing that is missing, and no further;
# space counts only until the stamp says that all is installed.
define check
@sh ops/demo/missing.sh "$(PYTHON)" $(1) | { ok=0; tab=$$(printf '\t'); while IFS=$$tab read -r package reason; do \
	echo "missing: $$reason. Debian, Ubuntu: apt install $$package, or: make apt-deps" >&2; ok=1; \
	case $$reason in *kernels*) echo "  (or without it, slower: make FLASHD_NO_NATIVE=1 ...)" >&2;; esac; \
	done; exit $$ok; }
@free=$$(df -Pm . | awk 'NR == 2 { print $$4 }'); [ -e $(3) ] || [ "$$free" -ge $(2) ] || \
	{ echo "only $$free MB free here, $(2) MB are needed" >&2; exit 1; }
endef

check:
	$(call check,build,$(RUN_SPACE_MB),$(INSTALLED))

check-test:
	$(call check,test,$(TEST_SPACE_MB),$(INSTALLED_TEST))

venv: $(INSTALLED) ## Make the virtual environment and install flashd into it

venv-test: $(INSTALLED_TEST) ## The same with what tests need (torch, transformers, pytest, ...)

$(BIN)/python: | check
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@"$(PYTHON)" -m venv --clear $(VENV)

$(INSTALLED): $(BUILT_FROM) | check $(BIN)/python
	@echo "installing flashd into $(VENV)"
	@$(PIP) -e .
	@touch $@

$(INSTALLED_TEST): $(BUILT_FROM) | check-test $(BIN)/python
	@echo "installing flashd and its tests' needs into $(VENV)"
ifneq ($(TORCH_INDEX),)
	@$(PIP) --index-url "$(TORCH_INDEX)" "$$(sed -n 's/^ *"\(torch==[^"]*\)",$$/\1/p' pyproject.toml)"
endif
	@$(PIP) -e '.[test]'
	@touch $(INSTALLED) $@

model: $(GGUF) ## Fetch the demo model

$(GGUF): ops/demo/fetch_model.sh | $(BIN)/python
	@sh $< $(BIN)/python $@
	@touch $@

# Begun again, it goes on where it was; `rm -r models/relu` begins anew. Needs apt-get for four of the texts.
relu-model: $(INSTALLED_TEST) ## Train the ReLU model of ops/relu_model again (RELU_HOURS)
	@$(BIN)/python ops/relu_model/corpus.py --data $(RELU)/data --small ops/relu_model
	@$(BIN)/python ops/relu_model/train.py --hours $(RELU_HOURS) --data $(RELU)/data --out $(RELU)/run --resume
	@$(BIN)/python ops/relu_model/export.py --data $(RELU)/data --out $(RELU)/run

# Order-only: a bundle is finished or absent, so that it exists is all there is to know.
$(BUNDLE)/manifest.json: | $(INSTALLED) $(GGUF)
	@$(BIN)/flashd convert $(GGUF) $(BUNDLE)

run: $(INSTALLED) $(BUNDLE)/manifest.json ## Install, fetch and convert a small chat model, serve it, ask it
	@$(BIN)/flashd start --model $(BUNDLE)
	@echo "> $(QUESTION)"
	@$(BIN)/flashd run "$(QUESTION)" --temperature 0 --stats
	@echo "go on with: $(BIN)/flashd chat; end the daemon with: make stop"

stop: ## Stop the daemon on the default socket, if one runs
	@[ ! -x $(BIN)/flashd ] || [ "$$($(BIN)/flashd ps --json)" = "[]" ] || $(BIN)/flashd stop

test: lint $(GGUF) ## Install with tests, lint, type-check and run the whole suite
	@$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

asan: $(INSTALLED_TEST) ## Run the native modules' tests under AddressSanitizer and UBSan (slow)
	@echo "building the native modules with $(SANITIZE)"
	@rm -rf build/asan
	@$(PIP) --no-build-isolation --no-deps --target build/asan . -Cbuild-dir=build/asan-work \
		-Ccmake.build-type=RelWithDebInfo -Ccmake.define.FLASHD_SANITIZE=$(SANITIZE)
	@# -S and -P: neither the editable installation nor this directory, but the build above. The sanitizer
	@# looks for the C++ library's functions before Python has loaded it.
	@env LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so):$$($(CXX) -print-file-name=libstdc++.so.6)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH="$$PWD/build/asan:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		$(BIN)/python -P -S -m pytest -p no:cacheprovider $(ASAN_TESTS) $(PYTEST_ARGS)

lint: $(INSTALLED_TEST) | check-test ## ruff and mypy
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy

format: $(INSTALLED_TEST) ## Rewrite the sources as ruff wants them
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

clean: ## Remove environment, builds and caches; models stay
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis flashd/*/_native*.so
	find flashd clients tests -name __pycache__ -type d -prune -exec rm -rf {} +
