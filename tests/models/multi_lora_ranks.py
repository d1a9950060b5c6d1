"""What the ranks of the multi-adapter tests run, as plain values."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.dtensor.export import hf_name
from nemo_rl.models.dtensor.parallelize import local_tensor
from nemo_rl.models.multi_lora.messages import SLOT, StepRefused
from nemo_rl.models.multi_lora.multi_lora_policy import with_own_prompts
from nemo_rl.models.multi_lora.multi_lora_worker import MultiLoraWorker
from nemo_rl.models.policy.batches import shard_rows, shares_prompts
from nemo_rl.models.policy.lora import is_factor
from tests.models.policy_ranks import (
    PROMPT_LENGTH,
    RaisingLoss,
    _error,
    grouped_batch,
    make_worker,
    run_config,
    shard_of,
    training_batch,
)

BASE = ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=8"]
ADAPTERS: dict[int, list[str]] = {
    0: [*BASE, "policy.dtensor_cfg.lora_cfg.dim=4", "policy.max_grad_norm=0.05"],
    2: [
        *BASE,
        "policy.dtensor_cfg.lora_cfg.dim=2",
        "policy.optimizer.kwargs.lr=0.003",
        "loss_fn.ratio_clip_max=0.1",
        "loss_fn.token_level_loss=false",
    ],
}
STEPS = 2


def batch_of(slot: int, step: int) -> BatchedDataDict[Any]:
    """Rows that differ from slot to slot and step to step."""
    data = training_batch()
    ids = data["input_ids"]
    data["input_ids"] = torch.where(ids < 256, (ids + 17 * slot + 5 * step) % 256, ids)
    data["advantages"] = data["advantages"].roll(slot + step, dims=0) * data["token_mask"]
    return data


def one_prompt_of(slot: int, step: int) -> BatchedDataDict[Any]:
    """Samples of one prompt, which is the same for all slots."""
    data = grouped_batch()
    data["input_ids"][:, :PROMPT_LENGTH] = data["input_ids"][0, :PROMPT_LENGTH]
    data["advantages"] = data["advantages"].roll(slot + step, dims=0) * data["token_mask"]
    return data


def mixed(batches: dict[int, BatchedDataDict[Any]]) -> BatchedDataDict[Any]:
    """The rows of several slots, taken in turn."""
    rows = []
    for number in range(8):
        for slot, data in batches.items():
            rows.append(BatchedDataDict({**data.select_indices([number]), SLOT: torch.tensor([slot])}))
    return BatchedDataDict.from_batches(rows)


def joint_worker(model: str, world: int, overrides: list[str]) -> MultiLoraWorker:
    """This rank's worker, its slots filled with `ADAPTERS`."""
    worker = MultiLoraWorker(run_config(model, world, *BASE, *overrides).policy)
    worker.build()
    for slot, own in ADAPTERS.items():
        worker.fill_slot(slot, run_config(model, world, *own, *overrides).policy)
    return worker


def _chunk(worker: Any, data: BatchedDataDict[Any]) -> Any:
    share = shares_prompts(worker.cfg, cuda=False)
    shards, _ = shard_rows(with_own_prompts(data), worker.cfg, worker.backend.sizes.dp, training=True, share=share)
    return shards[worker.backend.groups.coordinates()["data_parallel"]]


def _captured(backend: Any, named: Any, into: list[dict[str, Any]]) -> None:
    """Keeps the gradients that the backend's optimizer gets, in full."""
    apply = backend.apply_gradients

    def capturing(factor: float) -> None:
        whole = {name: getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for name, p in named()}
        into.append({name: (gradient * factor).clone().numpy() for name, gradient in whole.items()})
        apply(factor)

    backend.apply_gradients = capturing


def _factors_of(worker: Any) -> Any:
    for name, parameter in worker.backend.scorer.named_parameters():
        if is_factor(name):
            yield hf_name(name), parameter


