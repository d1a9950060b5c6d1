"""Rules of free mappings, whose options go to a library unchanged: no option is set in two places, and an option that
is refused under its own key is refused here too. `foreign.yaml` has the verdict of each option.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_rl.config.errors import Problem, did_you_mean
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.foreign import ENGINE_ALIASES, PASSED_ON, passed_on
from nemo_rl.config.generation import GenerationConfig, VllmConfig
from nemo_rl.config.master import CompleteConfig, MasterConfig, RootConfig
from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.config.policy import OPTIMIZER_AMOUNTS
from nemo_rl.config.rules import rule
from nemo_rl.config.section import NotYet, Section, annotation_of, not_built

_MEGATRON = "policy.megatron_cfg.model_overrides"
_HF = "policy.hf_config_overrides"


@rule
def passed_on_options_are_safe(config: CompleteConfig) -> Iterator[Problem]:
    for where, options in _mappings(config):
        for name, value in _leaves(options) if where == _HF else options.items():
            yield from _judged(config, where, name, value)


def _mappings(config: CompleteConfig) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Free mappings whose options are judged by the file alone, by their dotted keys."""
    if isinstance(config, EvalMasterConfig):
        yield "tokenizer.chat_template_kwargs", config.tokenizer.chat_template_kwargs or {}
        yield "generation.vllm_cfg.env_vars", config.generation.vllm_cfg.env_vars or {}
    if not isinstance(config, RootConfig):
        return
    policy, logger = config.policy, config.logger
    yield "policy.optimizer.kwargs", policy.optimizer.kwargs if policy.optimizer is not None else {}
    for index, entry in enumerate(policy.scheduler or ()):
        yield f"policy.scheduler.{index}.kwargs", entry.kwargs
    yield _HF, policy.hf_config_overrides
    yield "policy.tokenizer.chat_template_kwargs", policy.tokenizer.chat_template_kwargs or {}
    yield "policy.generation.vllm_cfg.env_vars", policy.generation.vllm_cfg.env_vars or {}
    yield "policy.dtensor_cfg.env_vars", policy.dtensor_cfg.env_vars or {}
    yield "policy.megatron_cfg.env_vars", policy.megatron_cfg.env_vars or {}
    yield "logger.wandb", logger.wandb.model_extra or {}
    yield "logger.swanlab", logger.swanlab.model_extra or {}


def _names(config: CompleteConfig) -> dict[str, str]:
    """Names of the sections that verdicts refer to."""
    if isinstance(config, EvalMasterConfig):
        return {"generation": "generation", "policy": "generation", "tokenizer": "tokenizer", "seed": "eval.seed"}
    names = {"generation": "policy.generation", "policy": "policy", "tokenizer": "policy.tokenizer"}
    return names | {"seed": "grpo.seed"}


def _judged(
    config: CompleteConfig, where: str, name: str, value: object, meant: str | None = None
) -> Iterator[Problem]:
    """The verdict of one option, written `name`, under its plain name `meant`."""
    entry, key = passed_on(where, meant or name.rpartition(".")[2]), f"{where}.{name}"
    if entry is None:
        return
    on = value is not None and value != 0
    if entry.not_built and on:
        yield not_built(key, value, entry.not_built, entry.instead)
    elif entry.elsewhere or (entry.refused and on):
        yield f"{key}: {value!r}: {(entry.elsewhere or entry.refused).format(**_names(config))}"


def _as_its_own_key(key: str, value: object, section: Section, name: str, own: str) -> Iterator[Problem]:
    """Error for an engine option that has its own key."""
    mark = annotation_of(type(section).model_fields[name], NotYet)
    if mark is not None and (not mark.values or value in mark.values):
        yield not_built(key, value, mark.why, mark.instead or "leave it out")
    else:
        yield f"{key}: {value!r}: this is {own}.{name}; set it there"


@rule
def megatron_overrides_are_safe(config: RootConfig) -> Iterator[Problem]:
    megatron = config.policy.megatron_cfg
    for name, value in megatron.model_overrides.items() if megatron.enabled else ():
        key = f"{_MEGATRON}.{name}"
        if name in MegatronConfig.model_fields:
            if value != getattr(megatron, name):
                yield from _as_its_own_key(key, value, megatron, name, "policy.megatron_cfg")
        elif passed_on(_MEGATRON, name) is not None:
            yield from _judged(config, _MEGATRON, name, value)
        else:
            known = [*(entry.pattern for entry in PASSED_ON[_MEGATRON] if entry.ignored), *MegatronConfig.model_fields]
            yield (
                f"{key}: {value!r}: not known to leave the model and its gradients as they are."
                f"{did_you_mean(name, known)} Its sizes follow the model's files (policy.hf_config_overrides)"
            )


