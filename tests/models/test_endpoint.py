"""The OpenAI-compatible endpoint: vLLM's own classes over HTTP, and a generator that says what a test wants."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import random
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config import ConfigError, EnvConfig, load_master_config
from nemo_rl.data.datasets import load_response_dataset
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.agent_environment import AgentEnvironment
from nemo_rl.environments.call import step_environment
from nemo_rl.environments.environment_registry import environment_class, environment_settings
from nemo_rl.environments.interfaces import AgentSession, EnvironmentFailure
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.rollouts import (
    AgentRollouts,
    RolloutLimits,
    RolloutPlan,
    RolloutRunner,
    number_samples,
    rollout_metrics,
)
from nemo_rl.experience.store import rollout_columns, sample_starts
from nemo_rl.models.generation.decisions import SamplingMasks, TokenRoutes
from nemo_rl.models.generation.endpoint.endpoint_http import EndpointError, Slots, bound_socket, root_url
from nemo_rl.models.generation.endpoint.server import Endpoint, start_endpoint
from nemo_rl.models.generation.endpoint.serving import _load_plugins
from nemo_rl.models.generation.endpoint.session import SessionPlan
from nemo_rl.models.generation.endpoint.streamed_answers import StreamedAnswers, chunk_of
from nemo_rl.models.generation.interfaces import (
    GenerationError,
    GenerationRequest,
    GenerationResult,
    GenerationSamplingParams,
    OnTokens,
    VersionSpan,
)
from tests.models.branches import trained_tokens

_CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
_NEMO_GYM = Path(__file__).with_name("nemo_gym_stand_in")
_VLLM = "policy.generation.vllm_cfg"
_TOKEN = "secret-of-the-test"
# A token without text: what is tokenised again never has it.
_SILENT = 300
_CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@dataclass
class Model:
    """Says the text of the test, and a token that no text has."""

    tokenizer: Any
    text: str = "hi"
    ended: bool = True
    silent: bool = True
    stop: str = ""  # the token that ends its responses; empty: the tokenizer's
    requests: list[GenerationRequest] = field(default_factory=list)
    wait: Callable[[], Any] | None = None
    midway: Callable[[], Any] | None = None

    async def generate_one(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> GenerationResult:
        self.requests.append(request)
        if self.wait is not None:
            await self.wait()
        stop = self.tokenizer.convert_tokens_to_ids(self.stop) if self.stop else self.tokenizer.eos_token_id
        ids = [*self.tokenizer(self.text)["input_ids"], *([_SILENT] * self.silent), *([stop] * self.ended)]
        for place in range(0, len(ids) - 1, 2):
            if on_tokens is not None:
                on_tokens(ids[place : place + 2], [-0.5] * len(ids[place : place + 2]))
                await asyncio.sleep(0)
                if self.midway is not None:
                    await self.midway()
        reason = "stop" if self.ended else "length"
        spans = (VersionSpan(3, 0, len(ids)),)
        if request.record_from is None:
            return GenerationResult(request.request_id, ids, [-0.5] * len(ids), reason, spans)
        # Routes that name the request that brought them; the last token was never computed.
        start, end = request.record_from, len(request.prompt_ids) + len(ids)
        experts = np.full((end - start, 1, 2), len(self.requests), np.uint8)
        routes = TokenRoutes(start, experts, np.arange(start, end) < end - 1)
        masks = SamplingMasks.of([np.array([token, 301]) if place else None for place, token in enumerate(ids)])
        return GenerationResult(request.request_id, ids, [-0.5] * len(ids), reason, spans, 0, routes, masks)


def configured(model: Path, *overrides: str) -> Any:
    given = [
        f"policy.model_name={model}",
        "policy.max_total_sequence_length=512",
        f"policy.tokenizer.chat_template={Path(__file__).with_name('tools.jinja')}",
        "policy.generation.max_new_tokens=64",
        "data.max_input_seq_length=400",
        f"{_VLLM}.max_model_len=512",
        f"{_VLLM}.expose_http_server=true",
        f"{_VLLM}.http_server.max_body_bytes=4096",
        f"{_VLLM}.http_server.token_variable=NRL_TEST_TOKEN",
        f"{_VLLM}.http_server_serving_chat_kwargs={{enable_auto_tools: true, tool_parser: hermes}}",
    ]
    return load_master_config(_CONFIG, [*given, *overrides]).policy


def started(model: Path, says: Model, *overrides: str) -> Endpoint:
    policy = configured(model, *overrides)
    stops = [says.tokenizer.eos_token_id]
    if says.stop:
        stops.append(says.tokenizer.convert_tokens_to_ids(says.stop))
    return start_endpoint(policy, says.tokenizer, says.generate_one, stop_token_ids=stops, cuda=False)


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[tuple[Endpoint, Model]]:
    patch = pytest.MonkeyPatch()
    patch.setenv("NRL_TEST_TOKEN", _TOKEN)
    says = Model(get_tokenizer(configured(tiny_model).tokenizer))
    endpoint = started(tiny_model, says)
    yield endpoint, says
    endpoint.close()
    patch.undo()


@pytest.fixture
def session(served: tuple[Endpoint, Model]) -> Iterator[tuple[Endpoint, Model, str]]:
    endpoint, says = served
    says.text, says.ended, says.wait, says.midway = "hi", True, None, None
    says.requests.clear()
    plan = SessionPlan("4-2-1", GenerationSamplingParams(), 64, 512, lambda number: 100 + number)
    url = endpoint.open("s", plan)
    yield endpoint, says, url
    endpoint._sessions.clear()


def post(url: str, **body: object) -> requests.Response:
    return requests.post(url, json=body, headers={"Authorization": f"Bearer {_TOKEN}"}, timeout=60)


def chat(url: str, messages: list[dict[str, object]], **body: object) -> dict[str, Any]:
    response = post(f"{url}/chat/completions", model="policy", messages=messages, **body)
    assert response.status_code == 200, response.text
    return response.json()


def choices_of(response: requests.Response) -> list[dict[str, Any]]:
    """The choices of an answer with their prompt, whole or put together from a stream."""
    assert response.status_code == 200, response.text
    if "text/event-stream" not in response.headers["Content-Type"]:
        whole = response.json()
        return [{"prompt_token_ids": whole.get("prompt_token_ids"), **choice} for choice in whole["choices"]]
    made: dict[int, dict[str, Any]] = {}
    prompt: list[int] = []
    for event in filter(None, response.text.split("\n\n")):
        chunk = chunk_of(event) or {"choices": []}
        assert "error" not in chunk, chunk
        for part in chunk["choices"]:
            prompt = prompt or part.get("prompt_token_ids") or chunk.get("prompt_token_ids") or []
            before = made.setdefault(part["index"], {"token_ids": [], "answer": StreamedAnswers(1)})
            before["answer"].add({"choices": [{**part, "index": 0}]})
            ids = [*before["token_ids"], *(part.get("token_ids") or [])]
            made[part["index"]] = before | part | {"token_ids": ids, "message": before["answer"].messages[0]}
    return [made[index] | {"prompt_token_ids": prompt} for index in sorted(made)]


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def test_a_later_turn_is_prompted_with_the_sampled_tokens(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, says, url = session
    first = chat(url, [user("a")], logprobs=True, return_token_ids=True)["choices"][0]
    assert first["message"]["content"] == "hi" and first["weight_versions"] == [{"version": 3, "start": 0, "end": 4}]
    assert [one["logprob"] for one in first["logprobs"]["content"]] == [-0.5] * 4
    second = chat(url, [user("a"), first["message"], user("b")], return_token_ids=True)
    before, after = says.requests
    assert after.prompt_ids[: len(before.prompt_ids) + 4] == [*before.prompt_ids, *first["token_ids"]]
    text = says.tokenizer.decode(after.prompt_ids[len(before.prompt_ids) + 4 :])
    assert text == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert second["prompt_token_ids"] == after.prompt_ids
    assert second["usage"]["prompt_tokens"] == len(after.prompt_ids)
    assert [(one.seed, one.sample_id) for one in says.requests] == [(100, "4-2-1"), (101, "4-2-1")]
    (branch,) = endpoint.finish("s").branches()
    assert branch.token_ids == [*after.prompt_ids, *first["token_ids"]] and len(trained_tokens(branch)) == 8
    assert post(f"{url}/chat/completions", model="policy", messages=[user("c")]).status_code == 404


def test_a_session_may_be_named_in_the_body(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, _, _ = session
    chat(endpoint.base_url, [user("a")], session="s")
    assert len(endpoint.finish("s").turns) == 1
    ended = post(f"{endpoint.base_url}/chat/completions", model="policy", messages=[user("a")], session="s")
    assert ended.status_code == 404 and "not open" in ended.text


def test_a_call_of_a_tool_is_read_and_continued(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, says, url = session
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    says.text = _CALL
    answer = chat(url, [user("1+2?")], tools=tools)["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
    assert answer["finish_reason"] == "tool_calls"
    says.text, says.ended = "3", False
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    chat(url, [user("1+2?"), {"role": "assistant", "content": None, "tool_calls": [call]}, result], tools=tools)
    one = endpoint.finish("s")
    assert [turn.parent for turn in one.turns] == [None, 0] and len(one.branches()) == 1


@pytest.fixture(scope="module")
def next_speaker(tiny_model: Path) -> Iterator[tuple[Endpoint, Model]]:
    """A template that closes a turn with the next speaker's token, and shows neither tools nor what they say."""
    patch = pytest.MonkeyPatch()
    patch.setenv("NRL_TEST_TOKEN", _TOKEN)
    template = f"policy.tokenizer.chat_template={Path(__file__).with_name('next_speaker.jinja')}"
    says = Model(get_tokenizer(configured(tiny_model, template).tokenizer), "4", stop="<|im_start|>")
    endpoint = started(tiny_model, says, template)
    yield endpoint, says
    endpoint.close()
    patch.undo()


