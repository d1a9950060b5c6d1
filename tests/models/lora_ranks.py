"""What the ranks of the adapter tests run, as plain values."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.policy.lora import is_factor
from nemo_rl.utils.convert import to_hugging_face
from tests.models.policy_ranks import (
    ROWS,
    _error,
    half_of_mine,
    make_worker,
    many_splits,
    one_step,
    run_config,
    shard_of,
    training_batch,
)

LORA = ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4"]


def _train(worker: Any, config: Any) -> dict[str, Any]:
    return worker.train(
        shard_of(worker, training_batch()),
        ClippedPGLossFn(config.loss_fn),
        eval_mode=False,
        gbs=ROWS,
        mbs=half_of_mine(worker),
    )


def _logprobs(worker: Any) -> Any:
    return worker.get_logprobs(shard_of(worker, training_batch(), training=False))["logprobs"].numpy()


def _base_weights(worker: Any) -> dict[str, Any]:
    if not hasattr(worker.backend, "scorer"):
        own = worker.backend.weights.own().items()
        return {name: parameter.detach().clone() for name, parameter in own if not is_factor(name)}
    return {
        name: getattr(parameter.detach(), "full_tensor", parameter.detach)().clone()
        for name, parameter in worker.backend.scorer.named_parameters()
        if not is_factor(name)
    }


def _saved(worker: Any, path: str) -> None:
    worker.save_checkpoint(f"{path}/weights", f"{path}/optimizer")
    while not worker.checkpoint_written():
        time.sleep(0.02)
    torch.distributed.barrier()


def adapter_story(
    model: str, world: int, folder: str, overrides: list[str], lora: Sequence[str] = LORA
) -> dict[str, Any]:
    """Two steps of adapters with a checkpoint between them, and what every reader of the weights gets."""
    config = run_config(model, world, *lora, *overrides)
    plain = make_worker(run_config(model, world, *overrides))
    worker = make_worker(config, init_reference_model=True)
    names = [meta.name for meta in plain.tensor_metas()]
    seen: dict[str, Any] = {
        "same names": [meta.name for meta in worker.tensor_metas()] == names,
        "base logprobs": _logprobs(plain),
        "first logprobs": _logprobs(worker),
    }
    before = _base_weights(worker)
    first = _train(worker, config)
    after = _base_weights(worker)
    seen["base untouched"] = all(torch.equal(after[name], tensor) for name, tensor in before.items())
    seen["grad_norm"] = first["grad_norm"]
    seen["trained"] = sum(len(group["params"]) for group in worker.backend.optimizer.param_groups)
    seen["logprobs"] = _logprobs(worker)
    scored = shard_of(worker, training_batch(), training=False)
    seen["reference"] = worker.get_reference_policy_logprobs(scored)["reference_logprobs"].numpy()
    seen["exported"] = {name: tensor.numpy().copy() for name, tensor in worker.backend.full_weights(None)}
    worker.backend._sends_adapters = True
    seen["sent"] = {name: tensor.numpy().copy() for name, tensor in worker.backend.export(torch.float32)}
    seen["sent metas"] = {meta.name: (meta.shape, meta.nbytes) for meta in worker.tensor_metas()}
    worker.backend._sends_adapters = False
    _saved(worker, folder)
    seen["second"] = _train(worker, config)["loss"]
    resumed = make_worker(config, weights_path=f"{folder}/weights", optimizer_path=f"{folder}/optimizer")
    seen["resumed logprobs"] = _logprobs(resumed)
    seen["resumed second"] = _train(resumed, config)["loss"]
    seen["weights"] = (worker.weight_checksums(), resumed.weight_checksums())
    return seen


def told_of_adapters(
    model: str, world: int, folder: str, overrides: list[str], other: str | None = None
) -> dict[str, Any]:
    """`adapter_story`; log-probabilities of a model without adapters, into whose weights its checkpoint is merged in
    `folder`/merged; and with a model of other sizes, adapters that do not fit.
    """
    story = adapter_story(model, world, folder, overrides)
    if os.environ["RANK"] == "0":
        to_hugging_face(Path(folder) / "weights", Path(folder) / "merged")
    torch.distributed.barrier()
    story["merged logprobs"] = _logprobs(make_worker(run_config(f"{folder}/merged", world, *overrides)))
    return story if other is None else story | {"refused": refused(model, other, folder)}


def refused(model: str, other: str, folder: str) -> dict[str, str]:
    """Adapters that do not fit."""
    weights = f"{folder}/weights"
    return {
        "another base": _error(lambda: make_worker(run_config(other, 1, *LORA), weights_path=weights)),
        "another rank": _error(
            lambda: make_worker(
                run_config(model, 1, LORA[0], "policy.dtensor_cfg.lora_cfg.dim=2"), weights_path=weights
            )
        ),
        "other layers": _error(
            lambda: make_worker(
                run_config(model, 1, *LORA, "policy.dtensor_cfg.lora_cfg.exclude_modules=['*mlp*']"),
                weights_path=weights,
            )
        ),
        "all weights": _error(lambda: make_worker(run_config(model, 1), weights_path=weights)),
        "no adapter": _error(lambda: make_worker(run_config(model, 1, *LORA), weights_path=model)),
        "no such layer": _error(
            lambda: make_worker(
                run_config(
                    model,
                    1,
                    *LORA,
                    "policy.dtensor_cfg.lora_cfg.match_all_linear=false",
                    "policy.dtensor_cfg.lora_cfg.target_modules=[q_prj]",
                )
            )
        ),
    }


class NormedLinear(nn.Module):
    """A layer that begins with its block's norm, as Transformer Engine's do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_weight, self.weight = nn.Parameter(torch.rand(6)), nn.Parameter(torch.randn(8, 6))
        self.config = SimpleNamespace(layernorm_epsilon=1e-5)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        scale = inputs.square().mean(-1, keepdim=True).add(self.config.layernorm_epsilon).rsqrt()
        return F.linear(inputs * scale * self.layer_norm_weight, self.weight), None


