"""What a rank of the tests of text towers runs."""

from __future__ import annotations

import os

import torch

from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.dtensor.dtensor_checks import check_policy
from nemo_rl.models.dtensor.export import tensor_metas
from nemo_rl.models.dtensor.parallelize import local_tensor
from nemo_rl.models.policy.model_config import auto_class, model_config
from tests.models.policy_ranks import ROWS, make_worker, run_config, shard_of, training_batch


def scored_and_trained(model: str) -> dict[str, object]:
    """Log-probabilities of the first sample, as transformers gives them and as the worker does of its samples; what a
    step changes, and the names of what is sent to engines.
    """
    cfg = run_config(model, int(os.environ["WORLD_SIZE"]))
    config = model_config(cfg.policy)
    check_policy(cfg.policy, config)
    data = training_batch()
    plain = auto_class(config).from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    ids = data["input_ids"][:1]
    with torch.no_grad():
        logits = plain(input_ids=ids).logits.float()
    wanted = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    worker = make_worker(cfg)
    before = {name: local_tensor(tensor).detach().clone() for name, tensor in worker.backend.scorer.named_parameters()}  # type: ignore[attr-defined]
    found = worker.get_logprobs(shard_of(worker, data, training=False))["logprobs"]
    result = worker.train(shard_of(worker, data), ClippedPGLossFn(cfg.loss_fn), eval_mode=False, gbs=ROWS, mbs=2)
    after = dict(worker.backend.scorer.named_parameters())  # type: ignore[attr-defined]
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, local_tensor(after[name]))]
    return {
        "wanted": wanted.tolist(),
        "found": found[:, 1:].tolist(),
        "changed": changed,
        "grad_norm": float(result["grad_norm"]),
        "sent": [meta.name for meta in tensor_metas(worker.backend.scorer, torch.float32)],  # type: ignore[attr-defined]
    }
