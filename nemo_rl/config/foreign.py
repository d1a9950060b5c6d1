"""Keys that NeMo-RL's recipes set and no schema here has: what they were called before, what they ask for, and when
they ask for nothing.

A key is moved to its present name; or left out with a note, because its value changes nothing here (null, an empty
container, one of its `inert` values, or anything inside a section whose `enabled` is false); or it stays where it is,
for `validate` to refuse by name. Knows names only. Invariant: a key that a schema has is never touched, and a name
that is nowhere in these tables stays an unknown key.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from nemo_rl.config.dotted import ABSENT, at, put, take
from nemo_rl.config.section import Section, field_of, section_within

Key = tuple[str, ...]

VLM = "vision-language and audio models"
GYM = "NeMo-Gym"
FP8 = "fp8 generation"
QUANTISATION = "quantisation"
_TEXT = "train a text model"
_TRANSPORT = "weight_sync.transport chooses how weights travel"


class _Anything:
    """Stands for every value, in `Foreign.inert`."""


ALWAYS = (_Anything(),)


@dataclass(frozen=True)
class Foreign:
    """One key, or a family of keys.

    Attributes:
        pattern: dotted key; `*` matches within one name, and `**` at the end everything below.
        part: what would have to be built for it, or why it changes nothing.
        instead: what to do.
        inert: values that change nothing here; null and empty containers never do. `ALWAYS` is every value.
    """

    pattern: str
    part: str
    instead: str = "leave the key out"
    inert: tuple[object, ...] = ()

    def matches(self, key: Sequence[str]) -> bool:
        """Whether a key is meant."""
        names = self.pattern.split(".")
        if names[-1] == "**":
            names = names[:-1]
            key = key[: len(names)]
        return len(names) == len(key) and all(map(fnmatchcase, key, names))

    def changes_nothing(self, value: object) -> bool:
        """Whether a value of this key asks for nothing that is not here."""
        if isinstance(value, Mapping) and self.inert is not ALWAYS:
            return all(map(self.changes_nothing, value.values()))
        return value is None or value == [] or self.inert is ALWAYS or value in self.inert


_OTHER = "run examples/run_grpo.py or run_sft.py"
_MEGATRON = "policy.megatron_cfg"
_AUTOMODEL = "policy.dtensor_cfg.automodel_kwargs"
_SERVER = "the HTTP server that NeMo-Gym talks to"
_FLAGS = "flags of assistant messages come from NeMo-Gym"
_OPTIONS = "options of Megatron-Core that have no counterpart here"
FOREIGN: tuple[Foreign, ...] = (
    # Other algorithms, by their section; a recipe of one is refused by that alone.
    Foreign("dpo", "preference training (DPO)", _OTHER),
    Foreign("rm", "training of reward models", _OTHER),
    Foreign("ppo", "PPO with a value model", _OTHER),
    Foreign("value", "PPO with a value model", _OTHER),
    Foreign("distillation", "distillation", _OTHER),
    Foreign("teacher", "distillation", _OTHER),
    # Options of engines that the run does not use; choosing such an engine is what is refused.
    Foreign("policy.generation.sglang_cfg.**", "SGLang", inert=ALWAYS),
    Foreign("policy.generation.trtllm_cfg.**", "TensorRT-LLM", inert=ALWAYS),
    Foreign("policy.generation.trtllm_kwargs.**", "TensorRT-LLM", inert=ALWAYS),
    Foreign("policy.generation.dynamo_cfg.**", "Dynamo", inert=ALWAYS),
    # fp8 and quantised engines: precision and quant_cfg decide, the rest says how.
    Foreign("policy.generation.vllm_cfg.is_mx", FP8, inert=ALWAYS),
    Foreign("policy.generation.vllm_cfg.quantization_ignored_layer_kws", FP8, inert=ALWAYS),
    Foreign("policy.generation.quant_cfg", QUANTISATION),
    Foreign("policy.generation.real_quant", QUANTISATION, inert=(False,)),
    Foreign("policy.generation.real_quant_ignore", QUANTISATION, inert=ALWAYS),
    Foreign("policy.disable_modelopt_layer_spec", QUANTISATION, inert=ALWAYS),
    Foreign(
        "policy.dequantize_base_checkpoint", QUANTISATION, "name a checkpoint that is not quantised", inert=(False,)
    ),
    Foreign(
        f"{_AUTOMODEL}.dequantize_base_checkpoint",
        QUANTISATION,
        "name a checkpoint that is not quantised",
        inert=(False,),
    ),
    # The HTTP server of engines: expose_http_server decides.
    Foreign("policy.generation.vllm_cfg.enforce_monotonicity", _SERVER, inert=ALWAYS),
    # Refit over HTTP.
    Foreign(
        "policy.generation.vllm_cfg.http_refit_*", "refit over HTTP", "weight_sync.transport chooses how weights travel"
    ),
    Foreign(
        "policy.generation.vllm_cfg.zmq_refit_*", "refit over ZMQ", "weight_sync.transport chooses how weights travel"
    ),
    # Pictures, sound and video.
    Foreign("policy.generation.vllm_cfg.limit_mm_per_prompt", VLM, _TEXT, inert=(0,)),
    Foreign("data.*.video_*", VLM, _TEXT),
    Foreign("data.*.allowed_problem_types", VLM, _TEXT),
    Foreign(f"{_MEGATRON}.freeze_*", VLM, inert=ALWAYS),
    Foreign(f"{_MEGATRON}.freeze_config.**", VLM, inert=ALWAYS),
    Foreign(f"{_MEGATRON}.radio_force_cpe_eval_mode", VLM, inert=ALWAYS),
    # Data and rollouts.
    Foreign(
        "data.add_system_prompt", "a fixed system prompt", "name its file in data.default.system_prompt_file", (False,)
    ),
    Foreign(
        "grpo.zero_variance_prompt_filtering",
        "a second name for dynamic sampling",
        "set grpo.use_dynamic_sampling: true",
        (False,),
    ),
    *(
        Foreign(
            f"{section}.enable_thinking",
            "variables of a chat template outside chat_template_kwargs",
            "set policy.tokenizer.chat_template_kwargs.enable_thinking",
        )
        for section in ("policy", "policy.tokenizer", "policy.generation", "policy.generation.vllm_cfg", "data", "grpo")
    ),
    Foreign("grpo.penalize_invalid_tool_call", _FLAGS, inert=(False,)),
    Foreign("grpo.penalize_malformed_thinking", _FLAGS, inert=(False,)),
    # Layers and packing.
    Foreign("policy.sequence_packing.fuse_loss", "the loss of a packed row is always taken in one go", inert=ALWAYS),
    Foreign(f"{_AUTOMODEL}.use_sdpa_patching", "attention is chosen by backend.attn", inert=ALWAYS),
    Foreign(f"{_AUTOMODEL}.backend.gate_precision", "router scores in another precision than the model's"),
    # Megatron-Core.
    Foreign(f"{_MEGATRON}.attention_backend", "the fastest kernel that fits is taken", inert=ALWAYS),
    Foreign(f"{_MEGATRON}.calculate_per_token_loss", "the loss function normalises by itself", inert=ALWAYS),
    Foreign(f"{_MEGATRON}.do_not_average_loss", "the loss function normalises by itself", inert=ALWAYS),
    Foreign(f"{_MEGATRON}.cp_normalize", "the loss function normalises by itself", inert=ALWAYS),
    Foreign(f"{_MEGATRON}.scale_loss_by_dp_cp_size", "the loss function normalises by itself", inert=ALWAYS),
    Foreign(f"{_MEGATRON}.clear_memory_caches_before_refit", "caches are emptied where memory is needed", inert=ALWAYS),
    Foreign(
        f"{_MEGATRON}.train_iters",
        "a run ends by its own max_num_steps, and scheduler says how rates decay",
        inert=ALWAYS,
    ),
    Foreign(f"{_MEGATRON}.optimizer.muon_*", "belongs to optimizer: muon", inert=ALWAYS),
    Foreign(f"{_MEGATRON}.converter_type", "the architecture is read from the model", inert=ALWAYS),
    Foreign(f"{_MEGATRON}.track_moe_metrics", "metrics of the router are not measured", inert=ALWAYS),
    Foreign(
        f"{_MEGATRON}.optimizer.overlap_cpu_optimizer_d2h_h2d", "only the speed of an offloaded optimizer", inert=ALWAYS
    ),
    Foreign(f"{_MEGATRON}.distributed_data_parallel_config.average_in_collective", _OPTIONS, inert=(False,)),
    Foreign(f"{_MEGATRON}.scheduler.override_opt_param_scheduler", _OPTIONS, inert=(False,)),
    Foreign(f"{_MEGATRON}.moe_aux_loss_coeff", _OPTIONS, inert=(0, 0.0)),
    Foreign(f"{_MEGATRON}.moe_grouped_gemm", _OPTIONS, inert=(True,)),
    Foreign(f"{_MEGATRON}.moe_flex_dispatcher_backend", "token exchange by DeepEP or HybridEP"),
    Foreign(f"{_MEGATRON}.moe_hybridep_num_sms", "token exchange by DeepEP or HybridEP"),
    Foreign(f"{_MEGATRON}.moe_router_enable_expert_bias", "expert biases of Megatron's router", inert=(False,)),
)

# Earlier names, and NeMo-Automodel's own, of keys that a schema has.
MOVED: dict[str, str] = {
    "grpo.num_val_generations_per_prompt": "grpo.val_num_generations_per_prompt",
    "policy.activation_checkpointing_enabled": "policy.dtensor_cfg.activation_checkpointing",
    f"{_AUTOMODEL}.attn_implementation": f"{_AUTOMODEL}.backend.attn",
    "env.should_mask_flagged_samples": "grpo.should_mask_flagged_samples",
    "data.problem_key": "data.input_key",
    "data.solution_key": "data.output_key",
}
# Before release 0.5 the keys of the one dataset stood in `data` itself.
_OLD_ENTRY = ("prompt_file", "system_prompt_file", "env_name", "processor")
_OLD_TRAIN = (
    "dataset_name",
    "data_path",
    "split",
    "subset",
    "input_key",
    "output_key",
    "split_validation_size",
    "seed",
)
_OLD_PATHS = {"train_data_path": ("train", "data_path"), "val_data_path": ("validation", "data_path")}
# What those releases validated on, where a training set had no part of its own for that.
_OLD_VALIDATION: dict[str, dict[str, object]] = {
    "DAPOMath17K": {"dataset_name": "DAPOMathAIME2024"},
    "DeepScaler": {"dataset_name": "AIME2024", "repeat": 16},
}


@dataclass
class Adapted:
    """A configuration under present names.

    Attributes:
        values: a copy of the mapping, changed.
        notes: what was changed, one line each.
    """

    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def adapt(raw: Mapping[str, object], root: type[Section]) -> Adapted:
    """Moves keys with earlier names, and leaves out those that change nothing here."""
    adapted = Adapted(copy.deepcopy(dict(raw)))
    if _has_training_data(root):
        _move_old_data(adapted)
    _move_puzzle_game(adapted)
    for old, new in MOVED.items():
        _move(adapted, tuple(old.split(".")), tuple(new.split(".")))
    left_out: dict[str, str] = {}
    for key, value in list(unknown_leaves(adapted.values, root)):
        entry = find(key)
        off = switched_off(adapted.values, root, key)
        if entry is not None and (off is not None or entry.changes_nothing(value)):
            take(adapted.values, key)
            shown = f"{off} (not enabled)" if off else _family(entry, key)
            left_out.setdefault(shown, entry.part)
    if left_out:
        adapted.notes.append(f"keys that change nothing here: {', '.join(left_out)}")
    return adapted


def find(key: Sequence[str]) -> Foreign | None:
    """The entry of a key; None for a name that NeMo-RL does not have either."""
    names = [part for part in key if not part.isdigit()]
    # An evaluation has a policy's generation and tokenizer at its top.
    spellings = (names, ["policy", *names]) if names[:1] in (["generation"], ["tokenizer"]) else (names,)
    return next((entry for entry in FOREIGN if any(map(entry.matches, spellings))), None)


def other_algorithms(values: Mapping[str, object]) -> Iterator[tuple[str, Foreign]]:
    """The sections of a recipe that make it one of an algorithm that is not built, with their entries."""
    for name in values:
        entry = find([str(name)])
        if entry is not None and values[name] not in (None, {}):
            yield str(name), entry


def unknown_leaves(values: object, schema: type[Section] | None, prefix: Key = ()) -> Iterator[tuple[Key, object]]:
    """Every key below `values` that its section does not have, with its value."""
    if isinstance(values, list):
        for index, item in enumerate(values):
            yield from unknown_leaves(item, schema, (*prefix, str(index)))
        return
    if not isinstance(values, Mapping) or schema is None:
        return
    for name, value in values.items():
        known = field_of(schema, str(name))
        key = (*prefix, str(name))
        if known is None:
            yield key, value
        else:
            yield from unknown_leaves(value, section_within(known), key)


def switched_off(values: Mapping[str, object], root: type[Section], key: Sequence[str]) -> str | None:
    """The innermost section around `key` that is not enabled, if there is one."""
    schema: type[Section] | None = root
    found = None
    for depth, part in enumerate(key[:-1]):
        known = field_of(schema, part) if schema is not None else None
        schema = section_within(known) if known is not None else None
        if schema is None:
            break
        switch = field_of(schema, "enabled")
        if switch is not None:
            given = at(values, (*key[: depth + 1], "enabled"), default=switch.get_default(call_default_factory=True))
            found = ".".join(key[: depth + 1]) if given in (False, None) else found
    return found


def _has_training_data(root: type[Section]) -> bool:
    data = field_of(root, "data")
    section = section_within(data) if data is not None else None
    return section is not None and field_of(section, "train") is not None


def _family(entry: Foreign, key: Key) -> str:
    return entry.pattern.removesuffix(".**") if entry.pattern.endswith(".**") else ".".join(key)


def _move(adapted: Adapted, old: Key, new: Key) -> None:
    value = at(adapted.values, old)
    if value is ABSENT:
        return
    take(adapted.values, old)
    if at(adapted.values, new) is ABSENT and value is not None:
        put(adapted.values, new, value)
    adapted.notes.append(f"{'.'.join(old)} is read as {'.'.join(new)}")


def _move_puzzle_game(adapted: Adapted) -> None:
    """NeMo-RL's puzzle run makes its puzzles from the environment's options, whatever `data` names."""
    game = at(adapted.values, ("env", "sliding_puzzle_game"), default=None)
    if not isinstance(game, Mapping):
        return
    options = game.get("cfg") or {}
    take(adapted.values, ("env", "sliding_puzzle_game"))
    if options.get("max_moves") is not None:
        put(adapted.values, ("env", "sliding_puzzle", "max_moves"), options["max_moves"])
    puzzles = {
        "dataset_name": "sliding_puzzle",
        "env_name": "sliding_puzzle",
        "prompt_file": None,
        "num_problems": 2048,
        "held_out": 256,
        "task_config": dict(options.get("game_config") or {}),
    }
    for split in ("train", "validation"):
        put(adapted.values, ("data", split), {**puzzles, "split": split})
    adapted.notes.append(
        "env.sliding_puzzle_game is read as env.sliding_puzzle, and its game_config as the task_config of "
        "data.train and data.validation"
    )


def _move_old_data(adapted: Adapted) -> None:
    data = adapted.values.get("data")
    if not isinstance(data, dict):
        return
    entry = {name: data.pop(name) for name in (*_OLD_TRAIN, *_OLD_ENTRY) if name in data}
    paths = {name: data.pop(name) for name in _OLD_PATHS if name in data}
    if not entry and not paths:
        return
    default = {name: entry.pop(name) for name in _OLD_ENTRY if name in entry}
    if default:
        data["default"] = {**(data.get("default") or {}), **default}
    if "dataset_name" in entry:
        data["train"] = entry
        held_out = _OLD_VALIDATION.get(str(entry["dataset_name"]))
        if held_out is not None and not data.get("validation"):
            data["validation"] = dict(held_out)
        elif entry["dataset_name"] == "OpenMathInstruct-2":
            entry.setdefault("split_validation_size", 0.05)
    elif entry and isinstance(data.get("train"), dict):
        data["train"] = {**data["train"], **entry}
    for name, (split, key) in _OLD_PATHS.items():
        if name in paths:
            named = {
                "dataset_name": "ResponseDataset",
                **{k: v for k, v in entry.items() if k in ("input_key", "output_key")},
            }
            data[split] = {**named, **(data.get(split) or {}), key: paths[name]}
    adapted.notes.append("data has the layout of releases before 0.5; its keys are read as data.train and data.default")