@torch.no_grad()
def normed_layer() -> tuple[Any, Any]:
    """The output of a layer that begins with a norm, with an adapter and with the adapter in its weight."""
    from nemo_rl.models.megatron.megatron_lora import LowRankAdapter, _add_adapter

    torch.manual_seed(0)
    layer: Any = NormedLinear()
    alone: Any = SimpleNamespace(size=lambda: 1)
    layer.adapter = LowRankAdapter(layer.weight, 3, 0.5, inputs_cut=False, group=alone, sequence_parallel=False)
    for factor in layer.adapter.parameters():
        nn.init.normal_(factor)
    layer.register_forward_hook(_add_adapter)
    inputs = torch.randn(5, 6)
    adapted = layer(inputs)[0]
    layer.weight += 0.5 * layer.adapter.lora_B @ layer.adapter.lora_A
    layer.adapter.adapted = False
    return adapted.numpy(), layer(inputs)[0].numpy()


def megatron_adapters_of_two(
    models: dict[str, str],
    folder: str,
    cases: dict[str, list[str]],
    experts: list[str],
    story: list[str],
    lora: list[str],
    adapter: str,
) -> dict[str, Any]:
    """What two ranks show of adapters on Megatron. `adapter`: from which the steps of `cases` start."""
    model = models["tiny"]
    return {
        "cases": many_splits(model, 2, cases, adapter),
        "experts": one_step(models["experts"], 2, experts),
        "story": adapter_story(model, 2, f"{folder}/story", story, lora),
    }


def megatron_adapters_of_one(
    models: dict[str, str],
    folder: str,
    cases: dict[str, tuple[str, list[str]]],
    experts: list[str],
    packed: list[str],
    unequal: str,
) -> dict[str, Any]:
    """What one rank shows for comparison, each case with the adapter that it starts from; and adapters of others.
    `packed`: how the story of two ranks has its rows in order.
    """
    model, (_, dtensor), (_, megatron) = models["tiny"], cases["dtensor"], cases["megatron"]
    saved = make_worker(run_config(model, 1, *dtensor, *packed), weights_path=f"{folder}/story/weights")
    plain = [override for override in megatron if ".peft." not in override]
    return {
        "cases": {name: one_step(model, 1, how, weights=adapter) for name, (adapter, how) in cases.items()},
        "experts": one_step(models["experts"], 1, experts),
        "story in dtensor": _logprobs(saved),
        "layer with a norm": normed_layer(),
        "unequal": _error(lambda: make_worker(run_config(model, 1, *megatron), weights_path=unequal)),
        "all weights": _error(lambda: make_worker(run_config(model, 1, *plain), weights_path=unequal)),
    }
