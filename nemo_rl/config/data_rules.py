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
    name = config.checkpointing.metric_name
    if name is None:
        return
    kind, _, short = name.partition(":")
    if kind == "val":
        yield from _unknown_of_validation(config, f"checkpointing.metric_name: {name}", short, "val:")
        return
    known = SFT_TRAINING if isinstance(config, SFTMasterConfig) else GRPO_TRAINING
    near = did_you_mean(short, known)
    if short not in known and near:
        yield f"checkpointing.metric_name: {name}: training measures no {short!r}.{near} (train:<name>)"


def a_run_ends_by_a_metric(config: MasterConfig) -> Iterator[Problem]:
    name = config.grpo.stop_at_validation_metric
    if name is not None:
        short = name.removeprefix("val:").removeprefix("validation/")
        yield from _unknown_of_validation(config, f"grpo.stop_at_validation_metric: {name}", short, "")


def _unknown_of_validation(config: RootConfig, what: str, short: str, prefix: str) -> Iterator[Problem]:
    if short.startswith("total_reward/"):
        key = what.partition(":")[0]
        yield not_built(key, short, "metrics of NeMo-Gym's rollouts", f"{prefix}accuracy is the mean reward")
        return
    known = SFT_VALIDATION if isinstance(config, SFTMasterConfig) else GRPO_VALIDATION
    if short not in known and not (isinstance(config, MasterConfig) and short.startswith("accuracy/")):
        yield f"{what}: validation measures no {short!r}; it measures {', '.join(prefix + name for name in known)}"


SHARED_METRIC_RULES: tuple[Callable[[RootConfig], Iterator[Problem]], ...] = (checkpoints_are_ranked_by_a_metric,)
GRPO_METRIC_RULES: tuple[Callable[[MasterConfig], Iterator[Problem]], ...] = (a_run_ends_by_a_metric,)
