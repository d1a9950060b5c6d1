"""Checkpoints to Hugging Face directories and back.

    python -m nemo_rl.utils.convert to-hf CHECKPOINT OUT_DIR [--dtype bfloat16]
    python -m nemo_rl.utils.convert from-hf MODEL_DIR CHECKPOINT_DIR

A checkpoint's weights are a Hugging Face directory in float32; `to-hf` extracts it in the wanted precision, `from-hf`
makes a model the checkpoint of step 0. Invariants: nothing is overwritten; an output directory is complete or absent;
tensors keep their names.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rl.cli import EXIT_OK, one_message
from nemo_rl.config.errors import UserError
from nemo_rl.utils.adapter_files import base_directory, is_adapter, merged, read_adapter
from nemo_rl.utils.checkpoint import INFO_FILE, model_directory
from nemo_rl.utils.checkpoint_manifest import apply_umask, write_manifest

logger = logging.getLogger(__name__)

DTYPES = ("float32", "float16", "bfloat16")
_NOT_OF_THE_MODEL = (".safetensors", ".safetensors.index.json", ".bin", ".pt")


class ConversionError(UserError, RuntimeError):
    """A checkpoint or model cannot be converted."""


def to_hugging_face(checkpoint: Path, out_dir: Path, dtype: str | None = None) -> Path:
    """Writes the model of a checkpoint as a Hugging Face directory, tokenizer included; returns `out_dir`.

    Args:
        checkpoint: See `model_directory`.
        dtype: precision of the written weights; None keeps that of the checkpoint.

    Raises ConversionError: there is no such checkpoint, or `out_dir` exists; CheckpointError: it is damaged.
    """
    source = Path(model_directory(str(checkpoint)))
    if not (source / "config.json").is_file() and not is_adapter(source):
        raise ConversionError(
            f"{checkpoint}: is neither a checkpoint (step_N with policy/weights) nor a directory of "
            "checkpoints, nor a Hugging Face directory or an adapter in PEFT's format"
        )
    logger.info("model: %s", source)
    with _made_whole(out_dir) as aside:
        if is_adapter(source):
            merge_adapter(source, aside, dtype)
        else:
            _copy_model(source, aside, dtype)
    return out_dir


def merge_adapter(source: Path, target: Path, dtype: str | None = None, base: Path | None = None) -> None:
    """Writes the model that an adapter makes of its base.

    Args:
        source: the adapter, in PEFT's format.
        dtype: precision of the written weights; None keeps the base's.
        base: the base model's directory; None takes the one that the adapter names.

    Raises AdapterError, ConversionError: there is no such adapter or base, or they do not fit.
    """
    info, factors = read_adapter(source)
    folder = base or base_directory(info.base_model_name_or_path)
    used: set[str] = set()

    def adapted(name: str, weight: Any) -> object:
        module = name.removesuffix(".weight")
        used.update(factor for factor in (f"{module}.lora_A", f"{module}.lora_B") if factor in factors)
        return merged(name, weight, factors, info.scale)

    _copy_model(folder, target, dtype, adapted)
    if used != factors.keys():
        missing = sorted(factors.keys() - used)
        raise ConversionError(f"{source}: {folder} has no weights for {', '.join(missing[:3])}; it is another model")


def from_hugging_face(model: Path, checkpoint_dir: Path) -> Path:
    """Saves a Hugging Face model (a directory with safetensors) as `step_0` of `checkpoint_dir`, from which a run with
    that `checkpointing.checkpoint_dir` starts; returns the checkpoint. Raises ConversionError: no such model, or it
    exists.
    """
    if not (model / "config.json").is_file():
        raise ConversionError(f"{model}: is no Hugging Face directory; it has no config.json")
    with _made_whole(checkpoint_dir / "step_0") as aside:
        weights = aside / "policy" / "weights"
        weights.mkdir(parents=True)
        _copy_model(model, weights, "float32")
        # GRPO and SFT name their place within the data differently.
        places = ("current_step", "current_epoch", "step", "epoch")
        counters = dict.fromkeys(("total_steps", *places, "consumed_samples", "total_valid_tokens"), 0)
        (aside / INFO_FILE).write_text(json.dumps(counters, indent=2), encoding="utf-8")
        apply_umask(aside)
        write_manifest(aside)
    return checkpoint_dir / "step_0"


def _copy_model(
    source: Path, target: Path, dtype: str | None, change: Callable[[str, object], Any] = lambda name, tensor: tensor
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    wanted = getattr(torch, dtype) if dtype is not None else None
    files, torch_file = sorted(source.glob("*.safetensors")), source / "pytorch_model.bin"
    if not files and not torch_file.is_file():
        raise ConversionError(
            f"{source}: holds neither *.safetensors nor pytorch_model.bin; load and save the model with "
            "transformers first"
        )
    for file in files or [torch_file]:
        tensors = load_file(file) if files else torch.load(file, weights_only=True, map_location="cpu")
        # Tensors of a torch file may share memory, which safetensors refuses.
        converted = {
            name: change(name, tensor).to(wanted, copy=not files) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        save_file(converted, target / (file.name if files else "model.safetensors"), {"format": "pt"})
    for path in source.iterdir():
        if path.is_file() and (path.name.endswith(".index.json") or not path.name.endswith(_NOT_OF_THE_MODEL)):
            shutil.copy2(path, target / path.name)
    if dtype is not None:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        (target / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2), encoding="utf-8")


@contextmanager
def _made_whole(out_dir: Path) -> Generator[Path]:
    if out_dir.exists():
        raise ConversionError(f"{out_dir}: exists already; choose another directory or remove it")
    aside = out_dir.with_name(f".{out_dir.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        apply_umask(aside)
        aside.rename(out_dir)
    except OSError as error:
        raise ConversionError(f"{out_dir}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@one_message
def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Runs one conversion and returns its exit code."""
    about = "Convert checkpoints to and from Hugging Face directories."
    parser = argparse.ArgumentParser(prog=prog or "python -m nemo_rl.utils.convert", description=about)
    commands = parser.add_subparsers(required=True, dest="command")
    out = commands.add_parser("to-hf", help="write a checkpoint's model as a Hugging Face directory")
    out.add_argument(
        "checkpoint",
        type=Path,
        help="step_N, a checkpoint directory, whose latest is taken, or DIR/best, by its metric",
    )
    out.add_argument("out_dir", type=Path)
    out.add_argument(
        "--dtype", choices=DTYPES, help="precision of the written weights; default: the checkpoint's, float32"
    )
    back = commands.add_parser("from-hf", help="put a Hugging Face model into a checkpoint directory as step_0")
    back.add_argument("model", type=Path)
    back.add_argument("checkpoint_dir", type=Path)
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if chosen.command == "to-hf":
        path = to_hugging_face(chosen.checkpoint, chosen.out_dir, chosen.dtype)
    else:
        path = from_hugging_face(chosen.model, chosen.checkpoint_dir)
    sys.stdout.write(f"{path}\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
