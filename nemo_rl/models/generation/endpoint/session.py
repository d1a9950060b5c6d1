"""Sessions of an endpoint: the requests of one agent, and the token sequences that they make.

Pure: no vLLM, no HTTP. A request whose messages extend an earlier request and its answer continues that request's
tokens as they were sampled; any other request begins a branch. Invariants: a continued prompt begins with the tokens
of its parent's prompt and response; over the branches of a session every sampled token is trained exactly once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from nemo_rl.models.generation.decisions import RouteRecord
from nemo_rl.models.generation.interfaces import GenerationResult, GenerationSamplingParams

Message = Mapping[str, object]
# Fields of a tool call that the template shows; ids are the server's own.
_Call = tuple[str, object]


@dataclass(frozen=True)
class SessionPlan:
    """How the requests of a session are drawn."""

    sample_id: str  # whose session it is, for the run record and the ids of its requests
    sampling: GenerationSamplingParams
    max_new_tokens: int  # of each response
    max_total_tokens: int  # of a prompt and its response
    seed_of: Callable[[int], int | None] = lambda number: None  # seed of response `number` of the session
    own_seed: int | None = None  # mixed into a seed that the client sends, which samples of a group share
    stop_strings: tuple[str, ...] = ()
    records: bool = False  # whether generation's routes and sampling masks are wanted
    validates: bool = False  # whether nothing of it is trained


@dataclass(frozen=True)
class Turn:
    """One request and its response."""

    number: int
    parent: int | None  # the turn whose prompt and response this prompt begins with
    prompt_ids: list[int]
    result: GenerationResult
    template_ids: list[int]  # the prompt as the template gave it, with earlier answers tokenised again
    messages: tuple[Message, ...] = ()  # of the request; none where it was not a chat
    answer: Message | None = None  # answer as sent to the client

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response."""
        return [*self.prompt_ids, *self.result.token_ids]


@dataclass(frozen=True)
class BranchTurn:
    """One turn as a part of a branch."""

    turn: Turn
    context: list[int]  # tokens between the previous turn's response and this one's
    messages: tuple[Message, ...]  # those that are new in this turn
    trained: bool  # whether the response is trained in this branch


@dataclass(frozen=True)
class Branch:
    """One sequence of tokens, from the first prompt to the last response."""

    parts: tuple[BranchTurn, ...]

    @property
    def token_ids(self) -> list[int]:
        """All tokens."""
        return self.parts[-1].turn.token_ids


@dataclass
class Session:
    """Requests and answers of one agent. Used on one thread, read once it is closed."""

    plan: SessionPlan
    turns: list[Turn] = field(default_factory=list)
    asked: int = 0  # responses begun; numbers their seeds
    overflowed: bool = False  # whether a prompt was refused because it left no room
    last_overflowed: bool = False  # whether the last request was
    _by_history: dict[bytes, list[int]] = field(default_factory=dict)  # turns of equal texts, in their order

    def overflow(self) -> None:
        """Notes that a prompt was refused because it left no room."""
        self.overflowed = self.last_overflowed = True

    def begin(self, count: int) -> int:
        """The number of the first of `count` new responses."""
        first, self.asked = self.asked, self.asked + count
        return first

    def restart(self) -> None:
        """Drops all turns: the agent begins again."""
        self.turns.clear()
        self.overflowed = self.last_overflowed = False
        self._by_history.clear()

    def continued(self, messages: Sequence[Message], setup: object = None) -> Turn | None:
        """The turn whose messages and answer are the longest beginning of `messages`.

        Of answers with one text it is that whose reasoning the client sends back, or else the one whose calls have the
        ids that it sends, and among equal ones the latest. A reasoning that none of them had is another history.

        Args:
            messages: The request's.
            setup: Further inputs of the template, such as tools; histories differ where it does.
        """
        # Something must follow an answer for a request to continue it.
        for history in reversed(_histories(messages, setup)[:-1]):
            turns = [self.turns[number] for number in self._by_history.get(history, ())]
            fit = [turn for turn in turns if all(map(_same_reasoning, *self._sent_and_given(messages, turn)))]
            if fit:
                return max(fit, key=lambda turn: (self._calls_known(messages, turn), turn.number))
        return None

    def _sent_and_given(self, messages: Sequence[Message], turn: Turn) -> tuple[list[Message], list[Message]]:
        """The answers of a turn and of those before it, as a request has them and as they were given."""
        answered = [one for one in self.ancestors(turn) if one.answer is not None and len(one.messages) < len(messages)]
        return [messages[len(one.messages)] for one in answered], [one.answer or {} for one in answered]

    def _calls_known(self, messages: Sequence[Message], turn: Turn) -> int:
        """How many calls of tools in a request have the ids that they were given by the answers up to a turn."""
        pairs = zip(*self._sent_and_given(messages, turn), strict=True)
        return sum(len(_call_ids(sent) & _call_ids(given)) for sent, given in pairs)

    def add(
        self,
        prompt_ids: list[int],
        result: GenerationResult,
        *,
        template_ids: list[int] | None = None,
        messages: Sequence[Message] = (),
        answer: Message | None = None,
        setup: object = None,
    ) -> Turn:
        """Records a response. Its parent is found by the tokens."""
        parent = self.parent_of(prompt_ids)
        turn = Turn(
            len(self.turns),
            None if parent is None else parent.number,
            prompt_ids,
            result,
            prompt_ids if template_ids is None else template_ids,
            tuple(messages),
            answer,
        )
        self.turns.append(turn)
        if answer is not None:
            self._by_history.setdefault(_histories([*messages, answer], setup)[-1], []).append(turn.number)
        return turn

    def parent_of(self, prompt_ids: list[int]) -> Turn | None:
        """The turn whose prompt and response are the longest beginning of a prompt. Of equal ones the newest that
        nothing continues yet, so that agents that drew the same go on side by side.
        """
        # A turn without a response leaves nothing to continue.
        fit = [
            turn
            for turn in self.turns
            if turn.result.token_ids
            and len(turn.prompt_ids) + len(turn.result.token_ids) < len(prompt_ids)
            and prompt_ids[: len(turn.prompt_ids) + len(turn.result.token_ids)] == turn.token_ids
        ]
        continued = {turn.parent for turn in self.turns}
        return max(fit, key=lambda t: (len(t.token_ids), t.number not in continued, t.number), default=None)

    def ancestors(self, turn: Turn | None) -> list[Turn]:
        """The turns that a turn continues and itself, the oldest first."""
        chain: list[Turn] = []
        while turn is not None:
            chain.append(turn)
            turn = None if turn.parent is None else self.turns[turn.parent]
        return chain[::-1]

    def routes_of(self, turn: Turn | None) -> RouteRecord:
        """Recorded routes of a turn's prompt and response, once it is answered."""
        routes = RouteRecord()
        for one in self.ancestors(turn):
            if one.result.routes is not None:
                routes.add(one.result.routes)
        return routes

    def branches(self) -> list[Branch]:
        """One branch for each turn with tokens that no other continues, those with most sampled tokens first. A turn
        that several share is trained in the first.
        """
        answered = [turn for turn in self.turns if turn.result.token_ids]
        parents = {turn.parent for turn in answered}
        chains = [self.ancestors(leaf) for leaf in answered if leaf.number not in parents]
        chains.sort(key=lambda chain: -sum(len(turn.result.token_ids) for turn in chain))
        seen: set[int] = set()
        branches: list[Branch] = []
        for chain in chains:
            parts: list[BranchTurn] = []
            before: Turn | None = None
            for turn in chain:
                start = len(before.token_ids) if before is not None else 0
                context, messages = turn.prompt_ids[start:], _new_messages(turn, before)
                parts.append(BranchTurn(turn, context, messages, turn.number not in seen))
                seen.add(turn.number)
                before = turn
            branches.append(Branch(tuple(parts)))
        return branches


