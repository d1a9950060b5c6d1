"""A request that moves between shards: the tokens it keeps when its shard is taken away, and the rest of its prompt.

Pure: results of pieces in, the next piece out. Invariants: the joined pieces are the response, with each token's
log-probability, version, routes and mask; no random draw of one piece is repeated in the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from nemo_rl.models.generation.decisions import RouteRecord, SamplingMasks, TokenRoutes
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, NewTokens, VersionSpan

OnPreempt = Literal["continue", "redo_turn"]


class ResumableRequest:
    """A request that may be served in pieces. `on_preempt`: `continue` keeps the tokens of an interrupted piece;
    `redo_turn` drops them.
    """

    def __init__(self, request: GenerationRequest, on_preempt: OnPreempt = "continue") -> None:
        self._request = request
        self._keeps = on_preempt == "continue"
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._routes = RouteRecord()
        self._masks: SamplingMasks | None = None
        self._cuts = 0
        self._drawn: GenerationResult | None = None  # what is known of the piece that runs

    @property
    def kept(self) -> int:
        """Tokens of earlier pieces."""
        return len(self._token_ids)

    @property
    def cuts(self) -> int:
        """How often a piece was cut short."""
        return self._cuts

    def next_request(self) -> GenerationRequest:
        """The piece that is still to be served."""
        if not self._cuts:
            return self._request
        request, kept = self._request, self.kept
        return replace(
            request,
            request_id=f"{request.request_id}+{self._cuts}",
            prompt_ids=[*request.prompt_ids, *self._token_ids],
            max_new_tokens=request.max_new_tokens - kept,
            seed=request.seed if request.seed is None or not kept else _further_seed(request.seed, kept),
            # The position that the next token is drawn from counts as that piece computes it.
            record_from=None
            if request.record_from is None
            else min(self._routes.known_until(request.record_from), len(request.prompt_ids) + kept - 1),
        )

    def extend(self, new: NewTokens) -> None:
        """The piece that runs has drawn some tokens. They were passed on, so that they stay part of the response even
        if nothing comes back from their shard.
        """
        before = self._drawn or GenerationResult(new.request_id, [], [], "abort")
        before.token_ids.extend(new.token_ids)
        before.logprobs.extend(new.logprobs)
        self._drawn = replace(before, spans=new.spans)

    def cut(self, piece: GenerationResult | None) -> None:
        """A piece ended because its shard left; None when nothing came back from it."""
        self._cuts += 1
        piece = piece or self._drawn
        self._drawn = None
        if piece is not None and self._keeps:
            self._append(piece)

    def finish(self, piece: GenerationResult) -> GenerationResult:
        """The whole response, once its last piece is complete."""
        if not self._cuts:
            return piece
        # A response that fills the context between two pieces ended by its length, although the last piece found no
        # room.
        reason = "length" if piece.finish_reason == "no_room" and self._token_ids else piece.finish_reason
        self._append(piece)
        return replace(
            piece,
            request_id=self._request.request_id,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            spans=tuple(self._spans),
            finish_reason=reason,
            routes=self._all_routes(),
            masks=self._masks,
        )

    @property
    def complete(self) -> bool:
        """Whether what was kept is already as long as the request allows."""
        return self.kept >= self._request.max_new_tokens

    def as_it_is(self, shard: int) -> GenerationResult:
        """The kept tokens as a response that ended by its length."""
        return GenerationResult(
            self._request.request_id,
            self._token_ids,
            self._logprobs,
            "length",
            tuple(self._spans),
            shard,
            self._all_routes(),
            self._masks,
        )

    def _all_routes(self) -> TokenRoutes | None:
        return self._routes.since(self._request.record_from or 0, len(self._request.prompt_ids) + self.kept)

    def _append(self, piece: GenerationResult) -> None:
        start = self.kept
        self._token_ids = [*self._token_ids, *piece.token_ids]
        self._logprobs = [*self._logprobs, *piece.logprobs]
        if piece.routes is not None:
            self._routes.add(piece.routes)
            if piece.token_ids:
                self._routes.correct(len(self._request.prompt_ids) + start - 1, piece.routes)
        if piece.masks is not None:
            self._masks = piece.masks if self._masks is None else self._masks.then(piece.masks)
        for span in piece.spans:
            moved = replace(span, start=span.start + start, end=span.end + start)
            last = self._spans[-1] if self._spans else None
            if last is not None and (last.version, last.mixed_kv, last.end) == (
                moved.version,
                moved.mixed_kv,
                moved.start,
            ):
                self._spans[-1] = replace(last, end=moved.end)
            else:
                self._spans.append(moved)


def _further_seed(seed: int, kept: int) -> int:
    # A restarted generator would draw the first piece's numbers again.
    return int.from_bytes(hashlib.blake2b(f"{seed}+{kept}".encode(), digest_size=8).digest(), "little") & 0x7FFFFFFF


def safe_cut(token_ids: Sequence[int], texts: Sequence[str], decode: Callable[[list[int]], str]) -> int:
    """How many tokens can be kept so that no text of `texts` (stop strings, bad words) has begun in them without being
    complete: the engine searches only what it generates itself, and would miss one that straddles two pieces.
    """
    count = len(token_ids)
    while count and texts:
        said = decode(list(token_ids[:count]))
        # Half of a character decodes to a replacement character, so its text is not known yet.
        if not said.endswith("\ufffd") and not any(
            said.endswith(text[:length]) for text in texts for length in range(1, len(text))
        ):
            break
        count -= 1
    return count
