"""Real engines that come and go, take new weights, preempt requests and die: every trained token has the routes and the
mask that the engines themselves wrote down when they drew it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.config import EnvConfig
from nemo_rl.environments.agent_environment import AgentEnvironment
from nemo_rl.environments.environment_registry import environment_settings
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.rollout_source import LiveRollouts
from nemo_rl.experience.rollouts import AgentRollouts, RolloutLimits, RolloutPlan, RolloutRunner, number_samples
from nemo_rl.models.generation.decisions import Recording
from nemo_rl.models.generation.endpoint.server import start_endpoint
from nemo_rl.models.generation.vllm import engine_actors
from nemo_rl.models.generation.vllm.fleet import ShardState
from nemo_rl.models.policy.router_replay import VALIDATE
from tests.conftest import example
from tests.experience.test_rollout_flow import Counts, prompts
from tests.models.elastic_engines import Elastic, elastic_engines
from tests.models.test_endpoint import _TOKEN, choices_of, configured, post
from tests.test_documentation import blocks

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

SCHEDULES, SEED = 6, 5
REPLAYED = (
    "policy.router_replay.enabled=true",
    "policy.sampling_mask_replay=true",
    "policy.generation.top_p=0.8",
    "policy.generation.vllm_cfg.enable_prefix_caching=true",
    # Prompts in parts, which a generator of a request's own could not draw again.
    "policy.generation.vllm_cfg.request_seeds=false",
    # Fewer blocks than twelve samples need: some are preempted.
    "policy.generation.vllm_kwargs={enable_chunked_prefill: true, max_num_batched_tokens: 48, max_num_seqs: 16, "
    "block_size: 32}",
    "policy.generation.vllm_cfg.num_gpu_blocks_override=14",
    "policy.generation.vllm_cfg.max_model_len=128",
    "policy.max_total_sequence_length=128",
)


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines") / "decisions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that what its engines free when they sleep is seen beside what else their processes do."""
    folder = tmp_path_factory.mktemp("models") / "moe"
    example("make_tiny_model").save_tiny_model(folder, layers=2, hidden=192, heads=3, kv_heads=3, experts=32)
    return folder


@pytest.fixture(scope="module")
def engines(ray_session: None, model: Path, log_file: Path) -> Iterator[Elastic]:
    written = f"+policy.generation.vllm_cfg.env_vars.NRL_TEST_DECISIONS={log_file}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine_actors, "EXTENSION", "tests.models.logging_extension.LoggingExtension")
        patched.setenv(VALIDATE, "1")
        with elastic_engines(model, 2, *REPLAYED, written) as some:
            yield some


RECORDING = Recording(layers=(0, 1), experts=32, per_token=2, masks=True, vocabulary=320)


class Moves:
    """What happens to engines while they generate. `version`: of their weights, at least."""

    def __init__(self, engines: Elastic, seed: int, version: int = 0) -> None:
        self._engines = engines
        self._random = random.Random(seed)
        self.version = version

    def some(self) -> None:
        """One or two moves; all engines serve again afterwards."""
        for _ in range(self._random.randint(1, 2)):
            time.sleep(self._random.uniform(0.0, 0.15))
            self._random.choice([self.elsewhere, self.all_asleep, self.new_weights])()

    def elsewhere(self) -> None:
        """A shard sleeps, its requests go on on the other, and it wakes."""
        shard = self._random.randrange(2)
        self._engines.elastic.shrink([shard])
        self._engines.elastic.expand([shard])

    def all_asleep(self) -> None:
        self._engines.elastic.shrink([0, 1])
        self._engines.elastic.expand([0, 1])

    def new_weights(self) -> None:
        self.version += 1
        self._engines.refresh(self.version, recompute_kv=self._random.random() < 0.5)

    def death(self) -> None:
        time.sleep(0.1)
        os.kill(self._engines.generation.fleet.shards[1].ranks[0]["pid"], signal.SIGKILL)


def rolled_out(engines: Elastic, number: int, move: Callable[[], None], longest: int = 96) -> Any:
    """Columns of two-turn rollouts during which engines move. `number`: step, part of every request's id."""
    texts = [f"{number % 7}: a beginning that many prompts have in common, then {n}=" for n in (1, 2, 2, 13)]
    batch = prompts(*texts)
    for log, text in zip(batch["message_log"], texts, strict=True):
        log[0]["token_ids"] = torch.tensor(engines.tokenizer(text[-(44 + number % 3) :])["input_ids"])
    sampling = engines.generation.default_sampling()
    plan = RolloutPlan(SEED, number, sampling, RolloutLimits(longest, 16, 2), records=True)
    runner = RolloutRunner(
        engines.generation, engines.tokenizer, {"count": EnvironmentHandle("count", (Counts(),))}, engines.record
    )
    source = LiveRollouts(runner, pad_token_id=engines.tokenizer.pad_token_id, multiple=1, recording=RECORDING)
    with ThreadPoolExecutor(1) as mover:
        moving = mover.submit(move)
        try:
            return source.roll_out(number_samples(batch, 3), plan, 0).columns
        finally:
            # What went wrong with a move is why the rollouts failed, if they did.
            moving.result(timeout=60.0)


