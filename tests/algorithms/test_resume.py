"""A run that goes on from a checkpoint obeys what changed and says so, or refuses it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.grpo.run import GRPOState
from nemo_rl.algorithms.resume import (
    LOADER_FILE,
    NothingToDo,
    Resume,
    ResumeError,
    check_same_shape,
    find_resume,
    same_contents,
)
from nemo_rl.config import MasterConfig, SFTMasterConfig
from nemo_rl.utils.checkpoint import CheckpointError, CheckpointManager


def configured(root: Path, *, kind: Any = MasterConfig, resume: Any = (), **sections: Any) -> Any:
    checkpointing = {"checkpoint_dir": str(root), "resume": resume}
    return kind(**{"checkpointing": checkpointing, **sections})


def saved(config: Any, step: int = 4, **more: Any) -> None:
    """A checkpoint as a run with this configuration leaves it."""
    manager = CheckpointManager(config.checkpointing)
    info = {"total_steps": step, "dataset_names": [entry.dataset_name for entry in config.data.train], **more}
    path = manager.init_tmp_checkpoint(step, info, config)
    torch.save({"rows": 16}, path / LOADER_FILE)
    manager.finalize_checkpoint(path)


def found(config: Any) -> Resume:
    resume = find_resume(config, CheckpointManager(config.checkpointing))
    assert resume is not None
    return resume


def test_a_run_without_a_checkpoint_begins(tmp_path: Path) -> None:
    config = configured(tmp_path)
    assert find_resume(config, CheckpointManager(config.checkpointing)) is None


def test_the_same_configuration_goes_on_without_a_word_more(tmp_path: Path) -> None:
    saved(configured(tmp_path))
    assert list(found(configured(tmp_path)).lines()) == [f"resuming from step 4 of {tmp_path}/step_4"]


def test_what_can_be_obeyed_is_named_with_both_values(tmp_path: Path) -> None:
    saved(configured(tmp_path, policy={"optimizer": {"kwargs": {"lr": 0.1}}}))
    resume = found(configured(tmp_path, policy={"optimizer": {"kwargs": {"lr": 0.2}}}, grpo={"max_num_steps": 7}))
    said = "\n".join(resume.lines())
    assert "policy.optimizer.kwargs.lr: 0.1 -> 0.2" in said and "-> 7" in said
    assert not resume.allowed


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("data", {"data": {"train": {"dataset_name": "arithmetic", "max_operand": 7}}}, "data.train.0.max_operand"),
    ("environment", {"env": {"mine": {"class": "a.B"}}}, "env.mine.class"),
    ("loss", {"loss_fn": {"ratio_clip_min": 0.3}}, "loss_fn.ratio_clip_min"),
    ("model", {"policy": {"model_name": "another/model"}}, "policy.model_name"),
    ("optimizer", {"policy": {"optimizer": {"name": "torch.optim.SGD"}}}, "policy.optimizer.name"),
    ("batch", {"grpo": {"num_prompts_per_step": 8}}, "grpo.num_prompts_per_step"),
    ("seed", {"grpo": {"seed": 7}}, "grpo.seed"),
]


@pytest.mark.parametrize(("name", "change", "key"), CHANGES)
def test_what_makes_another_run_is_refused_by_its_key_and_allowed_by_its_name(
    name: str, change: dict[str, Any], key: str, tmp_path: Path
) -> None:
    saved(configured(tmp_path))
    with pytest.raises(ResumeError) as refused:
        found(configured(tmp_path, **change))
    said = str(refused.value)
    assert f"- {name}: {key}: " in said and f"checkpointing.resume=[{name}" in said
    resume = found(configured(tmp_path, resume=sorted({name, "model"}), **change))
    assert name in resume.allowed and any(f"allowed as {name}: {key}" in line for line in resume.lines())


def test_how_an_environment_is_run_changes_no_reward(tmp_path: Path) -> None:
    saved(configured(tmp_path))
    assert not found(configured(tmp_path, env={"math": {"num_workers": 3}})).allowed


def test_sft_takes_its_batch_from_the_policy(tmp_path: Path) -> None:
    saved(configured(tmp_path, kind=SFTMasterConfig, policy={"train_global_batch_size": 16}))
    changed = {"kind": SFTMasterConfig, "policy": {"train_global_batch_size": 8}}
    with pytest.raises(ResumeError, match="policy.train_global_batch_size: 16 -> 8"):
        found(configured(tmp_path, **changed))
    assert found(configured(tmp_path, resume="batch", **changed)).rows_before == 16


def test_a_configuration_of_another_version_is_named_and_its_data_are_known_by_their_names(tmp_path: Path) -> None:
    saved(configured(tmp_path))
    (tmp_path / "step_4" / "config.yaml").write_text("grpo: {prompts: 3}\n")
    resume = found(configured(tmp_path))
    assert "is not known" in list(resume.lines())[1] and resume.same_data
    other = {"data": {"train": {"dataset_name": "arithmetic"}}}
    assert not found(configured(tmp_path, **other)).same_data


class Loader:
    state: Any = None

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_other_data_begin_with_their_first_prompt(tmp_path: Path) -> None:
    saved(configured(tmp_path))
    loader, state = Loader(), GRPOState(step=4, epoch=2, step_in_epoch=1)
    _, change, _ = CHANGES[0]
    assert not found(configured(tmp_path, resume="data", **change)).restore_position(loader, state, 32)
    assert loader.state is None and (state.epoch, state.step_in_epoch) == (0, 0)
    assert found(configured(tmp_path)).restore_position(loader, state, 32)
    assert loader.state == {"rows": 16}


BEFORE = {"data.train.0": "9 rows, digest a", "data.train.1": "5 rows, digest b", "data.validation": "3 rows, digest c"}


def resumed_on(contents: dict[str, str], root: Path, **now: Any) -> Resume:
    saved(configured(root), data_contents=BEFORE)
    config = configured(root, **now)
    resume = same_contents(found(config), {**BEFORE, **contents}, config.checkpointing.resume)
    assert resume is not None
    return resume


@pytest.mark.parametrize("changed", [{"data.train.0": "9 rows, digest z"}, {"data.train.1": "6 rows, digest b"}])
def test_other_rows_under_the_same_keys_make_another_run(changed: dict[str, str], tmp_path: Path) -> None:
    [(key, now)] = changed.items()
    with pytest.raises(ResumeError) as refused:
        resumed_on(changed, tmp_path)
    assert f"- data: {key}: {BEFORE[key]} -> {now}" in str(refused.value)
    assert "checkpointing.resume=[data]" in str(refused.value)
    resume = resumed_on(changed, tmp_path, resume="data")
    assert not resume.same_data and f"  allowed as data: {key}: {BEFORE[key]} -> {now}" in list(resume.lines())


def test_other_validation_rows_are_said_and_change_no_position(tmp_path: Path) -> None:
    resume = resumed_on({"data.validation": "4 rows, digest c"}, tmp_path)
    assert resume.same_data and "data.validation: 3 rows, digest c -> 4 rows" in "\n".join(resume.lines())
    assert list(resumed_on({}, tmp_path).lines()) == [f"resuming from step 4 of {tmp_path}/step_4"]


def test_a_checkpoint_that_knows_no_contents_goes_on(tmp_path: Path) -> None:
    saved(configured(tmp_path))
    resume = found(configured(tmp_path))
    assert same_contents(resume, BEFORE, []) == resume and same_contents(None, BEFORE, []) is None


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 40))
def test_steps_of_another_size_leave_the_run_as_many_as_the_rest_of_the_data_give(
    before: int, now: int, done: int
) -> None:
    rows, epochs = 40, 2
    epoch, in_epoch = divmod(done, rows // before)
    if epoch >= epochs:
        return
    resume = Resume(Path("step_4"), {}, [], {"batch": []}, rows_before=before)
    state = GRPOState(step=done, epoch=epoch, step_in_epoch=in_epoch * before // now)
    left = (rows - in_epoch * before) // now + (epochs - epoch - 1) * (rows // now)
    assert 0 <= resume.total_steps(state, 1000, epochs, rows // now) - done - left <= 1


def test_a_run_that_is_over_says_so() -> None:
    Resume(Path("step_4"), {"total_steps": 4}, [], {}).check_unfinished(5, "grpo.max_num_steps")
    with pytest.raises(NothingToDo, match=r"already at step 48 of 5; nothing to do.*grpo\.max_num_steps"):
        Resume(Path("step_48"), {"total_steps": 48}, [], {}).check_unfinished(5, "grpo.max_num_steps")


@pytest.mark.slow
def test_a_checkpoint_that_lost_its_place_in_the_data_is_refused(tmp_path: Path) -> None:
    saved(configured(tmp_path))
    loader, state = Loader(), GRPOState(step=4, epoch=2, step_in_epoch=1)
    (tmp_path / "step_4" / LOADER_FILE).unlink()
    with pytest.raises(CheckpointError, match=rf"step_4 is damaged: {LOADER_FILE}: is missing"):
        found(configured(tmp_path))
    # One of an earlier version has no manifest that says so.
    (tmp_path / "step_4" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=rf"{LOADER_FILE} is missing.*resume=\[seed,data\]"):
        found(configured(tmp_path, resume=["seed"]))
    resume = found(configured(tmp_path, resume=["data"]))
    assert not resume.restore_position(loader, state, 32) and "not verified" in "\n".join(resume.lines())
    for content in (b"", b"PK\x03\x04 torn", b"\x80\x02junk"):
        (tmp_path / "step_4" / LOADER_FILE).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{LOADER_FILE} cannot be read"):
            found(configured(tmp_path)).restore_position(loader, state, 32)


@pytest.mark.parametrize("metric", ["accuracy", "val:accuracy", "mine/solved", "validation/reward/form"])
def test_a_run_that_its_validation_has_ended_is_over(metric: str, tmp_path: Path) -> None:
    def stops_at(threshold: float) -> Any:
        return configured(
            tmp_path, grpo={"stop_at_validation_metric": metric, "stop_at_validation_threshold": threshold}
        )

    saved(stops_at(0.5), val_metrics={metric.removeprefix("val:").removeprefix("validation/"): 0.6})
    with pytest.raises(NothingToDo, match=r"already ended at step 4 by its validation: .*was 0\.6"):
        found(stops_at(0.5))
    assert found(stops_at(0.7)).obeyed[0].key == "grpo.stop_at_validation_threshold"


def test_weights_of_another_shape_are_refused_by_their_sizes(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "weights").symlink_to(tiny_model)
    model = AutoConfig.from_pretrained(tiny_model)
    check_same_shape(model, tmp_path)
    model.hidden_size = 64
    with pytest.raises(ResumeError, match="hidden_size=128, policy.model_name has 64"):
        check_same_shape(model, tmp_path)
