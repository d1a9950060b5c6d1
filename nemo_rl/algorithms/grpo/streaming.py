"""Training on prompt groups as they finish: the source that gives a step in parts, and the step that trains on them.

Early groups are scored, weighed and put through forward and backward while slow ones still generate; there is one
optimizer step, with one gradient reduction, once the last group is through. Stages that need all groups of a step at
once are refused by name. Invariants: every group of a step is trained once, in a part that is large enough to fill the
accelerators, or in the last one; a step that fails leaves the weights of the step before, and no step open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.grpo.async_source import AsynchronousSource
from nemo_rl.algorithms.grpo.metrics import step_metrics
from nemo_rl.algorithms.grpo.stages import Experience, columns_to_train, filter_rows, score_rewards, whole_batch_stages
from nemo_rl.algorithms.grpo.train_on_batch import Trained, score, weigh
from nemo_rl.config import ConfigError, MasterConfig
from nemo_rl.config.placement import data_parallel_size
from nemo_rl.experience.columns import joined_rows
from nemo_rl.experience.replay_buffer import BufferedGroup

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.run import GRPORun


def check_streaming(config: MasterConfig) -> None:
    """Whether every stage of the run can work on some groups of a step.

    Raises:
        ConfigError: One needs the whole step.
    """
    stages = whole_batch_stages(config.grpo, config.loss_fn)
    if config.async_rl is not None and stages:
        raise ConfigError(
            [f"async_rl trains on groups as they finish, and {key} does not: {why}" for key, why in stages.items()]
        )


class StreamingSource(AsynchronousSource):
    """Rollouts run beside training, and a step takes its groups as they finish."""

    def parts(self) -> Iterator[Experience[Any]]:
        """The groups of the current step, each once: scored and filtered, as many at a time as are worth a pass. None
        where the prompts are used up.

        Raises:
            CollectorError: The collector cannot deliver.
        """
        run, step = self._run, self._run.state.step
        with run.control.demand(step, *self.waited_for()) as report:
            while True:
                run.progress.phase("waiting for rollouts")
                try:
                    with run.timer.time("exposed_generation"):
                        groups = self.collector.take_finished(step, 0, self._enough, report)
                except StopIteration:
                    return
                if not groups:
                    return
                experience = self._experience(groups)
                score_rewards(experience.rows, run.config.grpo)
                filter_rows(experience.rows, run.config.grpo)
                self._judge(experience)
                yield experience

    def _enough(self, groups: Sequence[BufferedGroup]) -> bool:
        """Whether a pass over these groups fills the accelerators: by their number, or by their tokens."""
        config = self._run.config
        if config.async_rl is not None and len(groups) >= config.async_rl.min_groups_for_streaming_train:
            return True
        packing = config.policy.sequence_packing
        if not packing.enabled:
            return False
        tokens = sum(float(group.rows["total_lengths"].sum()) for group in groups)
        return tokens >= packing.train_mb_tokens * data_parallel_size(config)


def train_on_stream(run: GRPORun, source: StreamingSource) -> Trained:
    """One step, trained on its groups as they finish; the weights are then those of version `state.step + 1`.

    Raises:
        StopIteration: The prompts are used up.
        NonFiniteStepError, WorkerError, CollectorError: The weights are those of the step before.
    """
    parts: list[Experience[Any]] = []
    try:
        for part in source.parts():
            if not parts:
                run.control.lend_training(run.state.step)
            score(run, part, step_open=bool(parts))
            weigh(run, part, first_row=sum(earlier.rows.size for earlier in parts))
            run.progress.phase("training")
            with run.timer.time("training_prep"):
                run.policy.prepare_for_training()
            if not parts:
                run.policy.begin_train_step(run.loss_fn, gbs=run.config.policy.train_global_batch_size)
            parts.append(part)
            with run.timer.time("policy_training"):
                data = columns_to_train(part, run.store, run.config.grpo, run.config.loss_fn)
                run.policy.train_microbatches(data, timer=run.timer)
        if not parts:
            raise StopIteration
        with run.timer.time("policy_training"):
            result = run.policy.finish_train_step()
    except BaseException:
        if parts:
            run.policy.abort_train_step()
        raise
    whole = _joined(run, parts)
    metrics = step_metrics(run, whole, result) | {"streaming/parts": float(len(parts))}
    return Trained(whole, metrics, result)


def _joined(run: GRPORun, parts: Sequence[Experience[Any]]) -> Experience[Any]:
    """All parts of a step as one, for its metrics and its samples."""
    if len(parts) == 1:
        return parts[0]
    rows = joined_rows([part.rows for part in parts])
    return Experience(run.store.concat([part.handle for part in parts]), rows, _joined_metrics(parts))


def _joined_metrics(parts: Sequence[Experience[Any]]) -> dict[str, Any]:
    """Extremes of extremes, sums of counts, and means by rows."""
    joined: dict[str, Any] = {}
    rows = [part.rows.size for part in parts]
    for name in parts[0].metrics:
        values = [part.metrics[name] for part in parts if name in part.metrics]
        if "max" in name:
            joined[name] = max(values)
        elif "min" in name:
            joined[name] = min(values)
        elif name.startswith(("num_", "total_")) or name.endswith("/sum"):
            joined[name] = sum(values)
        else:
            weights = rows[: len(values)]
            joined[name] = sum(value * size for value, size in zip(values, weights, strict=True)) / sum(weights)
    return joined
