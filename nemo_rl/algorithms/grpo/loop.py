"""The steps of a GRPO run for all sources of experience and all control planes.

The source supplies experience, the control plane hands over accelerators, the stages compute; `training_loop` calls
them in order.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING

from nemo_rl.algorithms.accelerators import OwnAccelerators
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.algorithms.grpo.step_reports import StepReport, step_metrics
from nemo_rl.algorithms.grpo.step_trainer import StepTrainer, Trained
from nemo_rl.algorithms.grpo.validation import validate
from nemo_rl.algorithms.training_loop import CompletedStep, Steps, train_to_end
from nemo_rl.config.errors import UserError, did_you_mean
from nemo_rl.config.metric_names import MetricName
from nemo_rl.experience.hooks import HooksError, RLixHooksProtocol, time_sharing_enabled
from nemo_rl.experience.prompts import group_id
from nemo_rl.utils.checkpoint_retention import UnknownMetric
from nemo_rl.utils.record_events import GroupTrained, StepBegun, StepFinished

if TYPE_CHECKING:
    from nemo_rl.data.loader import HasState
    from nemo_rl.utils.log_backends import Metrics


class PromptsUsedUp(UserError, RuntimeError):
    """The prompts ran out before the requested last step."""


def drive(run: GRPORun) -> None:
    """Trains to the end; see `training_loop.train_to_end`."""
    train_to_end(GRPOSteps(run))


class GRPOSteps(Steps[GRPORun]):
    """Steps of GRPO, and of distillation, which is GRPO with another loss."""

    def __init__(self, run: GRPORun) -> None:
        self.run = run
        self.section = run.config.section()
        self.saves_before_publish = run.accelerators.saves_before_publish
        self._trained: Trained | None = None
        self._used_up = False

    @contextmanager
    def running(self) -> Generator[None]:
        """Starts the source and the accelerators, validates if configured, and stops both at the end."""
        run = self.run
        try:
            with run.source.running():
                run.accelerators.start(run.source.collector, run.state.step)
                if run.config.grpo.val_at_start and run.state.step == 0:
                    validate(run, 0)
                run.source.published(run.state.step)
                yield
        finally:
            run.accelerators.stop()

    def finished(self) -> bool:
        """Whether the source has no more steps."""
        return self.run.source.finished()

    @contextmanager
    def open(self) -> Generator[None]:
        """Clears the step's rows on failure; otherwise `report` clears them."""
        self._trained = None
        with self.run.store.step():
            yield
            if self._trained is not None:
                self.run.store.keep(self._trained.experience.handle)

    def train(self) -> Metrics | None:
        """Scores, weighs and trains on each part of the step's experience."""
        run, source, step = self.run, self.run.source, self.run.state.step
        run.record.emit(StepBegun(step, run.adapter))
        with StepTrainer(run) as trainer, closing(source.parts()) as parts:
            for part in parts:
                trainer.ask_served_teachers(part)
                run.accelerators.lend_training(step)
                trainer.score(part)
                trainer.weigh(part)
                trainer.add(part)
            if not trainer.rows:
                self._used_up = True
                return None
            self._trained = trained = trainer.finish(meanwhile=source.draw_ahead)
        metrics = step_metrics(run.config.grpo, step + 1, trained.experience, trained.result)
        run.accelerators.weights_ready(step)
        complete_step(run, trained.experience)
        metrics |= source.trained()
        with run.timer.time("step_report"):
            run.reports.wait()
        return metrics

    def publish(self) -> None:
        """Publishes the new weights and lets the next rollouts begin."""
        run = self.run
        run.accelerators.publish(run.state.step - 1, run.source.waited_for)
        with run.timer.time("begin_rollouts"):
            run.source.published(run.state.step)

    def validation_due(self, *, is_last: bool) -> bool:
        """As in `Steps`, but not before `grpo.val_start_at`."""
        cfg = self.run.config.grpo
        early = self.run.state.step < cfg.val_start_at and not (cfg.val_at_end and is_last)
        return not early and super().validation_due(is_last=is_last)

    def validate(self) -> dict[str, float]:
        """Validates; the time counts as idle for generation that could run ahead."""
        run = self.run
        with run.timer.time("idle/validation") if run.source.collector is not None else nullcontext():
            return validate(run, run.state.step)

    def early_stop(self, val_metrics: Mapping[str, float] | None) -> bool:
        """Whether `grpo.stop_at_validation_metric` has reached its threshold."""
        cfg = self.run.config.grpo
        name, threshold = cfg.stop_at_validation_metric, cfg.stop_at_validation_threshold
        if name is None or threshold is None or val_metrics is None:
            return False
        short = MetricName.read(name).name
        if short not in val_metrics:
            raise UnknownMetric(
                f"grpo.stop_at_validation_metric={name}: validation gives {sorted(val_metrics)}."
                f"{did_you_mean(short, val_metrics)}"
            )
        return val_metrics[short] >= threshold

    def lend_saving(self) -> None:
        """Makes room for the policy's state."""
        self.run.accelerators.lend_saving(self.run.state.step)

    def position(self) -> tuple[HasState, Mapping[str, object]]:
        """The source's loader position and pending groups."""
        return self.run.source.position()

    def report(self, done: CompletedStep) -> None:
        """Writes metrics and samples in the background."""
        run, trained = self.run, self._trained
        if trained is not None:
            seconds = {name: sum(run.timer.elapsed(name)) for name in run.timer.get_timing_metrics("sum")}
            refit = dict(run.accelerators.metrics()) if run.generation is not None else {}
            step, metrics = run.state.step, done.metrics
            run.reports.put(StepReport(step, trained.experience, metrics, trained.result, seconds, refit))

    def await_reports(self) -> None:
        """Waits for background reports and raises their errors."""
        self.run.reports.wait()

    def why_ended(self, newest: CompletedStep | None) -> str | None:
        """See `Steps.why_ended`. Raises PromptsUsedUp: the prompts ran out before the first step, or a custom loader
        stopped early.
        """
        cfg, step = self.run.config.grpo, self.run.state.step
        if self._used_up and self.run.config.data.use_multiple_dataloader:
            raise PromptsUsedUp(
                f"ended after step {step} of grpo.max_num_steps={cfg.max_num_steps}: data.custom_dataloader gave no "
                "more prompts; it has to restart exhausted iterators itself, from the loaders that it is given"
            )
        if self._used_up and step == 0:
            kept = "dynamic sampling kept too few samples for one step of " if cfg.use_dynamic_sampling else ""
            raise PromptsUsedUp(
                f"no step was trained: the prompts of grpo.max_num_epochs={cfg.max_num_epochs} are used up, and {kept}"
                f"grpo.num_prompts_per_step={cfg.num_prompts_per_step} was not filled; look at the rewards "
                "(are the prompts too hard or too easy for the model?), take more data or smaller steps"
            )
        return super().why_ended(newest)


