"""Rollouts turn by turn, their columns, and where they come from: with a generator and environments that are plain
Python.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.compat.calls import run_multi_turn_rollout
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentFailure, EnvironmentReturn, response_of
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.rollout_source import LiveRollouts, RecordedRollouts, RecordingError, ReplayedRollouts
from nemo_rl.experience.rollout_tasks import is_infrastructure
from nemo_rl.experience.rollouts import (
    RolloutLimits,
    RolloutPlan,
    RolloutRunner,
    Trajectory,
    number_samples,
    rollout_metrics,
)
from nemo_rl.experience.store import InProcessStore, SpentHandleError, StageOutput, TokenStage, rollout_columns
from nemo_rl.models.generation.interfaces import (
    GenerationError,
    GenerationRequest,
    GenerationResult,
    GenerationSamplingParams,
    VersionSpan,
    results_to_batch,
)


class Letters:
    """A tokenizer of one token per character."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


class Generator:
    """Answers every prompt with three letters, later requests first."""

    def __init__(self, length: int = 3) -> None:
        self.seen: list[GenerationRequest] = []
        self._length = length

    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        self.seen.append(request)
        await asyncio.sleep(0.02 / len(self.seen))
        room = min(self._length, request.max_new_tokens)
        if room <= 0:
            return GenerationResult(request.request_id, [], [], "no_room")
        ids = [97 + (request.seed or 0) % 26] * room
        return GenerationResult(
            request.request_id,
            ids,
            [-0.5] * room,
            "stop" if room == self._length else "length",
            (VersionSpan(4, 0, room),),
        )

    def run_on_dispatch_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)


class Counts:
    """Asks twice, then ends; rewards every turn with 1."""

    def __init__(self, turns: int = 2) -> None:
        self.calls = 0
        self._turns = turns

    def step(self, logs: Any, metadata: Any) -> Any:
        self.calls += 1
        turn = [sum(message["role"] == "assistant" for message in log) for log in logs]
        done = torch.tensor([count >= self._turns for count in turn])
        return EnvironmentReturn(
            [{"role": "environment", "content": "??"} for _ in logs],
            list(metadata),
            [["!"] for _ in logs],
            torch.ones(len(logs)),
            done,
            None,
        )


def prompts(*texts: str) -> BatchedDataDict[Any]:
    logs = [
        [{"role": "user", "content": text, "token_ids": torch.tensor([ord(letter) for letter in text])}]
        for text in texts
    ]
    return BatchedDataDict(
        message_log=logs,
        task_name=["count"] * len(texts),
        extra_env_info=[{} for _ in texts],
        stop_strings=[None] * len(texts),
        loss_multiplier=torch.ones(len(texts)),
        length=torch.tensor([len(text) for text in texts]),
        idx=list(range(len(texts))),
    )


def plan(max_total: int = 64, max_turns: int = 5) -> RolloutPlan:
    return RolloutPlan(42, 7, GenerationSamplingParams(), RolloutLimits(max_total, 8, max_turns), ("#",))


def roll_out(
    batch: BatchedDataDict[Any],
    chosen: RolloutPlan,
    environment: Counts | None = None,
    generator: Generator | None = None,
) -> Any:
    runner = RolloutRunner(
        generator or Generator(), Letters(), {"count": EnvironmentHandle("count", (environment or Counts(),))}
    )
    return runner.run(batch, chosen)


def test_rows_stay_in_order_whatever_finishes_first_and_turns_add_up() -> None:
    batch = number_samples(prompts("a", "bb", "ccc"), 2)
    done = roll_out(batch, plan())
    assert [t.message_log[0]["content"] for t in done] == ["a", "a", "bb", "bb", "ccc", "ccc"]
    assert {(t.turns, t.reward, t.terminated, t.truncated, t.observed) for t in done} == {(2, 2.0, True, False, 4)}
    assert [message["role"] for message in done[0].message_log] == ["user", *["assistant", "environment"] * 2]
    assert done[0].spans == [VersionSpan(4, 0, 3), VersionSpan(4, 3, 6)]


def test_the_next_turn_continues_the_very_tokens_and_asks_with_its_own_seed_and_stops() -> None:
    generator = Generator()
    roll_out(number_samples(prompts("ab"), 1), plan(), generator=generator)
    first, second = generator.seen
    assert second.prompt_ids[:2] == first.prompt_ids and len(second.prompt_ids) == 2 + 3 + 2
    assert (first.stop_strings, second.stop_strings) == (("#",), ("#", "!"))
    assert first.seed != second.seed
    assert (first.request_id, second.request_id) == ("7-0-0-0", "7-0-0-1")


