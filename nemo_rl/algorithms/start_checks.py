"""What a correct configuration may ask for in vain: prompts that train nothing, a model too large for this machine.

Says what a person would otherwise find out after hours; refuses what cannot be meant. Knows data and devices by their
counts alone. Invariant: nothing here changes the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl.config import ConfigError
from nemo_rl.config.master import RootConfig
from nemo_rl.data.interfaces import DataError
from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.utils.flops import TransformerShape, UnknownArchitecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Say = Callable[[str], None]

_LOOKED_AT = 512
_TOO_LARGE_FOR_CPUS = 200e6


def check_prompt_lengths(by_task: Mapping[str, Any], limit: int | None, say: Say) -> None:
    """Counts prompts that are longer than the limit and therefore train nothing.

    Args:
        by_task: Processed training data per task; `[i]["loss_multiplier"]` is 0 for a prompt that is too long.
        limit: `data.max_input_seq_length`, tokens; None has no limit.
        say: Tells the person.

    Raises:
        DataError: Every prompt that was looked at is too long.
    """
    for task, dataset in by_task.items() if limit is not None else ():
        rows = len(dataset)
        looked_at = _spread(rows)
        too_long = sum(dataset[row]["loss_multiplier"] == 0 for row in looked_at)
        part = "" if len(looked_at) == rows else f" looked at, of {rows},"
        count = f"{too_long} of {len(looked_at)} prompts{part}"
        if looked_at and too_long == len(looked_at):
            raise DataError(
                f"data.train ({task}): {count} are longer than data.max_input_seq_length={limit} tokens, so nothing "
                "would be trained; raise it (and policy.max_total_sequence_length), or name shorter data"
            )
        if too_long:
            say(f"data.train ({task}): {count} are longer than data.max_input_seq_length={limit} and train nothing")


def check_cpu_is_meant(config: RootConfig, accelerator: Accelerator, model: PretrainedConfig, say: Say) -> None:
    """Whether a run that took what it found runs where it was meant to.

    Args:
        config: The run's.
        accelerator: What there is.
        model: The model's Hugging Face configuration.
        say: Tells the person.

    Raises:
        ConfigError: There is no GPU, nobody asked for CPUs, and the run is too large for them.
    """
    cluster = config.cluster
    if accelerator.is_cuda or cluster.device != "auto":
        return
    meant = "cluster.device=cpu says that CPUs are meant"
    if cluster.gpus_per_node > cluster.cpu_slots:
        raise ConfigError(
            [
                f"cluster.gpus_per_node={cluster.gpus_per_node}, but there is no GPU here, and cluster.cpu_slots="
                f"{cluster.cpu_slots}; {meant}, and cluster.cpu_slots how many slots they make"
            ]
        )
    size = _parameters(model)
    if size is not None and size > _TOO_LARGE_FOR_CPUS:
        raise ConfigError(
            [
                f"there is no GPU here, and {config.policy.model_name} has about {size / 1e9:.1f} billion parameters: "
                f"a step would take minutes to hours; {meant}. A run made for CPUs is "
                "examples/configs/grpo_arithmetic_cpu.yaml"
            ]
        )
    say(f"no GPU here: everything runs on CPUs ({meant})")


def _spread(rows: int) -> Sequence[int]:
    return range(rows) if rows <= _LOOKED_AT else [number * rows // _LOOKED_AT for number in range(_LOOKED_AT)]


def _parameters(model: PretrainedConfig) -> float | None:
    """Parameters that a token meets, and the embedding."""
    try:
        shape = TransformerShape.from_hf_config(model)
    except UnknownArchitecture:
        return None
    attention = 2 * shape.hidden * (shape.query_width + shape.key_value_width)
    return shape.layers * (attention + shape.mlp_operations) + shape.vocabulary * shape.hidden
