"""Rules between the keys of an evaluation. Knows the schema only; each rule gives lines that name keys, values and a way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nemo_rl.config.evaluation import EvalMasterConfig


def k_answers_are_drawn(config: EvalMasterConfig) -> Iterator[str]:
    drawn, k = config.eval.num_tests_per_prompt, config.eval.k_value
    if k > drawn:
        yield f"eval.k_value is {k}, but eval.num_tests_per_prompt draws {drawn} answers per problem; draw at least {k}"


def several_answers_may_differ(config: EvalMasterConfig) -> Iterator[str]:
    if config.generation.temperature == 0 and config.eval.num_tests_per_prompt > 1:
        yield (
            f"eval.num_tests_per_prompt is {config.eval.num_tests_per_prompt}, but generation.temperature 0 gives the same answer every time; "
            "raise the temperature or draw one answer"
        )


def engines_divide_the_slots(config: EvalMasterConfig) -> Iterator[str]:
    vllm, cluster = config.generation.vllm_cfg, config.cluster
    width = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    if cluster.gpus_per_node % width:
        yield (
            f"generation.vllm_cfg: tensor_parallel_size * pipeline_parallel_size is {width}, "
            f"which does not divide cluster.gpus_per_node {cluster.gpus_per_node}"
        )
    if cluster.device == "cpu" and cluster.gpus_per_node > cluster.cpu_slots:
        yield f"cluster.gpus_per_node is {cluster.gpus_per_node}, but cluster.cpu_slots offers {cluster.cpu_slots} slots per node"


def responses_fit(config: EvalMasterConfig) -> Iterator[str]:
    generation = config.generation
    if generation.max_new_tokens > generation.vllm_cfg.max_model_len:
        yield f"generation.max_new_tokens is {generation.max_new_tokens}, above generation.vllm_cfg.max_model_len {generation.vllm_cfg.max_model_len}"


EVAL_RULES: tuple[Callable[[EvalMasterConfig], Iterator[str]], ...] = (
    k_answers_are_drawn,
    several_answers_may_differ,
    engines_divide_the_slots,
    responses_fit,
)
