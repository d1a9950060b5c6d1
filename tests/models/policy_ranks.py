"""What the ranks of the policy tests run: a training batch, workers on it, and what they measured, as plain values."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from nemo_rl.config import MasterConfig, load_master_config
from nemo_rl.data_plane.field_schema import PROMPT, PROMPT_TOKENS, TAG
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.loss.interfaces import LossInputType, LossType, MetricNormalizer
from nemo_rl.models.dtensor.export import hf_name
from nemo_rl.models.dtensor.parallelize import local_tensor
from nemo_rl.models.policy.batches import microbatches, shard_batch, shard_rows, shares_prompts
from nemo_rl.models.policy.policy_worker import PolicyWorker
from nemo_rl.models.policy.residency import MovableStorages

ROWS, WIDTH = 8, 24
_CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
_BASE = (
    "loss_fn.reference_policy_kl_penalty=0.0",
    "policy.max_total_sequence_length=24",
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=2",
    "policy.logprob_batch_size=2",
    "policy.make_sequence_length_divisible_by=4",
    "policy.sequence_packing.enabled=false",
    "policy.sequence_packing.train_mb_tokens=32",
    "policy.sequence_packing.logprob_mb_tokens=48",
    "policy.dynamic_batching.train_mb_tokens=48",
    "policy.dynamic_batching.logprob_mb_tokens=64",
    "policy.dynamic_batching.sequence_length_round=4",
    "policy.optimizer.kwargs.lr=0.01",
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=4",
    "cluster.cpu_slots=4",
)
# Where each rank has all rows: two microbatches as with half of them, of the same sizes in training and scoring.
ALL_ROWS = (
    "policy.train_micro_batch_size=4",
    "policy.logprob_batch_size=4",
    *(f"policy.sequence_packing.{which}_mb_tokens=64" for which in ("train", "logprob")),
    *(f"policy.dynamic_batching.{which}_mb_tokens=96" for which in ("train", "logprob")),
)

PROMPT_LENGTH = 17


def run_config(model: str | Path, world: int, *overrides: str) -> MasterConfig:
    """A checked configuration of a small run on `world` CPU slots."""
    return load_master_config(
        _CONFIG, [*_BASE, f"policy.model_name={model}", f"cluster.gpus_per_node={world}", *overrides]
    )


def training_batch() -> BatchedDataDict[Any]:
    """Eight samples of different lengths, one of them masked out; log-probabilities close to a random model's."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([24, 5, 17, 9, 12, 21, 6, 14])
    real = torch.arange(WIDTH) < lengths[:, None]
    trained = real & (torch.arange(WIDTH) >= 3)
    noise = 0.3 * torch.randn(ROWS, WIDTH, generator=draw)
    input_ids = torch.randint(0, 256, (ROWS, WIDTH), generator=draw).masked_fill(~real, 257)
    input_ids[0, 10] = 256  # the tokenizer's padding, drawn as a token
    return BatchedDataDict(
        input_ids=input_ids,
        input_lengths=lengths,
        token_mask=trained.long(),
        sample_mask=torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 1]),
        advantages=torch.randn(ROWS, 1, generator=draw).expand(ROWS, WIDTH) * trained,
        prev_logprobs=(-5.8 + noise) * trained,
        generation_logprobs=(-5.8 + 0.5 * noise) * trained,
        sample_index=torch.arange(ROWS),
    )