class Log:
    """What the engines wrote: draws by sample and position, and how often things happened."""

    def __init__(self, file: Path) -> None:
        lines = [json.loads(line) for part in file.parent.glob(f"{file.name}.*") for line in part.open()]
        self.happened = Counter(line["happened"] for line in lines if "happened" in line)
        self.draws: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for line in lines:
            if "position" in line:
                sample = line["key"].partition("+")[0].rpartition("-")[0]
                self.draws.setdefault((sample, line["position"]), []).append(line)

    def check(self, columns: Any, number: int) -> tuple[int, int]:
        """Compares every trained token of a rollout; how many there are, and how many tokens have no routes besides
        those that were never computed.
        """
        tokens, rows = columns.tokens, columns.rows
        trained = lost = 0
        for row in range(tokens.size):
            sample = f"{number}-{int(rows['prompt_number'][row])}-{int(rows['sample_number'][row])}"
            mask, ids = tokens["token_mask"][row], tokens["input_ids"][row].tolist()
            kept, at = tokens["sampling_mask_ids"][row].tolist(), 0
            last = int(mask.nonzero().max())
            for position in mask.nonzero().flatten().tolist():
                logprob = float(tokens["generation_logprobs"][row, position])
                # A draw that was lost with its engine or its step may have been the same one: the last of them counts.
                draw = max(
                    (one for one in self.draws[sample, position] if one["drawn"] == [ids[position], logprob]),
                    key=lambda one: one["time"],
                )
                assert tokens["routed_experts_valid"][row, position - 1]
                assert tokens["routed_experts"][row, position - 1].tolist() == draw["experts"]
                count = int(tokens["sampling_mask_counts"][row, position])
                assert kept[at : at + count] == draw["kept"]
                trained, at = trained + 1, at + count
            assert at == len(kept)
            valid = tokens["routed_experts_valid"][row]
            lost += int((~valid[:last]).sum())
            # The last token is computed only where the engine ran on before its stop string was found.
            assert not valid[last + 1 :].any()
        return trained, lost


GOT: list[tuple[str, dict[str, Any]]] = []
"""What agents got: the sample, none outside of sessions, and a choice."""


def asks(task: dict[str, Any], base_url: str, session: Any) -> float:
    """An agent that goes on with its conversation, and has others beside it that begin alike; whole and streamed."""
    sample = session.id.rpartition("-")[0]

    def ask(path: str, sample: str = sample, url: str = base_url, **body: object) -> dict[str, object]:
        choices = choices_of(post(f"{url}/{path}", model="policy", return_token_ids=True, **body))
        GOT.extend((sample, choice) for choice in choices)
        return choices[0].get("message", {})

    one, other = [[*task["messages"], {"role": "user", "content": text}] for text in ("a", "b")]
    for messages, stream in ((one, False), (other, True)):
        messages += [ask("chat/completions", messages=messages, stream=stream), {"role": "user", "content": "c"}]
        ask("chat/completions", messages=messages, stream=stream)
    ask("chat/completions", messages=[*one[:-1], {"role": "user", "content": "d"}])
    text = task["messages"][-1]["content"]
    ask("completions", prompt=text, n=2, stream=session.seed % 2 == 0)
    ask("completions", "", base_url.replace(f"/session/{session.id}", ""), prompt=text, max_tokens=8)
    return 1.0


