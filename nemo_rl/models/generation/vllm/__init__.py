"""Generation with vLLM. `VllmGeneration` is imported on first use, so that importing this package needs no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration as VllmGeneration

__all__ = ["VllmGeneration"]


def __getattr__(name: str) -> Any:
    if name == "VllmGeneration":
        from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

        return VllmGeneration
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
