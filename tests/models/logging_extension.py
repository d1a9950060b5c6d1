"""A worker extension whose engine writes down, by itself, what each of its steps drew: which experts, which tokens were
left to draw from, and what was drawn; and what happened to requests on the way.

Reads the runner's own state, the routers' own results and the logits before the filters, not the recorder.
"""

from __future__ import annotations

import json
import os
import time
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
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    log = open(f"{os.environ['NRL_TEST_DECISIONS']}.{os.getpid()}", "a", buffering=1)  # noqa: SIM115
    experts: list[list[list[int]]] = []
    computed: dict[str, int] = {}
    for module in runner.get_model().modules():
        if type(module).__name__ != "MoERunner":
            continue

        def select(*args: Any, choose: Any = module.router._compute_routing, **kwargs: Any) -> Any:
            weights, ids = choose(*args, **kwargs)
            experts.append(ids.tolist())
            return weights, ids

        module.router._compute_routing = select

    execute = runner.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        experts.clear()
        return execute(*args, **kwargs)

    runner.execute_model = execute_model
    sampler = runner.sampler.topk_topp_sampler
    draw = sampler.forward

    def forward(logits: torch.Tensor, generators: Any, k: Any, p: Any) -> Any:
        kept = apply_top_k_top_p(logits.clone(), k, p) > float("-inf")
        sampled, processed = draw(logits, generators, k, p)
        ends = runner.query_start_loc.np[1:].tolist()
        lines: list[dict[str, Any]] = []
        for row, name in enumerate(runner.input_batch.req_ids):
            request = runner.requests[name]
            key = (request.sampling_params.extra_args or {}).get(REQUEST)
            if key is None:
                continue
            start, partly = runner.input_batch.num_computed_tokens_cpu[row], bool(runner.discard_request_mask.np[row])
            happened = {
                "in parts": partly,
                "cached": name not in computed and start > 0,
                "again": start < computed.get(name, 0),
            }
            lines += [{"key": key, "happened": what} for what, so in happened.items() if so]
            computed[name] = int(start) + 1
            if partly:
                continue
            ids = kept[row].nonzero().flatten().tolist()
            lines.append(
                {
                    "key": key,
                    "time": time.time(),
                    "position": request.num_tokens,
                    "drawn": [int(sampled[row]), float(processed[row, sampled[row]])],
                    "experts": [layer[ends[row] - 1] for layer in experts],
                    "kept": [] if len(ids) == kept.shape[1] else ids,
                }
            )
        log.write("".join(json.dumps(line) + "\n" for line in lines))
        return sampled, processed

    sampler.forward = forward