def check_returned(columns: Any, number: int) -> int:
    """Compares what agents got with the rows that it became; how many choices are the last of a row."""
    (text,) = [text for _, text in blocks("docs/agents.md", "python") if "def decisions" in text]
    page: dict[str, Any] = {}
    exec(text, page)
    tokens, rows = columns.tokens, columns.rows
    last = 0
    for sample, choice in GOT:
        ids, start = [*choice["prompt_token_ids"], *choice["token_ids"]], len(choice["prompt_token_ids"])
        experts, known, drawn_from = page["decisions"](choice)
        assert (experts.dtype, experts.shape, known.shape) == (np.uint8, (len(ids), 2, 2), (len(ids),))
        if not sample:
            assert known.tolist() == [True] * (len(ids) - 1) + [False]
            for token, some in zip(choice["token_ids"], drawn_from, strict=True):
                assert some is None or token in some
            continue
        same: list[int] = []
        for row in range(rows.size):
            of = f"{number}-{int(rows['prompt_number'][row])}-{int(rows['sample_number'][row])}"
            counts = tokens["sampling_mask_counts"][row].numpy()
            if (of, tokens["input_ids"][row, : len(ids)].tolist()) != (sample, ids):
                continue
            # What a turn does not train has no masks in this row.
            if not tokens["token_mask"][row, start : len(ids)].all():
                continue
            ends = int(tokens["input_lengths"][row]) == len(ids)
            # The routes of a response's last token come with the next turn.
            sure = slice(None, len(ids) - (not ends))
            first, end = int(counts[:start].sum()), int(counts[: len(ids)].sum())
            kept = np.split(tokens["sampling_mask_ids"][row].numpy()[first:end], counts[start : len(ids)].cumsum())[:-1]
            if (
                np.array_equal(tokens["routed_experts_valid"][row, : len(ids)].numpy()[sure], known[sure])
                and np.array_equal(tokens["routed_experts"][row, : len(ids)].numpy()[sure], experts[sure])
                and [some.tolist() for some in kept] == [[] if some is None else some.tolist() for some in drawn_from]
            ):
                same.append(int(ends))
        assert same, f"sample {sample} was trained with other decisions than its agent got"
        last += max(same)
    return last


def played(engines: Elastic, model: Path, number: int, move: Callable[[], None]) -> Any:
    """Columns of episodes that agents play at the endpoint while engines move. `number`: as in `rolled_out`."""
    limits = ("max_total_sequence_length=128", "generation.vllm_cfg.max_model_len=128", "generation.max_new_tokens=8")
    policy = configured(model, *REPLAYED[:3], *(f"policy.{limit}" for limit in limits))
    stops = [engines.tokenizer.eos_token_id]
    endpoint = start_endpoint(
        policy, engines.tokenizer, engines.generation.generate_one, stop_token_ids=stops, cuda=False
    )
    batch = prompts("7+7=", "8+1=")
    environment = AgentEnvironment(
        environment_settings(EnvConfig.read({"e": {"agent": f"{__name__}.asks"}}).of("e"), "e")
    )
    handle = EnvironmentHandle("e", (environment,), 120.0, 6, 1, is_agent=True)
    agents = AgentRollouts(endpoint, engines.tokenizer)
    runner = RolloutRunner(engines.generation, engines.tokenizer, {"count": handle}, engines.record, agents)
    source = LiveRollouts(runner, pad_token_id=engines.tokenizer.pad_token_id, multiple=1, recording=RECORDING)
    plan = RolloutPlan(SEED, number, engines.generation.default_sampling(), RolloutLimits(128, 8, 1), records=True)
    try:
        with ThreadPoolExecutor(1) as mover:
            moving = mover.submit(move)
            try:
                return source.roll_out(number_samples(batch, 3), plan, 0).columns
            finally:
                moving.result(timeout=60.0)
    finally:
        endpoint.close()


def test_every_token_that_an_agent_samples_has_what_the_engines_wrote_down(
    engines: Elastic, model: Path, log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NRL_TEST_TOKEN", _TOKEN)
    moves = Moves(engines, SEED)
    first = SCHEDULES + 1
    done: list[tuple[int, Any]] = []
    for number in range(first, first + 2):
        GOT.clear()
        done.append((number, played(engines, model, number, moves.some)))
        # Of each sample two conversations and the continuation of one, and two completions.
        assert len(GOT) == 6 * 8 and check_returned(done[-1][1], number) >= 6 * 5
    log = Log(log_file)
    assert min(columns.rows.size for _, columns in done) >= 30
    checked = [log.check(columns, number) for number, columns in done]
    assert min(trained for trained, _ in checked) > 60 and [lost for _, lost in checked] == [0] * 2


def test_every_trained_token_has_what_the_engines_wrote_down_whatever_happened(
    engines: Elastic, log_file: Path
) -> None:
    moves = Moves(engines, 11, version=100)  # half of this seed's moves bring new weights
    done = [(number, rolled_out(engines, number, moves.some)) for number in range(SCHEDULES)]
    assert engines.generation._dispatcher.preempted >= 5 and moves.version >= 105
    done.append((SCHEDULES, rolled_out(engines, SCHEDULES, moves.death)))
    assert engines.generation.fleet.state(1) is ShardState.FAILED
    log = Log(log_file)
    checked = [log.check(columns, number) for number, columns in done]
    assert sum(trained for trained, _ in checked) > 100 * SCHEDULES
    # Cached tokens have the routes of the request that computed them: none is lost.
    assert [number for number, (_, lost) in enumerate(checked) if lost] == []
    assert min(log.happened[what] for what in ("in parts", "cached", "again")) > 0, log.happened
