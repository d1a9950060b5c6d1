# Every target that runs something sets itself up first: Python >= 3.11 and make are all it needs.
# Variables: PYTHON (interpreter of the environment), MINUTES (of chaos), HOURS (of night), TRIES (of each benchmark), GPUS (of scenarios), TEST_SESSIONS (2: tests that start an engine, and beside them the others; on larger machines as many as there are cores), EXTRAS (cpu; on GPU nodes vllm), TORCH_BACKEND (cpu; on GPU nodes auto).

PYTHON ?= python3
EXTRAS ?= cpu
TORCH_BACKEND ?= cpu
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
READY_DEV := $(VENV)/.installed-dev
RESULTS := results/arithmetic
TEST_SESSIONS ?= 2
MINUTES ?= 60
HOURS ?= 8
TRIES ?= 1
GPUS ?= 2

export PYTHONUNBUFFERED := 1
# Many processes import the package: with compiled files each of them starts a second sooner.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: benchmarks scenarios soak chaos night endpoint-stress adapter-stress mooncake-libs help install demo distillation multi-lora test test-fast lint format docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY_DEV) ## the environment in .venv with all that tests and docs need, made anew when pyproject.toml changes

$(READY): pyproject.toml
	@$(call install_into_venv,$(EXTRAS))
	@touch $@

$(READY_DEV): pyproject.toml
	@$(call install_into_venv,$(EXTRAS)$(comma)dev)
	@touch $(READY) $@

# A run is many processes: compiled once here, each of them starts in half of the time.
# uv does not read pip's settings; where pip is given a directory of wheels, uv is given the same one, and torch's CPU build is found there.
comma := ,
define install_into_venv
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nemo_rl needs Python 3.11 or newer; name one with make PYTHON=...")' && \
{ test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); } && \
$(BIN)/python -m pip install --quiet --upgrade uv && \
links="$${PIP_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null | tr '\n' ' ')}" && \
if [ -n "$$links" ]; then \
  UV_FIND_LINKS="$$(echo $$links | tr ' ' ',')" VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --compile-bytecode -e '.[$(1)]'; \
else \
  VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --compile-bytecode --torch-backend $(TORCH_BACKEND) -e '.[$(1)]'; \
fi
endef

demo: $(RESULTS)/base/config.json ## a small model learns arithmetic: made, warm-started, trained with GRPO; goes on where it was stopped
	$(BIN)/python examples/run_sft.py --config examples/configs/sft_arithmetic_cpu.yaml
	$(BIN)/python examples/run_grpo.py --config examples/configs/grpo_arithmetic_cpu.yaml

distillation: $(RESULTS)/base/config.json $(RESULTS)/student/config.json ## a student of half the size learns to add from a teacher
	$(BIN)/python examples/run_sft.py --config examples/configs/sft_arithmetic_cpu.yaml data.train.slips=0 \
	    checkpointing.checkpoint_dir=$(RESULTS)/teacher logger.log_dir=logs/distillation_teacher
	$(BIN)/python examples/run_sft.py --config examples/configs/sft_arithmetic_cpu.yaml policy.model_name=$(RESULTS)/student \
	    checkpointing.checkpoint_dir=$(RESULTS)/student_sft logger.log_dir=logs/distillation_student
	$(BIN)/python examples/run_distillation.py --config examples/configs/distillation_arithmetic_cpu.yaml

multi-lora: $(RESULTS)/base/config.json ## four adapters learn four tasks on one small model, beside each other
	$(BIN)/python examples/run_sft.py --config examples/configs/multi_lora/warm_start.yaml
	$(BIN)/python examples/run_multi_lora.py --config examples/configs/multi_lora/base.yaml \
	    --adapters $(foreach task,add subtract reverse sort,examples/configs/multi_lora/$(task).yaml)

$(RESULTS)/student/config.json: examples/make_tiny_model.py | $(READY)
	$(BIN)/python examples/make_tiny_model.py $(RESULTS)/student --layers 2 --hidden 96 --heads 3 --kv-heads 1 --seed 1

