"""The asynchronous driver calls its hooks in their order, leaves refits to a control plane, trains every prompt once,
and goes on after a restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.accelerators import check_control_plane
from nemo_rl.algorithms.grpo import loop, validation
from nemo_rl.algorithms.grpo.loop import PromptsUsedUp, async_grpo_train, drive
from nemo_rl.algorithms.grpo.run import ValidationParts
from nemo_rl.algorithms.grpo.stages import Experience, apply_staleness_policy
from nemo_rl.config import ConfigError, load_master_config
from nemo_rl.data_plane.client import StoredClient
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import WorkerDiedError
from nemo_rl.experience.hooks import HooksError
from nemo_rl.experience.store import InProcessStore
from nemo_rl.utils.checkpoint_retention import UnknownMetric
from nemo_rl.utils.record_events import GroupDropped, GroupTrained, StepFinished
from tests.experience.plane_in_process import plane_in_process
from tests.virtual_world import CONFIG, PROMPTS, SAMPLES, Hooks, Loader, World, save_in_memory

IN_TURNS = "grpo.async_grpo.enabled=false"


@pytest.fixture(autouse=True)
def _saving(monkeypatch: pytest.MonkeyPatch) -> None:
    save_in_memory(monkeypatch)


def test_hooks_are_called_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLIX_CONTROL_PLANE", raising=False)
    world = World(tmp_path, "grpo.max_num_steps=2")
    hooks = Hooks(world, refits=False)
    async_grpo_train(world.run, hooks)
    step = [
        "begin {0}",
        "end",
        "before training {0}",
        "logprobs",
        "train",
        "before sync {0}",
        "after training {0}",
        "refit {1}",
    ]
    expected = ["collector", "refit 0", *[line.format(n, n + 1) for n in range(2) for line in step], "save 2", "clear"]
    assert world.happened == expected
    batches = [position for position, (*_, new) in enumerate(hooks.progress) if new]
    assert batches[0] == 0 and len(batches) == 2
    assert [hooks.progress[end - 1][:2] for end in (*batches[1:], len(hooks.progress))] == [(PROMPTS, PROMPTS)] * 2


@pytest.mark.parametrize(("steps", "switches"), [("2:3", 2), ("3:9", 2), ("8:9", 0)])
def test_workers_record_in_the_steps_that_a_profile_names(
    steps: str, switches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, "grpo.max_num_steps=3")
    seen: list[tuple[int, bool]] = []

    def switch(on: bool) -> None:
        seen.append((world.run.state.step, on))
        if on:
            raise WorkerDiedError("vllm (rank 1, node here): gone")

    world.profile = switch  # type: ignore[attr-defined]
    monkeypatch.setenv("NRL_NSYS_WORKER_PATTERNS", "*")
    monkeypatch.setenv("NRL_NSYS_PROFILE_STEP_RANGE", steps)
    async_grpo_train(world.run, Hooks(world, refits=False))
    # The world is policy and engines at once, so each switch comes twice.
    switched = [(int(steps[0]) - 1, True), (min(int(steps[2]) - 1, 3), False)][:switches]
    assert seen == [switch for switch in switched for _ in range(2)] and world.run.state.step == 3
    assert ("gone" in caplog.text) == bool(switches) and ("no_step_in_range" in caplog.text) != bool(switches)


def test_under_a_control_plane_the_driver_refits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIX_CONTROL_PLANE", "rlix")
    world = World(
        tmp_path, "grpo.max_num_steps=3", "grpo.val_at_start=true", "grpo.val_period=1", "checkpointing.save_period=1"
    )
    validated: list[int] = []

    def roll_out_all(*_: object) -> validation._Validated:
        validated.append(world.served)
        return validation._Validated(torch.ones(2), torch.ones(2), torch.zeros(2), {}, ["sum"] * 2, [], {})

    monkeypatch.setattr("nemo_rl.algorithms.grpo.validation._roll_out_all", roll_out_all)
    world.run.val_loader, world.run.validation = Loader(), ValidationParts(world, {}, {})  # type: ignore[arg-type]
    async_grpo_train(world.run, Hooks(world, refits=True))
    # A snapshot needs the accelerators, so it is taken before the hooks give them back.
    step = [
        "begin {0}",
        "end",
        "before training {0}",
        "logprobs",
        "train",
        "before sync {0}",
        "save {1}",
        "after training {0}",
    ]
    assert world.happened == ["collector", *[line.format(n, n + 1) for n in range(3) for line in step], "clear"]
    assert not world.released
    assert world.trained == list(range(9)) and world.run.state.step == 3
    # Validation too takes generation as the hooks left it, at the version of the step.
    assert validated == [0, 1, 2, 3]

    # An early stop is known only afterwards: the accelerators are asked for once more, and the run ends.
    early = ["grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_threshold=0.5"]
    world = World(tmp_path, "grpo.max_num_steps=3", "grpo.val_period=2", *early)
    world.run.val_loader, world.run.validation = Loader(), ValidationParts(world, {}, {})  # type: ignore[arg-type]
    async_grpo_train(world.run, Hooks(world, refits=True))
    assert world.happened[-4:] == ["after training 1", "before training 2", "save 2", "clear"]


def test_a_control_plane_takes_no_engines_that_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    several = load_master_config(None, ["policy.generation.vllm_cfg.engines_per_gpu=2"])
    monkeypatch.delenv("RLIX_CONTROL_PLANE", raising=False)
    check_control_plane(several)
    monkeypatch.setenv("RLIX_CONTROL_PLANE", "rlix")
    check_control_plane(load_master_config(None))
    with pytest.raises(ConfigError, match="engines_per_gpu is 2, but RLIX_CONTROL_PLANE is set"):
        check_control_plane(several)


def test_a_control_plane_whose_hooks_do_not_publish_the_steps_version_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLIX_CONTROL_PLANE", "rlix")
    world = World(tmp_path)
    with pytest.raises(HooksError, match="after_training must bring generation to version 1 and return it"):
        async_grpo_train(world.run, Hooks(world, refits=False))
    world = World(tmp_path)
    behind = Hooks(world, refits=True)
    behind.after_training = lambda step: step  # type: ignore[method-assign]
    with pytest.raises(
        HooksError, match=r"after_training\(0\) published version 0; the weights of 1 completed steps are that version"
    ):
        async_grpo_train(world.run, behind)


def test_without_hooks_every_prompt_is_trained_once_in_order_and_within_the_bound(tmp_path: Path) -> None:
    world = World(tmp_path)
    async_grpo_train(world.run)
    assert world.trained == list(range(5 * PROMPTS))
    assert all(metrics["lag/max"] <= 1 for metrics in world.logged)
    world.every_prompt_is_accounted_for()
    assert [event.version for event in world.events(StepFinished)] == [1, 2, 3, 4, 5]


def test_the_synchronous_driver_trains_the_same_prompts_on_the_same_stages(tmp_path: Path) -> None:
    world, other = World(tmp_path, IN_TURNS), World(tmp_path)
    drive(world.run)
    async_grpo_train(other.run)
    assert world.trained == other.trained == list(range(5 * PROMPTS))
    assert [metrics["reward"] for metrics in world.logged] == [metrics["reward"] for metrics in other.logged]
    assert world.run.state == other.run.state
    assert [event.group_id for event in world.events(GroupTrained)] == [
        event.group_id for event in other.events(GroupTrained)
    ]


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> StoredClient:
    return plane_in_process(monkeypatch)


@pytest.mark.parametrize("rule", ["importance", "mask"])
def test_the_same_prompts_are_trained_with_their_rows_on_the_data_plane_and_no_row_is_left(
    tmp_path: Path, plane: StoredClient, rule: str
) -> None:
    overrides = (
        f"grpo.async_grpo.mixed_versions={rule}",
        "grpo.use_dynamic_sampling=true",
        "grpo.use_leave_one_out_baseline=false",
        "grpo.max_num_steps=3",
    )
    in_process, on_plane = World(tmp_path, *overrides), World(tmp_path, *overrides, plane=plane)
    for world in (in_process, on_plane):
        world.rewards = lambda prompt, sample: float(sample) if prompt % 3 else 1.0
        async_grpo_train(world.run)
    assert on_plane.trained == in_process.trained
    assert [metrics["reward"] for metrics in on_plane.logged] == [metrics["reward"] for metrics in in_process.logged]
    assert plane.list_samples("train") == {}


def test_a_step_that_fails_takes_its_rows_off_the_data_plane_and_leaves_those_that_wait(
    tmp_path: Path, plane: StoredClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, plane=plane)
    taken: list[str] = []

    def fail(data: Any, *_: Any, **__: Any) -> Any:
        taken.extend(data.sample_ids)
        raise RuntimeError("planted")

    monkeypatch.setattr(world, "submit_train", fail)
    with pytest.raises(RuntimeError, match="planted"):
        async_grpo_train(world.run)
    assert len(taken) == PROMPTS * SAMPLES
    assert not set(taken) & set(plane.list_samples("train"))


def test_an_exhausted_loader_ends_the_run_after_its_last_batch(tmp_path: Path) -> None:
    world = World(tmp_path, "grpo.max_num_steps=100", loader=Loader(batches=4))
    async_grpo_train(world.run)
    assert (world.trained, world.run.state.step) == (list(range(4 * PROMPTS)), 4)


def test_dynamic_sampling_refills_a_step_from_later_prompts(tmp_path: Path) -> None:
    world = World(
        tmp_path, "grpo.use_dynamic_sampling=true", "grpo.use_leave_one_out_baseline=false", "grpo.max_num_steps=3"
    )
    world.rewards = lambda prompt, sample: float(sample) if prompt % 3 else 1.0
    async_grpo_train(world.run)
    assert len(world.trained) == 9 and len(set(world.trained)) == 9
    assert all(prompt % 3 for prompt in world.trained)
    assert {event.reason for event in world.events(GroupDropped)} == {"zero_variance"}
    assert any(metrics["dynamic_sampling_num_gen_batches"] > 1 for metrics in world.logged)


@pytest.mark.parametrize("ahead", [False, True])
def test_when_prompts_end_below_dynamic_sampling_the_newest_step_is_validated_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.delenv("RLIX_CONTROL_PLANE", raising=False)
    world = World(
        tmp_path,
        f"grpo.async_grpo.enabled={ahead}",
        "grpo.use_dynamic_sampling=true",
        "grpo.use_leave_one_out_baseline=false",
        "grpo.max_num_steps=100",
        "grpo.val_at_end=true",
        "checkpointing.save_period=50",
        "checkpointing.metric_name=val:accuracy",
        loader=Loader(batches=5),
    )
    validated: list[int] = []
    saved: list[tuple[int, Any]] = []
    monkeypatch.setattr(
        "nemo_rl.algorithms.grpo.loop.validate", lambda run, step: validated.append(step) or {"accuracy": 0.5}
    )
    monkeypatch.setattr(
        "nemo_rl.algorithms.training_loop.begin_checkpoint",
        lambda checkpointer, policy, loader, step, info, *_: saved.append((step, info["val:accuracy"])),
    )
    world.rewards = lambda prompt, sample: float(sample) if prompt % 3 else 1.0
    drive(world.run)
    steps = world.run.state.step
    assert steps > 1 and len(world.trained) == steps * PROMPTS
    assert validated == [steps] and saved[-1] == (steps, 0.5)
    world.every_prompt_is_accounted_for()
    assert "prompts_exhausted" in {event.reason for event in world.events(GroupDropped)}


@pytest.mark.parametrize("wanted", [True, False])
def test_every_step_logs_what_the_engines_say_where_that_is_wanted(tmp_path: Path, wanted: bool) -> None:
    world = World(tmp_path, "grpo.max_num_steps=2", f"policy.generation.vllm_cfg.enable_vllm_metrics_logger={wanted}")
    world.run.generation.engine_metrics = lambda: {"kv_cache_usage_perc": 0.5}
    logged: list[tuple[int, dict[str, Any]]] = []
    world.run.logger.log_metrics = lambda metrics, step, prefix, **_: (
        logged.append((step, metrics)) if prefix == "generation_metrics" else None
    )
    async_grpo_train(world.run)
    assert logged == ([(step, {"kv_cache_usage_perc": 0.5}) for step in (1, 2)] if wanted else [])


def test_reward_scaling_and_shaping_work_as_in_the_synchronous_driver(tmp_path: Path) -> None:
    scaling = [
        "grpo.reward_scaling.enabled=true",
        "grpo.reward_scaling.target_min=-1",
        "grpo.reward_scaling.target_max=1",
    ]
    world = World(tmp_path, *scaling, "grpo.max_num_steps=1")
    async_grpo_train(world.run)
    assert world.logged[0]["reward"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "on_plane"), [(False, False), (True, False), (False, True)])
def test_a_restart_from_any_checkpoint_trains_every_prompt_exactly_once(
    tmp_path: Path, plane: StoredClient, dynamic: bool, on_plane: bool
) -> None:
    where = plane if on_plane else None
    switches = ["grpo.use_dynamic_sampling=true", "grpo.use_leave_one_out_baseline=false"] if dynamic else []
    period = ["checkpointing.save_period=1", "grpo.async_grpo.max_trajectory_age_steps=2", *switches]

    def rewards(prompt: int, sample: int) -> float:
        return float(sample) if prompt % 4 or not dynamic else 1.0

    whole = World(tmp_path, *period, plane=where)
    whole.rewards = rewards
    async_grpo_train(whole.run)
    for step in (1, 2, 3):
        again = whole.resumed(step, *period)
        again.rewards = rewards
        async_grpo_train(again.run)
        both = whole.trained[: step * PROMPTS] + again.trained
        assert len(set(both)) == len(both)
        if not dynamic:
            # Refills are drawn when they are needed, so with dynamic sampling other prompts may fill a step.
            assert both == whole.trained


def test_a_run_resumes_under_a_smaller_age_without_the_groups_that_are_too_old_for_it(tmp_path: Path) -> None:
    whole = World(tmp_path, "checkpointing.save_period=1", "grpo.async_grpo.max_trajectory_age_steps=3")
    async_grpo_train(whole.run)
    groups = whole.saved[1][1]["replay_buffer.pt"]["groups"]
    assert any(int(group["rows"]["weight_version"].min()) < group["key"][0] - 1 for group in groups), (
        "the checkpoint holds no group that is too old"
    )
    again = whole.resumed(1, "grpo.async_grpo.max_trajectory_age_steps=1")
    async_grpo_train(again.run)
    assert whole.trained[:PROMPTS] + again.trained == whole.trained
    assert all(metrics["lag/max"] <= 1 for metrics in again.logged)


def test_groups_of_other_datasets_are_not_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    whole = World(tmp_path, "checkpointing.save_period=1")
    async_grpo_train(whole.run)
    again = whole.resumed(2, "data.train={dataset_name: gsm8k}")
    async_grpo_train(again.run)
    assert "resume=buffer_ignored reason=batch_shape_or_datasets_changed" in caplog.text
    assert again.trained[0] == PROMPTS * whole.saved[2][0]["at"]


def test_settings_that_leave_training_waiting_for_itself_are_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(
        ConfigError, match=r"grpo.async_grpo.max_trajectory_age_steps is 0: .* the smallest that works is 1"
    ):
        load_master_config(CONFIG, ["grpo.async_grpo.max_trajectory_age_steps=0"])
    with pytest.raises(ConfigError, match=r"grpo.async_grpo.enabled does not take grpo.rollout_record"):
        load_master_config(CONFIG, ["grpo.rollout_record=somewhere"])


@contextmanager
def mixed() -> Iterator[tuple[Experience, InProcessStore]]:
    store = InProcessStore(0)
    handle = store.write(
        BatchedDataDict(
            input_ids=torch.ones(2, 5, dtype=torch.long),
            input_lengths=torch.tensor([5, 5]),
            token_mask=torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]]),
            token_versions=torch.tensor([[-1, 3, 3, 4, 4], [-1, 4, 4, 4, -1]]),
        )
    )
    rows = BatchedDataDict(
        weight_version=torch.tensor([3, 4]),
        newest_version=torch.tensor([4, 4]),
        mixed_kv=torch.tensor([True, False]),
        sample_mask=torch.ones(2),
        generated_lengths=torch.tensor([4, 3]),
    )
    yield Experience(handle, rows), store


def test_mixed_samples_are_corrected_masked_or_dropped_as_configured() -> None:
    for rule, mask, samples, dropped in (
        ("importance", [[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]], [1, 1], 0.0),
        ("mask", [[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]], [1, 1], 2 / 7),
        ("drop", [[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]], [0, 1], 0.5),
    ):
        with mixed() as (experience, store):
            apply_staleness_policy(experience, store, rule, 5)  # type: ignore[arg-type]
            assert experience.handle["token_mask"].tolist() == mask
            assert experience.rows["sample_mask"].tolist() == samples
            assert experience.metrics["dropped_share"] == pytest.approx(dropped)
            assert (experience.metrics["lag/max"], experience.metrics["lag/mean"]) == (2.0, 1.5)
            assert (experience.metrics["mixed_share"], experience.metrics["mixed_kv_share"]) == (0.5, 0.5)


def test_a_metric_that_no_validation_gives_ends_the_run_after_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "validate", lambda run, step: {"accuracy": 0.5})
    judge = ["++env.judge.class=letters.Judge", "data.train.env_name=judge", "data.train.split_validation_size=1"]
    stop = ["grpo.stop_at_validation_metric=judge/rihgt", "grpo.stop_at_validation_threshold=1", "grpo.val_period=1"]
    world = World(tmp_path, "grpo.max_num_steps=3", "checkpointing.save_period=3", *judge, *stop)
    with pytest.raises(UnknownMetric, match=r"judge/rihgt: validation gives \['accuracy'\]"):
        async_grpo_train(world.run)
    assert "save 1" in world.happened


@pytest.mark.parametrize("ahead", [False, True])
def test_a_run_whose_prompts_fill_no_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    monkeypatch.delenv("RLIX_CONTROL_PLANE", raising=False)
    sampling = ["grpo.use_dynamic_sampling=true", "grpo.use_leave_one_out_baseline=false"]
    world = World(tmp_path, f"grpo.async_grpo.enabled={ahead}", *sampling, loader=Loader(batches=2))
    world.rewards = lambda prompt, sample: 0.0
    with pytest.raises(PromptsUsedUp, match=r"no step was trained.*max_num_epochs=1 are used up, and dynamic sampling"):
        drive(world.run)


def test_a_custom_loader_that_gives_no_more_prompts_fails(tmp_path: Path) -> None:
    world = World(tmp_path, IN_TURNS, "grpo.max_num_steps=9", loader=Loader(batches=2))
    world.run.config.data.use_multiple_dataloader = True
    with pytest.raises(PromptsUsedUp, match=r"ended after step 2 of grpo.max_num_steps=9: data.custom_dataloader gave"):
        drive(world.run)
    assert world.run.state.step == 2


def test_an_end_before_the_last_step_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "validate", lambda run, step: {"accuracy": 0.5})
    stop = ["grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_threshold=0.5", "grpo.val_period=1"]
    held_out = "data.train.split_validation_size=1"
    ends = {
        "stop_at_validation_metric=accuracy has reached grpo.stop_at_validation_threshold=0.5": [held_out, *stop],
        "grpo.max_num_epochs=1 passes over the data are done": ["grpo.max_num_steps=50"],
        "it was asked to end; the same command goes on": ["grpo.max_num_steps=3"],
        "": ["grpo.max_num_steps=2"],
    }
    for number, (why, overrides) in enumerate(ends.items()):
        caplog.clear()
        world = World(tmp_path / str(number), IN_TURNS, *overrides, loader=Loader(batches=4))
        if "asked to end" in why:
            world.run.timeout.end_after_step()
        drive(world.run)
        said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("ended after step")]
        assert len(said) == int(bool(why)) and all(why in line for line in said)
