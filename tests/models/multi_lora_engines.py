"""A policy with adapter slots and a real engine that takes adapters, on CPU slots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from nemo_rl.algorithms.multi_lora.assembly import Shared, shared_parts
from nemo_rl.algorithms.multi_lora.engines import AdapterEngines
from nemo_rl.config import load_master_config
from nemo_rl.config.master import MultiLoraMasterConfig
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.multi_lora.messages import SLOT
from nemo_rl.models.multi_lora.multi_lora_policy import MultiLoraPolicy
from nemo_rl.utils.adapter_files import AdapterInfo
from nemo_rl.utils.progress import StartPhases
from nemo_rl.utils.record import NullRecord
from tests.models.multi_lora_ranks import batch_of

_CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
_TIMEOUT_S = 180.0


@dataclass
class EnginesAndPolicy:
    """The shared parts of a job, with adapters by name."""

    config: MultiLoraMasterConfig
    shared: Shared
    slots: dict[str, int] = field(default_factory=dict)
    infos: dict[str, AdapterInfo] = field(default_factory=dict)

    @property
    def engines(self) -> AdapterEngines:
        return self.shared.engines

    @property
    def generation(self) -> VllmGeneration:
        return self.shared.engines.generation

    @property
    def policy(self) -> MultiLoraPolicy:
        return self.shared.policy

    def fill(self, slot: int, name: str, *, dim: int) -> None:
        """Puts an adapter into a slot, and trains it once so that it changes the model."""
        cfg = self.config.policy.model_copy(deep=True)
        cfg.dtensor_cfg.lora_cfg.dim = dim
        self.policy.fill_slot(slot, cfg)
        layers = sorted({n.rpartition(".")[0].rpartition(".")[2] for n in self.policy.slot_factors(slot)})
        self.slots[name] = slot
        self.infos[name] = AdapterInfo(cfg.model_name, dim, cfg.dtensor_cfg.lora_cfg.alpha, layers)
        self.train(name)

    def train(self, name: str) -> None:
        """One step of an adapter on made-up samples."""
        slot = self.slots[name]
        rows = BatchedDataDict({**batch_of(slot, 0), SLOT: torch.full((8,), slot)})
        result: Any = self.policy.train_adapters(rows, {slot: ClippedPGLossFn(self.config.loss_fn)})[slot]
        assert result["grad_norm"] > 0

    def bring(self, name: str, version: int) -> None:
        """Sends an adapter to the engines."""
        self.engines.bring_to(name, self.slots[name], self.infos[name], version, NullRecord())

    def requests(self, names: Sequence[str], each: int = 3) -> list[GenerationRequest]:
        """Seeded requests of each adapter, the same prompts for all."""
        tokenizer = get_tokenizer(self.config.policy.tokenizer)
        sampling = self.generation.default_sampling()
        return [
            GenerationRequest(f"{name}-{n}", tokenizer(f"{7 * n}+{n}=")["input_ids"], 8, sampling, n, adapter=name)
            for n in range(each)
            for name in names
        ]

    def run(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Results in the order of the requests."""

        async def all_of_them() -> list[GenerationResult]:
            return list(await asyncio.gather(*(self.generation.generate_one(request) for request in requests)))

        return asyncio.run(all_of_them())

    def check(
        self, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult], versions: Mapping[str, int]
    ) -> None:
        """Every token is of its adapter's version, with the log-probability that the policy's adapter gives it."""
        for request, result in zip(requests, results, strict=True):
            assert {(s.adapter, s.version) for s in result.spans} == {(request.adapter, versions[request.adapter])}
            assert sum(span.end - span.start for span in result.spans) == len(result.token_ids) > 0
        rows = [[*request.prompt_ids, *result.token_ids] for request, result in zip(requests, results, strict=True)]
        ids = torch.full((len(rows), 32), 257)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        slots = torch.tensor([self.slots[request.adapter] for request in requests])
        batch = BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([len(row) for row in rows]), **{SLOT: slots})
        scored = self.policy.score_adapters(batch, policy=True, reference=False)["logprobs"]
        for row, (request, result) in enumerate(zip(requests, results, strict=True)):
            start = len(request.prompt_ids)
            trained = scored[row, start : start + len(result.token_ids)].numpy()
            np.testing.assert_allclose(trained, result.logprobs, atol=1e-4)

    def versions(self) -> list[dict[str, int]]:
        """The adapters of every shard."""
        return self.generation.fleet.call(self.generation.fleet.healthy(), "adapter_versions")

    def lose_engine(self) -> None:
        """Ends the first shard's process; returns once a request got an answer from the new one."""
        ray.kill(self.generation.group.workers[0])
        self.generation.fleet.fail({0: "killed by the test"})
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.generation.router.active and time.monotonic() < deadline:
            time.sleep(0.2)
        assert self.generation.router.active


@contextmanager
def engines_and_policy(model: Path) -> Iterator[EnginesAndPolicy]:
    """Starts both and ends them."""
    config = load_master_config(
        _CONFIG,
        [
            f"policy.model_name={model}",
            "loss_fn.reference_policy_kl_penalty=0.0",
            "policy.train_global_batch_size=8",
            "policy.train_micro_batch_size=4",
            "policy.logprob_batch_size=4",
            "grpo.num_prompts_per_step=2",
            "grpo.num_generations_per_prompt=4",
            "policy.optimizer.kwargs.lr=0.01",
            "policy.dtensor_cfg.lora_cfg.enabled=true",
            "multi_lora.slots=2",
        ],
        MultiLoraMasterConfig,
    )
    with shared_parts(config, StartPhases()) as shared:
        yield EnginesAndPolicy(config, shared)
