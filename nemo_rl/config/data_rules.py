"""Rules of data, environments and metrics: validation has data, loaders have their shares, and every name is one of
something that exists.

Whether a dataset or a column can be read is found out when it is read; this file knows keys and names only. Invariant:
a metric that a run measures is never refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config.algorithms import GRPOConfig
from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.env import EnvConfig, EnvironmentConfig, UserEnvironmentConfig
from nemo_rl.config.errors import Problem, did_you_mean
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.foreign import UNBUILT
from nemo_rl.config.master import MasterConfig, RootConfig, SFTMasterConfig
from nemo_rl.config.metric_names import MetricName
from nemo_rl.config.rules import caution, rule
from nemo_rl.config.section import not_built


@rule
def validation_has_data(config: MasterConfig | SFTMasterConfig) -> Iterator[str]:
    loop, section = (config.sft, "sft") if isinstance(config, SFTMasterConfig) else (config.grpo, "grpo")
    switches = {
        f"{section}.val_period {loop.val_period}": loop.val_period > 0,
        f"{section}.val_at_start": loop.val_at_start,
        f"{section}.val_at_end": loop.val_at_end,
        "grpo.stop_at_validation_metric": section == "grpo" and loop["stop_at_validation_metric"] is not None,
    }
    asking = [name for name, on in switches.items() if on]
    held_out = any(entry.split_validation_size > 0 for entry in config.data.train)
    if asking and not config.data.validation and not held_out:
        yield (
            f"data.validation is null and no data.train has split_validation_size, but {', '.join(asking)} "
            f"{'asks' if len(asking) == 1 else 'ask'} for validation; name a dataset, or switch validation off"
        )


@rule
def loaders_have_their_shares(config: RootConfig) -> Iterator[str]:
    data = config.data
    if not data.use_multiple_dataloader:
        return
    if data.num_prompts_per_dataloader is None:
        yield "data.use_multiple_dataloader needs data.num_prompts_per_dataloader"
        return
    if not isinstance(config, MasterConfig):
        return
    grpo, each = config.grpo, data.num_prompts_per_dataloader
    prompts, of = grpo.num_prompts_per_step, f"grpo.num_prompts_per_step {grpo.num_prompts_per_step}"
    if grpo.batch_multiplier != 1:
        prompts, of = prompts * grpo.batch_multiplier, f"{of} * grpo.batch_multiplier {grpo.batch_multiplier}"
    if prompts % each:
        yield f"data.num_prompts_per_dataloader {each} does not divide {of}"


@rule
def fine_tuning_has_one_loader(config: SFTMasterConfig) -> Iterator[str]:
    if config.data.use_multiple_dataloader:
        yield (
            "data.use_multiple_dataloader is true, and SFT has one loader, which draws from all datasets in proportion "
            "to their rows; set it to false (data.train.*.repeat gives a dataset more weight)"
        )


@rule
def training_has_a_dataset(config: RootConfig) -> Iterator[str]:
    if not config.data.train:
        yield "data.train: an empty list; name at least one dataset"


@rule
def environments_exist(config: MasterConfig | EvalMasterConfig) -> Iterator[Problem]:
    names = environment_names(config.env)
    used = set()
    for key, entry in data_entries(config):
        used.add(entry.env_name)
        part = UNBUILT["environments"].get(entry.env_name)
        own = config.env.of(entry.env_name)
        if part is not None and (own is None or not own.is_users):
            yield not_built(
                f"{key}.env_name", entry.env_name, part, "name another, or give it a class or function of your own"
            )
        elif entry.env_name not in names:
            yield (
                f"{key}.env_name: there is no environment {entry.env_name!r}.{did_you_mean(entry.env_name, names)} A "
                f"new one needs env.{entry.env_name}.class, .function or .agent"
            )
    for name, section in (config.env.model_extra or {}).items():
        known = name in used or name in UNBUILT["environments"]
        if isinstance(section, UserEnvironmentConfig) and not section.is_users and not known:
            built_in = [other for other in names if other not in (config.env.model_extra or {})]
            yield (
                f"env.{name}: unknown environment, and nothing uses it.{did_you_mean(name, built_in)} A "
                f"new one needs env.{name}.class, .function or .agent"
            )


@rule
def own_judges_judge(config: MasterConfig | EvalMasterConfig) -> Iterator[str]:
    used = {key: entry.env_name for key, entry in data_entries(config)}
    own = [name for name in config.env.model_extra or {} if (at := config.env.of(name)) is not None and at.is_users]
    if own and not any((section := config.env.of(name)) is not None and section.is_users for name in used.values()):
        yield (
            f"env.{own[0]}: nothing uses it, because data name {', '.join(dict.fromkeys(used.values()))}; "
            f"set {' and '.join(f'{key}.env_name={own[0]}' for key in used)}, or leave it out"
        )


@rule
def functions_stand_alone(config: MasterConfig | EvalMasterConfig) -> Iterator[str]:
    for name, section in _judged_by_functions(config.env):
        if section.env_class is not None:
            yield f"env.{name}.class and env.{name}.function exclude each other; leave one out"


@rule
def agents_reach_the_model(config: MasterConfig) -> Iterator[str]:
    for name in environments_in_use(config):
        section = config.env.of(name)
        if section is not None and section.python is not None and section.agent is None:
            yield f"env.{name}.python is the interpreter of an agent; name one in env.{name}.agent, or leave it out"
        if section is None or section.agent is None:
            continue
        if section.env_class is not None or section.function is not None:
            yield f"env.{name}.agent excludes env.{name}.class and env.{name}.function; leave one out"
        if not config.policy.generation.vllm_cfg.expose_http_server:
            yield (
                f"env.{name}.agent reaches the model through the run's endpoint; set "
                "policy.generation.vllm_cfg.expose_http_server=true"
            )


@rule
def nemo_gym_plays_its_own_rows(config: MasterConfig | EvalMasterConfig) -> Iterator[str]:
    plays = config.env.should_use_nemo_gym
    if plays and (config.env.nemo_gym is None or not config.env.nemo_gym.config_paths):
        yield "env.should_use_nemo_gym: true needs env.nemo_gym.config_paths, the configurations of its servers"
    elif plays and config.env.nemo_gym is not None and config.env.nemo_gym.agent is None:
        yield "env.nemo_gym.agent: null, and nothing plays the rows; leave the key out"
    for key, entry in data_entries(config):
        if plays and entry.env_name != "nemo_gym":
            yield (
                f"{key}.env_name: {entry.env_name!r}, but env.should_use_nemo_gym: true plays every row with NeMo-Gym; "
                "name nemo_gym, or set it to false"
            )
        elif entry.env_name == "nemo_gym" and not plays:
            yield f"{key}.env_name: 'nemo_gym' plays with env.should_use_nemo_gym: true; set it"
        elif plays and entry.dataset_name != "NemoGymDataset" and "." not in entry.dataset_name:
            yield (
                f"{key}.dataset_name: {entry.dataset_name!r} has no rows of NeMo-Gym; name NemoGymDataset, with the "
                "JSONL file in data_path"
            )


@rule
def evaluations_run_no_agents(config: EvalMasterConfig) -> Iterator[str]:
    for _, entry in data_entries(config):
        section = config.env.of(entry.env_name)
        if section is not None and section.agent is not None:
            yield f"env.{entry.env_name}.agent plays in training and its validation alone; name a class or a function"


@caution
def keys_of_replaced_environments(config: MasterConfig | EvalMasterConfig) -> Iterator[str]:
    """Keys that only the built-in environment reads, where a function stands in its place."""
    for name, section in _judged_by_functions(config.env):
        fields = type(section).model_fields
        own = [key for key in fields if key not in EnvironmentConfig.model_fields]
        changed = [f"env.{name}.{key}" for key in own if section[key] != fields[key].default]
        if changed:
            yield f"values that change nothing here: {', '.join(changed)} (env.{name}.function judges)"


def _judged_by_functions(env: EnvConfig) -> Iterator[tuple[str, EnvironmentConfig]]:
    for name in environment_names(env):
        section = env.of(name)
        if section is not None and section.function is not None:
            yield name, section


@rule
def datasets_exist(config: RootConfig | EvalMasterConfig) -> Iterator[Problem]:
    for key, entry in data_entries(config):
        if (part := UNBUILT["datasets"].get(entry.dataset_name)) is not None:
            yield not_built(f"{key}.dataset_name", entry.dataset_name, part, "choose another dataset")
        if (part := UNBUILT["processors"].get(entry.processor)) is not None:
            yield not_built(f"{key}.processor", entry.processor, part, "choose another processor")


def environment_names(env: EnvConfig) -> list[str]:
    """Names that `data.*.env_name` may hold: the built-in environments and those the configuration adds."""
    built_in = [name for name in EnvConfig.model_fields if not name.startswith("should_")]
    return [*built_in, *(env.model_extra or {})]


def environments_in_use(config: MasterConfig) -> list[str]:
    """Names of the environments that entries of data name."""
    return list(dict.fromkeys(entry.env_name for _, entry in data_entries(config)))


def data_entries(config: RootConfig | EvalMasterConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Entries of data by their dotted keys."""
    if isinstance(config, EvalMasterConfig):
        yield "data", config.data
        return
    for split, entries in (("train", config.data.train), ("validation", config.data.validation or [])):
        for index, entry in enumerate(entries):
            yield (f"data.{split}" if len(entries) == 1 else f"data.{split}.{index}"), entry


