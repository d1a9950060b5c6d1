"""Generation with vLLM; names are loaded when they are first used, so that importing this needs no engine."""

from typing import TYPE_CHECKING

from nemo_rl.lazy import names_of

if TYPE_CHECKING:
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration as VllmGeneration

__getattr__, __dir__ = names_of(__name__)