def grouped_batch() -> BatchedDataDict[Any]:
    """`training_batch` with two prompts of four samples each, tagged as a run's samples are."""
    data = training_batch()
    lengths = torch.tensor([24, 20, 22, 19, 24, 23, 18, 21])
    real = torch.arange(WIDTH) < lengths[:, None]
    prompts = torch.randint(0, 256, (2, PROMPT_LENGTH), generator=torch.Generator().manual_seed(1))
    responses = torch.randint(0, 256, (ROWS, WIDTH), generator=torch.Generator().manual_seed(2))
    # Samples of a prompt differ from their first token on.
    responses[:, PROMPT_LENGTH] = torch.arange(ROWS)
    data["input_ids"] = responses.masked_fill(~real, 257)
    data["input_ids"][:, :PROMPT_LENGTH] = prompts.repeat_interleave(4, dim=0)
    data["input_lengths"] = lengths
    trained = real & (torch.arange(WIDTH) >= PROMPT_LENGTH)
    data["token_mask"] = trained.long()
    for name in ("advantages", "prev_logprobs", "generation_logprobs"):
        data[name] = torch.where(trained, training_batch()[name].roll(PROMPT_LENGTH, dims=1), 0.0)
    data[TAG + PROMPT] = torch.arange(2).repeat_interleave(4)
    data[TAG + PROMPT_TOKENS] = torch.full((ROWS,), PROMPT_LENGTH)
    return data


def shard_of(worker: PolicyWorker, data: BatchedDataDict[Any], *, training: bool = True) -> Any:
    """The part of a global batch that this rank sees."""
    share = shares_prompts(worker.cfg, cuda=False)
    shards, _ = shard_batch(data, worker.cfg, worker.backend.sizes.dp, data.size, training=training, share=share)
    return shards[worker.backend.groups.coordinates()["data_parallel"]]


def make_worker(config: MasterConfig, **options: Any) -> PolicyWorker:
    """This rank's worker, without a reference model."""
    worker = PolicyWorker(config.policy, **({"init_reference_model": False} | options))
    worker.build()
    return worker