@caution
def choices_are_shown(config: MasterConfig | EvalMasterConfig) -> Iterator[str]:
    for key, entry in data_entries(config):
        asks = entry.processor == "multichoice_qa_processor" or entry.dataset_name.startswith(("mmlu", "gpqa"))
        if asks and entry.prompt_file is None:
            yield (
                f"{key}.prompt_file is null: questions are asked with their choices, where NeMo-RL leaves the choices "
                "out (docs/from_nemo_rl.md)"
            )


GRPO_VALIDATION = ("accuracy", "avg_length", "pass_k", "mean_accuracy")
SFT_VALIDATION = ("val_loss",)
_EVERY_STEP = ("loss", "grad_norm", "lr", "wd", "global_valid_seqs", "global_valid_toks", "num_valid_samples")
SFT_TRAINING = (*_EVERY_STEP, "num_unmasked_tokens")
GRPO_TRAINING = (
    *_EVERY_STEP,
    "reward",
    "filtered_reward",
    "baseline_reward/pct_0",
    "baseline_reward/pct_1",
    "baseline_reward/pct_mixed",
    "mean_prompt_length",
    "total_num_tokens",
    "kl_penalty",
    "approx_entropy",
    "probs_ratio",
    "probs_ratio_clamped",
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
    "is_oob_ratio",
    "positive_nll_loss",
    "mean_total_reward",
    "max_total_reward",
    "min_total_reward",
    "truncation_rate",
    "natural_termination_rate",
    "max_turns_reached_rate",
    "mean_gen_tokens_per_sample",
    "mean_total_tokens_per_sample",
    "avg_turns_per_sample",
)


