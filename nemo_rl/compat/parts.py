"""A run in the parts that NeMo-RL's `setup` returns, thirteen of a GRPO run, and the run that such parts are of.

The run is made of its configuration; what a script hands over must be what it got from here. Invariant: nothing that a
script hands over is ignored: it is the run's own, or used, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from nemo_rl.compat.errors import ShapeChanged
from nemo_rl.config import DataConfig, EnvConfig, MasterConfig, SFTMasterConfig
from nemo_rl.config.master import RootConfig

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.algorithms.distillation.teachers import Teachers
    from nemo_rl.algorithms.grpo.run import GRPORun
    from nemo_rl.algorithms.run_checkpoint import RunState
    from nemo_rl.algorithms.sft.driver import SFTRun
    from nemo_rl.data.loader import Batch, Loader
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.environments.registry import ResponseData
    from nemo_rl.loss.interfaces import LossFunction
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
    from nemo_rl.models.policy.lm_policy import Policy
    from nemo_rl.utils.checkpoint import CheckpointManager
    from nemo_rl.utils.logger import Logger


class GRPOParts(NamedTuple):
    """What `setup(master_config, tokenizer, dataset, val_dataset)` returns."""

    policy: Policy
    policy_generation: VllmGeneration | None
    nemo_gym: None
    clusters: tuple[RayVirtualCluster, RayVirtualCluster]  # of training and of generation, which may be one
    dataloader: Loader
    val_dataloader: StatefulDataLoader[Batch] | None
    loss_fn: LossFunction
    logger: Logger
    checkpointer: CheckpointManager
    grpo_state: RunState
    master_config: MasterConfig
    teacher_worker_groups: Teachers | None
    alias_to_group_alias: dict[str, str]


class SFTParts(NamedTuple):
    """What SFT's `setup(master_config, tokenizer, dataset, val_dataset)` returns: what GRPO's does, in that order,
    without what only generation, environments and teachers need.
    """

    policy: Policy
    cluster: RayVirtualCluster
    dataloader: StatefulDataLoader[Batch]
    val_dataloader: StatefulDataLoader[Batch] | None
    loss_fn: LossFunction
    logger: Logger
    checkpointer: CheckpointManager
    sft_save_state: RunState
    master_config: SFTMasterConfig


@dataclass(frozen=True)
class _Known:
    """A run with its parts and the script's tokenizer."""

    run: GRPORun | SFTRun
    parts: GRPOParts | SFTParts
    tokenizer: object


_KNOWN: list[_Known] = []
# Entries of the data that a dataset was made of, and environments that are not the run's own.
_ENTRIES: WeakKeyDictionary[object, list[dict[str, object]]] = WeakKeyDictionary()
_ENVIRONMENTS: set[object] = set()


def setup_response_data(
    tokenizer: PreTrainedTokenizerBase,
    data_config: DataConfig | Mapping[str, object],
    env_configs: EnvConfig | Mapping[str, object] | None = None,
    is_vlm: bool = False,
) -> ResponseData | tuple[object, object]:
    """See `nemo_rl.environments.registry.setup_response_data`; what it returns may be handed to `setup`. Without
    environments it is the two datasets of supervised fine-tuning.
    """
    from nemo_rl.data.setup import load_datasets
    from nemo_rl.environments import registry

    data = DataConfig.read(data_config)
    if env_configs is None and not is_vlm:
        datasets = load_datasets(tokenizer, data)
        _keep_entries(datasets.train, datasets.validation, data)
        return datasets.train, datasets.validation
    found = registry.setup_response_data(tokenizer, data, {} if env_configs is None else env_configs, is_vlm)
    _keep_entries(found[0], found[1], data)
    _ENVIRONMENTS.update(actor for actors in found[2:] for actor in actors.values())
    return found


def _keep_entries(train: object, validation: object, data: DataConfig) -> None:
    for dataset, entries in ((train, data.train), (validation, [*data.train, *(data.validation or [])])):
        if dataset is not None:
            _ENTRIES[dataset] = [entry.to_dict() for entry in entries]


