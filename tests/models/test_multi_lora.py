"""Adapter slots: what is trained together is what is trained alone, and what fails fails alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nemo_rl.models.multi_lora.slots import AdapterSlots, spans_of
from nemo_rl.models.policy.model_config import CheckpointMismatchError
from tests.models.multi_lora_ranks import ADAPTERS, adapters_of_one, adapters_of_two
from tests.models.policy_ranks import PROMPT_LENGTH, grouped_batch
from tests.ranks import run_ranks

SHARED = ["policy.sequence_packing.share_prompts=true", "policy.sequence_packing.train_mb_tokens=256"]
ONE = {
    "one rank, packed": ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=64"],
    "one rank, shared prompts": ["policy.sequence_packing.enabled=true", *SHARED],
}
TWO = {"two ranks, recomputed": ["policy.dtensor_cfg.activation_checkpointing=true"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def one(tiny_model: Path, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(adapters_of_one, 1, str(tiny_model), str(folder), ONE)


@pytest.fixture(scope="module")
def two(tiny_model: Path) -> list[dict[str, Any]]:
    return run_ranks(adapters_of_two, 2, str(tiny_model), TWO)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ONE, *TWO])
def test_adapters_trained_together_are_those_trained_alone(case: str, request: pytest.FixtureRequest) -> None:
    ranks = request.getfixturevalue("one" if case in ONE else "two")
    for seen in (rank["cases"][case] for rank in ranks):
        assert seen["base untouched"]
        for slot in ADAPTERS:
            alone, together = seen["alone"][slot], seen["together"][slot]
            assert together["rates"] == alone["rates"] and together["metrics"] == alone["metrics"]
            # In the second step Adam has enlarged what rounding differs by.
            steps = zip((1e-6, 1e-5), alone["gradients"], together["gradients"], strict=True)
            for bound, before, after in steps:
                assert before.keys() == after.keys()
                wanted, found = (np.concatenate([part[name].ravel() for name in before]) for part in (before, after))
                assert np.linalg.norm(found - wanted) <= bound * np.linalg.norm(wanted)
            np.testing.assert_allclose(together["losses"], alone["losses"], rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(together["norms"], alone["norms"], rtol=1e-5)
            if len(ranks) == 1:
                assert together["tokens"] == alone["tokens"]
                if "shared prompts" in case:
                    # All tokens of the prompt but the last are computed once for its eight samples.
                    saved = 7 * (PROMPT_LENGTH - 1)
                    assert together["tokens"][0] == int(grouped_batch()["input_lengths"].sum()) - saved
                np.testing.assert_allclose(together["reference"][:, 0], 0.0)


@pytest.mark.slow
def test_a_loss_that_fails_stops_its_own_adapter_alone(two: list[dict[str, Any]]) -> None:
    for seen in (rank["failing"] for rank in two):
        for kind, reason in (("nan", "the step was refused"), ("raises", "planted")):
            told = seen[kind]["refused"]
            assert all(line is not None and (reason in line or "another rank" in line) for line in told), told
            assert seen[kind]["unchanged"]
            np.testing.assert_allclose(seen[kind]["loss"], seen["none"]["loss"], rtol=1e-5)
            for name, tensor in seen["none"]["factors"].items():
                np.testing.assert_allclose(seen[kind]["factors"][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_adapters_are_saved_for_peft_and_go_on_in_other_slots(one: list[dict[str, Any]], folder: Path) -> None:
    seen = one[0]["saved"]
    assert seen["resumed"] == seen["went on"] and seen["same factors"]
    written = json.loads((folder / "2/weights/adapter_config.json").read_text())
    assert written["peft_type"] == "LORA" and written["r"] == 2
    assert "the adapter has dim 4" in seen["another rank"] and "has 3" in seen["another rank"]
    assert "slot 5 holds an adapter" in seen["taken"]


def test_rows_of_a_slot_make_one_span() -> None:
    assert spans_of([1, 1, 0, 3], [2, 5, 6, 10]) == [(1, 0, 5), (0, 5, 6), (3, 6, 10)]
    assert spans_of([], []) == []


class Small(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _filled() -> tuple[Small, AdapterSlots]:
    torch.manual_seed(0)
    model = Small()
    slots = AdapterSlots(model, ["up", "down"], torch.device("cpu"))
    for slot in (3, 1):
        slots.fill(slot, _drawn(), 2.0)
    return model, slots


def _drawn() -> dict[str, torch.Tensor]:
    return {
        "up.lora_A": torch.randn(2, 4),
        "up.lora_B": torch.randn(6, 2),
        "down.lora_A": torch.randn(2, 6),
        "down.lora_B": torch.randn(4, 2),
    }


def test_a_token_is_computed_with_the_adapter_of_its_span_alone() -> None:
    model, slots = _filled()
    row = torch.randn(1, 7, 4)
    base = model(row)
    slots.plan.aim([(3, 1, 3), (1, 3, 6)])
    mixed = model(row)
    for slot, start, end in slots.plan.spans:
        slots.plan.aim([(slot, 0, 7)])
        torch.testing.assert_close(model(row)[:, start:end], mixed[:, start:end])
    torch.testing.assert_close(mixed[:, [0, 6]], base[:, [0, 6]])
    slots.clear(3)
    slots.plan.aim([(3, 0, 7)])
    torch.testing.assert_close(model(row), base)


def test_a_nan_of_one_slot_reaches_no_token_and_no_gradient_of_another() -> None:
    model, slots = _filled()
    slots.plan.aim([(3, 0, 3), (1, 3, 7)])
    with torch.no_grad():
        slots.parameters(3)[1].fill_(float("nan"))
    out = model(torch.randn(1, 7, 4))
    assert out[:, :3].isnan().any() and out[:, 3:].isfinite().all()
    (out[:, :3].sum() + out[:, 3:].square().sum()).backward()
    for parameter in slots.parameters(1):
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0


def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    _, slots = _filled()
    before = [parameter.clone() for parameter in slots.parameters(1)]
    with pytest.raises(CheckpointMismatchError, match="layers that the base does not adapt: gate"):
        slots.fill(1, _drawn() | {"gate.lora_A": torch.zeros(2, 4), "gate.lora_B": torch.zeros(6, 2)}, 1.0)
    with pytest.raises(CheckpointMismatchError, match="do not fit a layer of 4 inputs and 6 outputs"):
        slots.fill(1, _drawn() | {"up.lora_A": torch.zeros(2, 5)}, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, slots.parameters(1), strict=True))
