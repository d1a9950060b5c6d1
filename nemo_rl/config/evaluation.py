"""The configuration of an evaluation (`eval.*`, `generation.*`, `data.*`, ...), and the rules between its keys.

A tree of its own, as NeMo-RL's evaluator has it. Knows the schema only; each rule gives lines that name keys, values
and a way out.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.env import EnvConfig
from nemo_rl.config.generation import GenerationConfig, TopK, VllmConfig
from nemo_rl.config.infrastructure import ClusterConfig
from nemo_rl.config.master import CompleteConfig
from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.config.section import DefaultFrom, Section

_BASE_MODEL = "Qwen/Qwen2.5-1.5B"


class EvalConfig(Section):
    """`eval.*`."""

    metric: Literal["pass@k", "cons@k", "solved@k", "majority@k"] = "pass@k"
    """pass@k: chance that one of k answers is right, where rewards between 0 and 1 count as parts of an answer;
    solved@k: that one has a reward of at least 1. cons@k: that the commonest of k answers is right, of equally common
    ones the first; majority@k: equally common ones share the vote. pass@k and cons@k are NeMo-RL's.
    """
    num_tests_per_prompt: PositiveInt = 1
    """Answers drawn per problem; k_value of them count at a time, over all choices."""
    k_value: PositiveInt = Field(1, description="k of the metric.")
    seed: int = Field(42, description="Seed of every answer.")
    save_path: str | None = None
    """Directory for summary.json and samples.jsonl, and for config.json and evaluation_data.json as NeMo-RL writes
    them; null writes none.
    """


class EvalGenerationConfig(GenerationConfig):
    """`generation.*`."""

    model_name: str = _BASE_MODEL
    """Hugging Face id or directory, a checkpoint (step_N), or a checkpoint_dir, whose latest is taken."""
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    num_prompts_per_step: int = Field(-1, ge=-1, description="Problems in flight at a time; -1 is all of them.")
    max_new_tokens: Annotated[PositiveInt, DefaultFrom("${generation.vllm_cfg.max_model_len}")] = 2048
    """Tokens per response and turn."""
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    val_temperature: Annotated[float, DefaultFrom("${generation.temperature}")] = Field(0.0, ge=0)
    """Follows temperature."""
    val_top_p: Annotated[float, DefaultFrom("${generation.top_p}")] = Field(1.0, gt=0, le=1)
    """Follows top_p."""
    val_top_k: Annotated[TopK, DefaultFrom("${generation.top_k}")] = Field(None, description="Follows top_k.")
    vllm_cfg: VllmConfig = VllmConfig(precision="bfloat16", max_model_len=2048)
    """Options of the vLLM engine."""


class EvalTokenizerConfig(TokenizerConfig):
    """`tokenizer.*`."""

    name: Annotated[str, DefaultFrom("${generation.model_name}")] = _BASE_MODEL
    """Hugging Face id or path of the tokenizer."""


class EvalDataConfig(DatasetConfig):
    """`data.*`: one dataset, whose every row is a problem."""

    dataset_name: str = Field("AIME2024", description="Name in the registry, or the dotted path of a class.")
    max_input_seq_length: Annotated[PositiveInt, DefaultFrom("${generation.vllm_cfg.max_model_len}")] = 2048
    """Longest prompt, in tokens."""
    max_rollout_turns: PositiveInt = Field(1, description="Rounds of answer and environment per sample.")


class EvalMasterConfig(CompleteConfig):
    """An evaluation."""

    eval: EvalConfig = Field(EvalConfig(), description="What is measured.")
    generation: EvalGenerationConfig = Field(EvalGenerationConfig(), description="The model and its engine.")
    tokenizer: EvalTokenizerConfig = Field(EvalTokenizerConfig(), description="The tokenizer.")
    data: EvalDataConfig = Field(EvalDataConfig(), description="The problems.")
    env: EnvConfig = Field(EnvConfig(), description="Environments, by name.")
    cluster: ClusterConfig = Field(ClusterConfig(), description="Accelerator slots.")