def test_parts_of_a_reward_add_up_over_parts_and_turns() -> None:
    class Parts(Counts):
        def step(self, logs: Any, metadata: Any) -> Any:
            answer = super().step(logs, metadata)
            return answer._replace(
                rewards={"reward/a": torch.full((len(logs),), 0.25), "reward/b": torch.full((len(logs),), -1.0)}
            )

    (done,) = roll_out(number_samples(prompts("a"), 1), plan(), Parts())
    assert done.turns == 2 and done.reward == -1.5 and done.components == {"reward/a": 0.5, "reward/b": -2.0}
    generator: Any = Generator()
    generator.cfg = SimpleNamespace(max_new_tokens=8, stop_strings=None)
    generator.default_sampling = lambda greedy: GenerationSamplingParams()
    batch, _ = run_multi_turn_rollout(generator, prompts("a", "b"), Letters(), {"count": Parts()}, 64)
    assert batch["reward/a"].tolist() == [0.5, 0.5] and batch["reward/b"].tolist() == [-2.0, -2.0]
    assert batch["total_reward"].tolist() == [-1.5, -1.5] and batch["extra_env_info"] == [{}, {}]


def test_steps_that_arrive_together_are_one_call_of_the_environment() -> None:
    environment = Counts(turns=1)
    roll_out(number_samples(prompts("a", "b"), 8), plan(), environment)
    assert environment.calls < 16


def test_a_prompt_that_leaves_no_room_is_answered_with_nothing_and_not_with_an_error() -> None:
    (done,) = roll_out(number_samples(prompts("x" * 64), 1), plan(max_total=64, max_turns=1))
    assert done.generated == [0]


def test_an_observation_that_does_not_fit_is_cut_and_ends_the_sample() -> None:
    (done,) = roll_out(number_samples(prompts("abcd"), 1), plan(max_total=9))
    assert done.truncated and done.out_of_room and done.turns == 1
    assert sum(len(message["token_ids"]) for message in done.message_log) <= 9


@pytest.mark.parametrize(("room", "truncated", "observed"), [(9, False, 2), (8, False, 1), (7, False, 0)])
def test_the_last_observation_takes_what_room_there_is(room: int, truncated: bool, observed: int) -> None:
    (done,) = roll_out(number_samples(prompts("abcd"), 1), plan(max_total=room), Counts(turns=1))
    assert (done.terminated, done.truncated, done.observed) == (True, truncated, observed)
    assert done.message_log[-1]["content"] == "??" and len(done.message_log[-1]["token_ids"]) == observed


def test_a_turn_that_was_cut_goes_on_with_the_environments_answer() -> None:
    class Cut(Generator):
        """Does not end its first turn."""

        async def generate_one(self, request: GenerationRequest) -> GenerationResult:
            result = await super().generate_one(request)
            return replace(result, finish_reason="length") if len(self.seen) == 1 else result

    (done,) = roll_out(number_samples(prompts("a"), 1), plan(), Counts(turns=3), Cut())
    assert (done.turns, done.terminated, done.truncated) == (3, True, True)
    (last,) = roll_out(number_samples(prompts("a"), 1), plan(max_turns=1), Counts(turns=3), Cut())
    assert (last.turns, last.terminated, last.truncated, last.observed) == (1, False, True, 2)


def test_an_episode_ends_by_its_environment_by_room_or_by_its_turns() -> None:
    def log(tokens: int) -> list[dict[str, Any]]:
        return [{"role": "user", "token_ids": torch.zeros(tokens, dtype=torch.long)}]

    ended = Trajectory(log(9), terminated=True, turns=1, generated=[3], observed=1)
    cut = Trajectory(log(9), truncated=True, out_of_room=True, turns=1, generated=[4], observed=2)
    stopped = Trajectory(log(9), turns=2, generated=[1, 1], observed=4)
    metrics = rollout_metrics([episode.outcome(2) for episode in (ended, cut, stopped)])
    assert metrics["natural_termination_rate"] == pytest.approx(2 / 3)
    assert metrics["truncation_rate"] == metrics["max_turns_reached_rate"] == pytest.approx(1 / 3)
    # What came behind the prompt: responses and what the environment said.
    assert metrics["mean_total_tokens_per_sample"] == pytest.approx((4 + 6 + 6) / 3)