def complete_step(run: GRPORun, experience: Experience) -> None:
    """Counts and records a trained step."""
    state, rows = run.state, experience.rows
    trained = sorted(set(rows["prompt_number"].tolist()))
    for prompt in trained:
        name = experience.group_names.get(prompt, group_id(state.step, prompt))
        run.record.emit(GroupTrained(name, state.step, run.adapter))
    run.record.emit(StepFinished(state.step, state.step + 1, len(trained), run.adapter))
    state.step += 1
    state.step_in_epoch += 1
    state.consumed_samples += run.config.grpo.num_prompts_per_step if not experience.group_names else len(trained)
    state.total_valid_tokens += int(rows["generated_lengths"][rows["sample_mask"] != 0].sum())


def async_grpo_train(run: GRPORun, rlix_hooks: RLixHooksProtocol | None = None) -> None:
    """Trains to the end with the hooks of a foreign control plane; see `training_loop.train_to_end`.

    Args:
        run: Set up, with generation on accelerators of its own.
        rlix_hooks: A foreign control plane's hooks; under `RLIX_CONTROL_PLANE=rlix` they own the accelerators.

    Raises HooksError: the hooks own the accelerators, and did not bring generation to the new weights; or a scheduler
    lends the accelerators.
    """
    if rlix_hooks is not None:
        if not isinstance(run.accelerators, OwnAccelerators):
            raise HooksError("a scheduler lends this run its accelerators, so that it calls no hooks; leave them out")
        run.accelerators.call_hooks(rlix_hooks, they_refit=time_sharing_enabled())
    drive(run)
