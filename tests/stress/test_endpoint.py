"""The endpoint stays up: clients of an agent's kind talk on while shards sleep, wake, are refitted and die.

More of them, in another order each time: `make endpoint-stress`.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import requests

from nemo_rl.config import load_master_config
from nemo_rl.models.generation.endpoint.server import Endpoint, start_endpoint
from nemo_rl.models.generation.endpoint.session import Session, SessionPlan
from nemo_rl.models.generation.endpoint.streamed_answers import StreamedAnswers, chunk_of
from nemo_rl.models.generation.interfaces import GenerationSamplingParams, request_seed
from tests.models.branches import trained_tokens
from tests.models.elastic_engines import Elastic, elastic_engines

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

_CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
_CLIENTS = int(os.environ.get("NRL_STRESS_CLIENTS", "16"))
_SESSIONS = int(os.environ.get("NRL_STRESS_SESSIONS", "4"))
_SHARDS = int(os.environ.get("NRL_STRESS_SHARDS", "2"))
_DISTURBANCES = int(os.environ.get("NRL_STRESS_DISTURBANCES", "10"))
_SEED = int(os.environ.get("NRL_STRESS_SEED", "2"))
_TURNS, _TOKENS = 3, 16
_OVERRIDES = [
    "policy.max_total_sequence_length=256",
    "policy.generation.vllm_cfg.max_model_len=256",
    "policy.generation.max_new_tokens=16",
    "policy.tokenizer.chat_template=default",
    # What a shard had begun is drawn again with the same seed, and so the same.
    "policy.generation.on_preempt=redo_turn",
]


@pytest.fixture(scope="module")
def served(tiny_model: Path, ray_session: None) -> Iterator[tuple[Elastic, Endpoint]]:
    # All versions have the same weights: a refit changes no token.
    with elastic_engines(tiny_model, _SHARDS, *_OVERRIDES, change=0.0) as engines:
        expose = "policy.generation.vllm_cfg.expose_http_server=true"
        config = load_master_config(_CONFIG, [f"policy.model_name={tiny_model}", *_OVERRIDES, expose])
        endpoint = start_endpoint(
            config.policy,
            engines.tokenizer,
            engines.generation.generate_one,
            stop_token_ids=[engines.tokenizer.eos_token_id],
            cuda=False,
        )
        yield engines, endpoint
        endpoint.close()


def said(response: requests.Response) -> dict[str, object]:
    """The message of a response, whole or streamed."""
    if "text/event-stream" not in response.headers["Content-Type"]:
        return response.json()["choices"][0]["message"]
    answers = StreamedAnswers(1)
    for line in response.text.split("\n\n"):
        if line and (chunk := chunk_of(line)) is not None:
            answers.add(chunk)
    assert answers.complete, response.text
    return answers.messages[0]


class Clients:
    """Agents that talk at the same time, and a count of the answers that they got."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._endpoint, self._name = endpoint, name
        self._answers = 0
        self._more = threading.Condition()

    def wait_for(self, answers: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: self._answers >= answers, 300)

    def play(self, number: int) -> Session:
        def seed_of(turn: int) -> int:
            return request_seed(7, 0, number, 0, turn)

        name = f"{self._name}-{number}"
        plan = SessionPlan(name, GenerationSamplingParams(), _TOKENS, 256, seed_of)
        url = self._endpoint.open(name, plan)
        messages: list[dict[str, object]] = []
        for turn in range(_TURNS):
            messages.append({"role": "user", "content": f"{number}+{turn}="})
            body = {"model": "policy", "messages": messages, "stream": number % 2 == 1}
            response = requests.post(f"{url}/chat/completions", json=body, timeout=300)
            assert response.status_code == 200, response.text
            messages.append(said(response))
            with self._more:
                self._answers += 1
                self._more.notify_all()
        return self._endpoint.finish(name)

    def play_all(self, meanwhile: Callable[[Clients], None]) -> list[Session]:
        with ThreadPoolExecutor(_CLIENTS) as threads:
            playing = [threads.submit(self.play, number) for number in range(_CLIENTS * _SESSIONS)]
            meanwhile(self)
            return [one.result(600) for one in playing]