def test_the_next_speakers_token_is_in_a_prompt_once(next_speaker: tuple[Endpoint, Model]) -> None:
    endpoint, says = next_speaker
    url = endpoint.open("g", SessionPlan("0-0-0", GenerationSamplingParams(), 64, 512))
    messages = [user("1+3?")]
    for question in ("and 3?", "and 5?"):
        answer = chat(url, messages)["choices"][0]["message"]
        messages += [{"role": "assistant", "content": answer["content"]}, user(question)]
    chat(url, messages)
    texts = [
        says.tokenizer.decode(request.prompt_ids).replace(says.tokenizer.decode([_SILENT]), "")
        for request in says.requests
    ]
    turn, opened = "<|im_start|>user\n{}<|im_start|>assistant\n", "4"
    expected = turn.format("1+3?")
    for text, question in zip(texts, ("and 3?", "and 5?", ""), strict=True):
        assert text == expected
        expected += opened + turn.format(question)
    (branch,) = endpoint.finish("g").branches()
    assert len(trained_tokens(branch)) == 3 * len(says.tokenizer("4")["input_ids"]) + 3 * 2


CARRIED_BY_A_REQUEST: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"messages": [user("a")], "tools": [{"type": "function", "function": {"name": "add"}}]}),
    (
        "tool_calls",
        {
            "messages": [
                user("a"),
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
                },
                user("b"),
            ]
        },
    ),
    ("content of tool", {"messages": [user("a"), {"role": "tool", "tool_call_id": "1", "content": "3"}]}),
]


@pytest.mark.parametrize(("key", "body"), CARRIED_BY_A_REQUEST)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_template_does_not_show_is_refused_in_a_request(
    key: str,
    body: dict[str, Any],
    stream: bool,
    next_speaker: tuple[Endpoint, Model],
    session: tuple[Endpoint, Model, str],
) -> None:
    endpoint, _ = next_speaker
    for _ in range(2):
        refused = post(f"{endpoint.base_url}/chat/completions", model="policy", stream=stream, **body)
        assert refused.status_code == 400 and f"{key}: the chat template shows nothing of it" in refused.text
    _, _, url = session
    assert post(f"{url}/chat/completions", model="policy", stream=stream, **body).status_code == 200


