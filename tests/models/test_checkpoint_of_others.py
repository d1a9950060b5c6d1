"""A checkpoint that somebody else made is read, and runs no code."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nemo_rl.models.dtensor import dtensor_checkpoint
from nemo_rl.models.policy.model_config import CheckpointMismatchError

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.Rprop, {}),
]


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def trained(kind: type[torch.optim.Optimizer], options: dict[str, Any], steps: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]  # each optimizer has its own
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def saved(folder: Path, model: Any, optimizer: Any) -> None:
    dcp.save({"optimizer": dtensor_checkpoint._named_state(model, optimizer)}, checkpoint_id=folder)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_the_state_of_every_optimizer_is_read_as_it_was_saved(
    tmp_path: Path, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model, optimizer = trained(kind, options, 2)
    saved(tmp_path, model, optimizer)
    fresh, again = trained(kind, options, 0)
    dtensor_checkpoint.load_optimizer(fresh, again, None, str(tmp_path))
    before = [optimizer.state[parameter] for parameter in model.parameters()]
    after = [again.state[parameter] for parameter in fresh.parameters()]
    for left, right in zip(before, after, strict=True):
        assert left.keys() == right.keys()
        for key in left:
            assert torch.equal(left[key], right[key]) if torch.is_tensor(left[key]) else left[key] == right[key]


def test_a_description_that_names_code_is_refused_and_not_run(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW, {}, 1)
    saved(tmp_path, model, optimizer)
    touched = tmp_path / "touched"
    honest = (tmp_path / ".metadata").read_bytes()
    metadata = pickle.loads(honest)
    metadata.planner_data = Harm(touched)
    class_of_ours = pickle.dumps(metadata)
    attacks = [
        pickle.dumps(Harm(touched)),
        class_of_ours,
        b"cposix\nsystem\n(S'touch " + os.fsencode(touched) + b"'\ntR.",
        b"cbuiltins\neval\n(S'open(\"" + os.fsencode(touched) + b'", "w")\'\ntR.',
        b"ctorch\nload\n(S'x'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x0bhub.os.pathh\x93.",
        b"\x80\x04\x8c\x05torch\x8c\tfloat32.f\x93.",
        b"I1\n.",
        honest[: len(honest) // 2],
    ]
    for attack in attacks:
        (tmp_path / ".metadata").write_bytes(attack)
        with pytest.raises(CheckpointMismatchError, match=str(tmp_path)):
            dtensor_checkpoint.load_optimizer(model, optimizer, None, str(tmp_path))
        assert not touched.exists()


def test_a_value_that_is_no_tensor_runs_no_code(tmp_path: Path) -> None:
    """torch reads such values by `torch.load` with every class allowed."""
    touched = tmp_path / "touched"
    model, optimizer = trained(torch.optim.AdamW, {}, 1)
    state = dtensor_checkpoint._named_state(model, optimizer)
    next(iter(state.values()))["exp_avg"] = Harm(touched)
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointMismatchError, match="does not fit"):
        dtensor_checkpoint.load_optimizer(model, optimizer, None, str(tmp_path))
    assert not touched.exists()
    # The attack is one: unguarded, the value runs.
    pickle.load(io.BytesIO(pickle.dumps(Harm(touched))))
    assert touched.exists()