@rule
def checkpoints_are_ranked_by_a_metric(config: RootConfig) -> Iterator[Problem]:
    if config.checkpointing.metric_name is None:
        return
    name = f"checkpointing.metric_name: {config.checkpointing.metric_name}"
    if not config.checkpointing.metric_name.startswith(("val:", "train:")):
        yield f"{name} begins with neither val: nor train:, which say what is measured"
        return
    metric = MetricName.read(config.checkpointing.metric_name)
    if metric.kind == "val":
        yield from _unknown_of_validation(config, name, metric.name, "val:")
        return
    known = SFT_TRAINING if isinstance(config, SFTMasterConfig) else GRPO_TRAINING
    near = did_you_mean(metric.name, known)
    if metric.name not in known and near:
        yield f"{name}: training measures no {metric.name!r}.{near} (train:<name>)"


@rule
def a_run_ends_by_a_metric(config: MasterConfig) -> Iterator[Problem]:
    grpo, key = config.grpo, "grpo.stop_at_validation_metric"
    if (grpo.stop_at_validation_metric is None) != (grpo.stop_at_validation_threshold is None):
        yield f"{key} and grpo.stop_at_validation_threshold belong together; set both or neither"
    if grpo.stop_at_validation_metric is None:
        return
    metric = MetricName.read(grpo.stop_at_validation_metric)
    name = f"{key}: {grpo.stop_at_validation_metric}"
    if metric.kind == "train":
        yield f"{name}: a metric of training; a run ends by one of validation, such as accuracy"
        return
    if grpo.val_period <= 0:
        yield f"{name}: grpo.val_period is {grpo.val_period}, so that nothing is validated before the run's end"
    elif (first := _first_validation(grpo)) > grpo.max_num_steps:
        yield (
            f"{name}: the first validation would be after step {first} (grpo.val_period {grpo.val_period}, "
            f"grpo.val_start_at {grpo.val_start_at}), and the run ends after grpo.max_num_steps {grpo.max_num_steps}"
        )
    highest, threshold = _highest(config, metric.name), grpo.stop_at_validation_threshold
    if highest is not None and threshold is not None and threshold > highest:
        yield (
            f"grpo.stop_at_validation_threshold: {threshold:g} can never be reached: {metric.name} is at most "
            f"{highest:g}"
        )
    yield from _unknown_of_validation(config, name, metric.name, "")


