"""NeMo-RL's entry functions over a run: `setup` gives one object instead of thirteen, and the loops take it.

Called in NeMo-RL's own shape they say what has changed, before anything starts. Invariant: a run that these functions
drive is the run that `examples/run_grpo.py` and its like drive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_rl.compat.errors import ShapeChanged
from nemo_rl.compat.parts import GRPOParts, SFTParts, check_datasets, parts_of, plain, run_of, sft_parts_of
from nemo_rl.config import EvalMasterConfig, MasterConfig, SFTMasterConfig, check_config
from nemo_rl.config.master import CompleteConfig, RootConfig

if TYPE_CHECKING:
    from nemo_rl.algorithms.evaluation import Score
    from nemo_rl.algorithms.grpo.run import GRPORun
    from nemo_rl.algorithms.sft.driver import SFTRun
    from nemo_rl.experience.hooks import RLixHooksProtocol

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
    if tokenizer is None and dataset is None:
        _refuse((), {} if val_dataset is None else {"val_dataset": val_dataset}, "setup(master_config)")
        return setup(config)
    if processor is not None or policy_factory is not None:
        raise ShapeChanged(f"setup: processor and policy_factory are not taken; {_PAGE}")
    _check_handed(config, tokenizer, dataset, val_dataset)
    return parts_of(setup(config), tokenizer)


def grpo_train(run: object = None, *others: object, **named: object) -> None:
    """Drives a run to its end, rollouts and training in turns, and ends it; given as a run, or as the parts that
    `setup` returned, in any order.
    """
    run = _run(run, others, named, "grpo_train")
    from nemo_rl.algorithms.grpo import loop
    from nemo_rl.algorithms.grpo.assembly import close

    try:
        loop.grpo_train(run)
    finally:
        close(run)


def async_grpo_train(
    run: object = None, *others: object, rlix_hooks: RLixHooksProtocol | None = None, **named: object
) -> None:
    """Drives a run to its end with rollouts ahead of training, and ends it; given as `grpo_train` takes it. Raises
    ShapeChanged: the run is not asynchronous, or something else is given.
    """
    limits = {name: named.pop(name) for name in ("max_trajectory_age_steps",) if name in named}
    run = _run(run, others, named, "async_grpo_train")
    age = run.config.grpo.async_grpo.max_trajectory_age_steps
    if limits and [*limits.values()] != [age]:
        raise ShapeChanged(f"async_grpo_train: {limits}, but grpo.async_grpo.max_trajectory_age_steps is {age}")
    if not run.config.grpo.async_grpo.enabled:
        raise ShapeChanged("async_grpo_train: the run was set up with grpo.async_grpo.enabled: false; set it to true")
    from nemo_rl.algorithms.grpo import loop
    from nemo_rl.algorithms.grpo.assembly import close

    try:
        loop.async_grpo_train(run, rlix_hooks)
    finally:
        close(run)


def _run(first: Any, others: tuple[object, ...], named: Mapping[str, object], name: str) -> GRPORun:
    found = run_of(name, [first, *others, *named.values()])
    if found is None:
        form = f"{name}(run), with the run, or all parts, that setup gave"
        _refuse(others, named, form, object() if first is None else first)
    return found or first


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
    if tokenizer is None and dataset is None:
        _refuse((), {} if val_dataset is None else {"val_dataset": val_dataset}, "setup(master_config)")
        return setup(config)
    _check_handed(config, tokenizer, dataset, val_dataset)
    return sft_parts_of(setup(config), tokenizer)


def sft_train(run: Any = None, *others: object, **named: object) -> None:
    """Drives an SFT run to its end and ends it; given as a run, or as the parts that `setup` returned, in any order."""
    found = run_of("sft_train", [run, *others, *named.values()], SFTParts)
    if found is None:
        form = "sft_train(run), with the run, or all parts, that setup gave"
        _refuse(others, named, form, object() if run is None else run)
    from nemo_rl.algorithms.sft import driver
    from nemo_rl.algorithms.sft.assembly import close

    run = found or run
    try:
        driver.sft_train(run)
    finally:
        close(run)


def sft_validate(run: SFTRun, *others: object, **named: object) -> dict[str, float]:
    """Validates and returns the metrics."""
    _refuse(others, named, "validate(run)", run)
    from nemo_rl.algorithms.sft.driver import validate

    return validate(run)


def eval_setup(
    master_config: EvalMasterConfig | Mapping[str, object], *others: object, **named: object
) -> EvalMasterConfig:
    """The checked configuration of an evaluation, which `run_env_eval` takes."""
    _refuse(others, named, "setup(master_config)")
    return _checked(master_config, EvalMasterConfig)


def run_env_eval(master_config: EvalMasterConfig | Mapping[str, object], *others: object, **named: object) -> Score:
    """Evaluates and returns the score."""
    _refuse(others, named, "run_env_eval(master_config)")
    from nemo_rl.algorithms.evaluation import evaluate

    return evaluate(_checked(master_config, EvalMasterConfig))


def _check_handed(config: RootConfig, tokenizer: object, *datasets: object) -> None:
    check_datasets(config, datasets)
    if not hasattr(tokenizer, "apply_chat_template"):
        raise ShapeChanged(f"setup: {type(tokenizer).__name__} is no tokenizer; {_PAGE}")


def _checked(given: Config | Mapping[str, object], kind: type[Config]) -> Config:
    config = kind.read(given)
    check_config(config)
    return config


def _refuse(others: tuple[object, ...], named: Mapping[str, object], form: str, run: object = None) -> None:
    wrong_run = run is not None and not hasattr(run, "config")
    if others or named or wrong_run:
        raise ShapeChanged(f"here it is {form}; {_PAGE}")
