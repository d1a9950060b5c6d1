"""NeMo-RL's entry functions over a run: `setup` gives one object, or the parts that NeMo-RL's gives, and the loops take
either.

Called in NeMo-RL's own shape they say what has changed, before anything starts. Invariants: a run that these functions
drive is the run that `examples/run_grpo.py` and its like drive; nothing that a script hands over is ignored: it is the
run's own, or used, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from nemo_rl.config import DataConfig, EnvConfig, MasterConfig, SFTMasterConfig, check_config
from nemo_rl.config.errors import UserError
from nemo_rl.config.master import CompleteConfig, RootConfig

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.algorithms.distillation.teachers import Teachers
    from nemo_rl.algorithms.grpo.run import GRPORun
    from nemo_rl.algorithms.resume import RunState
    from nemo_rl.algorithms.sft.driver import SFTRun
    from nemo_rl.data.loader import Batch, Loader
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.experience.hooks import RLixHooksProtocol
    from nemo_rl.loss.interfaces import LossFunction
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
    from nemo_rl.models.policy.lm_policy import Policy
    from nemo_rl.utils.checkpoint import CheckpointManager
    from nemo_rl.utils.logger import Logger


class ShapeChanged(UserError, TypeError):
    """A function of NeMo-RL's is called with arguments that it does not take here."""


class GRPOParts(NamedTuple):
    """Result of `setup(master_config, tokenizer, dataset, val_dataset)`."""

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
    """Result of SFT's `setup(master_config, tokenizer, dataset, val_dataset)`: GRPO's parts, in that order, without
    those that only generation, environments and teachers need.
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
) -> tuple[object, ...]:
    """Loads datasets and starts environments, for `setup`. `data_config`, `env_configs`: `data` and `env`, as sections
    or plain mappings.

    Returns training prompts, validation prompts (None without), environment actor per training task and per validation
    task; without environments, the two datasets of an SFT run. Raises DataError: see `data.setup.load_datasets`;
    UnknownEnvironment, ConfigError: see `environment_registry.environment_class`.
    """
    from nemo_rl.data.interfaces import DataError
    from nemo_rl.data.setup import load_datasets
    from nemo_rl.environments.environment_registry import start_environments

    if is_vlm:
        raise DataError("datasets of images (is_vlm) are not built yet")
    data = DataConfig.read(data_config)
    found = load_datasets(tokenizer, data)
    for dataset, entries in ((found.train, data.train), (found.validation, [*data.train, *(data.validation or [])])):
        if dataset is not None:
            _ENTRIES[dataset] = [entry.to_dict() for entry in entries]
    if env_configs is None:
        return found.train, found.validation
    tasks = (found.env_of_task, found.env_of_validation_task)
    actors = start_environments([name for of_task in tasks for name in of_task.values()], EnvConfig.read(env_configs))
    # The form that NeMo-RL's callers know has one actor per task.
    by_task = [{task: actors[name][0] for task, name in of_task.items()} for of_task in tasks]
    _ENVIRONMENTS.update(actor for of_task in by_task for actor in of_task.values())
    return found.train, found.validation, *by_task


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
    """The parts of a run, by any of which `grpo_train` finds it."""
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
    """The parts of a run, by any of which `sft_train` finds it."""
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


def _run(
    first: object,
    others: tuple[object, ...],
    named: Mapping[str, object],
    name: str,
    kind: type[GRPOParts | SFTParts] = GRPOParts,
) -> Any:
    """The run that is given, or whose parts are. A loss of the script's own becomes the run's. Raises ShapeChanged: the
    run is of another kind, or something is given that is not the run's.
    """
    from nemo_rl.loss import LossFunction

    given = [first, *others, *named.values()]
    known = next((known for known in _KNOWN if any(part is known.parts.policy for part in given)), None)
    if known is None:
        form = f"{name}(run), with the run, or all parts, that setup gave"
        _refuse(others, named, form, object() if first is None else first)
        return first
    if not isinstance(known.parts, kind):
        raise ShapeChanged(f"{name}: the given run is {type(known.run).__name__}, which setup of another script gave")
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
            f"{name}: {type(part).__name__} is no part of this run: data, environments and everything else come from "
            "the configuration (env.<name>.class, data.train.dataset_name, loss_fn.class take classes of yours)"
        )
    return run


def _is_referable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return hasattr(value, "__weakref__")


_PAGE = "docs/from_nemo_rl.md lists what is called differently"


Config = TypeVar("Config", bound=CompleteConfig)


def grpo_setup(
    master_config: MasterConfig | Mapping[str, object],
    tokenizer: object = None,
    dataset: object = None,
    val_dataset: object = None,
    processor: None = None,
    policy_factory: None = None,
) -> GRPORun | GRPOParts:
    """A GRPO run that is ready to be driven; see `nemo_rl.algorithms.grpo.assembly.setup`.

    Called as in NeMo-RL, with what `get_tokenizer` and `setup_response_data` returned, it gives thirteen parts of the
    run, which `grpo_train` takes. Raises ShapeChanged: something else is handed over.
    """
    from nemo_rl.algorithms.grpo.assembly import setup

    config = _checked(plain(master_config), MasterConfig)
    if processor is not None or policy_factory is not None:
        raise ShapeChanged(f"setup: processor and policy_factory are not taken; {_PAGE}")
    in_parts = _in_parts(config, tokenizer, dataset, val_dataset)
    run = setup(config)
    return parts_of(run, tokenizer) if in_parts else run


def grpo_train(run: object = None, *others: object, **named: object) -> None:
    """Drives a run to its end, rollouts and training in turns, and ends it; given as a run, or as the parts that
    `setup` returned, in any order. Raises ShapeChanged: the run generates ahead, or something else is given.
    """
    whole = _run(run, others, named, "grpo_train")
    if whole.config.grpo.async_grpo.enabled:
        raise ShapeChanged(
            "grpo_train: the run was set up with grpo.async_grpo.enabled: true; set it to false, or call "
            "async_grpo_train"
        )
    if whole.config.async_rl is not None:
        raise ShapeChanged(
            "grpo_train: the run was set up with async_rl, which trains on groups as they finish; leave it out, or "
            "start the run with examples/run_grpo.py"
        )
    from nemo_rl.algorithms.grpo import loop

    with closing(whole):
        loop.drive(whole)


def async_grpo_train(
    run: object = None, *others: object, rlix_hooks: RLixHooksProtocol | None = None, **named: object
) -> None:
    """Drives a run to its end with rollouts ahead of training, and ends it; given as `grpo_train` takes it. Raises
    ShapeChanged: the run is not asynchronous, or something else is given.
    """
    limits = {name: named.pop(name) for name in ("max_trajectory_age_steps",) if name in named}
    whole = _run(run, others, named, "async_grpo_train")
    age = whole.config.grpo.async_grpo.max_trajectory_age_steps
    if limits and [*limits.values()] != [age]:
        raise ShapeChanged(f"async_grpo_train: {limits}, but grpo.async_grpo.max_trajectory_age_steps is {age}")
    if not whole.config.grpo.async_grpo.enabled:
        raise ShapeChanged("async_grpo_train: the run was set up with grpo.async_grpo.enabled: false; set it to true")
    from nemo_rl.algorithms.grpo import loop

    with closing(whole):
        loop.async_grpo_train(whole, rlix_hooks)


def grpo_validate(run: GRPORun, step: int, *others: object, **named: object) -> dict[str, float]:
    """Validates and returns the metrics; see `nemo_rl.algorithms.grpo.validation.validate`."""
    _refuse(others, named, "validate(run, step)", run)
    from nemo_rl.algorithms.grpo.validation import validate

    return validate(run, step)


def refit_policy_generation(run: object = None, *others: object, **named: object) -> None:
    """Makes generation serve the policy's weights of the last completed step."""
    whole = _run(run, others, named, "refit_policy_generation")
    whole.accelerators.serve(whole.state.step)


