"""A policy and a real vLLM engine that share CPU slots, for the engine tests."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from nemo_rl.algorithms.grpo.refitter import Refitter
from nemo_rl.config import MasterConfig, load_master_config
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.vllm.engine_actors import start_engine_actors
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.record import MemoryRecord

_CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"


@dataclass
class Colocated:
    """Both engines of a run, and what brings one to the other's version."""

    config: MasterConfig
    tokenizer: Any
    policy: Policy
    generation: VllmGeneration
    refitter: Refitter
    record: MemoryRecord

    def requests(self, count: int = 12, tokens: int = 10) -> list[GenerationRequest]:
        """Seeded requests with prompts of different lengths."""
        sampling = self.generation.default_sampling()
        prompts = [self.tokenizer(f"{7 * n}+{n * n}=")["input_ids"] for n in range(count)]
        return [GenerationRequest(f"r{n}", ids, tokens, sampling, seed=1000 + n) for n, ids in enumerate(prompts)]

    def run(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Results in the order of the requests."""

        async def all_of_them() -> list[GenerationResult]:
            return list(await asyncio.gather(*(self.generation.generate_one(request) for request in requests)))

        return asyncio.run(all_of_them())

    def disagreement(self, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> float:
        """`token_mult_prob_error` of the results under the policy: mean of exp(|difference of log-probabilities|)."""
        rows = [[*request.prompt_ids, *result.token_ids] for request, result in zip(requests, results, strict=True)]
        ids = torch.full((len(rows), 32), self.tokenizer.pad_token_id)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        self.policy.prepare_for_lp_inference()
        scored = self.policy.get_logprobs(
            BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([len(row) for row in rows]))
        )["logprobs"]
        errors = []
        for row, (request, result) in enumerate(zip(requests, results, strict=True)):
            start = len(request.prompt_ids)
            trained = scored[row, start : start + len(result.token_ids)].tolist()
            errors += [math.exp(abs(a - b)) for a, b in zip(trained, result.logprobs, strict=True)]
        return sum(errors) / len(errors)

    def train_step(self) -> None:
        """Changes the weights by one optimizer step on made-up samples."""
        rows, width = 8, 16
        draw = torch.Generator().manual_seed(3)
        batch = BatchedDataDict(
            input_ids=torch.randint(0, 256, (rows, width), generator=draw),
            input_lengths=torch.full((rows,), width),
            token_mask=torch.ones(rows, width, dtype=torch.long),
            sample_mask=torch.ones(rows),
            advantages=torch.randn(rows, 1, generator=draw).expand(rows, width).clone(),
            prev_logprobs=torch.full((rows, width), -5.8),
            generation_logprobs=torch.full((rows, width), -5.8),
            sample_index=torch.arange(rows),
        )
        self.policy.prepare_for_training()
        self.policy.train(batch, ClippedPGLossFn(self.config.loss_fn))


@contextmanager
def colocated(model: Path, slots: int, *overrides: str, nodes: int = 1, cuda: bool = False) -> Iterator[Colocated]:
    """Starts policy and engine on the same slots of each node, CPU slots or GPUs, and ends both."""
    base = [
        f"policy.model_name={model}",
        "loss_fn.reference_policy_kl_penalty=0.0",
        f"cluster.gpus_per_node={slots}",
        f"cluster.num_nodes={nodes}",
        "cluster.cpu_slots=4",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=4",
        "policy.logprob_batch_size=4",
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=4",
        "policy.optimizer.kwargs.lr=0.01",
        "policy.generation.max_new_tokens=10",
    ]
    config = load_master_config(_CONFIG, [*base, *overrides])
    tokenizer = get_tokenizer(config.policy.tokenizer)
    cluster = RayVirtualCluster(
        [slots] * nodes, use_gpus=cuda, max_colocated_worker_groups=2, num_gpus_per_node=slots, name="engines"
    )
    generation = VllmGeneration(
        start_engine_actors(cluster, config.policy, config.cluster, seed=1, colocated=True),
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=[tokenizer.eos_token_id],
    )
    policy = Policy(cluster, config.policy, tokenizer, init_reference_model=False)
    try:
        policy.wait_until_started()
        generation.wait_until_started()
        record = MemoryRecord()
        refitter = Refitter(policy, generation, config.weight_sync, colocated=True, cuda=cuda, record=record)
        refitter.bring_to(0)
        yield Colocated(config, tokenizer, policy, generation, refitter, record)
    finally:
        policy.shutdown()
        generation.shutdown()
        cluster.shutdown()


def without_place(results: Sequence[GenerationResult]) -> list[GenerationResult]:
    """Results without what may differ between two runs of the same requests: version and shard."""
    return [replace(result, spans=(), shard=0) for result in results]


def engine_pids(generation: VllmGeneration) -> list[int]:
    """Every process below the engines' actors, and the engine workers."""
    workers = {rank["pid"] for shard in generation.fleet.shards.values() for rank in shard.ranks}
    above = {
        parent.pid
        for pid in workers
        for parent in psutil.Process(pid).parents()
        if "EngineCore" in " ".join(parent.cmdline() or [parent.name()])
    }
    return sorted(workers | above)


def kill(pid: int) -> None:
    """As the out-of-memory killer does."""
    os.kill(pid, signal.SIGKILL)


# Ray's own processes stay a minute longer where a cluster was killed: they try to tell it so.
_AGENTS = (["ray::DashboardAgent"], ["ray::RuntimeEnvAgent"])


def wait_until_gone(pids: Sequence[int], timeout_s: float = 60.0) -> None:
    """Fails when a process still lives after the time. Agents of Ray do not count."""
    deadline = time.monotonic() + timeout_s
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if _lives(pid)]
        time.sleep(0.1)
    assert not left, f"still running: {[psutil.Process(pid).cmdline() for pid in left]}"


def _lives(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.cmdline()[:1] not in _AGENTS
    except psutil.NoSuchProcess:
        return False
