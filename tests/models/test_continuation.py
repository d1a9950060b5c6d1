"""A request that is cut short goes on with every token it has, and what comes back is one response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, VersionSpan
from nemo_rl.models.generation.vllm.request_state import ResumableRequest, safe_cut


def request(limit: int = 20, seed: int | None = 5) -> GenerationRequest:
    return GenerationRequest("a", [1, 2, 3], limit, seed=seed, stop_strings=("#",))


def piece(name: str, tokens: list[int], version: int, reason: str = "abort", shard: int = 0) -> GenerationResult:
    spans = (VersionSpan(version, 0, len(tokens)),) if tokens else ()
    return GenerationResult(name, tokens, [-float(t) for t in tokens], reason, spans, shard)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=6), st.integers(1, 5))
def test_the_pieces_joined_are_the_response_with_every_log_probability_and_version(
    cuts: list[tuple[int, int]], last: int
) -> None:
    way = ResumableRequest(request(limit=100))
    drawn: list[int] = []
    versions: list[int] = []
    seeds = [way.next_request().seed]
    for index, (count, version) in enumerate(cuts):
        asked = way.next_request()
        assert asked.prompt_ids == [1, 2, 3, *drawn] and asked.max_new_tokens == 100 - len(drawn)
        tokens = [100 + len(drawn) + n for n in range(count)]
        way.cut(piece(asked.request_id, tokens, version))
        drawn += tokens
        versions += [version] * count
        if count:
            seeds.append(way.next_request().seed)
        assert way.next_request().request_id == f"a+{index + 1}"
    tail = [900 + n for n in range(last)]
    whole = way.finish(piece(way.next_request().request_id, tail, 7, "stop", shard=3))
    assert (whole.request_id, whole.token_ids, whole.shard, whole.finish_reason) == ("a", drawn + tail, 3, "stop")
    assert whole.logprobs == [-float(t) for t in whole.token_ids]
    stamped = [span.version for span in whole.spans for _ in range(span.start, span.end)]
    assert stamped == versions + [7] * last
    assert [span.start for span in whole.spans[1:]] == [span.end for span in whole.spans[:-1]]
    assert len(set(seeds)) == len(seeds), "a piece would draw the numbers of an earlier one again"


def test_a_turn_that_is_redone_is_asked_for_as_it_was() -> None:
    way = ResumableRequest(request(), "redo_turn")
    way.cut(piece("a", [7, 8], 0))
    again = way.next_request()
    assert (again.prompt_ids, again.max_new_tokens, again.seed, again.request_id) == ([1, 2, 3], 20, 5, "a+1")
    assert way.finish(piece("a+1", [9], 1, "stop")).token_ids == [9]


def test_a_request_that_was_never_cut_is_passed_on_untouched() -> None:
    way = ResumableRequest(request())
    whole = piece("a", [7], 0, "stop")
    assert way.next_request() == request() and way.finish(whole) is whole


def test_a_context_that_is_full_between_two_pieces_ended_the_response_by_its_length() -> None:
    way = ResumableRequest(request())
    way.cut(piece("a", [7], 0))
    assert way.finish(piece("a+1", [], 0, "no_room")).finish_reason == "length"
    full = ResumableRequest(request(limit=2))
    full.cut(piece("a", [7, 8], 0))
    assert full.complete and full.as_it_is(1).truncated and full.as_it_is(1).token_ids == [7, 8]


@pytest.mark.parametrize(
    ("said", "texts", "kept"),
    [
        ("hello", ["#"], 5),
        ("hello<", ["</answer>"], 5),
        ("hello</ans", ["</answer>"], 5),
        ("a</answer>", ["</answer>"], 10),
        ("xab", ["abc", "b!"], 1),
        ("<<<", ["<<<<"], 0),
        ("any", [], 3),
    ],
)
def test_no_text_that_the_engine_looks_for_straddles_two_pieces(said: str, texts: list[str], kept: int) -> None:
    assert safe_cut([ord(letter) for letter in said], texts, lambda ids: "".join(map(chr, ids))) == kept


def test_half_of_a_character_is_not_kept_where_texts_are_looked_for() -> None:
    assert safe_cut([65, 0xC3], ["#"], lambda ids: bytes(ids).decode(errors="replace")) == 1


def test_a_shortened_result_keeps_its_spans_aligned() -> None:
    result = GenerationResult("a", [1, 2, 3, 4], [-1.0] * 4, "abort", (VersionSpan(0, 0, 2), VersionSpan(1, 2, 4)))
    assert result.first(4) is result
    assert result.first(3).spans == (VersionSpan(0, 0, 2), VersionSpan(1, 2, 3))
    assert result.first(1).spans == (VersionSpan(0, 0, 1),) and result.first(1).logprobs == [-1.0]
