"""Checkpoints to Hugging Face directories and back, as transformers reads them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.config import CheckpointingConfig
from nemo_rl.utils.checkpoint import CheckpointManager, model_directory
from nemo_rl.utils.convert import from_hugging_face, main, to_hugging_face


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict()


def test_a_model_goes_into_a_checkpoint_and_out_again(tiny_model: Path, tmp_path: Path) -> None:
    step = from_hugging_face(tiny_model, tmp_path / "results")
    manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(tmp_path / "results")))
    assert manager.get_latest_checkpoint_path() == step
    assert model_directory(str(tmp_path / "results")) == model_directory(str(step)) == str(step / "policy" / "weights")
    out = to_hugging_face(tmp_path / "results", tmp_path / "out")
    before, after = weights(tiny_model), weights(out)
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (
        AutoTokenizer.from_pretrained(out)("1+1")["input_ids"]
        == AutoTokenizer.from_pretrained(tiny_model)("1+1")["input_ids"]
    )


def test_weights_are_written_in_the_precision_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    half = weights(to_hugging_face(tiny_model, tmp_path / "half", "bfloat16"))
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor.bfloat16(), half[name]) for name, tensor in weights(tiny_model).items())


@pytest.mark.slow
def test_weights_saved_by_torch_are_converted_to_safetensors(tiny_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for path in tiny_model.iterdir():
        if not path.name.startswith("model"):
            (source / path.name).write_bytes(path.read_bytes())
    torch.save(weights(tiny_model), source / "pytorch_model.bin")
    out = to_hugging_face(source, tmp_path / "out")
    assert (out / "model.safetensors").is_file() and not list(out.glob("*.bin"))
    assert all(torch.equal(tensor, weights(out)[name]) for name, tensor in weights(tiny_model).items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["to-hf", "{tmp}/none", "{tmp}/out"], "is neither a checkpoint"),
        (["to-hf", "{model}", "{tmp}"], "exists already"),
        (["from-hf", "{tmp}", "{tmp}/results"], "has no config.json"),
    ],
)
def test_what_cannot_be_converted_is_said_and_nothing_is_left(
    arguments: list[str], message: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(tmp=tmp_path, model=tiny_model) for argument in arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
