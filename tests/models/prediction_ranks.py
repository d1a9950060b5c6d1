"""What the ranks of the tests of multi-token prediction run, and the plain model that they are compared with: one
forward and backward pass over the whole padded batch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from nemo_rl.config import MasterConfig
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.megatron.prediction import drawn
from nemo_rl.models.policy.model_config import CheckpointMismatchError
from tests.models.policy_ranks import (
    ROWS,
    WIDTH,
    kept_gradients,
    make_worker,
    run_config,
    shard_of,
    training_batch,
)
from tests.models.replay_ranks import replayed_steps

DEPTHS, FACTOR = 2, 0.3
_KEY = "policy.megatron_cfg.mtp_num_layers"
PREDICTS = [f"{_KEY}={DEPTHS}", f"policy.megatron_cfg.mtp_loss_scaling_factor={FACTOR}"]
_LAYER = {"qwen3": "Qwen3DecoderLayer", "qwen3_moe": "Qwen3MoeDecoderLayer"}


def untied(model: Path, folder: Path) -> Path:
    """A model of the same sizes with an output projection of its own."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lm.config.tie_word_embeddings = False
    torch.manual_seed(1)
    type(lm)(lm.config).float().save_pretrained(folder)
    return folder


def predicted_step(model: str, world: int, overrides: list[str]) -> dict[str, Any]:
    """The gradient of plain sums of a step on `training_batch` in chunks, by name; what a step says of its predictions;
    and the names that an export has.
    """
    config = run_config(model, world, *overrides)
    worker, data = make_worker(config), training_batch()
    loss_fn, mbs = ClippedPGLossFn(config.loss_fn), config.policy.train_micro_batch_size
    mine, found = shard_of(worker, data), kept_gradients(worker)
    worker.begin_train_step(loss_fn, mbs=mbs)
    packed = config.policy.sequence_packing.enabled
    for start in range(0, mine.size, mine.size if packed else mbs):
        worker.train_microbatches(mine if packed else mine.slice(start, start + mbs))
    answer: Any = worker.finish_train_step()
    sums = [sum(values) for name, values in sorted(answer["all_mb_metrics"].items()) if name.startswith("mtp/")]
    said = worker.backend.groups.sum_over_data(torch.tensor(sums, dtype=torch.float64))
    return {
        "gradient": found,
        "losses": said.tolist(),
        "grad_norm": answer["grad_norm"],
        "exported": [meta.name for meta in worker.tensor_metas()],
    }


def predictions_of_one(
    cases: dict[str, tuple[str, list[str]]], model: str, replayed: dict[str, Any], data: dict[str, Any]
) -> dict[str, Any]:
    """What one rank shows: `predicted_step` of every case, and steps on recorded routes."""
    return {
        "steps": {name: predicted_step(model, 1, overrides) for name, (model, overrides) in cases.items()},
        "replayed": replayed_steps(model, 1, replayed, data),
    }


def predictions_of_two(
    cases: dict[str, tuple[str, list[str]]], model: str, folder: str, stories: dict[str, list[str]]
) -> dict[str, Any]:
    """What two ranks show: `predicted_step` of every case, and runs that resume."""
    return {
        "steps": {name: predicted_step(model, 2, overrides) for name, (model, overrides) in cases.items()},
        "stories": {
            name: resumed_story(model, 2, f"{folder}/{number}", overrides)
            for number, (name, overrides) in enumerate(stories.items())
        },
    }


def resumed_story(model: str, world: int, folder: str, overrides: list[str]) -> dict[str, Any]:
    """Digests of every parameter after a step, after a second one, and after that second one by a policy that resumes
    in between; and what others make of that checkpoint.
    """
    config = run_config(model, world, *overrides, *PREDICTS)
    loss_fn, data = ClippedPGLossFn(config.loss_fn), training_batch()
    worker = make_worker(config, init_reference_model=True)

    def trained(worker: Any) -> dict[str, str]:
        worker.train(shard_of(worker, data), loss_fn, eval_mode=False, gbs=ROWS, mbs=2)
        return _digests(worker)

    def scored(worker: Any) -> Any:
        return worker.get_logprobs(shard_of(worker, data, training=False))["logprobs"].numpy()

    seen: dict[str, Any] = {"start": _digests(worker), "first": trained(worker)}
    weights, optimizer = f"{folder}/weights", f"{folder}/optimizer"
    worker.save_checkpoint(weights, optimizer)
    seen["second"] = trained(worker)
    worker.backend.wait_saved()
    torch.distributed.barrier()
    resumed = make_worker(config, init_reference_model=True, weights_path=weights, optimizer_path=optimizer)
    seen["resumed"], seen["scored"], seen["resumed second"] = _digests(resumed), scored(resumed), trained(resumed)
    plain = make_worker(run_config(model, world, *overrides), weights_path=weights)
    seen["without"], seen["scored without"] = plain.weight_checksums(), scored(plain)
    seen["not training"] = make_worker(config, weights_path=weights, init_optimizer=False).weight_checksums()
    seen["one layer"] = _refusal(run_config(model, world, *overrides, *PREDICTS, f"{_KEY}=1"), weights)
    torch.distributed.barrier()
    if plain.backend.rank == 0:
        Path(f"{weights}/mtp").rename(f"{folder}/taken away")
        AutoModelForCausalLM.from_pretrained(weights)
    torch.distributed.barrier()
    seen["no layer"] = _refusal(config, weights)
    return seen