def plain(master_config: MasterConfig | Mapping[str, Any]) -> MasterConfig | dict[str, Any]:
    """The configuration without what `configure_generation_config` put into it for engines alone."""
    if isinstance(master_config, MasterConfig):
        return master_config
    config = dict(master_config)
    policy = dict(config.get("policy") or {})
    if isinstance(policy.get("generation"), Mapping):
        engines_own = ("_pad_token_id", "model_name")
        policy["generation"] = {key: value for key, value in policy["generation"].items() if key not in engines_own}
        config["policy"] = policy
    return config


def check_datasets(config: RootConfig, datasets: Sequence[object]) -> None:
    """Raises ShapeChanged: a dataset is not what `setup_response_data` made of this configuration."""
    whole = [entry.to_dict() for entry in [*config.data.train, *(config.data.validation or [])]]
    for dataset in datasets:
        if dataset is None:
            continue
        entries = _ENTRIES.get(dataset) if _is_referable(dataset) else None
        if entries is None:
            raise ShapeChanged(
                f"setup: the dataset {type(dataset).__name__} is not from setup_response_data; name the class of a "
                "dataset of your own in data.train.dataset_name (docs/from_nemo_rl.md)"
            )
        if any(entry not in whole for entry in entries):
            raise ShapeChanged("setup: the dataset was made of another data section than master_config has")


def parts_of(run: GRPORun, tokenizer: object) -> GRPOParts:
    """The parts of a run, by any of which `run_of` finds it."""
    parts = GRPOParts(
        run.policy,
        run.generation,
        None,
        (run.clusters[0], run.clusters[-1]),
        run.train_loader,
        run.val_loader,
        run.loss_fn,
        run.logger,
        run.checkpointer,
        run.state,
        run.config,
        run.teachers,
        {},
    )
    _KNOWN.append(_Known(run, parts, tokenizer))
    return parts


def sft_parts_of(run: SFTRun, tokenizer: object) -> SFTParts:
    """The parts of a run, by any of which `run_of` finds it."""
    parts = SFTParts(
        run.policy,
        run.clusters.training,
        run.train_loader,
        run.val_loader,
        run.loss_fn,
        run.logger,
        run.checkpointer,
        run.state,
        run.config,
    )
    _KNOWN.append(_Known(run, parts, tokenizer))
    return parts


def run_of(what: str, given: Sequence[object], kind: type[GRPOParts | SFTParts] = GRPOParts) -> Any:
    """The run whose parts are given; None where there is no policy of a run among them. A loss of the script's own
    becomes the run's. Raises ShapeChanged: the run is of another kind, or something is given that is not the run's.
    """
    from nemo_rl.loss import LossFunction

    known = next((known for known in _KNOWN if any(part is known.parts.policy for part in given)), None)
    if known is None:
        return None
    if not isinstance(known.parts, kind):
        raise ShapeChanged(f"{what}: the given run is {type(known.run).__name__}, which setup of another script gave")
    run = known.run
    clusters = known.parts.clusters if isinstance(known.parts, GRPOParts) else ()
    own = [*known.parts, *clusters, run, getattr(run, "tokenizer", None), known.tokenizer]
    for part in given:
        if part is None or isinstance(part, bool) or any(part is one for one in own):
            continue
        if isinstance(part, Mapping) and all(
            _is_referable(actor) and actor in _ENVIRONMENTS for actor in part.values()
        ):
            continue
        if isinstance(part, LossFunction):
            run.loss_fn = part
            continue
        raise ShapeChanged(
            f"{what}: {type(part).__name__} is no part of this run: data, environments and everything else come from "
            "the configuration (env.<name>.class, data.train.dataset_name, loss_fn.class take classes of yours)"
        )
    return run


def _is_referable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return hasattr(value, "__weakref__")