def alone_and_together(model: str, world: int, overrides: list[str]) -> dict[str, Any]:
    """Gradients, losses and weights of two adapters over some steps, each alone and both in one pass."""
    seen: dict[str, Any] = {"alone": {}, "together": {}}
    share = shares_prompts(run_config(model, world, *overrides).policy, cuda=False)
    rows_of = one_prompt_of if share else batch_of
    for slot, own in ADAPTERS.items():
        config = run_config(model, world, *own, *overrides)
        worker = make_worker(config)
        gradients: list[dict[str, Any]] = []
        _captured(worker.backend, lambda worker=worker: _factors_of(worker), gradients)
        results = [
            worker.train(
                shard_of(worker, rows_of(slot, step)),
                ClippedPGLossFn(config.loss_fn),
                eval_mode=False,
                gbs=8,
                mbs=4 // world,
            )
            for step in range(STEPS)
        ]
        scored = worker.get_logprobs(shard_of(worker, rows_of(slot, 0), training=False))["logprobs"]
        seen["alone"][slot] = _plain(gradients, results) | {"logprobs": scored.numpy()}
    worker = joint_worker(model, world, overrides)
    before = {
        name: local_tensor(p).clone() for name, p in worker.backend.scorer.named_parameters() if not is_factor(name)
    }
    captured: dict[int, list[dict[str, Any]]] = {slot: [] for slot in ADAPTERS}
    for slot, kept in captured.items():
        step_backend: Any = worker.multi.adapters[slot].step._backend
        _captured(step_backend, lambda slot=slot: worker.multi.slots.named(slot), kept)
    losses: dict[int, Any] = {
        slot: ClippedPGLossFn(run_config(model, world, *own).loss_fn) for slot, own in ADAPTERS.items()
    }
    reports = [
        worker.train_adapters(
            _chunk(worker, mixed({slot: rows_of(slot, step) for slot in ADAPTERS})), losses, 4 // world
        )
        for step in range(STEPS)
    ]
    for slot in ADAPTERS:
        seen["together"][slot] = _plain(captured[slot], [report[slot] for report in reports])
    if world == 1:
        data = with_own_prompts(mixed({slot: rows_of(slot, 0) for slot in ADAPTERS}))
        shards, order = shard_rows(data, worker.cfg, 1, training=False, share=share)
        scores = worker.score_adapters(shards[0], policy=True, reference=True)
        if order is not None:
            scores = scores.reorder_data(order)
        for index, slot in enumerate(ADAPTERS):
            rows = list(range(index, 16, 2))
            seen["together"][slot]["logprobs"] = scores["logprobs"][rows].numpy()
            seen["together"][slot]["reference"] = scores["reference_logprobs"][rows].numpy()
    seen["base untouched"] = all(
        torch.equal(local_tensor(p), before[name])
        for name, p in worker.backend.scorer.named_parameters()
        if not is_factor(name)
    )
    return seen


def _plain(gradients: list[dict[str, Any]], results: list[Any]) -> dict[str, Any]:
    return {
        "gradients": gradients,
        "losses": [result["loss"] for result in results],
        "norms": [result["grad_norm"] for result in results],
        "rates": [result["lr"] for result in results],
        "metrics": [sorted(result["all_mb_metrics"]) for result in results],
        "tokens": [result["work"].tokens for result in results],
    }


