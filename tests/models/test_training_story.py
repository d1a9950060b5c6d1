"""A policy over time: steps in chunks, refused and failed steps, checkpoints and what resumes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import example
from tests.models.policy_ranks import story_of_one, story_of_two
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(tiny_model: Path, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(story_of_two, 2, str(tiny_model), str(folder))


@pytest.fixture(scope="module")
def one(tiny_model: Path, folder: Path, two: list[dict[str, Any]]) -> dict[str, Any]:
    other = folder / "other model"
    example("make_tiny_model").save_tiny_model(other, layers=2, hidden=32)
    return run_ranks(story_of_one, 1, str(tiny_model), str(other), str(folder))[0]


@pytest.fixture(scope="module", params=["one rank", "two ranks"])
def story(request: pytest.FixtureRequest, one: dict[str, Any], two: list[dict[str, Any]]) -> dict[str, Any]:
    return one["story"] if request.param == "one rank" else two[1]["story"]


def test_a_step_in_chunks_is_the_step_bit_for_bit(story: dict[str, Any]) -> None:
    assert story["chunked"]["loss"] == story["whole"]["loss"]
    assert story["chunked"]["grad_norm"] == story["whole"]["grad_norm"]
    assert story["chunked"]["all_mb_metrics"] == story["whole"]["all_mb_metrics"]
    assert story["chunked weights"] == story["whole weights"]


def test_parts_of_a_step_out_of_order_are_refused(story: dict[str, Any]) -> None:
    assert story["finish without begin"].startswith("TrainStepStateError: finish_train_step: no train step open")
    assert story["microbatches without begin"].startswith("TrainStepStateError: train_microbatches: no train step open")
    assert story["begin twice"].startswith("TrainStepStateError: a train step is already open")


def test_an_aborted_step_changes_no_weight(story: dict[str, Any]) -> None:
    assert story["weights after abort"] == story["chunked weights"]


def test_a_step_with_nan_is_refused_and_names_its_samples_on_every_rank(story: dict[str, Any]) -> None:
    assert story["nan"].startswith("NonFiniteStepError: the step was refused, weights are unchanged")
    assert story["nan"].endswith("values that are not finite: [6]")
    assert story["weights after nan"] == story["chunked weights"]


def test_weights_that_an_optimizer_made_infinite_end_the_step(story: dict[str, Any]) -> None:
    assert story["damaged optimizer"].startswith("NonFiniteStepError: weights are not finite after the optimizer's")


def test_after_refused_and_failed_steps_training_goes_on_as_if_they_had_not_been(story: dict[str, Any]) -> None:
    assert story["loss raises"] == "ArithmeticError: planted"
    assert story["weights after raise"] == story["chunked weights"]
    assert story["second, after all that"] == story["second"]
    assert story["second weights"][0] == story["second weights"][1] != story["chunked weights"]


def test_the_schedule_moves_once_per_step(story: dict[str, Any]) -> None:
    assert [story[name]["lr"] for name in ("whole", "second", "third")] == [0.01, 0.01, 0.005]


def test_a_checkpoint_resumes_bit_for_bit(story: dict[str, Any]) -> None:
    assert story["resumed weights"] == story["second weights"][1]
    assert story["resumed third"] == story["third"]
    assert story["resumed third weights"] == story["third weights"]


def test_a_checkpoint_of_two_ranks_resumes_on_one(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    saved = two[0]["story"]
    assert one["resharded weights"] == saved["second weights"][1]
    assert one["resharded third"]["lr"] == saved["third"]["lr"]
    assert one["resharded third"]["loss"] == pytest.approx(saved["third"]["loss"], rel=1e-5)
    assert one["resharded third"]["grad_norm"] == pytest.approx(saved["third"]["grad_norm"], rel=1e-5)


def test_the_checkpoint_loads_in_transformers(one: dict[str, Any], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "1" / "weights")
    assert {name for name, _ in model.named_parameters()} == set(one["resharded weights"])


def test_weights_saved_by_torch_are_one_file_that_loads_without_running_code(one: dict[str, Any], folder: Path) -> None:
    saved, loaded = one["saved by torch"]
    assert loaded == saved
    assert set(torch.load(folder / "torch" / "pytorch_model.bin", weights_only=True)) == set(saved)
    assert not list((folder / "torch").glob("*.safetensors"))


def test_a_checkpoint_of_another_model_is_refused_by_its_path(one: dict[str, Any]) -> None:
    assert one["other model's weights"].startswith("CheckpointMismatchError: ")
    assert "other model" in one["other model's weights"]


def test_state_of_another_optimizer_is_refused(one: dict[str, Any]) -> None:
    assert one["other optimizer's state"].startswith("CheckpointMismatchError: ")
    assert "optimizer state does not fit the configured model or optimizer" in one["other optimizer's state"]


def test_a_full_disk_or_a_path_that_cannot_be_written_is_reported(one: dict[str, Any]) -> None:
    assert "No space left on device" in one["full disk"]
    assert "/dev/null/" in one["unwritable"]


def test_packed_shards_with_unequal_rows_take_the_same_steps(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    assert len(one["uneven"]) == 2
    for rank in two:
        assert rank["uneven"] == pytest.approx(one["uneven"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("split", ["dp", "tp"])
def test_a_loss_on_logits_has_the_same_gradient(one: dict[str, Any], two: list[dict[str, Any]], split: str) -> None:
    for rank in two:
        want = one["logit gradient"]
        assert np.linalg.norm(rank["logit gradient"][split] - want) <= 1e-5 * np.linalg.norm(want)


def test_reference_logprobs_stay_those_of_the_start_and_leave_the_weights_alone(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    for seen in (one["reference"], two[0]["reference"], two[1]["reference"]):
        np.testing.assert_array_equal(seen["reference after"], seen["reference before"])
        np.testing.assert_allclose(seen["reference before"], seen["start"], atol=1e-6)
        assert np.abs(seen["after"] - seen["start"]).max() > 1e-3
        assert seen["weights untouched"] and seen["one call scores as two"]


def test_top_logits_agree_over_tensor_parallel_ranks(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    np.testing.assert_allclose(two[0]["reference"]["topk_logits"], one["reference"]["topk_logits"], atol=1e-5)
    assert one["reference"]["topk_logits"].shape == (8, 24, 3)
