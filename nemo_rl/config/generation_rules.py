"""Rules between the keys of generation: placement of its engines, sharing of accelerators, sampling.

Knows the schemas only. Invariant: no rule depends on another's result.
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config.errors import Problem
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.master import MasterConfig, RootConfig, SFTMasterConfig
from nemo_rl.config.rules import caution, rule
from nemo_rl.config.schema import shown
from nemo_rl.config.section import not_built
from nemo_rl.config.world_sizes import engine_fits, generation_slots_per_node, generation_world_size

_OF_FP8 = (
    "use_deep_gemm",
    "num_first_layers_in_bf16",
    "num_last_layers_in_bf16",
    "quantization_ignored_layer_kws",
    "is_mx",
)
# Weights that engines keep as one.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@rule
def generation_has_its_own_accelerators(config: MasterConfig) -> Iterator[str]:
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if colocated.enabled:
        return
    key = "policy.generation.colocated.resources"
    gpus, nodes = colocated.resources.gpus_per_node, colocated.resources.num_nodes
    if cluster.num_nodes == 1:
        if gpus is None or not 0 < gpus < cluster.gpus_per_node:
            yield (
                f"{key}.gpus_per_node is {shown(gpus)}; without colocation it must leave training one of "
                f"cluster.gpus_per_node={cluster.gpus_per_node}"
            )
        if nodes not in (None, 1):
            yield f"{key}.num_nodes is {nodes}, but the cluster has one node"
        return
    if nodes is None or not 0 < nodes < cluster.num_nodes:
        yield (
            f"{key}.num_nodes is {shown(nodes)}; without colocation it must leave training at least one "
            f"of cluster.num_nodes={cluster.num_nodes}"
        )
    if gpus not in (None, cluster.gpus_per_node):
        yield (
            f"{key}.gpus_per_node is {gpus}; in a cluster of several nodes generation takes whole nodes: "
            f"{cluster.gpus_per_node}"
        )


@rule
def engines_fit_into_nodes(config: MasterConfig) -> Iterator[Problem]:
    vllm, slots = config.policy.generation.vllm_cfg, generation_slots_per_node(config)
    engine = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    if config.policy.generation.backend != "vllm":
        return
    nodes = generation_world_size(config) // slots if slots > 0 else 0
    if slots > 0 and not engine_fits(engine, slots, nodes):
        yield (
            f"policy.generation.vllm_cfg: tensor_parallel_size * pipeline_parallel_size is {engine}, which neither "
            f"divides the {slots} generating accelerators of a node nor is all accelerators of some of the {nodes} "
            "nodes that generate, in equal groups; change one of the two sizes, or how many accelerators generate"
        )
    if vllm.expert_parallel_size > 1 and vllm.expert_parallel_size % vllm.tensor_parallel_size:
        yield (
            f"policy.generation.vllm_cfg.expert_parallel_size is {vllm.expert_parallel_size}, "
            f"which is not a multiple of tensor_parallel_size {vllm.tensor_parallel_size}"
        )
    elif vllm.expert_parallel_size > vllm.tensor_parallel_size:
        yield not_built(
            "policy.generation.vllm_cfg.expert_parallel_size",
            vllm.expert_parallel_size,
            "experts shared among several engines",
            f"the ranks of one engine share them: tensor_parallel_size {vllm.tensor_parallel_size}, or 1",
        )


@rule
def fp8_engines_run_on_gpus(config: MasterConfig | EvalMasterConfig) -> Iterator[str]:
    is_run = isinstance(config, MasterConfig)
    vllm = (config.policy.generation if is_run else config.generation).vllm_cfg
    key = f"{'policy.' if is_run else ''}generation.vllm_cfg"
    if vllm.precision != "fp8":
        for name in _OF_FP8:
            if getattr(vllm, name):
                yield f"{key}.{name} is for {key}.precision fp8, which is {vllm.precision}; leave it out"
        return
    for group in _FUSED:
        named = [any(part in name for part in vllm.quantization_ignored_layer_kws) for name in group]
        if any(named) and not all(named):
            yield (
                f"{key}.quantization_ignored_layer_kws: engines keep {', '.join(group)} in one layer, which is "
                "quantised as a whole; name all of them, or none"
            )
    if config.cluster.device == "cpu":
        yield fp8_needs_gpus(key, "cluster.device is cpu")
    if vllm.is_mx and vllm.use_deep_gemm:
        yield f"{key}.use_deep_gemm: DeepGEMM's kernels multiply blocks of 128 x 128, and is_mx is true; leave one out"


def fp8_needs_gpus(key: str, why: str) -> str:
    """The message for fp8 engines on CPU slots. `key`: of the engines' section."""
    return f"{key}.precision: fp8: engines quantise to fp8 on GPUs alone, and {why}; set it to bfloat16"