def _refusal(config: MasterConfig, weights: str) -> str:
    try:
        make_worker(config, weights_path=weights)
    except CheckpointMismatchError as error:
        return str(error)
    return ""


def _digests(worker: Any) -> dict[str, str]:
    further = worker.backend.weights.predicting(worker.backend.device)
    found = {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in further
    }
    return worker.weight_checksums() | found


@functools.cache
def plain_step(
    model: str, override: str, *, tokens: bool, balanced: float = 0.0
) -> tuple[dict[str, Any], list[float], float]:
    """The gradient that `predicted_step` should have, the losses of the layers, and the count that divides both.
    `balanced`: coefficient of the load-balancing loss of all rows in one microbatch.
    """
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lm.get_input_embeddings().padding_idx = None
    routed: list[torch.Tensor] = []
    _watch(lm, routed)
    config, data = lm.config, training_batch()
    ids, real = data["input_ids"], torch.arange(WIDTH) < data["input_lengths"][:, None]
    hidden = lm.model(input_ids=ids, attention_mask=real.long()).last_hidden_state
    loss_fn = ClippedPGLossFn(run_config(model, 1, override).loss_fn)
    loss, _ = loss_fn(data, 1.0, 1.0, next_token_logprobs=_scores(lm.lm_head(hidden)[:, :-1], ids[:, 1:]))
    trained = data["token_mask"].float()
    weight = data["sample_mask"][:, None] * (trained if tokens else trained / trained[:, 1:].sum(1, keepdim=True))
    later = torch.full((WIDTH, WIDTH), float("-inf")).triu(1)[None, None]
    places = lm.model.rotary_emb(hidden, torch.arange(WIDTH)[None])
    layers, sums = [], []
    for depth in range(1, DEPTHS + 1):
        prefix = f"mtp.layers.{depth - 1}"
        layer, own = _decoder_layer(config, prefix), {}
        _watch(layer, routed)
        for name, shape in {"enorm": (1,), "hnorm": (1,), "final_layernorm": (1,), "eh_proj": (1, 2)}.items():
            value = drawn(f"{prefix}.{name}.weight", tuple(n * config.hidden_size for n in shape), _spread(config))
            own[name] = value.requires_grad_()
        read = torch.zeros_like(ids)
        read[:, :-depth] = ids[:, depth:]
        read = read.masked_fill(torch.arange(WIDTH) + depth >= data["input_lengths"][:, None], 0)
        both = [_norm(lm.get_input_embeddings()(read), own["enorm"], config), _norm(hidden, own["hnorm"], config)]
        hidden = layer(torch.cat(both, -1) @ own["eh_proj"].T, attention_mask=later, position_embeddings=places)
        hidden = _norm(hidden[0] if isinstance(hidden, tuple) else hidden, own["final_layernorm"], config)
        scores = _scores(lm.lm_head(hidden)[:, : -depth - 1], ids[:, depth + 1 :])
        sums.append(-(scores * (weight * real)[:, depth + 1 :]).sum())
        layers.append((prefix, layer, own))
    mask = trained[:, 1:] * data["sample_mask"][:, None]
    count = float(mask.sum() if tokens else data["sample_mask"].sum())
    total = loss + FACTOR / DEPTHS * torch.stack(sums).sum()
    for logits in routed if balanced else []:
        scores = logits.softmax(-1).view(ROWS, WIDTH, -1)[real]
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0)
        total = total + balanced * count * scores.shape[1] * (chosen.mean(0) / 2 * scores.mean(0)).sum()
    total.backward()
    found = dict(_named_gradients(lm, ""))
    for prefix, layer, own in layers:
        found |= dict(_named_gradients(layer, f"{prefix}."))
        found |= {f"{prefix}.{name}.weight": value.grad.numpy() for name, value in own.items()}
    return found, [float(value.detach()) / count for value in sums], count


def _watch(module: torch.nn.Module, routed: list[torch.Tensor]) -> None:
    for router in module.modules():
        if isinstance(router, Qwen3MoeTopKRouter):
            router.register_forward_hook(lambda _, __, output: routed.append(output[0]))


def _spread(config: Any) -> float:
    return float(config.initializer_range)


def _scores(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)


def _norm(values: torch.Tensor, weight: torch.Tensor, config: Any) -> torch.Tensor:
    return F.rms_norm(values, values.shape[-1:], weight, config.rms_norm_eps)


def _decoder_layer(config: Any, prefix: str) -> torch.nn.Module:
    """A layer of transformers' own with the values that a run draws."""
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    name = _LAYER[config.model_type]
    layer: Any = getattr(modeling_qwen3_moe if "moe" in config.model_type else modeling_qwen3, name)(config, 0)
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            for part, view in _parts(f"{prefix}.{parameter_name}", parameter):
                view.copy_(drawn(part, tuple(view.shape), _spread(config)))
    return layer.train()


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter under the names of files, which hold each expert's matrices."""
    before, experts, kind = name.partition(".experts.")
    if not experts:
        yield name, tensor
        return
    for expert, whole in enumerate(tensor):
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for part, view in zip(names, whole.chunk(len(names)), strict=True):
            yield f"{before}.experts.{expert}.{part}.weight", view


def _named_gradients(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            for part, gradient in _parts(f"{prefix}{name}", parameter.grad):
                yield part, gradient.numpy()