def sft_setup(
    master_config: SFTMasterConfig | Mapping[str, object],
    tokenizer: object = None,
    dataset: object = None,
    val_dataset: object = None,
) -> SFTRun | SFTParts:
    """An SFT run that is ready to be driven. Called with what `get_tokenizer` and `setup_response_data` returned, it
    gives the parts of the run, which `sft_train` takes. Raises ShapeChanged: something else is handed over.
    """
    from nemo_rl.algorithms.sft.assembly import setup

    config = _checked(master_config, SFTMasterConfig)
    in_parts = _in_parts(config, tokenizer, dataset, val_dataset)
    run = setup(config)
    return sft_parts_of(run, tokenizer) if in_parts else run


def sft_train(run: object = None, *others: object, **named: object) -> None:
    """Drives an SFT run to its end and ends it; given as a run, or as the parts that `setup` returned, in any order."""
    whole = _run(run, others, named, "sft_train", SFTParts)
    from nemo_rl.algorithms.sft import driver

    with closing(whole):
        driver.sft_train(whole)


def sft_validate(run: SFTRun, *others: object, **named: object) -> dict[str, float]:
    """Validates and returns the metrics."""
    _refuse(others, named, "validate(run)", run)
    from nemo_rl.algorithms.sft.driver import validate

    return validate(run)


def _in_parts(config: RootConfig, tokenizer: object, dataset: object, val_dataset: object) -> bool:
    """Whether `setup` is called as in NeMo-RL. Raises ShapeChanged: what is handed over is not this configuration's."""
    if tokenizer is None and dataset is None:
        _refuse((), {} if val_dataset is None else {"val_dataset": val_dataset}, "setup(master_config)")
        return False
    check_datasets(config, (dataset, val_dataset))
    if not hasattr(tokenizer, "apply_chat_template"):
        raise ShapeChanged(f"setup: {type(tokenizer).__name__} is no tokenizer; {_PAGE}")
    return True


def _checked(given: Config | Mapping[str, object], kind: type[Config]) -> Config:
    config = kind.read(given)
    check_config(config)
    return config


def _refuse(others: tuple[object, ...], named: Mapping[str, object], form: str, run: object = None) -> None:
    wrong_run = run is not None and not hasattr(run, "config")
    if others or named or wrong_run:
        raise ShapeChanged(f"here it is {form}; {_PAGE}")
