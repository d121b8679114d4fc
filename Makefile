# Every target makes .venv itself, from the first Python 3.10 to 3.13 that works. PYTHON=... chooses another one.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CANDIDATES := $(PYTHON) python3.11 python3.12 python3.13 python3.10 python3
FITS := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))

.PHONY: demo test zoo check docs bench bench-gpu sanitize clean

demo: $(STAMP)  ## train about 10 M parameters with parameters and optimizer states on NVMe
	$(BIN)/python examples/train_lm.py

test: $(STAMP)  ## all tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal -q

zoo: $(STAMP)  ## families of transformers against plain torch; ARGUMENTS="--compile aot_eager" and the like
	$(BIN)/python -m tests.zoo $(ARGUMENTS)

check: $(STAMP)  ## lint, types, and the documentation site, in which a broken link is an error
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(SITE)

docs: $(STAMP)  ## the documentation site, in site/; to search it: python -m http.server --directory site
	$(SITE)

# Never with --quiet: it hides the warnings from mkdocs itself, which then counts none of them as an error.
SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# DRIVE is a folder on the drive to measure; DEEPSPEED_PYTHON an interpreter that has deepspeed with its operators built.
DRIVE := .
RIVAL = $(if $(DEEPSPEED_PYTHON),--deepspeed-python $(DEEPSPEED_PYTHON))
bench: $(STAMP)  ## every table of docs/benchmarks.md, one after the other; takes about an hour
	$(BIN)/python benchmarks/adam.py
	$(BIN)/python benchmarks/aio.py --folder $(DRIVE)
	$(BIN)/python benchmarks/hooks.py --folder $(DRIVE)
	$(BIN)/python benchmarks/tensor_functions.py
	$(BIN)/python benchmarks/pipeline_executor.py
	$(BIN)/python benchmarks/predict.py --folder $(DRIVE)
	$(BIN)/python benchmarks/step.py --numel 500000000 --folder $(DRIVE) $(RIVAL)
	$(BIN)/python benchmarks/pipeline_peers.py $(RIVAL)
	$(BIN)/python benchmarks/checkpoint.py --folder $(DRIVE)
	$(BIN)/python benchmarks/startup.py --folder $(DRIVE)
	@set -e; for ranks in 1 2; do for dtype in fp32 bf16; do \
	    $(BIN)/python benchmarks/train.py --ranks $$ranks --dtype $$dtype --folder $(DRIVE); \
	    $(BIN)/python benchmarks/peers.py --ranks $$ranks --dtype $$dtype --folder $(DRIVE) $(RIVAL); done; done

bench-gpu: $(STAMP)  ## what a first run on an accelerator does, in order; results in benchmarks/results/first_run.json
	$(BIN)/python -m tests.first_run

sanitize:  ## the C++ code under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer
	@$(MAKE) --no-print-directory -j 2 -C tests/native run

clean:  ## what builds, tests and runs leave behind; the environment stays
	rm -rf build dist site *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .hypothesis infinity/_native
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# A name on the path may be a shim that does not run, so each candidate is tried.
$(BIN)/python:
	@for python in $(CANDIDATES); do \
	    if "$$python" -c '$(FITS)' >/dev/null 2>&1; then \
	        echo "$$python -m venv $(VENV)"; exec "$$python" -m venv $(VENV); fi; done; \
	echo "no Python 3.10 to 3.13 with venv was found among: $(CANDIDATES)" >&2; exit 1

$(STAMP): pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,examples]'
	touch $@