@rule
def engines_share_accelerators(config: MasterConfig | EvalMasterConfig) -> Iterator[str]:
    is_run = isinstance(config, MasterConfig)
    vllm = (config.policy.generation if is_run else config.generation).vllm_cfg
    if vllm.engines_per_gpu == 1:
        return
    asked = f"{'policy.' if is_run else ''}generation.vllm_cfg.engines_per_gpu is {vllm.engines_per_gpu}"
    ranks = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    if ranks > 1:
        yield (
            f"{asked}, and tensor_parallel_size * pipeline_parallel_size is {ranks}: only engines of one rank share "
            "an accelerator; set both sizes to 1, or engines_per_gpu to 1"
        )
    if vllm.enable_expert_parallel or vllm.expert_parallel_size > 1:
        yield (
            f"{asked}, and the ranks of an engine share experts (enable_expert_parallel or expert_parallel_size): only "
            "engines of one rank share an accelerator; switch expert parallelism off, or set engines_per_gpu to 1"
        )


@rule
def weights_reach_engines_that_share(config: MasterConfig) -> Iterator[str]:
    generation = config.policy.generation
    if generation.vllm_cfg.engines_per_gpu == 1 or generation.colocated.enabled:
        return
    asked = (
        f"policy.generation.vllm_cfg.engines_per_gpu is {generation.vllm_cfg.engines_per_gpu}, and NCCL cannot put two "
        "ranks on one GPU"
    )
    if config.weight_sync.transport == "nccl":
        yield f"weight_sync.transport is nccl: {asked}; set weight_sync.transport to auto, or engines_per_gpu to 1"
    elif config.cluster.num_nodes > 1:
        yield (
            f"policy.generation.colocated.enabled is false and cluster.num_nodes {config.cluster.num_nodes}, so that "
            f"weights travel between nodes by NCCL: {asked}; set engines_per_gpu to 1, or colocate"
        )


@rule
def log_probabilities_are_of_what_was_sampled(config: MasterConfig) -> Iterator[str]:
    generation = config.policy.generation
    if generation.temperature == 0:
        yield (
            "policy.generation.temperature is 0: every sample of a group would be the same greedy one, with nothing to "
            "learn from; sample with a temperature above 0 (val_temperature may be 0)"
        )
        return
    if generation.top_k == 1:
        yield (
            "policy.generation.top_k is 1: every sample of a group would be the same greedy one, with nothing to learn "
            "from; leave it null, or take a larger one (val_top_k may be 1)"
        )
        return
    plain = {"temperature": 1, "top_p": 1, "top_k": None}
    changed = [f"{name} {generation[name]}" for name, value in plain.items() if generation[name] != value]
    if generation.vllm_cfg.logprobs_mode == "raw_logprobs" and changed:
        yield (
            "policy.generation.vllm_cfg.logprobs_mode is raw_logprobs, of before temperature and filters, but "
            f"policy.generation samples with {', '.join(changed)} and training scores what was sampled; set it to "
            "processed_logprobs"
        )


_ROUTES, _MASKS = "policy.router_replay.enabled", "policy.sampling_mask_replay"


@rule
def decisions_of_generation_can_be_replayed(config: RootConfig) -> Iterator[Problem]:
    generation = config.policy.generation
    asked = {_ROUTES: config.policy.router_replay.enabled, _MASKS: config.policy.sampling_mask_replay}
    for key in (key for key, on in asked.items() if on):
        if isinstance(config, SFTMasterConfig):
            yield f"{key} is true, but supervised finetuning generates nothing that could be replayed; set it to false"
        elif generation.vllm_cfg.pipeline_parallel_size > 1:
            size = generation.vllm_cfg.pipeline_parallel_size
            why = f"policy.generation.vllm_cfg.pipeline_parallel_size is {size}; set it to 1"
            yield not_built(key, True, "replay with engines of several pipeline stages", why)
        elif generation.vllm_kwargs.get("speculative_config"):
            why = "leave speculative_config out of policy.generation.vllm_kwargs"
            yield not_built(key, True, "replay with speculative decoding", why)


@rule
def sampling_masks_hold_something(config: MasterConfig) -> Iterator[Problem]:
    generation = config.policy.generation
    if not config.policy.sampling_mask_replay:
        return
    if generation.bad_words:
        yield not_built(_MASKS, True, "sampling masks with policy.generation.bad_words", "leave bad_words null")
    if generation.top_p == 1 and generation.top_k is None:
        yield (
            f"{_MASKS} is true, but policy.generation.top_p is 1 and top_k null: every token is drawn from the whole "
            "vocabulary, and there is no mask to record; set it to false, or set top_p or top_k"
        )


