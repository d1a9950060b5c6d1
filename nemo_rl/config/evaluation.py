"""The configuration of an evaluation (`eval.*`, `generation.*`, `data.*`, ...), and the rules between its keys.

A tree of its own, as NeMo-RL's evaluator has it. Knows the schema only; each rule gives lines that name keys, values
and a way out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.env import EnvConfig
from nemo_rl.config.generation import GenerationConfig, TopK, VllmConfig
from nemo_rl.config.generation_rules import engines_share_accelerators
from nemo_rl.config.infrastructure import ClusterConfig
from nemo_rl.config.master import CompleteConfig
from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.config.section import DefaultFrom, Section

_BASE_MODEL = "Qwen/Qwen2.5-1.5B"


class EvalConfig(Section):
    """`eval.*`."""

    metric: Literal["pass@k", "cons@k"] = Field(
        "pass@k", description="Share of problems solved by one of k answers, or by the majority of k answers."
    )
    num_tests_per_prompt: PositiveInt = Field(
        1, description="Answers drawn per problem; k_value of them count at a time, over all choices."
    )
    k_value: PositiveInt = Field(1, description="k of the metric.")
    seed: int = Field(42, description="Seed of every answer.")
    save_path: str | None = Field(
        None, description="Directory for summary.json and samples.jsonl; null writes neither."
    )


class EvalGenerationConfig(GenerationConfig):
    """`generation.*`."""

    model_name: str = Field(
        _BASE_MODEL,
        description="Hugging Face id or directory, a checkpoint (step_N), or a checkpoint_dir, whose latest is taken.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    num_prompts_per_step: int = Field(-1, ge=-1, description="Problems in flight at a time; -1 is all of them.")
    max_new_tokens: Annotated[PositiveInt, DefaultFrom("${generation.vllm_cfg.max_model_len}")] = Field(
        2048, description="Tokens per response and turn."
    )
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    val_temperature: Annotated[float, DefaultFrom("${generation.temperature}")] = Field(
        0.0, ge=0, description="Follows temperature."
    )
    val_top_p: Annotated[float, DefaultFrom("${generation.top_p}")] = Field(
        1.0, gt=0, le=1, description="Follows top_p."
    )
    val_top_k: Annotated[TopK, DefaultFrom("${generation.top_k}")] = Field(None, description="Follows top_k.")
    vllm_cfg: VllmConfig = Field(
        VllmConfig(precision="bfloat16", max_model_len=2048), description="Options of the vLLM engine."
    )


class EvalTokenizerConfig(TokenizerConfig):
    """`tokenizer.*`."""

    name: Annotated[str, DefaultFrom("${generation.model_name}")] = Field(
        _BASE_MODEL, description="Hugging Face id or path of the tokenizer."
    )


class EvalDataConfig(DatasetConfig):
    """`data.*`: one dataset, whose every row is a problem."""

    dataset_name: str = Field("AIME2024", description="Name in the registry, or the dotted path of a class.")
    max_input_seq_length: Annotated[PositiveInt, DefaultFrom("${generation.vllm_cfg.max_model_len}")] = Field(
        2048, description="Longest prompt, in tokens."
    )
    max_rollout_turns: PositiveInt = Field(1, description="Rounds of answer and environment per sample.")


class EvalMasterConfig(CompleteConfig):
    """An evaluation."""

    eval: EvalConfig = Field(EvalConfig(), description="What is measured.")
    generation: EvalGenerationConfig = Field(EvalGenerationConfig(), description="The model and its engine.")
    tokenizer: EvalTokenizerConfig = Field(EvalTokenizerConfig(), description="The tokenizer.")
    data: EvalDataConfig = Field(EvalDataConfig(), description="The problems.")
    env: EnvConfig = Field(EnvConfig(), description="Environments, by name.")
    cluster: ClusterConfig = Field(ClusterConfig(), description="Accelerator slots.")


def k_answers_are_drawn(config: EvalMasterConfig) -> Iterator[str]:
    drawn, k = config.eval.num_tests_per_prompt, config.eval.k_value
    if k > drawn:
        yield f"eval.k_value is {k}, but eval.num_tests_per_prompt draws {drawn} answers per problem; draw at least {k}"


def several_answers_may_differ(config: EvalMasterConfig) -> Iterator[str]:
    generation = config.generation
    greedy = [name for name, value in (("temperature", 0), ("top_k", 1)) if generation[name] == value]
    if greedy and config.eval.num_tests_per_prompt > 1:
        yield (
            f"eval.num_tests_per_prompt is {config.eval.num_tests_per_prompt}, but generation.{greedy[0]} "
            f"{generation[greedy[0]]:g} gives the same answer every time; raise it or draw one answer"
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
        yield (
            f"cluster.gpus_per_node is {cluster.gpus_per_node}, but cluster.cpu_slots offers "
            f"{cluster.cpu_slots} slots per node"
        )


def engines_of_an_accelerator_are_possible(config: EvalMasterConfig) -> Iterator[str]:
    yield from engines_share_accelerators(config.generation.vllm_cfg, "generation.vllm_cfg")


def responses_fit(config: EvalMasterConfig) -> Iterator[str]:
    generation = config.generation
    if generation.max_new_tokens > generation.vllm_cfg.max_model_len:
        yield (
            f"generation.max_new_tokens is {generation.max_new_tokens}, above "
            f"generation.vllm_cfg.max_model_len {generation.vllm_cfg.max_model_len}"
        )


EVAL_RULES: tuple[Callable[[EvalMasterConfig], Iterator[str]], ...] = (
    k_answers_are_drawn,
    several_answers_may_differ,
    engines_divide_the_slots,
    engines_of_an_accelerator_are_possible,
    responses_fit,
)