def exact_prompt(
    turn: Turn,
    rendered: Sequence[int],
    until_answer: Sequence[int],
    stop_token_ids: Collection[int],
    *,
    closes: bool = True,
) -> list[int] | None:
    """The prompt of a request that continues `turn`, with the turn's tokens as they were sampled.

    Args:
        rendered: The request as the template gives it.
        until_answer: The request's messages up to the turn's answer, as the template gives them.
        stop_token_ids: Tokens that end a response.
        closes: Whether the template shows anything after the text of an answer, such as a stop token.

    Returns None where the template shows the history in another way once more messages follow, or where it does not
    end an answer by a stop token: the request then begins a branch of its own.
    """
    if list(rendered[: len(until_answer)]) != list(until_answer):
        return None
    sampled, rest = turn.result.token_ids, list(rendered[len(until_answer) :])
    ended = bool(sampled) and sampled[-1] in stop_token_ids
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(turn.template_ids, until_answer)))  # noqa: B905
    if ended and rest[:1] == sampled[-1:] and sampled[-1] not in until_answer[shared:]:
        # A token that ends the answer and begins the next message, such as `<|user|>`: it was sampled.
        return [*turn.token_ids, *rest[1:]]
    if not closes:
        return [*turn.token_ids, *rest]
    closing = {sampled[-1]} if ended else set(stop_token_ids)
    ends = [place for place in range(shared, len(until_answer)) if until_answer[place] in closing]
    if not ends:
        return None
    # Where the response was cut off, the template's own stop token belongs to what follows.
    return [*turn.token_ids, *rendered[ends[-1] + int(ended) :]]


def _new_messages(turn: Turn, before: Turn | None) -> tuple[Message, ...]:
    known = len(before.messages) + 1 if before is not None and before.messages else 0
    return turn.messages[known:]


def _histories(messages: Sequence[Message], setup: object) -> list[bytes]:
    """A digest of every beginning of a conversation, the longest last."""
    digest = _digest(b"", setup)
    digests: list[bytes] = []
    for message in messages:
        digest = _digest(digest, _shown(message))
        digests.append(digest)
    return digests


def _digest(before: bytes, value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _shown(message: Message) -> dict[str, object]:
    """The identifying content of a message. Clients send an answer back without its reasoning, and with an empty text
    for none.
    """
    shown: dict[str, object] = {"role": message.get("role"), "content": text_of(message)}
    if message.get("role") == "assistant":
        shown["tool_calls"] = _tool_calls(message)
    else:
        shown |= {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}
    return shown


def _same_reasoning(sent: Message, given: Message) -> bool:
    reasonings = [str(message.get("reasoning") or "").strip() for message in (sent, given)]
    return not reasonings[0] or reasonings[0] == reasonings[1]


def _call_ids(message: Message) -> set[str]:
    calls = message.get("tool_calls")
    return {str(call["id"]) for call in (calls if isinstance(calls, Sequence) else ()) if call.get("id")}


def text_of(message: Message) -> str:
    """The text of a message, whose content may come in parts."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content if isinstance(part, Mapping))
    return json.dumps(content, sort_keys=True, default=str)


def _tool_calls(message: Message) -> list[_Call]:
    calls = message.get("tool_calls")
    found: list[_Call] = []
    for call in calls if isinstance(calls, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            found.append((str(function.get("name")), _arguments(function.get("arguments"))))
    return found


def _arguments(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except json.JSONDecodeError:
        return given
