"""A worker extension whose engine writes down, by itself, what each of its steps drew: which experts, which tokens were
left to draw from, and what was drawn.

Reads the runner's own state after the forward pass and the sampler's arguments before its filters, not the recorder.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from nemo_rl.models.generation.vllm.extension import VllmInternalWorkerExtension
from nemo_rl.models.generation.vllm.recorder import REQUEST


class LoggingExtension(VllmInternalWorkerExtension):
    """Mixed into vLLM's worker class in place of `engine_actors.EXTENSION`."""

    def nrl_record_decisions(self, routes: bool, masks: bool) -> None:
        _log_steps(self.model_runner)
        super().nrl_record_decisions(routes, masks)


def _log_steps(runner: Any) -> None:
    log = open(f"{os.environ['NRL_TEST_DECISIONS']}.{os.getpid()}", "a", buffering=1)  # noqa: SIM115
    experts: list[list[list[int]]] = []
    routers = [m.router for m in runner.get_model().modules() if type(m).__name__ == "MoERunner"]

    for router in routers:

        def select(*args: Any, choose: Any = router._compute_routing, **kwargs: Any) -> Any:
            weights, ids = choose(*args, **kwargs)
            experts.append(ids.tolist())
            return weights, ids

        router._compute_routing = select

    execute = runner.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        experts.clear()
        return execute(*args, **kwargs)

    runner.execute_model = execute_model
    sampler = runner.sampler.topk_topp_sampler
    draw = sampler.forward

    def forward(logits: torch.Tensor, generators: Any, k: Any, p: Any) -> Any:
        before = logits.clone()
        sampled, processed = draw(logits, generators, k, p)
        ends = runner.query_start_loc.np[1:]
        lines = []
        for row, name in enumerate(runner.input_batch.req_ids):
            request = runner.requests[name]
            key = (request.sampling_params.extra_args or {}).get(REQUEST)
            if key is None or bool(runner.discard_request_mask.np[row]):
                continue
            sizes = {"p": 1.0 if p is None else float(p[row]), "k": 0 if k is None else int(k[row])}
            lines.append(
                {
                    "key": key,
                    "position": request.num_tokens,
                    "token": int(sampled[row]),
                    "logprob": float(processed[row, sampled[row]]),
                    "experts": [layer[int(ends[row]) - 1] for layer in experts],
                    "kept": _kept(before[row], **sizes),
                }
            )
        log.write("".join(json.dumps(line) + "\n" for line in lines))
        return sampled, processed

    sampler.forward = forward


def _kept(logits: torch.Tensor, p: float, k: int) -> list[int] | None:
    """The ids that top-k and then top-p leave; None for all."""
    ordered, ids = logits.sort(descending=True)
    if 0 < k < len(ids):
        ordered, ids = ordered[:k], ids[:k]
    probs = ordered.softmax(dim=-1)
    # A token stays if those before it hold less than p.
    stay = probs.cumsum(dim=-1) - probs < p
    return None if bool(stay.all()) and len(ids) == len(logits) else sorted(ids[stay].tolist())