def test_metadata_of_none_leave_what_the_environment_was_given() -> None:
    class Forgets(Counts):
        """Says its metadata once, in its first step."""

        def step(self, logs: Any, metadata: Any) -> Any:
            seen.append(list(metadata))
            result = super().step(logs, metadata)
            return result._replace(metadata=[{"turn": 1} if len(seen) == 1 else None for _ in logs])

    seen: list[list[Any]] = []
    (done,) = roll_out(number_samples(prompts("a"), 1), plan(), Forgets(turns=3))
    assert seen == [[{}], [{"turn": 1}], [{"turn": 1}]] and done.metadata == {"turn": 1}


def test_environments_learn_what_of_a_conversation_is_their_prompts_history() -> None:
    class Judge(Counts):
        def step(self, logs: Any, metadata: Any) -> Any:
            said.extend(response_of(log) for log in logs)
            return super().step(logs, metadata)

    said: list[str] = []
    batch = number_samples(prompts("ab"), 1)
    old = {"role": "assistant", "content": "old", "token_ids": torch.tensor([1, 2, 3])}
    batch["message_log"][0] += [old, dict(batch["message_log"][0][0])]
    (done,) = roll_out(batch, plan(max_turns=2), Judge(turns=3))
    new = [message["content"] for message in done.message_log if "generation_logprobs" in message]
    assert said == [new[0], "".join(new)] and len(new) == 2


def test_a_task_without_environment_is_named() -> None:
    batch = number_samples(prompts("a"), 1)
    batch["task_name"] = ["riddle"]
    with pytest.raises(KeyError, match=r"task 'riddle' has no environment; tasks with one: \['count'\]"):
        roll_out(batch, plan())


def test_columns_train_responses_of_this_rollout_only() -> None:
    batch = number_samples(prompts("ab", "cde"), 1)
    batch["message_log"][0].insert(0, {"role": "assistant", "content": "old", "token_ids": torch.tensor([1, 2, 3])})
    batch["extra_env_info"][1] = {"mask_sample": True}
    columns = rollout_columns(batch, roll_out(batch, plan()), pad_token_id=0, multiple=4)
    tokens, rows = columns.tokens, columns.rows
    assert tokens["input_ids"].shape[1] % 4 == 0
    assert tokens["input_lengths"].tolist() == [
        3 + 2 + 3 + 2,
        3 + 3 + 2 + 3 + 2,
    ]  # the environment takes the old answer for the first turn
    assert tokens["token_mask"][0].tolist()[:10] == [0] * 5 + [1] * 3 + [0] * 2
    assert bool(((tokens["generation_logprobs"] != 0) == (tokens["token_mask"] != 0)).all())
    assert rows["generated_lengths"].tolist() == [3, 6] and rows["response_lengths"].tolist() == [3, 3]
    assert rows["mask_sample"].tolist() == [False, True]
    assert rows["weight_version"].tolist() == [4, 4] and rows["total_reward"].tolist() == [1.0, 2.0]


def test_every_trained_token_has_the_version_of_its_own_turn() -> None:
    def message(role: str, count: int, *, made: bool = False) -> dict[str, Any]:
        logprobs = {"generation_logprobs": torch.full((count,), -0.5)} if made else {}
        return {"role": role, "content": "", "token_ids": torch.ones(count, dtype=torch.long), **logprobs}

    log = [message("user", 2), message("assistant", 1), message("user", 1)]
    log += [message("assistant", 2, made=True), message("environment", 3), message("assistant", 2, made=True)]
    done = Trajectory(log, generated=[2, 2], spans=[VersionSpan(4, 0, 2), VersionSpan(4, 2, 3), VersionSpan(6, 3, 4)])
    batch = number_samples(prompts("ab"), 1)
    columns = rollout_columns(batch, [done], pad_token_id=0, multiple=12, token_versions=True)
    assert columns.tokens["token_versions"].tolist() == [[-1] * 4 + [4, 4] + [-1] * 3 + [4, 6] + [-1]]
    assert (columns.rows["weight_version"].item(), columns.rows["newest_version"].item()) == (4, 6)


def test_a_recording_replays_the_very_tensors(tmp_path: Path) -> None:
    batch = number_samples(prompts("a", "bb"), 2)
    runner = RolloutRunner(Generator(), Letters(), {"count": EnvironmentHandle("count", (Counts(),))})
    recorded = RecordedRollouts(LiveRollouts(runner, pad_token_id=0, multiple=1), str(tmp_path)).roll_out(
        batch, plan(), 1
    )
    replayed = ReplayedRollouts(str(tmp_path)).roll_out(batch, plan(), 1)
    for one, other in (
        (recorded.columns.tokens, replayed.columns.tokens),
        (recorded.columns.rows, replayed.columns.rows),
    ):
        assert sorted(one) == sorted(other)
        assert all(
            torch.equal(one[name], other[name]) if name not in ("content", "task_name") else one[name] == other[name]
            for name in one
        )
    assert recorded.metrics == replayed.metrics


