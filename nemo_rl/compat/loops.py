"""NeMo-RL's entry functions over a run: `setup` gives one object instead of thirteen, and the loops take it.

Called in NeMo-RL's own shape they say what has changed, before anything starts. Invariant: a run that these functions
drive is the run that `examples/run_grpo.py` and its like drive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from nemo_rl.config import EvalMasterConfig, MasterConfig, SFTMasterConfig, check_config
from nemo_rl.config.errors import UserError
from nemo_rl.config.master import CompleteConfig

if TYPE_CHECKING:
    from nemo_rl.algorithms.evaluation import Score
    from nemo_rl.algorithms.grpo.run import GRPORun
    from nemo_rl.algorithms.sft.driver import SFTRun
    from nemo_rl.experience.hooks import RLixHooksProtocol

_PAGE = "docs/from_nemo_rl.md lists what is called differently"


Config = TypeVar("Config", bound=CompleteConfig)


class ShapeChanged(UserError, TypeError):
    """A function of NeMo-RL's is called with arguments that it does not take here."""


def grpo_setup(master_config: MasterConfig | Mapping[str, object], *others: object, **named: object) -> GRPORun:
    """A GRPO run that is ready to be driven; see `nemo_rl.algorithms.grpo.assembly.setup`."""
    _refuse(others, named, "setup(master_config): tokenizer, data and environments come from the configuration")
    from nemo_rl.algorithms.grpo.assembly import setup

    return setup(_checked(master_config, MasterConfig))


def grpo_train(run: GRPORun, *others: object, **named: object) -> None:
    """Drives a run to its end, rollouts and training in turns, and ends it."""
    _refuse(others, named, "grpo_train(run), with the run that setup gave", run)
    from nemo_rl.algorithms.grpo import loop
    from nemo_rl.algorithms.grpo.assembly import close

    try:
        loop.grpo_train(run)
    finally:
        close(run)


def async_grpo_train(
    run: GRPORun, *others: object, rlix_hooks: RLixHooksProtocol | None = None, **named: object
) -> None:
    """Drives a run to its end with rollouts ahead of training, and ends it. Raises ShapeChanged: the run is not
    asynchronous, or this is called as in NeMo-RL.
    """
    _refuse(others, named, "async_grpo_train(run, rlix_hooks=None), with the run that setup gave", run)
    if not run.config.grpo.async_grpo.enabled:
        raise ShapeChanged("async_grpo_train: the run was set up with grpo.async_grpo.enabled: false; set it to true")
    from nemo_rl.algorithms.grpo import loop
    from nemo_rl.algorithms.grpo.assembly import close

    try:
        loop.async_grpo_train(run, rlix_hooks)
    finally:
        close(run)


def grpo_validate(run: GRPORun, step: int, *others: object, **named: object) -> dict[str, float]:
    """Validates and returns the metrics; see `nemo_rl.algorithms.grpo.validation.validate`."""
    _refuse(others, named, "validate(run, step)", run)
    from nemo_rl.algorithms.grpo.validation import validate

    return validate(run, step)


def refit_policy_generation(run: GRPORun, *others: object, **named: object) -> None:
    """Makes generation serve the policy's weights of the last completed step."""
    _refuse(others, named, "refit_policy_generation(run)", run)
    run.control.serve(run.state.step)


def sft_setup(master_config: SFTMasterConfig | Mapping[str, object], *others: object, **named: object) -> SFTRun:
    """An SFT run that is ready to be driven."""
    _refuse(others, named, "setup(master_config): tokenizer and data come from the configuration")
    from nemo_rl.algorithms.sft.assembly import setup

    return setup(_checked(master_config, SFTMasterConfig))


def sft_train(run: SFTRun, *others: object, **named: object) -> None:
    """Drives an SFT run to its end and ends it."""
    _refuse(others, named, "sft_train(run), with the run that setup gave", run)
    from nemo_rl.algorithms.sft import driver
    from nemo_rl.algorithms.sft.assembly import close

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


def _checked(given: Config | Mapping[str, object], kind: type[Config]) -> Config:
    config = kind.read(given)
    check_config(config)
    return config


def _refuse(others: tuple[object, ...], named: Mapping[str, object], form: str, run: object = None) -> None:
    wrong_run = run is not None and not hasattr(run, "config")
    if others or named or wrong_run:
        raise ShapeChanged(f"here it is {form}; {_PAGE}")