def _first_validation(grpo: GRPOConfig) -> int:
    """The first step after which a validation is due, of a run that validates periodically."""
    return -(-max(grpo.val_start_at, 1) // grpo.val_period) * grpo.val_period


def _highest(config: MasterConfig, metric: str) -> float | None:
    """Upper bound of a validation metric; None where it depends on a user's environment, or on turns."""
    names = {entry.env_name for entry in _validated(config)}
    own = [section for name in names if (section := config.env.of(name)) is not None and section.is_users]
    head, _, part = metric.partition("/")
    if metric == "pass_k" or (head == "reward" and not own) or (part in _SHARES and part in _MEASURED.get(head, ())):
        return 1.0
    if head not in ("accuracy", "mean_accuracy") or own or not names <= set(_HIGHEST_REWARD):
        return None
    return max(_HIGHEST_REWARD[name] for name in names)


def _unknown_of_validation(config: RootConfig, what: str, short: str, prefix: str) -> Iterator[Problem]:
    known = SFT_VALIDATION
    if isinstance(config, MasterConfig):
        grpo = config.grpo
        if short == "pass_k" and grpo.val_num_generations_per_prompt < 2:
            yield f"{what}: pass_k needs grpo.val_num_generations_per_prompt above 1"
        if short == "mean_accuracy" and not grpo.use_best_at_k:
            yield f"{what}: mean_accuracy needs grpo.use_best_at_k; without it, accuracy is the mean"
        known = (*GRPO_VALIDATION, *(names := _of_tasks_and_environments(config)))
        if any(short.startswith(name.removesuffix("*")) for name in names if name.endswith("*")):
            return
    if short not in known:
        listed = ", ".join(prefix + name for name in known)
        yield f"{what}: validation measures no {short!r}; it measures {listed}.{did_you_mean(short, known)}"


# What built-in environments measure of a validation, and the parts of their rewards.
_SHARES = ("accuracy", "pass@samples_per_prompt", "fraction_of_samples_properly_ended")
_MATH = (*_SHARES, "generation_lengths", "correct_solution_generation_lengths", "verify_timeouts")
_OF_MATH = ("math", "math_default", "dapo")
_MEASURED = {
    **dict.fromkeys(_OF_MATH, _MATH),
    **dict.fromkeys(("reasoning_gym", "code", "code_tests"), ("verify_timeouts",)),
}
_PARTS = {"math_multi_reward": ("correctness", "integer", "format")}
# The highest reward of environments whose episodes are one turn.
_HIGHEST_REWARD = dict.fromkeys((*_OF_MATH, "reasoning_gym", "code_jaccard"), 1.0) | {"math_multi_reward": 3.0}


def _validated(config: MasterConfig) -> list[DatasetConfig]:
    """The entries of data that a validation asks."""
    held_out = [entry for entry in config.data.train if entry.split_validation_size > 0]
    return [*held_out, *(config.data.validation or [])]


def _of_tasks_and_environments(config: MasterConfig) -> list[str]:
    """Names under which validation data and their environments are measured; `*` at the end stands for any."""
    entries = _validated(config)
    names: list[str] = []
    for name in dict.fromkeys(entry.env_name for entry in entries):
        own = config.env.of(name)
        if name in EnvConfig.model_fields and (own is None or not own.is_users):
            names += [f"{name}/{measured}" for measured in _MEASURED.get(name, ())]
            names += [f"reward/{part}" for part in _PARTS.get(name, ())]
        else:
            names += [f"{name}/*", "reward/*"]
    tasks = [entry.dataset_name for entry in entries]
    if len(entries) < 2 or any("." in task for task in tasks) or len(set(tasks)) < len(tasks):
        # One set of a class of the user's may hold several tasks, and equal names are numbered.
        return [*names, "accuracy/*"]
    return [*names, *(f"accuracy/{task}" for task in tasks)]
