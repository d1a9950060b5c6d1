"""Which tokens of a running request are part of its response whatever happens next.

A stop string or a bad word may begin in the last tokens, and a request that restarts elsewhere keeps none. Invariant:
tokens that were passed on are never taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, NewTokens
from nemo_rl.models.generation.resumable_request import safe_cut
from nemo_rl.models.generation.vllm.request_state import VersionTracker, new_tokens

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_CONTEXT = 8  # tokens before a text that may belong to its first character


class FinalTokens:
    """The final tokens of one engine's requests. `bad_words`: strings that are never generated.

    Attributes:
        restarted: Requests that go on elsewhere from their first token.
    """

    def __init__(self, bad_words: Sequence[str] | None) -> None:
        self._bad_words = tuple(bad_words or ())
        self.restarted: set[str] = set()

    def kept(
        self, request: GenerationRequest, result: GenerationResult, passed_on: int, engine: AsyncLLM
    ) -> GenerationResult:
        """What another shard goes on from, of a request that was cut. `passed_on`: tokens that `new` gave before.
        `engine`: vLLM's, whose tokenizer decodes what stop strings are searched in.
        """
        # One that was ending when it was released may have passed tokens on, and those are never taken back.
        restarts = request.request_id in self.restarted and not passed_on
        return result.first(0 if restarts else self._safe(request, result.token_ids, engine))

    def new(
        self,
        request: GenerationRequest,
        completion: CompletionOutput,
        start: int,
        engine: AsyncLLM,
        versions: VersionTracker,
    ) -> NewTokens | None:
        """Tokens after the first `start` of a running request that are final; None where there are none. `versions`:
        which weights drew which token.
        """
        if completion.finish_reason is not None or request.request_id in self.restarted:
            return None
        # No stop string begins in what was passed on, so that only later tokens are searched for one.
        context = max(0, start - _CONTEXT)
        count = context + self._safe(request, list(completion.token_ids[context:]), engine)
        return new_tokens(request.request_id, completion, versions.spans(request.request_id, completion), start, count)

    def _safe(self, request: GenerationRequest, token_ids: list[int], engine: AsyncLLM) -> int:
        looked_for = (*request.stop_strings, *self._bad_words)
        decode = engine.output_processor.tokenizer.decode if looked_for else str
        return safe_cut(token_ids, looked_for, decode)