def test_a_stream_goes_on_elsewhere_with_each_token_once(
    served: tuple[Elastic, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, endpoint = served
    # A turn that may be redone is not shown before its end.
    monkeypatch.setattr(engines.generation._dispatcher, "_on_preempt", "continue")
    begun = threading.Semaphore(0)

    def stream(number: int) -> tuple[list[int], int]:
        plan = SessionPlan(f"s{number}", GenerationSamplingParams(), 200, 256, lambda turn: number)
        url = endpoint.open(f"s{number}", plan)
        body = {"model": "policy", "prompt": f"{number}+1=", "stream": True, "return_token_ids": True}
        drawn: list[int] = []
        chunks = 0
        with requests.post(f"{url}/completions", json=body | {"max_tokens": 200}, stream=True, timeout=300) as response:
            assert response.status_code == 200, response.text
            for line in response.iter_lines():
                chunk = chunk_of(line.decode()) if line else None
                for choice in chunk["choices"] if chunk is not None else ():
                    drawn += choice["token_ids"] or ()
                    chunks += 1
                begun.release()
        return drawn, chunks

    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(stream, number) for number in range(8)]
        for shard in (0, 1):
            assert begun.acquire(timeout=300)
            engines.elastic.shrink([shard])
            engines.elastic.expand([shard])
        results = [one.result(300) for one in streams]
    for number, (drawn, chunks) in enumerate(results):
        (turn,) = endpoint.finish(f"s{number}").turns
        assert drawn == turn.result.token_ids
        assert [span.start for span in turn.result.spans[1:]] == [span.end for span in turn.result.spans[:-1]]
        assert chunks > 1 or len(drawn) < 3


@dataclass(frozen=True)
class Disturbance:
    """What happens to shards once so many answers have come; at once where none serves."""

    after: int
    kind: str
    shards: tuple[int, ...] = ()


def schedule(seed: int, shards: int, count: int, answers: int) -> list[Disturbance]:
    """Random disturbances, of each kind at least one. No shard that was killed is used again, and one is never killed.
    At the end one serves.
    """
    draw = random.Random(seed)
    while True:
        living, awake, chosen = set(range(shards)), set(range(shards)), []
        for after in sorted(draw.sample(range(1, answers * 4 // 5), count)):
            possible = ["kill"] * (len(living) > 1) + ["sleep", "refit"] * bool(awake) + ["wake"] * bool(living - awake)
            kind = draw.choice(possible)
            among = {"kill": living, "sleep": awake, "wake": living - awake, "refit": set[int]()}[kind]
            some = draw.sample(sorted(among), 1 if kind == "kill" else draw.randint(min(1, len(among)), len(among)))
            chosen.append(Disturbance(after if awake else 0, kind, tuple(sorted(some))))
            living -= set(some) if kind == "kill" else set()
            awake = awake | set(some) if kind == "wake" else awake - set(some)
        if not awake:
            chosen.append(Disturbance(0, "wake", tuple(sorted(living))))
        if {one.kind for one in chosen} == {"kill", "sleep", "wake", "refit"}:
            return chosen


def test_no_client_notices_that_shards_sleep_are_refitted_and_die(served: tuple[Elastic, Endpoint]) -> None:
    engines, endpoint = served
    disturbances = schedule(_SEED, _SHARDS, _DISTURBANCES, _CLIENTS * _SESSIONS * _TURNS)
    sys.stdout.write("\n  ".join([f"NRL_STRESS_SEED={_SEED}:", *map(str, disturbances)]) + "\n")
    refits = 0

    def disturb(clients: Clients) -> None:
        nonlocal refits
        for one in disturbances:
            clients.wait_for(one.after)
            if one.kind == "sleep":
                engines.elastic.shrink(one.shards)
            elif one.kind == "wake":
                engines.elastic.expand(one.shards)
            elif one.kind == "refit":
                refits += 1
                engines.refresh(refits, recompute_kv=False)
            else:
                ray.kill(engines.generation.group.workers[one.shards[0]])

    calm = Clients(endpoint, "calm").play_all(lambda clients: None)
    disturbed = Clients(endpoint, "disturbed").play_all(disturb)
    for before, after in zip(calm, disturbed, strict=True):
        # No turn is lost or there twice, and all of them are one trajectory.
        assert len(after.turns) == _TURNS and len(after.branches()) == 1
        (branch,) = after.branches()
        assert len(trained_tokens(branch)) == sum(len(turn.result.token_ids) for turn in after.turns)
        assert branch.token_ids == before.branches()[0].token_ids
        for one, other in zip(before.turns, after.turns, strict=True):
            assert other.result.logprobs == pytest.approx(one.result.logprobs, abs=1e-5)
    versions = {span.version for session in disturbed for turn in session.turns for span in turn.result.spans}
    assert {0} < versions <= set(range(refits + 1))
