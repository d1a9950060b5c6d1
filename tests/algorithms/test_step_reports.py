"""What is said of a step is written under the next generation, in order, and is lost neither to an error nor at the
end; the next prompts are fetched while a step trains.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms.grpo import loop
from nemo_rl.algorithms.grpo.loop import GRPOSteps, drive
from nemo_rl.algorithms.grpo.validation import batches_to_run
from nemo_rl.config import GRPOConfig
from nemo_rl.experience.prompts import EpochPrompts
from nemo_rl.utils.metrics_file import MetricsLost
from nemo_rl.utils.record import RecordUnwritable
from tests.algorithms.test_run_checkpoint import Sections
from tests.experience.plane_in_process import plane_in_process
from tests.virtual_world import Loader, World, save_in_memory

TURNS = ("grpo.async_grpo.enabled=false", "grpo.max_num_steps=3")


@pytest.fixture(autouse=True)
def _saving(monkeypatch: pytest.MonkeyPatch) -> None:
    save_in_memory(monkeypatch)


class Reported(World):
    """Writes down which metrics and samples are logged, beside what else happens."""

    def __init__(self, tmp_path: Path, **arguments: Any) -> None:
        super().__init__(tmp_path, *TURNS, **arguments)
        self.generating = [threading.Event() for _ in range(4)]
        self.steps: list[int] = []
        self.fails_at: int | None = None

    def roll_out(self, batch: Any, plan: Any, attempt: int) -> Any:
        self.generating[plan.step].set()
        return super().roll_out(batch, plan, attempt)

    def log_metrics(self, metrics: Any, step: int, prefix: str, **_: Any) -> None:
        if prefix != "train":
            return
        if step == self.fails_at:
            raise OSError(28, "No space left on device")
        if step < 3:
            assert self.generating[step].wait(60.0), "the next step waited for this one's report"
        self.steps.append(step)


def test_a_step_is_reported_while_the_next_one_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = plane_in_process(monkeypatch)
    for folder, arguments in (("here", {}), ("plane", {"plane": plane})):
        (tmp_path / folder).mkdir()
        world = Reported(tmp_path / folder, **arguments)
        drive(world.run)
        assert world.steps == [1, 2, 3]
        lines = [(tmp_path / folder / f"train_data_step{step}.jsonl").read_text().count("\n") for step in world.steps]
        assert lines == [6, 6, 6]
    assert plane.list_samples("train") == {}


def test_a_step_that_is_saved_is_reported_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, *TURNS, "checkpointing.save_period=1")
    seen: list[int] = []
    begin = world.roll_out
    # A report takes longer than the next step needs to begin.
    world.run.logger.log_metrics = lambda *logged, **named: (time.sleep(0.02), world.log_metrics(*logged, **named))

    def roll_out(batch: Any, plan: Any, attempt: int) -> Any:
        seen.append(len(world.logged))
        return begin(batch, plan, attempt)

    monkeypatch.setattr(world, "roll_out", roll_out)
    drive(world.run)
    assert seen == [0, 1, 2] and len(world.logged) == 3


@pytest.mark.parametrize("step", [1, 3])
def test_a_report_that_fails_ends_the_run_with_its_error(tmp_path: Path, step: int) -> None:
    world = Reported(tmp_path)
    world.fails_at = step
    with pytest.raises(OSError, match="No space left"):
        drive(world.run)
    # The step under which it failed is whole.
    assert world.run.state.step == min(step + 1, 3) and world.steps == list(range(1, step))


@pytest.mark.parametrize("lost", ["metrics", "record"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_run_that_cannot_write_its_logs_saves_its_last_step_and_ends(lost: str, step: int, tmp_path: Path) -> None:
    world = Reported(tmp_path)
    world.run.checkpointer.cfg = world.run.config.checkpointing
    world.run.checkpointer.has = world.saved.__contains__
    full = OSError(28, "No space left on device")

    def fail() -> None:
        if world.run.state.step >= step:
            raise RecordUnwritable(tmp_path, full)

    def log_metrics(metrics: Any, step_of: int, prefix: str, **_: Any) -> None:
        if step_of >= step:
            raise MetricsLost("metrics.jsonl cannot be written")

    if lost == "record":
        world.run.record.flush = fail
    else:
        world.run.logger.log_metrics = log_metrics
    with pytest.raises((MetricsLost, RecordUnwritable), match="cannot be written"):
        drive(world.run)
    assert list(world.saved) == [min(step + 1, 3)] == [world.run.state.step]
    assert max(world.trained) == 3 * world.run.state.step - 1


def test_a_step_that_fails_does_not_take_the_report_before_it_along(tmp_path: Path) -> None:
    world = Reported(tmp_path)
    submit = world.submit_train

    def fail_at_second(*arguments: Any, **named: Any) -> Any:
        if world.run.state.step == 1:
            raise RuntimeError("out of memory")
        return submit(*arguments, **named)

    world.submit_train = fail_at_second  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        drive(world.run)
    world.run.reports.close()
    assert world.steps == [1] and world.run.state.step == 1


def test_the_next_batch_is_fetched_while_a_step_trains_and_is_not_in_its_checkpoint(tmp_path: Path) -> None:
    loader = Loader(3)
    world = World(tmp_path, *TURNS, "checkpointing.save_period=1", loader=loader)
    fetched: list[int] = []
    submit = world.submit_train

    def training(*arguments: Any, **named: Any) -> Any:
        pending = submit(*arguments, **named)
        result = pending.result
        pending.result = lambda: (fetched.append(loader.at), result())[1]
        return pending

    world.submit_train = training  # type: ignore[method-assign]
    drive(world.run)
    assert fetched == [2, 3, 3] and world.trained == list(range(9))
    assert [loader["at"] for loader, _ in world.saved.values()] == [1, 2, 3]


def test_what_a_loader_raises_while_it_is_asked_ahead_is_raised_by_who_draws() -> None:
    class Breaks(Loader):
        def __iter__(self) -> Any:
            yield next(super().__iter__())
            raise LookupError("row 3 is damaged")

    prompts = EpochPrompts(Breaks(), batch_size=3, epoch=0, max_epochs=1)
    prompts.next()
    before = prompts.position()
    assert not prompts.prefetch() and prompts.position() == before
    with pytest.raises(LookupError, match="row 3"):
        prompts.next()


@pytest.mark.parametrize(
    ("keys", "due"),
    [
        ({"val_period": 2}, [2, 4, 6]),
        ({"val_period": 2, "val_start_at": 3}, [4, 6]),
        ({"val_period": 2, "val_start_at": 4}, [4, 6]),
        ({"val_period": 3, "val_at_end": True}, [3, 6, 7]),
        ({"val_period": 0}, []),
        ({"val_period": 0, "val_at_end": True}, [7]),
    ],
)
def test_validation_is_due_by_its_period_its_first_step_and_the_end(keys: dict[str, Any], due: list[int]) -> None:
    assert [step for step in range(1, 8) if steps(GRPOConfig(**keys), step).validation_due(is_last=step == 7)] == due


@pytest.mark.parametrize("name", ["accuracy", "val:accuracy", "validation/accuracy"])
def test_a_run_ends_once_its_metric_is_at_least_the_threshold(name: str) -> None:
    stops = steps(GRPOConfig(stop_at_validation_metric=name, stop_at_validation_threshold=0.5))
    assert [stops.early_stop({"accuracy": value}) for value in (0.4, 0.5, 0.6)] == [False, True, True]
    assert not stops.early_stop(None) and not steps(GRPOConfig()).early_stop({"accuracy": 1.0})


def steps(grpo: GRPOConfig, step: int = 1) -> GRPOSteps:
    """The steps of a run that has done `step` of them."""
    accelerators = SimpleNamespace(saves_before_publish=False)
    run: Any = SimpleNamespace(
        config=Sections(grpo=grpo, section=lambda: "grpo"),
        state=SimpleNamespace(step=step),
        accelerators=accelerators,
        generation=None,
    )
    return GRPOSteps(run)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("samples", "batch", "batches"), [(256, 256, 1), (300, 100, 3), (299, 100, 2), (5, 100, 1), (None, 100, 9)]
)
def test_validation_runs_whole_batches_and_at_least_one(samples: int | None, batch: int, batches: int) -> None:
    assert batches_to_run(GRPOConfig(max_val_samples=samples, val_batch_size=batch), 9) == batches


STREAMS = (
    "++async_rl.sampler.name=in_order",
    "++async_rl.sampler.max_lookahead_versions=1",
    "++async_rl.min_groups_for_streaming_train=1",
    "grpo.async_grpo.enabled=false",
)
SAMPLING = ("grpo.use_dynamic_sampling=true", "grpo.use_leave_one_out_baseline=false", "grpo.max_num_steps=100")


@pytest.mark.parametrize(
    "overrides",
    [TURNS, ("grpo.max_num_steps=3",), (*STREAMS, "grpo.max_num_steps=3"), (*TURNS, *SAMPLING), SAMPLING],
    ids=["in_turns", "ahead", "streaming", "in_turns_until_prompts_end", "ahead_until_prompts_end"],
)
def test_trackers_take_the_steps_of_every_group_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.delenv("RLIX_CONTROL_PLANE", raising=False)
    world = World(tmp_path, *overrides, "grpo.val_at_end=true", "grpo.val_period=2", loader=Loader(batches=5))
    world.rewards = lambda prompt, sample: float(sample) if prompt % 3 else 1.0
    logged: list[tuple[int, str]] = []
    world.run.logger.log_metrics = lambda metrics, step, prefix, **_: logged.append((step, prefix))

    def validate(run: Any, step: int) -> dict[str, float]:
        logged.append((step, "validation"))
        return {"accuracy": 0.5}

    monkeypatch.setattr(loop, "validate", validate)
    drive(world.run)
    done = world.run.state.step
    assert done > 1 and [step for step, _ in logged] == sorted(step for step, _ in logged)
    assert [step for step, prefix in logged if prefix == "train"] == [*range(1, done + 1)]
    assert {step for step, prefix in logged if prefix == "validation"} == {*range(2, done + 1, 2), done}