def test_a_recording_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=f"grpo.rollout_replay={tmp_path}: there is no rollout_step"):
        ReplayedRollouts(str(tmp_path))
    batch = number_samples(prompts("a"), 2)
    runner = RolloutRunner(Generator(), Letters(), {"count": EnvironmentHandle("count", (Counts(),))})
    RecordedRollouts(LiveRollouts(runner, pad_token_id=0, multiple=1), str(tmp_path)).roll_out(batch, plan(), 0)
    with pytest.raises(RecordingError, match="the recording ends before step 8"):
        ReplayedRollouts(str(tmp_path)).roll_out(batch, plan(), 1)
    with pytest.raises(RecordingError, match="holds 2 samples, this run needs 3"):
        ReplayedRollouts(str(tmp_path)).roll_out(number_samples(prompts("a"), 3), plan(), 0)


def test_a_batch_of_results_is_padded_on_the_right() -> None:
    results = [GenerationResult("a", [5, 6], [-1.0, -2.0], "stop"), GenerationResult("b", [], [], "no_room")]
    batch = results_to_batch([[1], [2, 3]], results, 9)
    assert batch["output_ids"].tolist() == [[1, 5, 6], [2, 3, 9]]
    assert batch["logprobs"].tolist() == [[0.0, -1.0, -2.0], [0.0, 0.0, 0.0]]
    assert batch["unpadded_sequence_lengths"].tolist() == [3, 2]


def _double(columns: BatchedDataDict[Any], factor: int) -> StageOutput:
    return StageOutput({"doubled": columns["input_ids"] * factor}, {"sums": columns["input_ids"].sum(dim=1)})


def test_the_store_reads_what_was_written_and_names_what_was_not() -> None:
    store = InProcessStore(pad_token_id=9)
    handle = store.write(BatchedDataDict(input_ids=torch.tensor([[1, 2], [3, 4]]), input_lengths=torch.tensor([2, 2])))
    handle, rows = store.apply(handle, TokenStage(_double, ("input_ids",), ("doubled",), {"factor": 2}))
    assert rows["sums"].tolist() == [3, 7]
    handle = store.commit(handle, BatchedDataDict(logprobs=torch.zeros(2, 2)), prev_logprobs="logprobs")
    assert sorted(store.read(handle, ["doubled", "prev_logprobs"])) == ["doubled", "prev_logprobs"]
    with pytest.raises(KeyError, match=r"columns \['advantages'\] were never written"):
        store.read(handle, ["advantages"])
    wide = store.write(BatchedDataDict(input_ids=torch.tensor([[7, 7, 7]]), input_lengths=torch.tensor([3])))
    joined = store.concat([store.select_columns(store.select(handle, [1]), ["input_ids", "input_lengths"]), wide])
    assert joined["input_ids"].tolist() == [[3, 4, 9], [7, 7, 7]]
    store.clear(handle)
    with pytest.raises(SpentHandleError, match="its rows are gone"):
        store.read(handle, ["input_ids"])


class Slow(Counts):
    def step(self, logs: Any, metadata: Any) -> Any:
        time.sleep(0.5)
        return super().step(logs, metadata)


class Hangs(Generator):
    cancelled = 0

    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        if request.request_id != "7-1-0-0":
            return await super().generate_one(request)
        try:
            await asyncio.sleep(30.0)
        except asyncio.CancelledError:
            Hangs.cancelled += 1
            raise
        raise AssertionError("nobody ended it")


def test_a_response_and_a_step_of_the_environment_have_deadlines_of_their_own() -> None:
    batch = number_samples(prompts("a", "bb"), 1)

    def within(**limits: float) -> RolloutPlan:
        return replace(plan(), limits=replace(plan().limits, **limits))  # type: ignore[arg-type]

    with pytest.raises(
        GenerationError, match=r"generation of 7-1-0-0 took more than .*generation_timeout_s=0.1"
    ) as late:
        roll_out(batch, within(generation_s=0.1), generator=Hangs())
    # The machinery was late, not the prompt: it is tried again.
    assert is_infrastructure(late.value) and Hangs.cancelled == 1
    with pytest.raises(EnvironmentFailure, match=r"environment of task 'count' with .*env_timeout_s=0.1") as judged:
        roll_out(batch, within(environment_s=0.1), Slow())
    assert is_infrastructure(judged.value)
    assert len(roll_out(batch, within(generation_s=30.0, environment_s=30.0))) == 2
