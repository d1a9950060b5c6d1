"""Sessions of the endpoint: which tokens a request continues, and that every sampled token is trained once."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_rl.models.generation.endpoint.session import Message, Session, SessionPlan, exact_prompt
from nemo_rl.models.generation.interfaces import GenerationResult, GenerationSamplingParams
from tests.models.branches import trained_tokens

STOP = 0


def session() -> Session:
    return Session(SessionPlan("0-0-0", GenerationSamplingParams(), 100, 1000))


def result(tokens: list[int]) -> GenerationResult:
    return GenerationResult("r", tokens, [-float(token) for token in tokens], "stop")


def said(role: str, text: str) -> dict[str, object]:
    return {"role": role, "content": text}


# Each step continues an earlier turn, or begins anew, with some context and a response. Context is even and responses
# are odd, so that no context looks like a response.
_steps = st.lists(
    st.tuples(
        st.integers(-1, 8),
        st.lists(st.integers(1, 9).map(lambda n: 2 * n), min_size=1, max_size=4),
        st.lists(st.integers(1, 9).map(lambda n: 2 * n + 1), max_size=4),
    ),
    max_size=9,
)


@settings(max_examples=50)
@given(_steps)
def test_every_sampled_token_is_trained_exactly_once(steps: list[tuple[int, list[int], list[int]]]) -> None:
    one = session()
    for before, context, tokens in steps:
        start = one.turns[before].token_ids if 0 <= before < len(one.turns) else []
        one.add([*start, *context], result(tokens))
    trained: list[tuple[int, int]] = []
    for branch in one.branches():
        joined: list[int] = []
        for part in branch.parts:
            joined += [*part.context, *part.turn.result.token_ids]
            if part.trained:
                trained += [(part.turn.number, place) for place in range(len(part.turn.result.token_ids))]
        assert joined == branch.token_ids
    assert sorted(trained) == [
        (turn.number, place) for turn in one.turns for place in range(len(turn.result.token_ids))
    ], "a sampled token is lost, or trained twice"


@settings(max_examples=50)
@example([(0, [2], []), (1, [2], []), (0, [2], [])])
@given(_steps)
def test_a_continued_prompt_makes_no_new_branch(steps: list[tuple[int, list[int], list[int]]]) -> None:
    one = session()
    for before, context, tokens in steps:
        start = one.turns[before].token_ids if 0 <= before < len(one.turns) else []
        one.add([*start, *context], result([*tokens, STOP]))
    before_it = len(one.branches())
    last = one.branches()[-1].parts[-1].turn if before_it else None
    one.add([*(last.token_ids if last else []), 22], result([STOP]))
    assert len(one.branches()) == max(1, before_it)


def rendered(messages: list[dict[str, object]], prompt: bool = True) -> list[int]:
    """A template: 50 before a message, its characters, the stop token, 51 after it; 50 where an answer is due."""
    ids: list[int] = []
    for message in messages:
        ids += [50, *[100 + ord(letter) for letter in str(message["content"])], STOP, 51]
    return [*ids, 50] if prompt else ids


def ask(one: Session, messages: list[dict[str, object]], tokens: list[int], answer: Message) -> list[int]:
    """The prompt of a request as the endpoint makes it."""
    template_ids = prompt_ids = rendered(messages)
    turn = one.continued(messages)
    if turn is not None:
        until = rendered(messages[: len(turn.messages) + 1], prompt=False)
        prompt_ids = exact_prompt(turn, template_ids, until, [STOP]) or template_ids
    one.add(prompt_ids, result(tokens), template_ids=template_ids, messages=messages, answer=answer)
    return prompt_ids


def test_a_later_request_has_the_sampled_tokens_and_not_its_text_tokenised_again() -> None:
    one = session()
    first = [said("system", "s"), said("user", "u")]
    ask(one, first, [901, 902, STOP], said("assistant", "ab"))
    second = [*first, said("assistant", "ab"), said("user", "v")]
    prompt = ask(one, second, [903], said("assistant", "c"))
    assert prompt == [*rendered(first), 901, 902, STOP, 51, 50, 100 + ord("v"), STOP, 51, 50]
    third = ask(one, [*second, said("assistant", "c"), said("user", "w")], [904, STOP], said("assistant", "d"))
    # The second response was cut off: the template's stop token follows it and is not trained.
    assert third == [*prompt, 903, STOP, 51, 50, 100 + ord("w"), STOP, 51, 50]
    (branch,) = one.branches()
    assert trained_tokens(branch) == [901, 902, STOP, 903, 904, STOP]
    assert [[message["content"] for message in part.messages] for part in branch.parts] == [["s", "u"], ["v"], ["w"]]


def test_a_changed_history_begins_a_branch() -> None:
    one = session()
    first = [said("user", "u")]
    ask(one, first, [901, STOP], said("assistant", "a"))
    ask(one, [*first, said("assistant", "a"), said("user", "v")], [902, STOP], said("assistant", "b"))
    changed = [*first, said("assistant", "A"), said("user", "v")]
    assert ask(one, changed, [903, STOP], said("assistant", "c")) == rendered(changed)
    # From the first answer on two ways are possible.
    ask(one, [*first, said("assistant", "a"), said("user", "w")], [904, STOP], said("assistant", "d"))
    trained = [[part.trained for part in branch.parts] for branch in one.branches()]
    assert trained == [[True, True], [False, True], [True]], "the longest come first"


def test_other_tools_are_another_history() -> None:
    one = session()
    one.add([1], result([3]), messages=[said("user", "u")], answer=said("assistant", "a"), setup=["tool"])
    later = [said("user", "u"), said("assistant", "a"), said("user", "v")]
    assert one.continued(later, ["tool"]) is not None
    assert one.continued(later, ["other tool"]) is None


def test_an_answer_is_known_without_its_reasoning_and_by_what_its_calls_say() -> None:
    one = session()
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    answer = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    one.add([1], result([3]), messages=[said("user", "u")], answer=answer)
    again = {**call, "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
    sent = {"role": "assistant", "content": "", "tool_calls": [again]}
    tool = {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "3"}]}
    assert one.continued([said("user", "u"), sent, tool]) is not None
    other = {**sent, "tool_calls": [{**call, "function": {"name": "add", "arguments": '{"a": 1, "b": 3}'}}]}
    assert one.continued([said("user", "u"), other, tool]) is None


def test_of_equal_texts_the_client_continues_the_one_whose_reasoning_or_ids_it_sends() -> None:
    one = session()
    messages, later = [said("user", "u")], said("user", "v")
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    for number, reasoning in enumerate(("so", "else")):
        answer = {**said("assistant", "4"), "reasoning": reasoning, "tool_calls": [{**call, "id": f"call-{number}"}]}
        one.add([1], result([10 + number, STOP]), messages=messages, answer=answer)

    def continued(**sent: object) -> int | None:
        turn = one.continued([*messages, {**said("assistant", "4"), "tool_calls": [call], **sent}, later])
        return None if turn is None else turn.number

    assert continued(reasoning="so") == 0 and continued(reasoning=" else\n") == 1
    assert continued(tool_calls=[{**call, "id": "call-0"}]) == 0
    assert continued(tool_calls=[{**call, "id": "the client's own"}]) == continued() == 1, "the latest"
    assert continued(reasoning="the client's own") is None

    # Two turns later it is still the client's word that counts.
    for number, tokens in ((0, [10, STOP]), (1, [11, STOP])):
        sent = {**said("assistant", "4"), "tool_calls": [{**call, "id": f"call-{number}"}]}
        one.add([1, *tokens, 2], result([20, STOP]), messages=[*messages, sent, later], answer=said("assistant", "5"))
    first = {**said("assistant", "4"), "reasoning": "so", "tool_calls": [call]}
    turn = one.continued([*messages, first, later, said("assistant", "5"), said("user", "w")])
    assert turn is not None and turn.prompt_ids[:2] == [1, 10]


def test_a_template_that_shows_earlier_answers_otherwise_begins_a_branch() -> None:
    one = session()
    turn = one.add([1, 2], result([901, STOP]))
    assert exact_prompt(turn, [1, 2, 8, STOP, 5], [1, 2, 7, STOP], [STOP]) is None
    assert exact_prompt(turn, [1, 2, 7, 5], [1, 2, 7], [STOP]) is None, "the answer has no end in this template"
    assert exact_prompt(turn, [1, 2, 7, 5], [1, 2, 7], [STOP], closes=False) == [1, 2, 901, STOP, 5]
    # A stop token of the prompt is not the end of the answer.
    turn = one.add([1, STOP, 2], result([901, STOP]))
    assert exact_prompt(turn, [1, STOP, 2, 7, 5], [1, STOP, 2, 7], [STOP]) is None


@given(
    answer=st.lists(st.integers(2, 9), max_size=3),
    shown=st.lists(st.integers(2, 9), max_size=3),
    closes=st.booleans(),
    speaker=st.sampled_from([0, 1]),
)
def test_a_token_that_ends_an_answer_and_begins_the_next_message_is_there_once(
    answer: list[int], shown: list[int], closes: bool, speaker: int
) -> None:
    """Templates of GLM's kind show nothing behind an answer: the next speaker's token ends it."""
    prompt, stops = [10, 1, 11, 12], [0, 1]
    turn = session().add(prompt, result([*answer, speaker]))
    until = [*prompt, *shown]
    later = [20, 12]
    assert exact_prompt(turn, [*until, speaker, *later], until, stops, closes=closes) == [*turn.token_ids, *later]
    # What ended for another reason has the token from the template.
    cut = session().add(prompt, result([*answer, 7]))
    assert exact_prompt(cut, [*until, speaker, *later], until, stops, closes=False) == [*cut.token_ids, speaker, *later]
