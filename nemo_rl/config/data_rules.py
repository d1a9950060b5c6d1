"""Rules of data, environments and metrics: validation has data, loaders have their shares, and every name is one of
something that exists.

Whether a dataset or a column can be read is found out when it is read; this file knows keys and names only. Invariant:
a metric that a run measures is never refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.env import EnvConfig, UserEnvironmentConfig
from nemo_rl.config.errors import Problem, did_you_mean
from nemo_rl.config.foreign import GYM, VLM
from nemo_rl.config.master import MasterConfig, RootConfig, SFTMasterConfig
from nemo_rl.config.metric_names import MetricName
from nemo_rl.config.section import not_built

_UNBUILT_ENVIRONMENTS = {
    "reward_model": "reward models",
    "nemo_gym": GYM,
    **dict.fromkeys(("vlm", "clevr-cogent", "geometry3k", "refcoco", "mmpr-tiny", "avqa", "audiomcq"), VLM),
}
# By name; what they need is not there.
UNBUILT_DATASETS = {
    "NemoGymDataset": GYM,
    **dict.fromkeys(
        ("clevr-cogent", "geometry3k", "refcoco", "avqa", "audiomcq", "mmpr-tiny", "mmpr_tiny", "daily-omni"), VLM
    ),
}
UNBUILT_PROCESSORS = {"vlm_hf_data_processor": VLM, "nemo_gym_data_processor": GYM}


def validation_has_data(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    switches = {
        f"grpo.val_period {grpo.val_period}": grpo.val_period > 0,
        "grpo.val_at_start": grpo.val_at_start,
        "grpo.val_at_end": grpo.val_at_end,
        "grpo.stop_at_validation_metric": grpo.stop_at_validation_metric is not None,
    }
    yield from _validation_data(config, [name for name, on in switches.items() if on])


def sft_validation_has_data(config: SFTMasterConfig) -> Iterator[str]:
    sft = config.sft
    switches = {
        f"sft.val_period {sft.val_period}": sft.val_period > 0,
        "sft.val_at_start": sft.val_at_start,
        "sft.val_at_end": sft.val_at_end,
    }
    yield from _validation_data(config, [name for name, on in switches.items() if on])


def loaders_have_their_shares(config: RootConfig) -> Iterator[str]:
    data = config.data
    if not data.use_multiple_dataloader:
        return
    if data.num_prompts_per_dataloader is None:
        yield "data.use_multiple_dataloader needs data.num_prompts_per_dataloader"
    elif isinstance(config, MasterConfig) and config.grpo.num_prompts_per_step % data.num_prompts_per_dataloader:
        yield (
            f"data.num_prompts_per_dataloader {data.num_prompts_per_dataloader} does not divide "
            f"grpo.num_prompts_per_step {config.grpo.num_prompts_per_step}"
        )


def training_has_a_dataset(config: RootConfig) -> Iterator[str]:
    if not config.data.train:
        yield "data.train: an empty list; name at least one dataset"


def environments_exist(config: MasterConfig) -> Iterator[Problem]:
    names = environment_names(config.env)
    used = set()
    for key, entry in _entries(config):
        used.add(entry.env_name)
        part = _UNBUILT_ENVIRONMENTS.get(entry.env_name)
        own = config.env.of(entry.env_name)
        if part is not None and (own is None or own.env_class is None):
            yield not_built(f"{key}.env_name", entry.env_name, part, "name another, or give it a class of your own")
        elif entry.env_name not in names:
            yield (
                f"{key}.env_name: there is no environment "
                f"{entry.env_name!r}.{did_you_mean(entry.env_name, names)} A new one needs "
                f"env.{entry.env_name}.class"
            )
    for name, section in (config.env.model_extra or {}).items():
        known = name in used or name in _UNBUILT_ENVIRONMENTS
        if isinstance(section, UserEnvironmentConfig) and section.env_class is None and not known:
            built_in = [other for other in names if other not in (config.env.model_extra or {})]
            yield (
                f"env.{name}: unknown environment, and nothing uses it.{did_you_mean(name, built_in)} A "
                f"new one needs env.{name}.class"
            )


def datasets_exist(config: RootConfig) -> Iterator[Problem]:
    for key, entry in _entries(config):
        part = UNBUILT_DATASETS.get(entry.dataset_name)
        if part is not None:
            yield not_built(f"{key}.dataset_name", entry.dataset_name, part, "choose another dataset")
        part = UNBUILT_PROCESSORS.get(entry.processor)
        if part is not None:
            yield not_built(f"{key}.processor", entry.processor, part, "choose another processor")


def environment_names(env: EnvConfig) -> list[str]:
    """Names that `data.*.env_name` may hold: the built-in environments and those the configuration adds."""
    built_in = [name for name in EnvConfig.model_fields if not name.startswith("should_")]
    return [*built_in, *(env.model_extra or {})]


def _entries(config: RootConfig) -> Iterator[tuple[str, DatasetConfig]]:
    for split, entries in (("train", config.data.train), ("validation", config.data.validation or [])):
        for index, entry in enumerate(entries):
            yield (f"data.{split}" if len(entries) == 1 else f"data.{split}.{index}"), entry


def _validation_data(config: RootConfig, switches: list[str]) -> Iterator[str]:
    held_out = any(entry.split_validation_size > 0 for entry in config.data.train)
    if switches and not config.data.validation and not held_out:
        yield (
            f"data.validation is null and no data.train has split_validation_size, but {', '.join(switches)} "
            f"{'asks' if len(switches) == 1 else 'ask'} for validation; name a dataset, or switch validation off"
        )


DATA_RULES: tuple[Callable[[MasterConfig], Iterator[Problem]], ...] = (
    validation_has_data,
    loaders_have_their_shares,
    training_has_a_dataset,
    datasets_exist,
    environments_exist,
)
SFT_DATA_RULES: tuple[Callable[[SFTMasterConfig], Iterator[Problem]], ...] = (
    sft_validation_has_data,
    loaders_have_their_shares,
    training_has_a_dataset,
    datasets_exist,
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


def checkpoints_are_ranked_by_a_metric(config: RootConfig) -> Iterator[Problem]:
    if config.checkpointing.metric_name is None:
        return
    name = f"checkpointing.metric_name: {config.checkpointing.metric_name}"
    metric = MetricName.read(config.checkpointing.metric_name)
    if metric.kind == "val":
        yield from _unknown_of_validation(config, name, metric.name, "val:")
        return
    known = SFT_TRAINING if isinstance(config, SFTMasterConfig) else GRPO_TRAINING
    near = did_you_mean(metric.name, known)
    if metric.name not in known and near:
        yield f"{name}: training measures no {metric.name!r}.{near} (train:<name>)"


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
    yield from _unknown_of_validation(config, name, metric.name, "")


def _unknown_of_validation(config: RootConfig, what: str, short: str, prefix: str) -> Iterator[Problem]:
    if short.startswith("total_reward/"):
        key = what.partition(":")[0]
        yield not_built(key, short, "metrics of NeMo-Gym's rollouts", f"{prefix}accuracy is the mean reward")
        return
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
_MATH = ("accuracy", "verify_timeouts")
_MEASURED = dict.fromkeys(("math", "math_default", "dapo", "math_multi_reward"), _MATH)
_PARTS = {"math_multi_reward": ("correctness", "integer", "format")}


def _of_tasks_and_environments(config: MasterConfig) -> list[str]:
    """Names under which validation data and their environments are measured; `*` at the end stands for any."""
    entries = [entry for entry in config.data.train if entry.split_validation_size > 0]
    entries += config.data.validation or []
    names: list[str] = []
    for name in dict.fromkeys(entry.env_name for entry in entries):
        own = config.env.of(name)
        if name in EnvConfig.model_fields and (own is None or own.env_class is None):
            names += [f"{name}/{measured}" for measured in _MEASURED.get(name, ())]
            names += [f"reward/{part}" for part in _PARTS.get(name, ())]
        else:
            names += [f"{name}/*", "reward/*"]
    tasks = [entry.dataset_name for entry in entries]
    if len(entries) < 2 or any("." in task for task in tasks) or len(set(tasks)) < len(tasks):
        # One set of a class of the user's may hold several tasks, and equal names are numbered.
        return [*names, "accuracy/*"]
    return [*names, *(f"accuracy/{task}" for task in tasks)]


SHARED_METRIC_RULES: tuple[Callable[[RootConfig], Iterator[Problem]], ...] = (checkpoints_are_ranked_by_a_metric,)
GRPO_METRIC_RULES: tuple[Callable[[MasterConfig], Iterator[Problem]], ...] = (a_run_ends_by_a_metric,)
