"""What the ranks of the replay tests run: steps of a tiny mixture of experts on recorded routes and sampling masks.

The engine is transformers' own model, whose routers are told which experts to take, or which are perturbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from nemo_rl.config import MasterConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.loss.interfaces import count_valid
from nemo_rl.models.policy.policy_worker import PolicyWorker
from nemo_rl.models.policy.scoring import filter_logits
from tests.models.policy_ranks import (
    ROWS,
    WIDTH,
    gradients,
    in_one_vector,
    kept_gradients,
    make_worker,
    run_config,
    shard_of,
    training_batch,
)

REPLAY = "policy.router_replay.enabled=true"
SHARES = ("router_replay_share", "router_replay_changed")


@contextmanager
def told_routers(model: torch.nn.Module, routes_BSLK: torch.Tensor | None, seen: list[torch.Tensor]) -> Iterator[None]:
    """The model's routers take the routes where they are not None, and put what they took into `seen`, layer by
    layer.
    """
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]

    def forward(router: Any, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.t()
        scores = logits.softmax(-1)
        index = scores.topk(router.top_k).indices if routes_BSLK is None else routes_BSLK[:, :, layer].flatten(0, 1)
        seen.append(index)
        weights = scores.gather(1, index)
        return logits, weights / weights.sum(-1, keepdim=True), index

    for layer, router in enumerate(routers):
        router.__dict__["forward"] = lambda hidden, router=router, layer=layer: forward(router, layer, hidden)
    try:
        yield
    finally:
        for router in routers:
            del router.__dict__["forward"]


@torch.no_grad()
def engine(
    model: str, data: BatchedDataDict[Any], routes_BSLK: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [B, S] of the batch's tokens and routes [B, S, L, K] of an engine with these weights."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    with told_routers(lm, routes_BSLK, seen):
        mask = torch.arange(WIDTH) < data["input_lengths"][:, None]
        logits = lm(input_ids=data["input_ids"], attention_mask=mask.long()).logits.float().log_softmax(-1)
    own = torch.zeros(ROWS, WIDTH)
    own[:, 1:] = logits[:, :-1].gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
    return own, torch.stack(seen, dim=1).view(ROWS, WIDTH, len(seen), -1)


def recorded_batch(model: str, *, noise: float) -> BatchedDataDict[Any]:
    """`training_batch` as an engine made it that routes at random at `noise` of its decisions, with its routes."""
    data = training_batch()
    _, natural = engine(model, data, None)
    draw = torch.Generator().manual_seed(1)
    experts = 4
    random = torch.rand((*natural.shape[:3], experts), generator=draw).topk(natural.shape[-1]).indices
    routes = torch.where(torch.rand(natural.shape[:3], generator=draw)[..., None] < noise, random, natural)
    logprobs, _ = engine(model, data, routes)
    valid = torch.arange(WIDTH) < data["input_lengths"][:, None] - 1
    data["routed_experts"] = routes.to(torch.uint8) * valid[:, :, None, None]
    data["routed_experts_valid"] = valid
    data["generation_logprobs"] = logprobs * data["token_mask"]
    return data


def replayed_step(model: str, world: int, overrides: list[str], data: BatchedDataDict[Any]) -> dict[str, Any]:
    """Log-probabilities, and a step on them in chunks."""
    config = run_config(model, world, *overrides)
    return _replayed_step(make_worker(config), config, data)


def _replayed_step(worker: PolicyWorker, config: MasterConfig, data: BatchedDataDict[Any]) -> dict[str, Any]:
    rows = config.policy.train_micro_batch_size
    loss_fn: Any = ClippedPGLossFn(config.loss_fn)
    mine = shard_of(worker, data)
    mine["prev_logprobs"] = worker.get_logprobs(mine)["logprobs"] * mine["token_mask"]
    found = kept_gradients(worker)
    worker.begin_train_step(loss_fn)
    if config.policy.sequence_packing.enabled:
        worker.train_microbatches(mine)
    else:
        for start in range(0, mine.size, rows):
            worker.train_microbatches(mine.slice(start, start + rows))
    answer: Any = worker.finish_train_step()
    sums = torch.tensor([sum(answer["all_mb_metrics"]["token_mult_prob_error"])], dtype=torch.float64)
    shares = {name: answer["all_mb_metrics"].get(name, [None])[0] for name in SHARES}
    return {
        "gradient": in_one_vector(found),
        "logprobs": mine["prev_logprobs"].numpy(),
        "loss": answer["loss"][0],
        "grad_norm": answer["grad_norm"],
        "error": float(worker.backend.groups.sum_over_data(sums)),
        **shares,
    }


def replayed_steps(
    model: str, world: int, cases: dict[str, tuple[list[str], str]], batches: dict[str, BatchedDataDict[Any]]
) -> dict[str, dict[str, Any]]:
    """`replayed_step` of every case, with the batch it names."""
    return {name: replayed_step(model, world, overrides, batches[batch]) for name, (overrides, batch) in cases.items()}


def scores_of_both(model: str, overrides: list[str], data: BatchedDataDict[Any]) -> dict[str, Any]:
    """Log-probabilities of the policy, with its own routes too, and of its reference of the same weights, in one pass
    and in two.
    """
    worker = make_worker(run_config(model, 1, *overrides), init_reference_model=True)
    mine = shard_of(worker, data)
    alone = worker.get_reference_policy_logprobs(mine)
    return {
        **{name: column.numpy() for name, column in worker.get_policy_and_reference_logprobs(mine).items()},
        "reference alone": alone["reference_logprobs"].numpy(),
        "natural": worker.get_naturally_routed_logprobs(mine)["naturally_routed_logprobs"].numpy(),
    }


def steps_and_references(
    model: str, cases: dict[str, tuple[list[str], str]], batches: dict[str, BatchedDataDict[Any]], both: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """`replayed_steps` of the cases on one rank, and `scores_of_both` on the noisy batch of each case of `both`."""
    references = {name: scores_of_both(model, overrides, batches["noisy"]) for name, overrides in both.items()}
    return replayed_steps(model, 1, cases, batches), references


def perturbed(model: str, folder: str, scale: float) -> str:
    """A model directory with noise on every weight: an engine that disagrees with the policy."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in lm.parameters():
            weight.add_(scale * weight.std() * torch.randn_like(weight))
    lm.save_pretrained(folder)
    return folder


