"""What the gradients of a run's steps are when its real drivers train on one real worker, in turns and streaming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nemo_rl.algorithms.grpo.loop import drive
from nemo_rl.experience.rollout_source import Rollout
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.policy.lm_policy import Policy, _rank_grid
from nemo_rl.models.policy.policy_worker import PolicyWorker
from tests.algorithms.test_streaming import Streamed
from tests.models.policy_ranks import WIDTH, full_gradients, make_worker, run_config
from tests.virtual_world import CONFIG, SMALL, World

SAME = (
    "grpo.max_num_steps=2",
    "checkpointing.enabled=false",
    "loss_fn.reference_policy_kl_penalty=0.1",
    "loss_fn.use_importance_sampling_correction=false",
    "loss_fn.truncated_importance_sampling_type=null",
    "loss_fn.truncated_importance_sampling_ratio=null",
)
ON_POLICY = "async_rl.sampler.max_lookahead_versions=0"


class Here:
    """A worker group of the one worker in this process."""

    world_size = 1

    def __init__(self, worker: PolicyWorker) -> None:
        self.worker = worker

    def run(self, method: str, **named: Any) -> list[Any]:
        return [getattr(self.worker, method)(**named)]

    def run_all_workers_single_data(self, method: str) -> list[Any]:
        return self.run(method)

    def run_all_workers_sharded_data(
        self, method: str, common_kwargs: dict[str, Any] | None = None, data: Any = None, **_: Any
    ) -> list[Any]:
        return self.run(method, **({} if data is None else {"data": data[0]}), **(common_kwargs or {}))

    def get_all_worker_results(self, results: list[Any], timeout_s: float | None = None) -> list[Any]:
        return results


class LocalPolicy(Policy):
    """The policy on that worker."""

    def __init__(self, worker: PolicyWorker) -> None:
        self.cfg, self.sharding_annotations = worker.cfg, _rank_grid(worker.cfg, 1)
        self.worker_group = Here(worker)  # type: ignore[assignment]
        self._shape, self.shares_prompts = None, False


def _rollout(plain: Rollout) -> Rollout:
    """The same samples with tokens that their prompt and number decide."""
    columns = plain.columns
    rows = columns.rows.size
    prompts = columns.tokens["input_ids"][:, 0].tolist()
    ids, lengths, logprobs = torch.zeros(rows, WIDTH, dtype=torch.int64), [], torch.zeros(rows, WIDTH)
    for row, prompt in enumerate(prompts):
        draw = torch.Generator().manual_seed(1000 * prompt + int(columns.rows["sample_number"][row]))
        lengths.append(int(torch.randint(5, WIDTH + 1, (1,), generator=draw)))
        ids[row, : lengths[-1]] = torch.randint(0, 256, (lengths[-1],), generator=draw)
        logprobs[row, 3 : lengths[-1]] = -5.8 + 0.1 * torch.randn(lengths[-1] - 3, generator=draw)
    width = max(lengths) + -max(lengths) % 4
    columns.tokens["input_ids"], columns.tokens["generation_logprobs"] = ids[:, :width], logprobs[:, :width]
    columns.tokens["input_lengths"] = torch.tensor(lengths)
    columns.tokens["token_mask"] = (
        (torch.arange(width) >= 3) & (torch.arange(width) < torch.tensor(lengths)[:, None])
    ).long()
    columns.tokens["token_versions"] = torch.zeros(rows, width, dtype=torch.int32)
    return plain


class Turns(World):
    def roll_out(self, *arguments: Any) -> Any:
        return _rollout(super().roll_out(*arguments))


class Streams(Streamed):
    async def roll_out_group(self, batch: Any, plan: Any) -> Any:
        return _rollout(await super().roll_out_group(batch, plan))


def step_gradients(model: str, folder: str, cases: dict[str, list[str]]) -> dict[str, dict[str, list[Any]]]:
    """Per case the gradient of every step, in turns and streaming; the weights stay, so that steps have nothing to do
    with each other.
    """
    seen: dict[str, dict[str, list[Any]]] = {}
    for case, overrides in cases.items():
        config = run_config(model, 1, *(one for one in SMALL if one.startswith(("grpo.num", "policy."))), *overrides)
        worker = make_worker(config, init_reference_model=True)
        norm, found = worker.backend.gradient_norm, []

        def measured(worker: PolicyWorker = worker, norm: Any = norm, found: list[Any] = found) -> torch.Tensor:
            value = norm()
            found.append(full_gradients(worker).numpy().copy())
            return value

        worker.backend.gradient_norm = measured  # type: ignore[method-assign]
        worker.backend.apply_gradients = lambda factor, backend=worker.backend: backend.discard_gradients()  # type: ignore[method-assign]
        here = Path(folder) / case.replace(" ", "_")
        (here / "turns").mkdir(parents=True)
        turns: Any = Turns(here / "turns", *SAME, "grpo.async_grpo.enabled=false", config=CONFIG)
        streams: Any = Streams(here / "streams", *SAME, ON_POLICY)
        # Each group ends once the one before it is trained: every part is one group, in the order of the batch.
        streams.after = lambda prompt: prompt
        seen[case] = {}
        for name, world in (("turns", turns), ("streams", streams)):
            policy = LocalPolicy(worker)
            world.run.policy, world.run.loss_fn = policy, ClippedPGLossFn(world.run.config.loss_fn)
            submit = policy.submit_microbatches

            def counted(data: Any, timer: Any = None, submit: Any = submit, world: Any = world) -> Any:
                pending = submit(data, timer)
                world.trained += [0] * (data.size // 2)
                return pending

            policy.submit_microbatches = counted  # type: ignore[method-assign]
            drive(world.run)
            seen[case][name] = found.copy()
            found.clear()
        seen[case]["parts"] = [logged["streaming/parts"] for logged in streams.logged]
        seen[case]["grad_norms"] = [[logged["grad_norm"] for logged in world.logged] for world in (turns, streams)]
    return seen