def gradients(worker: PolicyWorker) -> dict[str, Any]:
    """Every gradient in full under its name; with Megatron those of Hugging Face files."""
    backend: Any = worker.backend
    if hasattr(backend, "scorer"):
        named = ((hf_name(name), parameter.grad) for name, parameter in backend.scorer.named_parameters())
        return {
            name: (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
            for name, grad in sorted(named, key=lambda pair: pair[0])
            if grad is not None
        }
    found = {}
    for weight in backend.weights.described:
        if not backend._trained[weight.name]:
            continue
        own = backend.weights.own().get(weight.name)
        whole = backend.weights.gather(weight, None if own is None else own.main_grad, backend.device, torch.float32)
        found |= {name: part.clone() for (name, _), part in zip(weight.parts, weight.split(whole), strict=True)}
    return dict(sorted(found.items()))


def kept_gradients(worker: PolicyWorker) -> dict[str, np.ndarray]:
    """Every gradient in full under its name, of the last step that is finished from here on."""
    norm, found = worker.backend.gradient_norm, dict[str, np.ndarray]()

    def read_gradients() -> torch.Tensor:
        value = norm()  # completes the gradients that tensor-parallel ranks hold in parts
        found.update({name: gradient.cpu().numpy().copy() for name, gradient in gradients(worker).items()})
        return value

    worker.backend.gradient_norm = read_gradients  # type: ignore[method-assign]
    return found


def in_one_vector(found: dict[str, np.ndarray]) -> np.ndarray:
    """All gradients, one after the other."""
    return np.concatenate([gradient.flatten() for gradient in found.values()])


def full_gradients(worker: PolicyWorker) -> torch.Tensor:
    """Every gradient in full, in one vector."""
    return torch.cat([gradient.flatten() for gradient in gradients(worker).values()])


def one_step(
    model: str,
    world: int,
    overrides: list[str],
    loss: Any = None,
    data: BatchedDataDict[Any] | None = None,
    weights: str | None = None,
) -> dict[str, Any]:
    """Log-probabilities, loss, gradient and gradient norm of one global batch under one way to split it. `weights`: a
    checkpoint's, to start from.
    """
    config = run_config(model, world, *overrides)
    worker = make_worker(config, weights_path=weights)
    loss_fn = loss or ClippedPGLossFn(config.loss_fn)
    data = training_batch() if data is None else data
    scored = worker.get_logprobs(shard_of(worker, data, training=False))["logprobs"]
    # A step that is given up between microbatches leaves nothing to the next, wherever its gradients are.
    worker.begin_train_step(loss_fn)
    worker.step.microbatches(microbatches(shard_of(worker, data), worker.cfg, config.policy.train_micro_batch_size)[:1])
    worker.abort_train_step()
    found = kept_gradients(worker)
    answer = worker.train(
        shard_of(worker, data), loss_fn, eval_mode=False, gbs=ROWS, mbs=config.policy.train_micro_batch_size
    )
    evaluated = worker.train(
        shard_of(worker, data), loss_fn, eval_mode=True, gbs=ROWS, mbs=config.policy.train_micro_batch_size
    )
    seen = {
        "gradient": in_one_vector(found),
        "logprobs": scored.numpy(),
        "loss": answer["loss"],
        "grad_norm": answer["grad_norm"],
        "metrics": answer["all_mb_metrics"],
        "tokens": answer["work"].tokens,
        "next_loss": evaluated["loss"],
    }
    return seen if weights is None else seen | {"gradients": found}


def trained_step(model: str, world: int, overrides: list[str], loss: Any, data: BatchedDataDict[Any]) -> dict[str, Any]:
    """Loss, gradient and gradient norm of one global batch, and nothing else of `one_step`."""
    config = run_config(model, world, *overrides)
    worker = make_worker(config)
    found = kept_gradients(worker)
    answer = worker.train(
        shard_of(worker, data), loss, eval_mode=False, gbs=ROWS, mbs=config.policy.train_micro_batch_size
    )
    return {"gradient": in_one_vector(found), "loss": answer["loss"], "grad_norm": answer["grad_norm"]}


def first_step(model: str, world: int, overrides: list[str]) -> dict[str, Any]:
    """The result of one step, and nothing else."""
    config = run_config(model, world, *overrides)
    return _train(make_worker(config), training_batch(), ClippedPGLossFn(config.loss_fn))


def many_splits(
    model: str, world: int, cases: dict[str, list[str]], weights: str | None = None
) -> dict[str, dict[str, Any]]:
    """`one_step` of every case, one after the other in the same processes."""
    return {name: one_step(model, world, overrides, weights=weights) for name, overrides in cases.items()}


def grouped_splits(model: str, world: int, cases: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """`one_step` of every case on `grouped_batch`; log-probabilities in the caller's order for one rank."""
    found = {}
    for name, overrides in cases.items():
        data = grouped_batch()
        config = run_config(model, world, *overrides).policy
        found[name] = one_step(model, world, overrides, data=data)
        share = shares_prompts(config, cuda=False)
        _, order = shard_batch(data, config, 1, data.size, training=False, share=share)
        if world == 1 and order is not None:
            found[name]["logprobs"] = found[name]["logprobs"][np.argsort(order)]
    return found


def moved_steps(
    model: str, world: int, overrides: list[str], moves: bool
) -> tuple[dict[str, str], list[tuple[int, int]]]:
    """Checksums of the weights after three steps, and bytes in use at the end of each, before all leaves the device and
    after it.
    """
    config = run_config(model, world, *overrides)
    worker = make_worker(config)
    loss_fn: Any = ClippedPGLossFn(config.loss_fn)
    used = []
    for _ in range(3):
        worker.prepare_for_training()
        worker.begin_train_step(loss_fn)
        worker.train_microbatches(shard_of(worker, training_batch()))
        if moves:
            # The gradients of an open step go along.
            worker.offload_all()
            worker.prepare_for_training()
        worker.finish_train_step()
        resident = worker.memory_in_use()
        if moves:
            worker.offload_all()
        used.append((resident, worker.memory_in_use()))
    return worker.weight_checksums(), used


def stayed_and_moved(model: str, world: int, cases: dict[str, list[str]]) -> dict[str, list[dict[str, str]]]:
    """Per case the checksums of `moved_steps` without moves, and with them on CPU slots that treat their memory as a
    GPU's: it is copied away and given back.
    """
    stayed = {case: moved_steps(model, world, overrides, False)[0] for case, overrides in cases.items()}
    MovableStorages.on_gpu = classmethod(lambda cls, tensors: cls(tensors, chunk_bytes=1 << 16))  # type: ignore[assignment, method-assign]
    return {case: [stayed[case], moved_steps(model, world, how, True)[0]] for case, how in cases.items()}


class RaisingLoss(ClippedPGLossFn):
    """A loss that fails in the middle of a step, after the forward pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("planted")


class LogitLoss:
    """A loss of raw logits: mean square over trained positions."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGIT
    metric_normalizations: ClassVar[dict[str, MetricNormalizer]] = {}

    def __call__(self, data: Any, global_valid_seqs: Any, global_valid_toks: Any, *, logits: torch.Tensor) -> Any:
        mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None])[..., None]
        loss = (logits[:, :-1].square() * mask).sum() / global_valid_toks
        return loss, {"loss": loss.detach()}