@torch.no_grad()
def kept_by(model: str, input_ids_BS: torch.Tensor, top_p: float) -> torch.Tensor:
    """[B, S, V] log-probabilities after every position over what an engine with top-p keeps, else minus infinity."""
    logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(input_ids=input_ids_BS).logits
    return filter_logits(logits.flatten(0, 1), top_p=top_p, top_k=None).view_as(logits).log_softmax(-1)


def masked_batch(engine_model: str, top_p: float) -> BatchedDataDict[Any]:
    """`training_batch` as an engine would have drawn it with top-p, whose sets hold the drawn tokens."""
    data = training_batch()
    ids, trained = data["input_ids"], data["token_mask"].bool()
    kept = kept_by(engine_model, ids, top_p).isfinite()[:, :-1]
    kept.scatter_(-1, ids[:, 1:, None], True)
    # Two tokens of three were drawn from a set, the others from the whole vocabulary.
    recorded = trained[:, 1:] & (torch.arange(1, WIDTH) % 3 > 0)
    kept &= recorded[..., None]
    data["sampling_mask_counts"] = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    data["sampling_mask_counts"][:, 1:] = kept.sum(-1)
    data["sampling_mask_ids"] = [row.nonzero()[:, 1].int() for row in kept]
    return data


def alternatives(engine_model: str, top_p: float) -> BatchedDataDict[Any]:
    """A context with each token that an engine with top-p may draw after it, one a row, and the set of these; and the
    engine's log-probabilities of them.
    """
    context = torch.randint(0, 256, (1, 7), generator=torch.Generator().manual_seed(3))
    after = kept_by(engine_model, context, top_p)[0, -1]
    drawn = after.isfinite().nonzero().flatten()
    rows, width = len(drawn), context.shape[1] + 1
    counts = torch.zeros(rows, width, dtype=torch.int32)
    counts[:, -1] = rows
    return BatchedDataDict(
        input_ids=torch.cat([context.expand(rows, -1), drawn[:, None]], dim=1),
        input_lengths=torch.full((rows,), width),
        sampling_mask_counts=counts,
        sampling_mask_ids=[drawn.int() for _ in range(rows)],
        generation_logprobs=after[drawn],
    )