class NanLoss(ClippedPGLossFn):
    """A loss that is not a number, with a gradient that is none either."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss, metrics = super().__call__(*args, **kwargs)
        return loss * float("nan"), metrics | {"loss": torch.tensor(float("nan"))}


class FailingLosses:
    """The ways in which a loss fails."""

    kinds: ClassVar[dict[str, Any]] = {"nan": NanLoss, "raises": RaisingLoss}


def one_fails(model: str, world: int, overrides: list[str]) -> dict[str, Any]:
    """Two steps in which the loss of one adapter fails, and the same steps without that adapter."""
    seen: dict[str, Any] = {}
    config = run_config(model, world, *ADAPTERS[0])
    good = ClippedPGLossFn(config.loss_fn)
    for kind, failing in {"none": None, **FailingLosses.kinds}.items():
        worker = joint_worker(model, world, overrides)
        losses: dict[int, Any] = {0: good} if failing is None else {0: good, 2: failing(config.loss_fn)}
        before = worker.slot_factors([2])[2]
        reports = [
            worker.train_adapters(_chunk(worker, mixed({slot: batch_of(slot, step) for slot in losses})), losses, 2)
            for step in range(2)
        ]
        refused = [report.get(2) for report in reports]
        seen[kind] = {
            "loss": [report[0]["loss"] for report in reports],  # type: ignore[index]
            "factors": {name: tensor.numpy() for name, tensor in worker.slot_factors([0])[0].items()},
            "refused": [report.reason if isinstance(report, StepRefused) else None for report in refused],
            "unchanged": all(torch.equal(before[n], tensor) for n, tensor in worker.slot_factors([2])[2].items()),
        }
    return seen


def adapters_of_one(model: str, folder: str, cases: dict[str, list[str]]) -> dict[str, Any]:
    """What one rank shows."""
    return {
        "cases": {name: alone_and_together(model, 1, overrides) for name, overrides in cases.items()},
        "saved": saved_and_resumed(model, folder),
    }


def adapters_of_two(model: str, cases: dict[str, list[str]]) -> dict[str, Any]:
    """What two ranks show."""
    return {
        "cases": {name: alone_and_together(model, 2, overrides) for name, overrides in cases.items()},
        "failing": one_fails(model, 2, []),
    }


def saved_and_resumed(model: str, folder: str) -> dict[str, Any]:
    """Steps of two adapters with a checkpoint of each, taken up again in other slots of another worker."""
    worker = joint_worker(model, 1, [])
    losses: dict[int, Any] = {
        slot: ClippedPGLossFn(run_config(model, 1, *own).loss_fn) for slot, own in ADAPTERS.items()
    }

    def train(worker: MultiLoraWorker, step: int, slots: dict[int, int]) -> Any:
        data = mixed({slots[slot]: batch_of(slot, step) for slot in ADAPTERS})
        reports = worker.train_adapters(_chunk(worker, data), {slots[s]: loss for s, loss in losses.items()}, 2)
        return [reports[slots[slot]]["loss"] for slot in ADAPTERS]  # type: ignore[index]

    same = {slot: slot for slot in ADAPTERS}
    train(worker, 0, same)
    for slot in ADAPTERS:
        worker.save_slot(slot, f"{folder}/{slot}/weights", f"{folder}/{slot}/optimizer")
        while not worker.slot_written(slot):
            time.sleep(0.01)
    went_on = train(worker, 1, same)
    other = MultiLoraWorker(run_config(model, 1, *BASE).policy)
    other.build()
    moved = {0: 5, 2: 1}
    for slot, own in ADAPTERS.items():
        policy = run_config(model, 1, *own).policy
        other.fill_slot(moved[slot], policy, f"{folder}/{slot}/weights", f"{folder}/{slot}/optimizer")
    resumed = train(other, 1, moved)
    smaller = run_config(model, 1, *ADAPTERS[0], "policy.dtensor_cfg.lora_cfg.dim=3").policy
    return {
        "went on": went_on,
        "resumed": resumed,
        "same factors": all(
            torch.equal(tensor, other.slot_factors([moved[slot]])[moved[slot]][name])
            for slot in ADAPTERS
            for name, tensor in worker.slot_factors([slot])[slot].items()
        ),
        "another rank": _error(lambda: other.fill_slot(7, smaller, f"{folder}/0/weights")),
        "taken": _error(lambda: other.fill_slot(5, smaller)),
    }