@rule
def validation_samples_may_differ(config: MasterConfig) -> Iterator[str]:
    drawn, generation = config.grpo.val_num_generations_per_prompt, config.policy.generation
    greedy = [name for name, value in (("val_temperature", 0), ("val_top_k", 1)) if generation[name] == value]
    if drawn > 1 and greedy:
        yield (
            f"grpo.val_num_generations_per_prompt is {drawn}, but policy.generation.{greedy[0]} is "
            f"{generation[greedy[0]]:g}: all samples of a validation prompt would be the same greedy one; draw one, or "
            "sample"
        )


@rule
def responses_fit_into_engines(config: MasterConfig) -> Iterator[str]:
    generation = config.policy.generation
    if generation.backend == "vllm" and generation.max_new_tokens > generation.vllm_cfg.max_model_len:
        yield (
            f"policy.generation.max_new_tokens is {generation.max_new_tokens}, above "
            f"policy.generation.vllm_cfg.max_model_len {generation.vllm_cfg.max_model_len}, the longest sequence of an "
            "engine, prompt included; lower one or raise the other"
        )


@caution
def lengths_differ(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    longest, engine = policy.max_total_sequence_length, policy.generation.vllm_cfg.max_model_len
    if policy.generation.max_new_tokens > longest:
        yield (
            f"policy.generation.max_new_tokens is {policy.generation.max_new_tokens}, but prompt and responses "
            f"together end at policy.max_total_sequence_length {longest}"
        )
    if engine < longest and policy.generation.backend == "vllm":
        yield (
            f"policy.generation.vllm_cfg.max_model_len is {engine}, below policy.max_total_sequence_length {longest}: "
            f"samples end at {engine} tokens"
        )


@rule
def the_endpoint_can_be_reached(config: MasterConfig) -> Iterator[str]:
    generation = config.policy.generation
    server = generation.vllm_cfg.http_server
    if not generation.vllm_cfg.expose_http_server:
        return
    key = "policy.generation.vllm_cfg"
    if server.token_variable is None and not server.is_local:
        yield (
            f"{key}.http_server.host is {server.host}, which other machines reach; name an environment variable that "
            f"holds a token in {key}.http_server.token_variable"
        )
    if config.grpo.rollout_replay is not None:
        yield f"{key}.expose_http_server needs engines; leave grpo.rollout_replay out"


@rule
def an_evaluation_serves_nothing(config: EvalMasterConfig) -> Iterator[str]:
    if config.generation.vllm_cfg.expose_http_server:
        yield "generation.vllm_cfg.expose_http_server is for runs that train; leave it false"


@rule
def k_answers_are_drawn(config: EvalMasterConfig) -> Iterator[str]:
    drawn, k = config.eval.num_tests_per_prompt, config.eval.k_value
    if k > drawn:
        yield f"eval.k_value is {k}, but eval.num_tests_per_prompt draws {drawn} answers per problem; draw at least {k}"


@rule
def several_answers_may_differ(config: EvalMasterConfig) -> Iterator[str]:
    generation = config.generation
    greedy = [name for name, value in (("temperature", 0), ("top_k", 1)) if generation[name] == value]
    if greedy and config.eval.num_tests_per_prompt > 1:
        yield (
            f"eval.num_tests_per_prompt is {config.eval.num_tests_per_prompt}, but generation.{greedy[0]} "
            f"{generation[greedy[0]]:g} gives the same answer every time; raise it or draw one answer"
        )


@rule
def engines_divide_the_slots(config: EvalMasterConfig) -> Iterator[str]:
    vllm, cluster = config.generation.vllm_cfg, config.cluster
    width, slots = vllm.tensor_parallel_size * vllm.pipeline_parallel_size, cluster.gpus_per_node
    if slots % width and (width % slots or cluster.num_nodes % (width // slots)):
        yield (
            f"generation.vllm_cfg: tensor_parallel_size * pipeline_parallel_size is {width}, which neither divides "
            f"cluster.gpus_per_node {slots} nor is all accelerators of some of the cluster.num_nodes "
            f"{cluster.num_nodes} nodes, in equal groups"
        )


@rule
def responses_fit(config: EvalMasterConfig) -> Iterator[str]:
    generation = config.generation
    if generation.max_new_tokens > generation.vllm_cfg.max_model_len:
        yield (
            f"generation.max_new_tokens is {generation.max_new_tokens}, above "
            f"generation.vllm_cfg.max_model_len {generation.vllm_cfg.max_model_len}"
        )
