"""Engines in the shape in which NeMo-RL's documentation makes them: a cluster and `policy.generation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl.compat.loops import ShapeChanged
from nemo_rl.config import ClusterConfig, GenerationConfig, MasterConfig
from nemo_rl.data.model_tokens import listed_stop_ids
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.vllm import vllm_generation
from nemo_rl.models.generation.vllm.engine_actors import start_engine_actors


class ClusterVllmGeneration(vllm_generation.VllmGeneration):
    """Engines on the slots of a cluster, up when this returns.

    Args:
        cluster: The slots.
        config: `policy.generation`, with `model_name`; what `configure_generation_config` fills in is taken.

    Raises ShapeChanged: an option that is not here. Made of `EngineActors`, it is the class that runs use.
    """

    def __init__(
        self,
        cluster: Any,
        config: GenerationConfig | Mapping[str, object] | None = None,
        name_prefix: str = "vllm_policy",
        workers_per_node: int | None = None,
        defer_model_load: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(cluster, RayVirtualCluster):
            super().__init__(cluster, **options)
            return
        if config is None or workers_per_node is not None or defer_model_load or options:
            raise ShapeChanged(
                "VllmGeneration(cluster, config, name_prefix): every slot of the cluster is used, and models are "
                "loaded at once; leave out workers_per_node, defer_model_load and further options"
            )
        given: dict[str, Any] = config.to_dict() if isinstance(config, GenerationConfig) else dict(config)
        pad_token_id, model = given.pop("_pad_token_id", None), given.pop("model_name", None)
        if not isinstance(model, str):
            raise ShapeChanged("VllmGeneration(cluster, config): config has no model_name")
        policy: dict[str, object] = {"model_name": model, "generation": given}
        longest = dict(given.get("vllm_cfg") or {}).get("max_model_len")
        if longest is not None:
            policy["max_total_sequence_length"] = longest
        checked = MasterConfig.read({"policy": policy}).policy
        tokenizer = get_tokenizer(checked.tokenizer, trust_remote_code=checked.trust_remote_code)
        colocated = checked.generation.colocated.enabled and cluster.max_colocated_worker_groups > 1
        actors = start_engine_actors(
            cluster,
            checked,
            ClusterConfig(),
            seed=MasterConfig().grpo.seed,
            colocated=colocated,
            refits=checked.generation.vllm_cfg.load_format == "dummy",
            name_prefix=name_prefix,
        )
        super().__init__(
            actors,
            pad_token_id=tokenizer.pad_token_id if pad_token_id is None else pad_token_id,
            stop_token_ids=checked.generation.stop_token_ids or listed_stop_ids(tokenizer, model),
        )
        self.wait_until_started()
