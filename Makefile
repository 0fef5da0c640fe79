# Everything starts here. Each target makes .venv first when it is missing or its pins have changed.
#   make demo     set up, start the server, stream an answer, run a short load, print a table and one JSON line
#   make serve    set up and serve until Ctrl-C            (ARGS="--http-port 9000 ..." are handed on)
#   make test     every test but those that need a GPU     (ARGS="-k claim" are handed on)
#   make test-repeat   the tests that start servers, RUNS times: a line a run and what failed; the rest in build/
#   make lint     ruff and mypy
#   make docs     the pages of docs/ into build/docs, with every link checked
#   make fuzz     random and adversarial texts, FUZZ_TEXTS a vocabulary, against every tokenizer engine
#   make audit    known vulnerabilities of the pinned packages; needs the network, fails when a package cannot be looked up
#   make ecosystem  other people's programs against a live server; needs their registries, writes docs/ecosystem.md
#   make soak     twice the sustainable load for SOAK_SECONDS with everything that goes wrong; the last line is JSON
#   make clean    remove .venv and everything generated    (fetched models stay in the cache folder)
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
AUDIT := .venv-audit
ARGS ?=
FUZZ_TEXTS ?= 20000
SOAK_SECONDS ?= 900
RUNS ?= 3
# Many tests wait more than they compute, those of servers above all: more processes than cores.
IN_PARALLEL := -n $$(( 2 * $$(nproc) )) --maxprocesses 8 --dist worksteal
BY_SERVER = -n 2 --dist loadfile $(if $(findstring tests/,$(ARGS)),,$$(grep -rl --include=*.py mark.triton tests))
# pytest's exit code 5: what ARGS select may be in one half of the tests alone.
UNLESS_NONE = $(if $(strip $(ARGS)),|| test $$? -eq 5)

.PHONY: demo serve test test-repeat test-triton lint docs fuzz soak audit clean setup model
.DEFAULT_GOAL := demo

setup: $(STAMP)

# The stamp is written last: an interrupted set-up is taken up again.
$(STAMP): pyproject.toml $(wildcard */pyproject.toml) constraints.txt tools/make_venv.py
	@$(PYTHON) tools/make_venv.py $(VENV)
	@touch $@

# What the tests and the soak serve; fetched once.
model: $(STAMP)
	@$(BIN)/tritandem model fetch

demo: $(STAMP)
	@$(BIN)/tritandem demo $(ARGS)

serve: $(STAMP)
	@exec $(BIN)/tritandem serve $(ARGS)

test: model
	$(BIN)/python -m pytest -m "not gpu and not triton" $(IN_PARALLEL) $(ARGS) $(UNLESS_NONE)
	$(BIN)/python -m pytest -m "not gpu and triton" $(BY_SERVER) $(ARGS) $(UNLESS_NONE)

# The tests with a real server, on the Triton installed in the folder TRITON: docs/triton-versions.md.
test-triton: model
	TRITANDEM_TRITON_ROOT=$(TRITON) $(BIN)/python -m pytest -m "not gpu and triton" $(BY_SERVER) $(ARGS) $(UNLESS_NONE)

test-repeat: model
	@mkdir -p build
	@for run in $$(seq $(RUNS)); do $(BIN)/python -m pytest -q -m "not gpu and triton" $(BY_SERVER) $(ARGS) 2>&1 \
		| tee build/test-repeat-$$run.log | grep -E "^(FAILED|ERROR) | in [0-9.]+s"; done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build

fuzz: $(STAMP)
	@$(BIN)/python -m tests.fuzz --texts $(FUZZ_TEXTS) $(ARGS)

# An environment of its own: what audits must not be among what is audited.
audit: $(STAMP)
	@test -x $(AUDIT)/bin/pip-audit || { $(BIN)/python -m venv $(AUDIT) && \
		$(AUDIT)/bin/pip --disable-pip-version-check install --quiet pip-audit==2.10.1; }
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r constraints.txt $(ARGS)

soak: model
	@$(BIN)/python -m tests.soak --seconds $(SOAK_SECONDS) $(ARGS)

ecosystem: model
	@$(BIN)/python -m tools.ecosystem $(ARGS)
	$(BIN)/python -m pytest -q -rs -m triton tests/real_triton/test_nvidias_front.py

clean:
	rm -rf $(VENV) $(AUDIT) .ecosystem build */build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis loadtest/results
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -name '*.egg-info' -prune -exec rm -rf {} +