def scored_alternatives(worker: PolicyWorker, data: BatchedDataDict[Any]) -> Any:
    """The policy's log-probability of each row's last token."""
    columns = ("input_ids", "input_lengths", "sampling_mask_counts", "sampling_mask_ids")
    scored = worker.get_logprobs(BatchedDataDict({column: data[column] for column in columns}), 128)
    return scored["logprobs"][:, -1].double().numpy()


def scores_and_steps(
    model: str, world: int, cases: dict[str, list[str]], drawn: BatchedDataDict[Any], batch: BatchedDataDict[Any]
) -> dict[str, dict[str, Any]]:
    """Per case `scored_alternatives` of what an engine may draw, and `replayed_step` of the same policy on a batch."""
    seen: dict[str, dict[str, Any]] = {"scores": {}, "steps": {}}
    for name, overrides in cases.items():
        config = run_config(model, world, *overrides)
        worker = make_worker(config)
        seen["scores"][name] = scored_alternatives(worker, drawn)
        seen["steps"][name] = _replayed_step(worker, config, batch)
    return seen


def balanced_step(model: str, world: int, overrides: list[str]) -> dict[str, Any]:
    """The gradient of plain sums of a step on `training_batch`, by name, and what was measured of the routers."""
    config = run_config(model, world, *overrides)
    worker = make_worker(config)
    mine = shard_of(worker, training_batch())
    worker.begin_train_step(ClippedPGLossFn(config.loss_fn))
    for start in range(0, mine.size, 2):
        worker.train_microbatches(mine.slice(start, start + 2))
    worker.backend.gradient_norm()
    found = {name: gradient.numpy() for name, gradient in gradients(worker).items()}
    measured = worker.backend.router_metrics()
    worker.abort_train_step()
    return {"gradient": found, "measured": measured}


def balanced_steps(model: str, world: int, cases: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """`balanced_step` of every case."""
    return {name: balanced_step(model, world, overrides) for name, overrides in cases.items()}


def balancing_gradient(model: str, *, tokens: bool) -> tuple[dict[str, Any], float]:
    """The gradient of the load-balancing loss of `training_batch` in microbatches of two rows, each times its trained
    tokens or sequences, by transformers' own model; and the mean loss.
    """
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lm.get_input_embeddings().padding_idx = None
    data = training_batch()
    total, weights = torch.zeros(()), 0.0
    for start in range(0, ROWS, 2):
        part = data.slice(start, start + 2)
        real = torch.arange(WIDTH) < part["input_lengths"][:, None]
        layers = lm(input_ids=part["input_ids"], attention_mask=real.long(), output_router_logits=True).router_logits
        sequences, trained = (float(count) for count in count_valid(part))
        for logits in layers:
            scores = logits.softmax(-1)[real.flatten()]
            chosen = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0)
            loss = scores.shape[1] * (chosen.mean(0) / 2 * scores.mean(0)).sum()
            total = total + loss * (trained if tokens else sequences)
            weights += trained if tokens else sequences
    total.backward()
    found = {name: weight.grad.numpy() for name, weight in lm.named_parameters() if weight.grad is not None}
    return found, float(total.detach()) / weights