def test_what_else_a_template_reads_is_a_part_of_the_history(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, _, url = session
    answer = chat(url, [user("a")])["choices"][0]["message"]
    for body in ({"reasoning_effort": "low"}, {"documents": [{"title": "t", "text": "x"}]}, {}):
        chat(url, [user("a"), answer, user("b")], **body)
    assert [turn.parent for turn in endpoint.finish("s").turns] == [None, None, None, 0]


def test_messages_in_parts_are_continued(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, _, url = session
    parts: list[dict[str, object]] = [
        {"role": role, "content": [{"type": "text", "text": text} for text in texts]}
        for role, texts in (("system", ["Be", " kind."]), ("user", ["a", "b"]))
    ]
    answer = chat(url, parts)["choices"][0]["message"]
    said = {"role": "assistant", "content": [{"type": "text", "text": answer["content"]}]}
    chat(url, [*parts, said, user("b")])
    assert [turn.parent for turn in endpoint.finish("s").turns] == [None, 0]


def test_a_stream_says_what_a_whole_answer_says(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, says, url = session
    says.text = _CALL
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    response = post(
        f"{url}/chat/completions",
        model="policy", messages=[user("1+2?")], tools=tools, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    *chunks, usage = (json.loads(line) for line in lines[:-1])
    assert len(chunks) > 2 and usage["usage"]["completion_tokens"] > 0
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["choices"][0]["weight_versions"][0]["version"] == 3
    (turn,) = endpoint.finish("s").turns
    whole = chat(endpoint.base_url, [user("1+2?")], tools=tools)["choices"][0]["message"]["tool_calls"][0]["function"]
    (call,) = turn.answer["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert json.loads(whole["arguments"]) == {"a": 1, "b": 2}


CALLS = {
    "a call": (_CALL, True),
    "two calls and a text": (f"I add.{_CALL}{_CALL.replace('1', '7')}", True),
    "a call in another language": ('<tool_call>find(b="x")</tool_call>', True),
    "arguments that were cut": ('<tool_call>{"name": "add", "arguments": {"a": 1, "b"', False),
    "a call and one that was cut": (f'{_CALL}<tool_call>{{"name": "add", "argum', False),
    "a mark alone": ("<tool_call>", True),
    "text": ("It is <b>3</b>.", True),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_stream_reads_the_calls_that_a_whole_answer_reads(case: str, session: tuple[Endpoint, Model, str]) -> None:
    endpoint, says, url = session
    says.text, says.ended = CALLS[case]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    asked = {"model": "policy", "messages": [user("1+2?")], "tools": tools, "n": 2, "return_token_ids": True}
    seen = []
    for stream in (False, True):
        told = []
        for choice in choices_of(post(f"{url}/chat/completions", stream=stream, **asked)):
            message = choice["message"]
            calls = [call["function"] for call in message.get("tool_calls") or []]
            told.append((message.get("content") or "", calls, choice["finish_reason"], choice["token_ids"]))
        seen.append(told)
    assert seen[0] == seen[1] and len(seen[0]) == 2
    content, calls, reason, _ = seen[0][0]
    assert content or calls
    assert reason == ("tool_calls" if calls else "stop" if says.ended else "length")
    # The session knows what the client got.
    one = endpoint.finish("s")
    assert [(turn.answer or {}).get("content") or "" for turn in one.turns] == [content] * 4


def test_a_stream_does_not_show_the_token_that_ends_it(session: tuple[Endpoint, Model, str]) -> None:
    """Not even where special tokens are shown, as parsers of tools and of reasoning ask for."""
    _, says, url = session
    for says.text in ("one", "four"):
        seen = {}
        for stream in (False, True):
            response = post(f"{url}/completions", model="policy", prompt="a", stream=stream, skip_special_tokens=False)
            lines = response.text.splitlines() if stream else [f"data: {response.text}"]
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            seen[stream] = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert seen[True] == seen[False] == says.text


def test_a_client_of_openai_reads_a_stream_and_goes_on_with_the_sampled_tokens(
    session: tuple[Endpoint, Model, str],
) -> None:
    import openai

    endpoint, says, url = session
    says.text = "gr\u00fc\u00df dich"
    client = openai.OpenAI(base_url=url, api_key=_TOKEN)
    messages: list[Any] = [user("a")]
    for _ in range(2):
        stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
        deltas = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(deltas) == says.text and len([delta for delta in deltas if delta]) > 3
        messages += [{"role": "assistant", "content": "".join(deltas)}, user("b")]
    one = endpoint.finish("s")
    assert [turn.parent for turn in one.turns] == [None, 0] and len(one.branches()) == 1


def test_a_stream_that_fails_midway_says_so_and_is_not_recorded(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, says, url = session

    async def fails() -> None:
        raise GenerationError("no shard is left")

    says.midway = fails
    response = post(f"{url}/chat/completions", model="policy", messages=[user("a")], stream=True)
    assert response.status_code == 200 and "no shard is left" in response.text
    assert not endpoint.finish("s").turns
    # The slot is free a moment after the client has the end of the answer.
    for _ in range(600):
        if endpoint._slots._value == endpoint._config.max_requests:
            return
        time.sleep(0.05)
    raise AssertionError("the slot of a stream that has ended is still taken")


def test_each_of_several_answers_is_a_turn_with_a_seed_of_its_own(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, says, url = session
    response = post(f"{url}/completions", model="policy", prompt="1+1=", n=2, stop=["h"])
    assert [choice["text"] for choice in response.json()["choices"]] == ["hi", "hi"]
    assert [(one.seed, one.stop_strings) for one in says.requests] == [(100, ("h",)), (101, ("h",))]
    assert [len(trained_tokens(branch)) for branch in endpoint.finish("s").branches()] == [4, 4]


def test_routes_and_masks_are_returned_where_they_are_recorded_and_tokens_asked_for(
    session: tuple[Endpoint, Model, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, _, url = session
    fields = {"routed_experts", "routed_experts_valid", "sampling_mask_counts", "sampling_mask_ids"}

    def asked(base_url: str, **body: object) -> list[set[str]]:
        found = [
            choices_of(post(f"{base_url}/completions", model="policy", prompt="abc", stream=stream, **body))
            for stream in (False, True)
        ]
        return [fields & {name for name, value in choice.items() if value is not None} for (choice,) in found]

    assert asked(url, return_token_ids=True) == [set()] * 2, "a run that records nothing"
    monkeypatch.setattr(endpoint._serving.engine, "_records", True)
    plan = SessionPlan("5-0-0", GenerationSamplingParams(), 64, 512, records=True)
    own = endpoint.open("r", plan)
    for base_url, draws in ((own, {}), (endpoint.base_url, {"temperature": 0.5})):
        assert asked(base_url, **draws) == [set()] * 2, "not asked for"
        assert asked(base_url, return_token_ids=True, **draws) == [fields] * 2
    # Nothing is drawn at temperature 0, and nothing recorded of validation.
    assert asked(endpoint.base_url, return_token_ids=True, temperature=0) == asked(url, return_token_ids=True)
    beyond = post(f"{own}/completions", model="policy", prompt="abc", routed_experts_prompt_start=4)
    assert beyond.status_code == 400 and "beyond the 3 tokens" in beyond.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_turns_routes_are_those_of_its_whole_history(session: tuple[Endpoint, Model, str], stream: bool) -> None:
    endpoint, _, _ = session
    url = endpoint.open("r", SessionPlan("5-0-0", GenerationSamplingParams(), 64, 512, records=True))

    def array(choice: dict[str, Any], name: str) -> Any:
        return np.load(io.BytesIO(base64.b64decode(choice[name])))

    body = {"model": "policy", "return_token_ids": True, "stream": stream, "n": 2}
    first = choices_of(post(f"{url}/chat/completions", messages=[user("a")], **body))
    later = {"messages": [user("a"), first[1]["message"], user("b")], "routed_experts_prompt_start": 2}
    second = choices_of(post(f"{url}/chat/completions", **body, **later))
    sizes = [len(choice["prompt_token_ids"]) + len(choice["token_ids"]) for choice in (*first, *second)]
    experts = [array(choice, "routed_experts")[:, 0, 0].tolist() for choice in (*first, *second)]
    assert [len(one) for one in experts[:2]] == sizes[:2] and len(experts[2]) == sizes[2] - 2
    by_both = [sorted({one[0], one[-2], one[-3]}) for one in experts]
    assert [len(one) for one in by_both] == [1, 1, 2, 2], "the later turns have the routes of the earlier one as well"
    for choice, turn in zip((*first, *second), endpoint.finish("r").turns, strict=True):
        assert array(choice, "routed_experts_valid").tolist()[-3:] == [True, True, False]
        assert array(choice, "sampling_mask_counts").tolist() == turn.result.masks.counts.tolist()
        assert array(choice, "sampling_mask_ids").tolist() == turn.result.masks.ids.tolist()


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "gpt-9"}, 404, "gpt-9"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "512"),
        ({"tools": [{"type": "fn"}]}, 400, "tools.0.type"),
        ({"tools": 3}, 400, "tools"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, 400, "name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, 400, "parameters"),
        ({"session": ["s"]}, 400, "session"),
        ({"messages": "hello"}, 400, "messages: expected a list"),
        ({"messages": None}, 400, "messages: expected a list"),
        ({"stop": ["a"] * 9}, 400, "at most"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"temperature": 0.25}, 400, "policy.generation.temperature=1"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, 400, "structured"),
        ({"guided_json": {"type": "object"}}, 400, "guided_json"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, 400, "structured"),
        ({"logprobs": True, "top_logprobs": 3}, 400, "top_logprobs"),
        ({"echo": True}, 400, "prompt_logprobs"),
        ({"best_of": 4}, 400, "best_of"),
        ({"use_beam_search": True}, 400, "use_beam_search"),
        ({"priority": 3}, 400, "priority"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 413, "max_body_bytes=4096"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(
    session: tuple[Endpoint, Model, str], body: dict[str, Any], status: int, says: str
) -> None:
    endpoint, model, url = session
    response = post(f"{url}/chat/completions", **{"model": "policy", "messages": [user("a")], **body})
    assert response.status_code == status and says in response.json()["error"]["message"]
    assert not model.requests and not endpoint.finish("s").turns


def test_validation_names_its_own_keys_of_sampling(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, _, _ = session
    url = endpoint.open("v", SessionPlan("9-0-0", GenerationSamplingParams(0.0), 64, 512, validates=True))
    response = post(f"{url}/chat/completions", model="policy", messages=[user("a")], temperature=1)
    assert response.status_code == 400 and "policy.generation.val_temperature=0" in response.text


@pytest.mark.parametrize("length", [511, 512, 513])
def test_a_prompt_that_leaves_no_room_is_known_to_its_session(
    session: tuple[Endpoint, Model, str], length: int
) -> None:
    endpoint, _, url = session
    response = post(f"{url}/completions", model="policy", prompt=[5] * length)
    assert response.status_code == (200 if length < 512 else 400), response.text
    assert endpoint.finish("s").overflowed == (length >= 512)


def test_a_prompt_of_unknown_tokens_or_of_none_is_refused_and_stops_of_any_length_are_not(
    session: tuple[Endpoint, Model, str],
) -> None:
    _, model, url = session
    for prompt, says in (([5, 999_999], "token 999999"), ([[]], "has no tokens")):
        response = post(f"{url}/completions", model="policy", prompt=prompt)
        assert response.status_code == 400 and says in response.json()["error"]["message"]
    response = post(f"{url}/completions", model="policy", prompt="a", logprobs=1)
    assert response.status_code == 400 and "logprobs of a completion" in response.json()["error"]["message"]
    assert not model.requests
    assert post(f"{url}/completions", model="policy", prompt="a", stop=["Observation:"]).status_code == 200
    assert model.requests[0].stop_strings == ("Observation:",)


def test_a_path_that_is_not_served_is_answered_with_those_that_are(session: tuple[Endpoint, Model, str]) -> None:
    _, _, url = session
    for path, status in (("responses", 404), ("models", 405)):
        response = post(f"{url}/{path}", model="policy", input="a")
        assert response.status_code == status and "/v1/chat/completions" in response.json()["error"]["message"]


def test_a_wrong_token_and_what_is_no_json_are_refused(session: tuple[Endpoint, Model, str]) -> None:
    _, _, url = session
    headers = {"Authorization": "Bearer wrong"}
    assert requests.get(f"{url}/models", headers=headers, timeout=60).status_code == 401
    headers = {"Authorization": f"Bearer {_TOKEN}"}
    assert requests.post(f"{url}/completions", data="{", headers=headers, timeout=60).status_code == 400
    models = requests.get(f"{url}/models", headers=headers, timeout=60).json()
    assert models["data"][0]["id"] == "policy"


def test_who_does_not_show_the_token_keeps_no_connection(served: tuple[Endpoint, Model]) -> None:
    address = served[0].base_url.removeprefix("http://").partition("/")[0].rpartition(":")
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    for more in ("", upgrade, "Content-Length: 1000\r\n", "Authorization: Bearer wrong\r\n"):
        with socket.create_connection((address[0], int(address[2])), timeout=20) as stranger:
            stranger.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode())
            said = b""
            with suppress(ConnectionResetError):
                while part := stranger.recv(4096):
                    said += part
            assert said.split()[1] == b"401"


def test_half_sent_requests_neither_keep_descriptors_nor_clients_out(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NRL_TEST_TOKEN", _TOKEN)
    monkeypatch.setattr("nemo_rl.models.generation.endpoint.server.connections", lambda: 40)
    monkeypatch.setattr("nemo_rl.models.generation.endpoint.server._REQUEST_S", 2.0)
    endpoint = started(tiny_model, Model(get_tokenizer({"name": str(tiny_model)})))
    host, _, port = endpoint.base_url.removeprefix("http://").partition("/")[0].rpartition(":")
    before = len(os.listdir("/proc/self/fd"))
    try:
        with ExitStack() as attack:
            for number in range(400):
                half = attack.enter_context(socket.create_connection((host, int(port)), timeout=20))
                half.sendall((b"", b"POST /v1/ch", b"GET /health HTTP/1.1\r\nX-Long: ")[number % 3])
            # Both ends are in this process.
            assert len(os.listdir("/proc/self/fd")) - before < 400 + 2 * 40
            assert chat(endpoint.base_url, [user("a")])["choices"]
            time.sleep(3.0)
            assert len(os.listdir("/proc/self/fd")) - before < 400 + 10
    finally:
        endpoint.close()


@pytest.mark.parametrize(
    ("path", "body", "responses"),
    [
        ("completions", {"prompt": ["a"] * 700, "n": 16_384}, 700 * 16_384),
        ("completions", {"prompt": [[65], [66]], "n": 600}, 1200),
        ("completions", {"prompt": ["a"] * 700, "n": 2}, 1400),
        ("completions", {"prompt": [65] * 9, "n": 1025}, 1025),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 1025}, 1025),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2000, "stream": True}, 2000),
    ],
)
def test_a_request_for_too_many_responses_is_refused_before_any_is_made(
    path: str, body: dict[str, object], responses: int, session: tuple[Endpoint, Model, str]
) -> None:
    endpoint, says, _ = session
    refused = post(f"{endpoint.base_url}/{path}", model="policy", **body)
    assert refused.status_code == 400, refused.text
    assert f"asks for {responses} responses" in refused.text and "http_server.max_responses=1024" in refused.text
    assert says.requests == [] and endpoint._slots._value == endpoint._config.max_requests


def test_responses_count_against_the_limit_and_not_requests(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_TEST_TOKEN", _TOKEN)
    says = Model(get_tokenizer({"name": str(tiny_model)}))
    endpoint = started(tiny_model, says, f"{_VLLM}.http_server.max_requests=4")
    at_once, most = 0, 0

    async def wait() -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.05)
        at_once -= 1

    says.wait = wait
    try:
        with ThreadPoolExecutor(8) as clients:
            ns = [1, 3, 2, 4, 1, 1, 3, 2]
            given = list(clients.map(lambda n: chat(endpoint.base_url, [user("a")], n=n), ns))
            assert [len(answer["choices"]) for answer in given] == ns and most <= 4
            # More than there are places: alone, and not never.
            assert len(chat(endpoint.base_url, [user("a")], n=6)["choices"]) == 6
        assert endpoint._slots._value == 4
    finally:
        endpoint.close()


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=12), st.randoms())
def test_places_are_never_oversold_or_lost_and_go_in_order(
    count: int, asked: list[tuple[int, bool]], chance: random.Random
) -> None:
    async def play() -> None:
        slots, held, order = Slots(count), {}, []

        async def take(number: int, responses: int) -> None:
            held[number] = (min(responses, count), await slots.take(responses))
            order.append(number)

        waiting = {number: asyncio.ensure_future(take(number, many)) for number, (many, _) in enumerate(asked)}
        await asyncio.sleep(0)
        gone = {number for number, (_, leaves) in enumerate(asked) if leaves}
        for number in gone:
            waiting[number].cancel()
        for _ in range(4 * len(asked)):
            await asyncio.sleep(0)
            assert sum(places for places, _ in held.values()) <= count
            if held:
                held.pop(chance.choice(sorted(held)))[1]()
        await asyncio.gather(*waiting.values(), return_exceptions=True)
        assert slots._value == count and order == sorted(order)
        assert set(order) >= set(waiting) - gone

    asyncio.run(play())


def waiting_until_cancelled(begun: threading.Event, cancelled: threading.Event) -> Callable[[], Awaitable[None]]:
    """A model that says that it has begun, never ends, and says when it is cancelled."""

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    return wait


def test_a_client_that_vanishes_ends_its_request(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, says, url = session
    begun, cancelled = threading.Event(), threading.Event()

    says.wait = waiting_until_cancelled(begun, cancelled)
    body = json.dumps({"model": "policy", "messages": [user("a")]}).encode()
    address = url.removeprefix("http://").partition("/")[0]
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        path = url.partition(address)[2]
        head = [
            f"POST {path}/chat/completions HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {_TOKEN}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        client.sendall("\r\n".join([*head, "", ""]).encode() + body)
        assert begun.wait(60)
    assert cancelled.wait(60)
    assert not endpoint.finish("s").turns


def test_a_client_that_vanishes_in_the_middle_of_a_stream_frees_its_slot(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, says, url = session
    cancelled = threading.Event()

    says.midway = waiting_until_cancelled(threading.Event(), cancelled)
    body = {"model": "policy", "messages": [user("a")], "stream": True}
    headers = {"Authorization": f"Bearer {_TOKEN}"}
    with requests.post(f"{url}/chat/completions", json=body, headers=headers, stream=True, timeout=60) as response:
        assert next(response.iter_lines())
    assert cancelled.wait(60)
    assert not endpoint.finish("s").turns
    for _ in range(600):
        if endpoint._slots._value == endpoint._config.max_requests:
            return
        time.sleep(0.05)
    raise AssertionError("the slot of a client that is gone is still taken")


def test_without_shards_the_answer_is_503_and_when_to_try_again(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, says, url = session

    async def fails() -> None:
        raise GenerationError("no shard is left")

    says.wait = fails
    for body in ({}, {"stream": True}):
        response = post(f"{url}/chat/completions", model="policy", messages=[user("a")], **body)
        assert response.status_code == 503 and int(response.headers["Retry-After"]) > 0
    assert not endpoint.finish("s").turns


@pytest.mark.slow
def test_past_the_deadline_the_answer_is_503(
    session: tuple[Endpoint, Model, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, says, url = session
    says.wait = asyncio.Event().wait
    monkeypatch.setattr(endpoint, "_config", endpoint._config.model_copy(update={"deadline_s": 0.2}))
    response = post(f"{url}/chat/completions", model="policy", messages=[user("a")])
    assert response.status_code == 503 and "deadline_s=0.2" in response.json()["error"]["message"]
    # An answer that has begun ends with the reason, and is not recorded.
    says.wait, says.midway = None, asyncio.Event().wait
    monkeypatch.setattr(endpoint, "_config", endpoint._config.model_copy(update={"deadline_s": 1.5}))
    response = post(f"{url}/chat/completions", model="policy", messages=[user("a")], stream=True)
    *_, last, end = response.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503 and end == "data: [DONE]"
    assert response.status_code == 200 and not endpoint.finish("s").turns


def test_each_engine_has_an_address_and_none_records(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, says, _ = session
    urls = endpoint.base_urls(2)
    assert len(set(urls)) == 2
    for url in urls:
        assert chat(url, [user("a")])["choices"][0]["message"]["content"] == says.text
    assert not endpoint.finish("s").turns and says.requests[0].sample_id == ""


def test_two_runs_do_not_share_a_port(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, _, url = session
    port = int(url.removeprefix("http://").partition("/")[0].rpartition(":")[2])
    with pytest.raises(EndpointError, match=f"port_range_low={port}"):
        Endpoint(endpoint._serving, endpoint._config, (port, port))


@pytest.mark.slow
def test_a_port_is_free_once_its_run_has_ended_whoever_was_connected(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, _, _ = session
    first = Endpoint(endpoint._serving, endpoint._config, (3000, 4999))
    address = first.base_url.removeprefix("http://").partition("/")[0]
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60):
        first.close()
    second = Endpoint(endpoint._serving, endpoint._config, (port, port))
    second.close()


def test_clients_are_given_an_address_that_other_machines_reach() -> None:
    with bound_socket("0.0.0.0", (3000, 4999)) as bound:
        assert "0.0.0.0" not in root_url(bound) and root_url(bound).endswith(f":{bound.getsockname()[1]}")


def test_options_of_the_server_are_checked_before_anything_starts(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"http_server\.host is 0\.0\.0\.0"):
        configured(
            tiny_model,
            "policy.generation.vllm_cfg.http_server.host=0.0.0.0",
            "policy.generation.vllm_cfg.http_server.token_variable=null",
        )


def test_a_parser_of_a_users_file_is_registered_and_a_file_that_is_missing_or_fails_refused(tmp_path: Path) -> None:
    from vllm.tool_parsers import ToolParserManager

    good, bad = tmp_path / "shouting.py", tmp_path / "failing.py"
    good.write_text(
        "from vllm.tool_parsers import ToolParser, ToolParserManager\n"
        "@ToolParserManager.register_module('shouting')\nclass Shouting(ToolParser):\n    pass\n"
    )
    bad.write_text("import no_such_module\n")
    _load_plugins({"tool_parser_plugin": str(good), "reasoning_parser_plugin": None})
    assert ToolParserManager.get_tool_parser("shouting").__name__ == "Shouting"
    for plugin in (str(bad), str(tmp_path / "missing.py"), "no.such.module"):
        with pytest.raises(ConfigError, match="vllm_cfg.reasoning_parser_plugin: .* cannot be imported"):
            _load_plugins({"reasoning_parser_plugin": plugin})


@pytest.mark.parametrize("key", [f"{_VLLM}.http_server.deadline_s", "env.mine.step_timeout_s"])
@pytest.mark.parametrize("value", [".inf", ".nan", "0"])
def test_a_deadline_is_a_number_of_seconds(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_master_config(_CONFIG, [f"++{key}={value}"])


# -- agents -----------------------------------------------------------------------------------------------------------


def ask(base_url: str, messages: list[dict[str, object]]) -> dict[str, object]:
    response = post(f"{base_url}/chat/completions", model="policy", messages=messages)
    response.raise_for_status()
    return response.json()["choices"][0]["message"]


def twice(task: dict[str, Any], base_url: str, session: Any, reward: float) -> dict[str, float]:
    """An agent that goes on with its conversation, and has another one beside it."""
    messages = list(task["messages"])
    messages += [ask(base_url, messages), user("again")]
    ask(base_url, messages)
    ask(base_url, [user("aside")])
    return {"right": reward, "named": float(task["expected"] == "4" and task["idx"] == 7)}


async def endless(task: dict[str, Any], base_url: str, session: Any) -> float:
    """An agent that asks until its conversation leaves no room."""
    messages = list(task["messages"])
    while True:
        messages += [await asyncio.to_thread(ask, base_url, messages), user("x" * 150)]


def too_long(task: dict[str, Any], base_url: str, session: Any) -> float:
    """An agent whose first prompt leaves no room."""
    ask(base_url, [user("x" * 600)])
    return 1.0


async def never(task: dict[str, Any], base_url: str, session: Any) -> float:
    """An agent whose episode does not end."""
    await asyncio.Event().wait()
    return 1.0


def given(task: dict[str, Any], base_url: str, session: Any, value: object) -> object:
    """An agent that earns what it is given, or raises it."""
    ask(base_url, task["messages"])
    if isinstance(value, BaseException):
        raise value
    return value


class Broken:
    """An agent with a mistake of its own."""

    def run(self, task: dict[str, Any], base_url: str, session: Any) -> float:
        ask(base_url, task["messages"])
        raise KeyError("oops")


def rolled_out(endpoint: Endpoint, says: Model, agent: str, timeout_s: float = 60.0, **arguments: object) -> Any:
    says.text, says.ended, says.wait = "hi", True, None
    section = EnvConfig.read({"mine": {"agent": f"{__name__}.{agent}", **arguments}}).of("mine")
    environment = AgentEnvironment(environment_settings(section, "mine"))
    return played(endpoint, says, environment, {"ground_truth": "4", "idx": 7}, timeout_s)


def played(
    endpoint: Endpoint, says: Model, environment: AgentEnvironment, known: dict[str, Any], timeout_s: float = 60.0
) -> Any:
    """Two samples of one prompt, whose row knows `known`."""
    says.requests.clear()
    handle = EnvironmentHandle("mine", (environment,), timeout_s, 4, 1, is_agent=True)
    generator = SimpleNamespace(run_on_dispatch_loop=asyncio.run)
    runner = RolloutRunner(generator, says.tokenizer, {"t": handle}, agents=AgentRollouts(endpoint, says.tokenizer))  # type: ignore[arg-type]
    ids = torch.tensor(says.tokenizer("2+2=")["input_ids"])
    batch = BatchedDataDict(
        message_log=[[{"role": "user", "content": "<2+2=>", "text": "2+2=", "token_ids": ids}]],
        task_name=["t"],
        extra_env_info=[known],
        stop_strings=[None],
        loss_multiplier=torch.ones(1),
        length=torch.tensor([4]),
    )
    plan = RolloutPlan(1, 0, GenerationSamplingParams(), RolloutLimits(512, 64, 1))
    numbered = number_samples(batch, 2)
    return numbered, runner.run(numbered, plan)


def test_the_episodes_of_an_agent_become_rows_with_what_was_sampled(served: tuple[Endpoint, Model]) -> None:
    endpoint, says = served
    batch, trajectories = rolled_out(endpoint, says, "twice", reward=0.25)
    assert [t.components for t in trajectories] == [{"reward/right": 0.25, "reward/named": 1.0}] * 2
    assert trajectories[0].further_branches[0].components == {"reward/right": 0.25, "reward/named": 1.0}
    assert {request.sample_id for request in says.requests} == {"0-0-0", "0-0-1"}
    assert len({request.seed for request in says.requests}) == 6
    columns = rollout_columns(batch, trajectories, pad_token_id=0)
    tokens, rows = columns.tokens, columns.rows
    longest = max(says.requests, key=lambda request: len(request.prompt_ids))
    # The conversation beside the first is a branch of its own, and a row.
    assert sample_starts(rows).tolist() == [True, False] * 2
    sampled = [*says.tokenizer("hi")["input_ids"], _SILENT, says.tokenizer.eos_token_id]
    for row in range(4):
        mask = tokens["token_mask"][row].bool()
        assert tokens["input_ids"][row][mask].tolist() == sampled * (1 if row % 2 else 2)
        assert tokens["generation_logprobs"][row][mask].tolist() == [-0.5] * len(sampled) * (1 if row % 2 else 2)
    for row in (0, 2):
        ids = tokens["input_ids"][row][: int(tokens["input_lengths"][row])].tolist()
        assert ids[: len(longest.prompt_ids)] == longest.prompt_ids
    metrics = rollout_metrics([trajectory.outcome(1) for trajectory in trajectories])
    assert (metrics["agent_branches_per_sample"], metrics["mean_gen_tokens_per_sample"]) == (2.0, 3.0 * len(sampled))
    assert (metrics["reward/right"], metrics["reward/named"]) == (0.25, 1.0)
    assert rows["weight_version"].tolist() == [3] * 4 and rows["total_reward"].tolist() == [1.25] * 4
    roles = [message["role"] for message in trajectories[0].message_log]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert not endpoint._sessions


def test_an_agent_that_ran_out_of_room_is_a_truncated_sample(served: tuple[Endpoint, Model]) -> None:
    _, trajectories = rolled_out(*served, "endless")
    assert [(t.truncated, t.reward, t.turns > 1) for t in trajectories] == [(True, 0.0, True)] * 2
    batch, trajectories = rolled_out(*served, "too_long")
    columns = rollout_columns(batch, trajectories, pad_token_id=0)
    assert columns.rows["truncated"].tolist() == [True, True] and columns.rows["total_reward"].tolist() == [0.0, 0.0]
    assert columns.tokens["input_lengths"].tolist() == [4, 4] and not columns.tokens["token_mask"].any()
    assert rollout_metrics([trajectory.outcome(1) for trajectory in trajectories])["truncation_rate"] == 1.0


class Overflows:
    """An agent whose conversation leaves no room once, and then what a test wants."""

    def __init__(self, then: str) -> None:
        self.then = then

    def run(self, task: dict[str, Any], base_url: str, session: Any) -> float:
        ask(base_url, task["messages"])
        body = {"model": "policy", "messages": [user("x" * 600)]}
        if self.then == "its error of urllib":
            request = urllib.request.Request(
                f"{base_url}/chat/completions",
                json.dumps(body).encode(),
                {"Authorization": f"Bearer {_TOKEN}", "Content-Type": "application/json"},
            )
            urllib.request.urlopen(request)
        response = post(f"{base_url}/chat/completions", **body)
        try:
            response.raise_for_status()
        except requests.HTTPError as error:
            if self.then == "its error":
                raise
            if self.then == "its error, wrapped":
                raise RuntimeError("the model failed") from error
            if self.then == "its error, in a group":
                raise ExceptionGroup("tasks", [error]) from None
            if self.then == "a mistake while it is handled":
                raise KeyError("oops") from None
        if self.then == "a mistake of its own":
            raise KeyError("oops")
        if self.then == "what the answer lacks":
            return float(response.json()["reward"])
        if self.then == "another refusal":
            refused = post(f"{base_url}/chat/completions", model="policy", messages=task["messages"], temperature=0.25)
            refused.raise_for_status()
        return 0.5


@pytest.mark.parametrize(
    "then", ["its error", "its error, wrapped", "its error, in a group", "its error of urllib", "a reward"]
)
def test_the_error_of_a_prompt_without_room_ends_its_episode(then: str, served: tuple[Endpoint, Model]) -> None:
    _, trajectories = rolled_out(*served, "Overflows", then=then)
    cut = then != "a reward"
    assert [(t.truncated, t.reward) for t in trajectories] == [(cut, 0.0 if cut else 0.5)] * 2


@pytest.mark.parametrize(
    "then", ["a mistake of its own", "a mistake while it is handled", "what the answer lacks", "another refusal"]
)
def test_another_error_of_an_agent_that_once_had_no_room_ends_the_run(
    then: str, served: tuple[Endpoint, Model]
) -> None:
    with pytest.raises(EnvironmentFailure, match=r"Overflows raised (.|\n)*had left no room before"):
        rolled_out(*served, "Overflows", then=then)


def either(task: dict[str, Any], base_url: str, session: Any) -> object:
    """An agent that earns a number, or parts."""
    ask(base_url, task["messages"])
    return 0.5 if session.seed % 2 else {"right": 1.0, "form": 0.25}


def test_numbers_and_parts_of_rewards_may_share_a_call(served: tuple[Endpoint, Model]) -> None:
    endpoint, says = served
    says.text, says.ended, says.wait = "hi", True, None
    section = EnvConfig.read({"mine": {"agent": f"{__name__}.either"}}).of("mine")
    environment = AgentEnvironment(environment_settings(section, "mine"))
    sessions = [
        AgentSession(
            f"s{number}",
            endpoint.open(f"s{number}", SessionPlan("0", GenerationSamplingParams(), 64, 512)),
            "policy",
            _TOKEN,
            number,
        )
        for number in range(3)
    ]
    log = [{"role": "user", "content": "a"}]

    def earned(chosen: list[AgentSession]) -> list[float]:
        known = [{"session": session, "row": {}} for session in chosen]
        returned = step_environment(environment, [log] * len(chosen), known, timeout_s=60, name="mine")
        rewards = returned.rewards
        columns = list(rewards.values()) if isinstance(rewards, dict) else [rewards]
        return torch.stack(columns).sum(0).tolist()

    assert earned(sessions) == [1.25, 0.5, 1.25]
    # With whom an episode shares its call does not matter.
    assert [earned([session])[0] for session in sessions] == [1.25, 0.5, 1.25]
    _, trajectories = rolled_out(*served, "either")
    assert all(set(t.components) <= {"reward/right", "reward/form"} for t in trajectories)


def test_a_seed_that_an_agent_sends_differs_by_sample_and_stays_its_own(session: tuple[Endpoint, Model, str]) -> None:
    endpoint, says, _ = session
    seeds: list[list[int | None]] = []
    for own in (11, 12):
        url = endpoint.open(f"seeded-{own}", SessionPlan("0", GenerationSamplingParams(), 64, 512, lambda _: 5, own))
        says.requests.clear()
        for seed in (42, 42, 43):
            chat(url, [user("a")], seed=seed)
        seeds.append([request.seed for request in says.requests])
    for first, again, other in seeds:
        assert first == again != other
    assert not set(seeds[0]) & set(seeds[1])
    # Outside of any session it is the client's.
    chat(endpoint.base_url, [user("a")], seed=42)
    assert says.requests[-1].seed == 42


def test_one_call_at_most_is_refused_by_its_own_name(session: tuple[Endpoint, Model, str]) -> None:
    _, _, url = session
    tools = [{"type": "function", "function": {"name": "add"}}]
    body: dict[str, Any] = {"model": "policy", "messages": [user("a")], "parallel_tool_calls": False}
    refused = post(f"{url}/chat/completions", **body, tools=tools)
    assert refused.status_code == 400 and "parallel_tool_calls=false: calls are drawn freely" in refused.text
    assert post(f"{url}/chat/completions", **body).status_code == 200
    body["parallel_tool_calls"] = True
    assert post(f"{url}/chat/completions", **body, tools=tools).status_code == 200


def test_the_mistake_of_an_agent_ends_the_run_and_names_it(served: tuple[Endpoint, Model]) -> None:
    with pytest.raises(EnvironmentFailure, match="Broken raised KeyError"):
        rolled_out(*served, "Broken")
    assert not served[0]._sessions


@pytest.mark.parametrize("reward", [True, np.float32(1.0), np.bool_(True), torch.tensor(1)])
def test_a_reward_may_be_any_number(served: tuple[Endpoint, Model], reward: object) -> None:
    _, trajectories = rolled_out(*served, "given", value=reward)
    assert [one.reward for one in trajectories] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (None, "given returned None; expected a number"),
        ("1", "given returned '1'; expected a number"),
        ({}, "given returned an empty dict"),
        ({"right": [1]}, "expected a number, or a dict of numbers"),
        (torch.ones(2), "expected a number"),
        (math.nan, "not finite"),
        ({"right": math.inf}, "reward/right that are not finite"),
        (SystemExit(3), r"given raised SystemExit\(3\)"),
    ],
)
def test_what_is_no_reward_ends_the_run_and_names_the_agent(
    served: tuple[Endpoint, Model], reward: object, says: str
) -> None:
    with pytest.raises(EnvironmentFailure, match=says):
        rolled_out(*served, "given", value=reward)
    assert not served[0]._sessions


def test_an_episode_that_does_not_end_ends_the_run_at_its_deadline(served: tuple[Endpoint, Model]) -> None:
    with pytest.raises(EnvironmentFailure, match="step_timeout_s"):
        rolled_out(*served, "never", timeout_s=0.2)
    assert not served[0]._sessions


def test_nemo_gym_plays_its_rows_with_the_keys_of_a_recipe(served: tuple[Endpoint, Model], tmp_path: Path) -> None:
    """A package that stands in for nemo-gym 0.4 sends what its `simple_agent` and `vllm_model` sent."""
    endpoint, says = served
    says.ended, says.wait = True, None
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={_NEMO_GYM} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    own = {"python": str(python), "config_paths": ["model.yaml", "tools.yaml"], "use_absolute_ip": True}
    section = EnvConfig.read({"should_use_nemo_gym": True, "nemo_gym": own}).of("nemo_gym")
    assert environment_class("nemo_gym", section) is AgentEnvironment

    async def answer() -> None:
        asked = says.tokenizer.decode(says.requests[-1].prompt_ids)
        says.text = "It is cold." if "<|im_start|>tool" in asked else _CALL

    rows = tmp_path / "rows.jsonl"
    row = {
        "responses_create_params": {
            "input": [{"role": "developer", "content": "Help."}, {"role": "user", "content": [{"text": "1+2?"}]}],
            "temperature": 0.5,
        },
        "agent_ref": {"name": "adder"},
    }
    rows.write_text(json.dumps(row) + "\n")
    entry = {"dataset_name": "NemoGymDataset", "data_path": str(rows), "prompt_file": None}
    dataset = load_response_dataset(entry)
    datum = dataset.processor(dataset.dataset[0], dataset.task_spec, says.tokenizer, 400, 0)
    assert datum["message_log"][0]["text"] == "Help.\n1+2?"
    environment = AgentEnvironment(environment_settings(section, "nemo_gym"))
    says.wait = answer
    try:
        _, trajectories = played(endpoint, says, environment, datum["extra_env_info"])
    finally:
        says.wait = None
        environment.close()
    for trajectory in trajectories:
        # The call and what follows the tool's result are one exact conversation.
        assert (trajectory.reward, trajectory.turns, trajectory.further_branches) == (1.0, 2, [])


def test_nemo_gym_needs_an_interpreter_that_has_it() -> None:
    section = EnvConfig.read({"nemo_gym": {"config_paths": ["a.yaml"]}}).of("nemo_gym")
    with pytest.raises(ConfigError, match=r"env\.nemo_gym\.python: .* has no package nemo_gym"):
        environment_class("nemo_gym", section)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"agent": f"{__name__}.twice"}, "reward"),
        ({"agent": f"{__name__}.Broken", "size": 3}, "size"),
        ({"agent": f"{__name__}._TOKEN"}, "cannot be called"),
        ({"agent": f"{__name__}.endless", "task": 3}, "task"),
    ],
)
def test_an_agent_that_cannot_be_called_is_refused_at_the_start(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        environment_class("mine", EnvConfig.read({"mine": section}).of("mine"))


def test_an_agent_needs_the_endpoint() -> None:
    with pytest.raises(ConfigError, match="expose_http_server=true"):
        load_master_config(_CONFIG.with_name("grpo_arithmetic_agent_cpu.yaml"), [f"{_VLLM}.expose_http_server=false"])


@pytest.mark.slow
def test_the_agents_sdk_of_openai_plays_with_its_tools(session: tuple[Endpoint, Model, str]) -> None:
    import agents as sdk
    import openai

    endpoint, says, url = session
    sdk.set_tracing_disabled(True)
    says.text = _CALL

    def add(a: int, b: int) -> int:
        """Adds."""
        says.text = "3"
        return a + b

    model = sdk.OpenAIChatCompletionsModel("policy", openai.AsyncOpenAI(base_url=url, api_key=_TOKEN))
    agent = sdk.Agent(name="adder", instructions="Add.", tools=[sdk.function_tool(add)], model=model)
    result = asyncio.run(sdk.Runner.run(agent, "1+2?"))
    assert result.final_output == "3"
    one = endpoint.finish("s")
    assert [turn.parent for turn in one.turns] == [None, 0]
    (branch,) = one.branches()
    assert len(trained_tokens(branch)) == sum(len(turn.result.token_ids) for turn in one.turns)
    assert [part.messages[-1]["role"] for part in branch.parts] == ["user", "tool"]
