"""What the ranks of the adapter tests run, as plain values."""

from __future__ import annotations

import time
from typing import Any

import torch

from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.dtensor.lora import is_factor
from tests.models.policy_ranks import ROWS, _error, make_worker, run_config, shard_of, training_batch

LORA = ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4"]


def _train(worker: Any, config: Any) -> dict[str, Any]:
    return worker.train(
        shard_of(worker, training_batch()), ClippedPGLossFn(config.loss_fn), eval_mode=False, gbs=ROWS, mbs=2
    )


def _logprobs(worker: Any) -> Any:
    return worker.get_logprobs(shard_of(worker, training_batch(), training=False))["logprobs"].numpy()


def _base_weights(worker: Any) -> dict[str, Any]:
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


def adapter_story(model: str, world: int, folder: str, overrides: list[str]) -> dict[str, Any]:
    """Two steps of adapters with a checkpoint between them, and what every reader of the weights gets."""
    config = run_config(model, world, *LORA, *overrides)
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
    seen["trained"] = len(worker.backend.optimizer.param_groups[0]["params"])
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


def scored_with(model: str, world: int, overrides: list[str]) -> Any:
    """Log-probabilities of a model without adapters."""
    return _logprobs(make_worker(run_config(model, world, *overrides)))


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