def half_of_mine(worker: PolicyWorker) -> int:
    """Rows of a microbatch of which this rank has two in a step."""
    return ROWS // (2 * worker.backend.sizes.dp)


def _train(worker: PolicyWorker, data: BatchedDataDict[Any], loss: Any) -> dict[str, Any]:
    return worker.train(shard_of(worker, data), loss, eval_mode=False, gbs=ROWS, mbs=half_of_mine(worker))


def _error(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the test reads what it was
        return f"{type(error).__name__}: {error}"
    return "no error"


MEGATRON = (
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.megatron_cfg.optimizer.lr=0.01",
    "policy.megatron_cfg.optimizer.weight_decay=0.0",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=2",
    "policy.megatron_cfg.scheduler.lr_warmup_init=0.005",
    "policy.megatron_cfg.freeze_moe_router=false",
    "policy.megatron_cfg.moe_router_dtype=fp32",
)


def training_story(model: str, world: int, folder: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Everything about one policy over time: chunks, refused and failed steps, checkpoints. Plain values for the tests
    to judge.
    """
    config = run_config(
        model,
        world,
        "policy.scheduler={name: torch.optim.lr_scheduler.MultiStepLR, kwargs: {milestones: [2], gamma: 0.5}}",
        *overrides,
    )
    loss, data = ClippedPGLossFn(config.loss_fn), training_batch()
    seen: dict[str, Any] = {}
    whole, chunked = make_worker(config), make_worker(config)
    seen["whole"] = _train(whole, data, loss)
    size = half_of_mine(chunked)
    chunked.begin_train_step(loss, mbs=size)
    local = shard_of(chunked, data)
    for start in range(0, local.size, size):
        chunked.train_microbatches(local.slice(start, start + size))
    seen["chunked"] = chunked.finish_train_step()
    seen["whole weights"], seen["chunked weights"] = whole.weight_checksums(), chunked.weight_checksums()

    seen["finish without begin"] = _error(chunked.finish_train_step)
    seen["microbatches without begin"] = _error(lambda: chunked.train_microbatches(local))
    chunked.begin_train_step(loss)
    seen["begin twice"] = _error(lambda: chunked.begin_train_step(loss))
    chunked.train_microbatches(local)
    chunked.abort_train_step()
    seen["weights after abort"] = chunked.weight_checksums()

    poisoned = BatchedDataDict({key: value.clone() for key, value in data.items()})
    poisoned["advantages"][ROWS - 2, 4] = float("nan")
    seen["nan"] = _error(lambda: _train(chunked, poisoned, loss))
    seen["weights after nan"] = chunked.weight_checksums()
    seen["loss raises"] = _error(lambda: _train(chunked, data, RaisingLoss(config.loss_fn)))
    chunked.abort_train_step()
    seen["weights after raise"] = chunked.weight_checksums()
    seen["second, after all that"], seen["second"] = _train(chunked, data, loss), _train(whole, data, loss)
    seen["second weights"] = (chunked.weight_checksums(), whole.weight_checksums())

    path = f"{folder}/{world}"
    whole.save_checkpoint(f"{path}/weights", f"{path}/optimizer")
    # Trained on before the files are complete: they must hold the snapshot all the same.
    seen["third"] = _train(whole, data, loss)
    seen["third weights"] = whole.weight_checksums()
    while not whole.checkpoint_written():
        time.sleep(0.02)
    torch.distributed.barrier()
    resumed = make_worker(config, weights_path=f"{path}/weights", optimizer_path=f"{path}/optimizer")
    seen["resumed weights"] = resumed.weight_checksums()
    seen["resumed third"] = _train(resumed, data, loss)
    seen["resumed third weights"] = resumed.weight_checksums()
    for value in _optimizer_state(resumed.backend.optimizer):
        value.fill_(float("inf"))
    seen["damaged optimizer"] = _error(lambda: _train(resumed, data, loss))
    return seen


def _optimizer_state(optimizer: Any) -> list[torch.Tensor]:
    """First moments, also within Megatron's wrappers."""
    if hasattr(optimizer, "chained_optimizers"):
        return [value for one in optimizer.chained_optimizers for value in _optimizer_state(one.optimizer)]
    return [local_tensor(state["exp_avg"]) for state in optimizer.state.values()]


def split_steps(model: str, world: int, cases: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Per case, the same global batch as `train` takes it and in chunks of several uneven sizes: what the step gave,
    its gradient, and how often gradients were reduced over ranks.
    """
    chunkings = {"one": [8], "many": [1, 5, 2]}
    seen: dict[str, dict[str, Any]] = {}
    for case, overrides in cases.items():
        config = run_config(model, world, *overrides)
        worker, loss, data = make_worker(config), ClippedPGLossFn(config.loss_fn), training_batch()
        counted, norm = _count_reductions(worker), worker.backend.gradient_norm
        gradient: dict[str, Any] = {}

        def measured(
            worker: PolicyWorker = worker, norm: Any = norm, gradient: dict[str, Any] = gradient
        ) -> torch.Tensor:
            value = norm()
            gradient["gradient"] = full_gradients(worker).numpy().copy()
            return value

        worker.backend.gradient_norm = measured  # type: ignore[method-assign]
        worker.backend.apply_gradients = lambda factor, backend=worker.backend: backend.discard_gradients()  # type: ignore[method-assign]
        whole = worker.train(shard_of(worker, data), loss, eval_mode=False, gbs=ROWS, mbs=2)
        seen[case] = {"train": whole | gradient | {"reductions": counted()}}
        for name, sizes in chunkings.items():
            start = 0
            worker.begin_train_step(loss, mbs=2)
            for size in sizes:
                chunk = data.slice(start, start + size)
                start += size
                shards, _ = shard_rows(chunk, worker.cfg, worker.backend.sizes.dp, training=True)
                worker.train_microbatches(shards[worker.backend.groups.coordinates()["data_parallel"]])
                # Scoring between chunks leaves the model in evaluation mode.
                worker.get_logprobs(shard_of(worker, data.slice(0, 2), training=False))
                # What the open step has gathered goes to the host and comes back.
                worker.offload_all()
                worker.prepare_for_training()
            seen[case][name] = worker.finish_train_step() | gradient | {"reductions": counted()}
    return seen


def _count_reductions(worker: PolicyWorker) -> Callable[[], int]:
    """Counts calls that reduce gradients over data-parallel ranks since it was asked last, per group of parameters."""
    calls: list[int] = []
    if hasattr(worker.backend, "scorer"):
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

        target, name = module, "foreach_reduce"
    else:
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

        target, name = _ParamAndGradBucketGroup, "start_grad_sync"
    original = getattr(target, name)
    original = getattr(original, "original", original)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    counting.original = original  # type: ignore[attr-defined]
    setattr(target, name, counting)

    def since() -> int:
        count = len(calls)
        calls.clear()
        return count

    return since


def empty_step(model: str, world: int, overrides: list[str]) -> dict[str, Any]:
    """A step whose samples are all masked out, after one that gave the optimizer momentum."""
    config = run_config(model, world, *overrides)
    worker, loss, data = make_worker(config), ClippedPGLossFn(config.loss_fn), training_batch()
    _train(worker, data, loss)
    before, rates = worker.weight_checksums(), worker.backend.rates()
    data["sample_mask"] = torch.zeros(ROWS)
    result = _train(worker, data, loss)
    worker.begin_train_step(loss)
    worker.train_microbatches(data)
    split = worker.finish_train_step()
    return {
        "unchanged": before == worker.weight_checksums() and rates == worker.backend.rates(),
        "skipped": result["skipped_steps"] + split["skipped_steps"],
        "grad_norm": result["grad_norm"],
        "loss": result["loss"],
        "open": worker.step.is_open,
    }


def steps_of_two(model: str, cases: dict[str, list[str]], backends: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """`empty_step` of both backends and `split_steps` of all cases on two ranks."""
    return {
        "empty": {name: empty_step(model, 2, overrides) for name, overrides in backends.items()},
        "split": split_steps(model, 2, cases),
    }


def dropped_communicators(model: str, world: int, cases: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Per case, steps with communicators dropped before each, and the same steps of a worker that keeps its own."""
    seen = {}
    for case, overrides in cases.items():
        config = run_config(model, world, *overrides)
        loss, data = ClippedPGLossFn(config.loss_fn), training_batch()
        keeping = make_worker(config)
        kept = [_train(keeping, data, loss) for _ in range(2)]
        kept_weights = keeping.weight_checksums()
        worker, results, groups = make_worker(config), [], []
        for _ in range(2):
            worker.drop_communicators()
            groups.append(len(torch.distributed.distributed_c10d._world.pg_map))
            results.append(_train(worker, data, loss))
            groups.append(len(torch.distributed.distributed_c10d._world.pg_map))
        worker.begin_train_step(loss)
        refused = _error(worker.drop_communicators)
        worker.abort_train_step()
        same = results == kept and worker.weight_checksums() == kept_weights
        searches = worker.backend.groups.communicators._holders.searches
        seen[case] = {"same": same, "groups": groups, "refused": refused, "searches": searches}
    return seen


def uneven_packing(model: str, world: int) -> list[float]:
    """Losses of two global batches whose packed shards hold unequal numbers of rows."""
    config = run_config(model, world, "policy.sequence_packing.enabled=true", "policy.train_global_batch_size=4")
    worker = make_worker(config)
    data = training_batch()
    data["input_lengths"] = torch.tensor([24, 6, 6, 6, 7, 24, 7, 7])
    shards, _ = shard_batch(data, worker.cfg, worker.backend.sizes.dp, 4, training=True)
    shard = shards[worker.backend.groups.coordinates()["data_parallel"]]
    return worker.train(shard, ClippedPGLossFn(config.loss_fn), eval_mode=False, gbs=4, mbs=2)["loss"]


def logit_gradient(model: str, world: int, overrides: list[str]) -> Any:
    """Gradient of a loss on logits."""
    worker = make_worker(run_config(model, world, *overrides))
    worker.begin_train_step(LogitLoss())
    worker.train_microbatches(shard_of(worker, training_batch()))
    worker.backend.gradient_norm()
    return full_gradients(worker).numpy()


def reference_and_topk(model: str, world: int, overrides: list[str]) -> dict[str, Any]:
    """Reference log-probabilities before and after a step, and the largest logits, on ranks that have all rows."""
    config = run_config(model, world, *ALL_ROWS, *overrides)
    worker = make_worker(config, init_reference_model=True)
    data = training_batch()
    scored = shard_of(worker, data, training=False)
    seen = {
        "start": worker.get_logprobs(scored)["logprobs"],
        "reference before": worker.get_reference_policy_logprobs(scored)["reference_logprobs"],
    }
    seen |= dict(worker.get_topk_logits(scored, 3).items())
    _train(worker, data, ClippedPGLossFn(config.loss_fn))
    before = worker.weight_checksums()
    seen["reference after"] = worker.get_reference_policy_logprobs(scored)["reference_logprobs"]
    seen["after"] = worker.get_logprobs(scored)["logprobs"]
    both = worker.get_policy_and_reference_logprobs(scored)
    pairs = {"logprobs": "after", "reference_logprobs": "reference after"}
    one_call_scores_as_two = all(torch.equal(both[name], seen[of]) for name, of in pairs.items())
    seen = {name: value.numpy() for name, value in seen.items()}
    seen["weights untouched"] = before == worker.weight_checksums()
    seen["one call scores as two"] = one_call_scores_as_two
    return seen


def story_of_two(model: str, folder: str) -> dict[str, Any]:
    """All that two ranks have to show."""
    tp2 = ["policy.dtensor_cfg.tensor_parallel_size=2"]
    return {
        "story": training_story(model, 2, folder),
        "uneven": uneven_packing(model, 2),
        "logit gradient": {"dp": logit_gradient(model, 2, []), "tp": logit_gradient(model, 2, tp2)},
        "reference": reference_and_topk(model, 2, tp2),
    }


def story_of_one(model: str, other_model: str, folder: str) -> dict[str, Any]:
    """All that one rank has to show; resumes what two ranks saved."""
    config = run_config(
        model, 1, "policy.scheduler={name: torch.optim.lr_scheduler.MultiStepLR, kwargs: {milestones: [2], gamma: 0.5}}"
    )
    resumed = make_worker(config, weights_path=f"{folder}/2/weights", optimizer_path=f"{folder}/2/optimizer")
    seen: dict[str, Any] = {"resharded weights": resumed.weight_checksums()}
    seen["resharded third"] = _train(resumed, training_batch(), ClippedPGLossFn(config.loss_fn))
    seen["other model's weights"] = _error(lambda: make_worker(config, weights_path=other_model))
    only_adam = ["~policy.optimizer.kwargs.betas", "~policy.optimizer.kwargs.eps"]
    sgd = run_config(
        model, 1, "policy.optimizer.name=torch.optim.SGD", "+policy.optimizer.kwargs.momentum=0.9", *only_adam
    )
    seen["other optimizer's state"] = _error(lambda: make_worker(sgd, optimizer_path=f"{folder}/2/optimizer"))
    seen["story"] = training_story(model, 1, folder)
    seen["uneven"] = uneven_packing(model, 1)
    seen["logit gradient"] = logit_gradient(model, 1, [])
    seen["reference"] = reference_and_topk(model, 1, [])
    resumed.save_checkpoint(f"{folder}/torch", None, "torch_save")
    resumed.backend.wait_saved()
    seen["saved by torch"] = (
        resumed.weight_checksums(),
        make_worker(config, weights_path=f"{folder}/torch").weight_checksums(),
    )
    full = make_worker(config)
    os.makedirs(f"{folder}/full/weights")
    os.symlink("/dev/full", f"{folder}/full/weights/config.json")
    full.save_checkpoint(f"{folder}/full/weights", None)
    seen["full disk"] = _error(lambda: [time.sleep(0.02) for _ in iter(full.checkpoint_written, True)])
    full.save_checkpoint("/dev/null/weights", "/dev/null/optimizer")
    seen["unwritable"] = _error(lambda: [time.sleep(0.02) for _ in iter(full.checkpoint_written, True)])
    return seen


def expert_story(model: str, world: int, folder: str, overrides: list[str], saved: str | None = None) -> dict[str, Any]:
    """Experts over time: two steps with a checkpoint between them, or the second step of the checkpoint `saved`; and
    what is exported.
    """
    config = run_config(model, world, *overrides)
    paths = {} if saved is None else {"weights_path": f"{saved}/weights", "optimizer_path": f"{saved}/optimizer"}
    worker, loss, data = make_worker(config, **paths), ClippedPGLossFn(config.loss_fn), training_batch()
    if saved is None:
        _train(worker, data, loss)
        worker.save_checkpoint(f"{folder}/weights", f"{folder}/optimizer")
        while not worker.checkpoint_written():
            time.sleep(0.02)
        torch.distributed.barrier()
    exported = {name: tensor.numpy().copy() for name, tensor in worker.backend.full_weights(None)}
    metas = {meta.name: meta.shape for meta in worker.tensor_metas()}
    logprobs = worker.get_logprobs(shard_of(worker, data, training=False))["logprobs"].numpy()
    second = _train(worker, data, loss)
    groups = len(worker.backend.optimizer.param_groups) if worker.backend.optimizer is not None else 0
    return {
        "exported": exported,
        "metas": metas,
        "logprobs": logprobs,
        "second": second,
        "groups": groups,
        "weights": worker.weight_checksums(),
    }


def experts_of_two(model: str, folder: str, cases: dict[str, list[str]], overrides: list[str]) -> dict[str, Any]:
    """Two ranks with experts: every case, and what they do over time with `overrides`, as a whole and resumed."""
    return {
        "cases": many_splits(model, 2, cases),
        "story": expert_story(model, 2, folder, overrides),
        "resumed": expert_story(model, 2, "", overrides, folder),
    }


def experts_of_one(model: str, folder: str, cases: dict[str, list[str]]) -> dict[str, Any]:
    """One rank for comparison; goes on from what two ranks saved in `folder`."""
    return {
        "cases": many_splits(model, 1, cases),
        "story": expert_story(model, 1, f"{folder}/whole", []),
        "resumed": expert_story(model, 1, "", [], folder),
    }


def megatron_of_two(
    models: dict[str, str],
    folder: str,
    cases: dict[str, list[str]],
    experts: dict[str, list[str]],
    deep: dict[str, list[str]],
    stories: dict[str, list[str]],
) -> dict[str, Any]:
    """All that two ranks on Megatron have to show: one group, for starting one costs more than most cases."""
    ep2 = [*MEGATRON, "policy.megatron_cfg.expert_model_parallel_size=2"]
    tp2 = [*MEGATRON, "policy.megatron_cfg.tensor_model_parallel_size=2"]
    model, moe = models["tiny"], models["experts"]
    return {
        "deep": many_splits(models["deep"], 2, deep),
        "cases": many_splits(model, 2, cases),
        "experts": many_splits(moe, 2, experts),
        "stories": {name: training_story(model, 2, f"{folder}/{name[:2]}", how) for name, how in stories.items()},
        "expert story": expert_story(moe, 2, f"{folder}/ep", ep2),
        "reference": reference_and_topk(model, 2, tp2),
    }


def half_precision(model: str) -> dict[str, Any]:
    """A step of Megatron in bfloat16: its loss, and in which precision weights and gradients lie."""
    config = run_config(model, 1, *MEGATRON, "policy.precision=bfloat16")
    worker = make_worker(config)
    result = _train(worker, training_batch(), ClippedPGLossFn(config.loss_fn))
    weights = worker.backend.weights.own().values()  # type: ignore[attr-defined]
    return {
        "loss": result["loss"],
        "grad_norm": result["grad_norm"],
        "weights": {str(weight.dtype) for weight in weights},
        "gradients": {str(weight.main_grad.dtype) for weight in weights},
    }


def megatron_of_one(
    models: dict[str, str],
    folder: str,
    cases: dict[str, list[str]],
    experts: dict[str, list[str]],
) -> dict[str, Any]:
    """What one rank shows for comparison; goes on from what two ranks saved in `folder`."""
    model, moe = models["tiny"], models["experts"]
    return {
        "deep": one_step(models["deep"], 1, cases["dtensor"]),
        "bfloat16": half_precision(model),
        "cases": many_splits(model, 1, cases),
        "experts": many_splits(moe, 1, experts),
        "resumed experts": expert_story(moe, 1, "", list(MEGATRON), f"{folder}/ep"),
        "reference": reference_and_topk(model, 1, []),
    }