@rule
def engine_arguments_are_safe(config: MasterConfig | EvalMasterConfig) -> Iterator[Problem]:
    if isinstance(config, EvalMasterConfig):
        generation, model, tokenizer = config.generation, config.generation, config.tokenizer
        overrides: Mapping[str, object] = {}
    else:
        generation, model, tokenizer = config.policy.generation, config.policy, config.policy.tokenizer
        overrides = config.policy.hf_config_overrides
    own = {
        "model": model.model_name,
        "tokenizer": tokenizer.name,
        "trust_remote_code": model.trust_remote_code,
        "dtype": generation.vllm_cfg.dtype,
        "hf_overrides": overrides,
        "disable_log_stats": not generation.vllm_cfg.enable_vllm_metrics_logger,
        "generation_config": "vllm",
    }
    prefix, known = _names(config)["generation"], engine_arguments()
    where = f"{prefix}.vllm_kwargs"
    yield from _no_numbers(where, generation.vllm_kwargs)
    for spelled, value in generation.vllm_kwargs.items():
        name = spelled.strip("-").replace("-", "_").lower()
        name = ENGINE_ALIASES.get(name, name)
        if spelled in own and value == own[spelled]:
            continue
        in_engine = name in VllmConfig.model_fields
        section: Section = generation.vllm_cfg if in_engine else generation
        if in_engine or name in GenerationConfig.model_fields:
            if value != getattr(section, name) or spelled != name:
                home = f"{prefix}.vllm_cfg" if in_engine else prefix
                yield from _as_its_own_key(f"{where}.{spelled}", value, section, name, home)
        elif passed_on(where, name) is not None:
            yield from _judged(config, where, spelled, value, name)
        elif known and spelled not in known:
            meant = name if name in known else spelled
            yield f"{where}.{spelled}: {value!r}: vLLM's engine has no such argument.{did_you_mean(meant, known)}"


@functools.cache
def engine_arguments() -> frozenset[str]:
    """Names of the arguments of the installed vLLM's engine, read without importing it, which takes many seconds;
    empty where it is not installed.
    """
    found = importlib.util.find_spec("vllm")
    folders = found.submodule_search_locations if found is not None else None
    names: set[str] = set()
    for folder in folders or ():
        file = Path(folder) / "engine" / "arg_utils.py"
        for node in ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else ():
            if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
                fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
                names |= {target.id for target in fields if isinstance(target, ast.Name)}
    return frozenset(names)


_SWITCHES = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "nesterov")
# What torch's schedulers take as text; everything else of theirs is a number, a switch, or a list of numbers.
_SCHEDULER_TEXTS = ("mode", "threshold_mode", "anneal_strategy", "scale_mode")


@rule
def optimizer_arguments_have_their_types(config: RootConfig) -> Iterator[str]:
    for name, value in config.policy.optimizer.kwargs.items() if config.policy.optimizer is not None else ():
        key = f"policy.optimizer.kwargs.{name}"
        if name in _SWITCHES and not (value is None or isinstance(value, bool)):
            yield f"{key}: {value!r} is neither true nor false"
        elif name in OPTIMIZER_AMOUNTS and not _is_number(value):
            yield f"{key}: {value!r} is no number; write one such as 1e-6 or 0.01"
        elif name.endswith("_dtype") and str(value).removeprefix("torch.") not in ("float32", "bfloat16"):
            yield f"{key}: {value!r} is neither torch.float32 nor torch.bfloat16"
        elif name == "betas" and not (isinstance(value, list) and all(map(_is_number, value))):
            yield f"{key}: {value!r} is no list of numbers; write one such as [0.9, 0.999]"


@rule
def scheduler_arguments_have_their_types(config: RootConfig) -> Iterator[str]:
    for index, entry in enumerate(config.policy.scheduler or ()):
        where = f"policy.scheduler.{index}.kwargs"
        for name, value in entry.kwargs.items():
            texts = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
            judged = name in _SCHEDULER_TEXTS or passed_on(where, name) is not None
            if texts and not judged and (entry.name or "").startswith("torch.optim.lr_scheduler."):
                yield f"{where}.{name}: {texts[0]!r} is no number; write one such as 0.1 or 50"


@rule
def passed_on_numbers_are_numbers(config: RootConfig) -> Iterator[str]:
    policy = config.policy
    if policy.megatron_cfg.enabled:
        yield from _no_numbers(_MEGATRON, policy.megatron_cfg.model_overrides)
    yield from _no_numbers(_HF, policy.hf_config_overrides)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _no_numbers(prefix: str, options: Mapping[str, object]) -> Iterator[str]:
    for name, value in _leaves(options):
        last = name.rpartition(".")[2]
        counted = last.startswith(("max_", "min_", "num_")) or last.endswith(
            ("_size", "_gb", "_bytes", "_len", "_theta", "_eps", "_layers", "_utilization")
        )
        if counted and isinstance(value, str) and value != "auto":
            yield f"{prefix}.{name}: {value!r} is no number; write one without quotes and units"


def _leaves(node: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