$(RESULTS)/base/config.json: examples/make_tiny_model.py | $(READY)
	$(BIN)/python examples/make_tiny_model.py $(RESULTS)/base --layers 2 --hidden 128

# NRL_REQUIRE_MOONCAKE=1 (as in .ci/run) turns what cannot run here into failures; otherwise the closing lines name it.
test: $(READY_DEV) mooncake-libs ## every test
	$(BIN)/python -m pytest -n $(TEST_SESSIONS) --dist loadscope

mooncake-libs: $(VENV)/native ## the shared libraries that Mooncake needs and the system lacks, beside the environment (no root)

$(VENV)/native: tools/mooncake_libs.sh | $(READY)
	@tools/mooncake_libs.sh $@
	@cat $@/missing.txt 2> /dev/null || true
	@touch $@

test-fast: $(READY_DEV) ## tests that need neither Ray nor an engine, for the inner loop
	$(BIN)/python -m pytest -m "not ray and not vllm and not slow" -n $(TEST_SESSIONS) --dist loadscope

benchmarks: $(READY_DEV) ## every benchmark on a tiny shape on the CPU, to see that it runs
	$(BIN)/python tools/tiny_benchmarks.py --tries $(TRIES)

scenarios: results/scenarios/qwen3/config.json results/scenarios/llama/config.json ## the six scenarios of time-sharing on GPUS (2) CPU slots with a small model, and their table
	$(BIN)/python examples/run_time_sharing.py --gpus $(GPUS) --device cpu --scale --scenario all

results/scenarios/%/config.json: examples/make_tiny_model.py | $(READY)
	$(BIN)/python examples/make_tiny_model.py results/scenarios/$* --layers 2 --hidden 128 --family $*

soak: $(READY) ## random time-sharing scenarios with every fault, 50 million simulated events, each checked
	$(BIN)/python -m nemo_rl.time_sharing soak --events 5e7

chaos: $(RESULTS)/base/config.json ## the asynchronous arithmetic run on the data plane, with each part killed or stopped, checkpoints damaged and disks filled for MINUTES (60)
	$(BIN)/python examples/run_sft.py --config examples/configs/sft_arithmetic_cpu.yaml
	$(BIN)/python tools/chaos.py --kinds all --minutes $(MINUTES) --folder results/chaos

night: $(READY) ## a pool of CPU slots whose jobs come, go and die for HOURS (8), and what grows meanwhile in one picture
	$(BIN)/python tools/night.py --hours $(HOURS) --folder results/night

endpoint-stress: $(READY_DEV) ## 1,056 requests of 32 agents at once, while shards sleep, wake, are refitted and killed in an order drawn from SEED; twice, the first time in peace
	NRL_STRESS_CLIENTS=32 NRL_STRESS_SESSIONS=11 NRL_STRESS_SHARDS=3 NRL_STRESS_DISTURBANCES=24 \
	    NRL_STRESS_SEED=$(or $(SEED),$(shell date +%s)) $(BIN)/python -m pytest -s tests/stress/test_endpoint.py

adapter-stress: SEED ?= $(shell date +%s)
adapter-stress: $(READY_DEV) ## 20 random schedules of adapters that join, leave and come back on real engines, some killed (SEED=N)
	NRL_ADAPTER_SCHEDULES=20 NRL_ADAPTER_SEED=$(SEED) $(BIN)/python -m pytest -s tests/algorithms/test_multi_lora_job.py -k random

lint: $(READY_DEV) ## ruff, formatting, types, and the order of packages
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports --no-logo

format: $(READY_DEV) ## format, and fix what ruff can fix
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

docs: $(READY_DEV) ## the documentation as a site in site/, generated pages included, links checked
	$(BIN)/python -m tools.pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean: ## results and logs of the demo, and every cache; the environment stays
	rm -rf $(RESULTS) logs/sft_arithmetic_cpu logs/grpo_arithmetic_cpu
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
	find nemo_rl tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
