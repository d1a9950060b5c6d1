"""One real engine beside one real policy on a CPU slot: agreement, seeds, limits, sleep, refit, and the engine's
death.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import WorkerError
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.experience.rollouts import run_multi_turn_rollout
from nemo_rl.models.generation.interfaces import GenerationError, GenerationResult, verify_right_padding
from nemo_rl.utils.record_events import SyncFinished
from tests.models.engines import Colocated, colocated, engine_pids, kill, wait_until_gone, without_place

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(ray_session: None, tiny_model: Path) -> Iterator[Colocated]:
    filters = ["policy.generation.temperature=0.9", "policy.generation.top_p=0.95", "policy.generation.top_k=100"]
    readings = [
        "policy.generation.vllm_cfg.enable_vllm_metrics_logger=true",
        "policy.generation.vllm_cfg.vllm_metrics_logger_interval=0.001",
    ]
    with colocated(tiny_model, 1, *filters, *readings) as both:
        yield both


def test_generation_and_policy_agree_on_every_drawn_token(engine: Colocated) -> None:
    requests = engine.requests(24)
    results = engine.run(requests)
    assert sum(len(result.token_ids) for result in results) > 150
    assert engine.disagreement(requests, results) <= 1.001


def test_the_engine_says_what_it_did_since_it_was_last_asked(engine: Colocated) -> None:
    engine.generation.engine_metrics()
    drawn = sum(len(result.token_ids) for result in engine.run(engine.requests(8)))
    metrics = engine.generation.engine_metrics()
    assert metrics["generation_tokens"] == drawn
    assert 0 < metrics["inflight_batch_sizes"] <= metrics["inflight_batch_sizes/max"] <= 8
    assert 0 < metrics["kv_cache_usage_perc/max"] < 1
    assert engine.generation.engine_metrics()["generation_tokens"] == 0.0


def test_equal_seeds_give_equal_tokens_whatever_the_order_of_arrival(engine: Colocated) -> None:
    requests = engine.requests(16)
    together = engine.run(requests)
    backwards = engine.run(requests[::-1])[::-1]
    one_by_one = [engine.run([request])[0] for request in requests]
    assert together == backwards == one_by_one
    assert len({tuple(result.token_ids) for result in together}) > 10, "different seeds drew the same tokens"


def test_limits_stops_and_lack_of_room_end_a_response(engine: Colocated) -> None:
    request = engine.requests(1, tokens=6)[0]
    greedy = replace(request, request_id="greedy", sampling=request.sampling.greedy())
    free, greedy_result = engine.run([replace(request, request_id="free"), greedy])
    assert (len(free.token_ids), free.finish_reason, free.truncated) == (6, "length", True)
    assert greedy_result.token_ids == engine.run([greedy])[0].token_ids
    # A token that is a character of its own: half of a character only appears in the text together with its other half.
    pieces = [engine.tokenizer.decode([token]) for token in greedy_result.token_ids]
    at = next(index for index, piece in enumerate(pieces) if piece.isascii() and piece.isprintable())
    text = pieces[at]
    stopped, short, full, cut = engine.run(
        [
            replace(greedy, request_id="stops", stop_strings=(text,)),
            replace(greedy, request_id="short", max_new_tokens=2),
            replace(greedy, request_id="no room", prompt_ids=[65] * 32),
            replace(greedy, request_id="little room", prompt_ids=[65] * 30),
        ]
    )
    assert (stopped.token_ids, stopped.finish_reason) == (greedy_result.token_ids[: len(stopped.token_ids)], "stop")
    assert text in engine.tokenizer.decode(stopped.token_ids) and len(stopped.token_ids) <= at + 1
    assert (len(short.token_ids), short.truncated) == (2, True)
    assert (full.token_ids, full.finish_reason, full.truncated) == ([], "no_room", False)
    assert len(cut.token_ids) == 2


def test_a_batch_comes_back_padded_on_the_right_and_row_by_row(engine: Colocated) -> None:
    requests = engine.requests(5)
    width = max(len(request.prompt_ids) for request in requests)
    pad = engine.tokenizer.pad_token_id
    ids = torch.tensor([request.prompt_ids + [pad] * (width - len(request.prompt_ids)) for request in requests])
    lengths = torch.tensor([len(request.prompt_ids) for request in requests])
    batch = BatchedDataDict(
        input_ids=ids, input_lengths=lengths, seeds=torch.tensor([request.seed for request in requests])
    )
    answer = engine.generation.generate(batch)
    assert verify_right_padding(answer, pad, ids_key="output_ids", lengths_key="unpadded_sequence_lengths") == (
        True,
        None,
    )
    for row, result in enumerate(engine.run(requests)):
        start, end = lengths[row], lengths[row] + len(result.token_ids)
        assert answer["output_ids"][row, start:end].tolist() == result.token_ids
        assert answer["logprobs"][row, start:end].tolist() == pytest.approx(result.logprobs)

    async def rows() -> dict[int, Any]:
        return {row: one async for row, one in engine.generation.generate_async(batch)}

    streamed = asyncio.run(rows())
    assert sorted(streamed) == list(range(5))
    assert all(
        int(streamed[row]["generation_lengths"][0]) == int(answer["generation_lengths"][row]) for row in range(5)
    )


class Echo(EnvironmentInterface):
    """Answers every response with `?`, until the third turn."""

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        done = [len([m for m in log if m["role"] == "assistant"]) >= 3 for log in message_log_batch]
        observations = [{"role": "environment", "content": "?"} for _ in message_log_batch]
        return EnvironmentReturn(
            observations, list(metadata), [["+"] for _ in metadata], torch.ones(len(done)), torch.tensor(done), None
        )


def test_turns_go_on_by_token_ids(engine: Colocated) -> None:
    prompts = [engine.tokenizer(f"{n}+1=")["input_ids"] for n in range(4)]
    batch = BatchedDataDict(
        message_log=[
            [{"role": "user", "content": f"{n}+1=", "token_ids": torch.tensor(ids)}] for n, ids in enumerate(prompts)
        ],
        task_name=["echo"] * 4,
        extra_env_info=[{}] * 4,
        stop_strings=[None] * 4,
        loss_multiplier=torch.ones(4),
    )
    done, metrics = run_multi_turn_rollout(
        engine.generation, batch, engine.tokenizer, {"echo": Echo()}, max_seq_len=32, max_rollout_turns=5
    )
    question = engine.tokenizer("?")["input_ids"]
    for row, log in enumerate(done["message_log"]):
        tokens = [token for message in log for token in message["token_ids"].tolist()]
        assert tokens[: len(prompts[row])] == prompts[row]
        assert len(tokens) <= 32
        # The last one is cut where the sample is full.
        said = [message["token_ids"].tolist() for message in log if message["role"] == "environment"]
        assert all(tokens == question for tokens in said[:-1]) and said[-1] in (question, [])
    assert metrics["max_turns_per_sample"] <= 3
    assert done["total_reward"].tolist() == [
        float(sum(m["role"] == "assistant" for m in log)) for log in done["message_log"]
    ]


def test_sleep_gives_the_memory_back_and_waking_restores_every_token(engine: Colocated) -> None:
    requests = engine.requests(8)
    before = engine.run(requests)
    resident = engine.generation.group.run("model_bytes")[0][0]
    engine.refitter.release_device()
    engine.refitter.release_device()
    assert engine.generation.released_bytes() >= 0.9 * (resident["weights"] + resident["kv_cache"])
    assert resident["kv_cache"] >= 60 << 20
    engine.refitter.bring_to(0)
    assert engine.run(requests) == before


async def many_running(engine: Colocated) -> list[asyncio.Future[GenerationResult]]:
    """More requests than the engine runs at once, from the moment when the first of them is done: then the shard has
    others. Earlier they may be on their way to it.
    """
    running = [
        asyncio.ensure_future(engine.generation.generate_one(request)) for request in engine.requests(1200, tokens=20)
    ]
    async with asyncio.timeout(30.0):
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    return running


def test_a_shard_with_running_requests_does_not_sleep(engine: Colocated) -> None:
    async def sleep_while_busy() -> None:
        running = await many_running(engine)
        with pytest.raises(WorkerError, match=r"shard 0 has \d+ running requests; end them before it sleeps"):
            engine.generation.sleep()
        await asyncio.gather(*running)

    asyncio.run(sleep_while_busy())


def test_a_refit_brings_the_new_weights_and_their_version(engine: Colocated) -> None:
    requests = engine.requests(12)
    before = engine.run(requests)
    syncs = [entry.event for entry in engine.record.entries if isinstance(entry.event, SyncFinished)]
    engine.refitter.release_device()
    engine.train_step()
    engine.refitter.bring_to(1)
    engine.refitter.bring_to(1)
    after = engine.run(requests)
    assert without_place(after) != without_place(before)
    assert {span.version for result in after for span in result.spans} == {1}
    assert engine.disagreement(requests, after) <= 1.001
    done = [entry.event for entry in engine.record.entries if isinstance(entry.event, SyncFinished)]
    assert len(done) == len(syncs) + 1, "bringing to the version that is there must not send again"


def test_a_session_that_was_aborted_leaves_the_version_and_the_next_one_works(
    engine: Colocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = engine.requests(6)
    before = engine.run(requests)
    export = engine.policy.export_window

    def flip(index: int, timeout_s: float) -> Any:
        windows = export(index, timeout_s)
        for window in windows:
            assert window is not None
            with open(window["host"]["handle"]["path"], "r+b") as segment:
                segment.seek(12345)
                byte = segment.read(1)[0]
                segment.seek(12345)
                segment.write(bytes([byte ^ 4]))
        return windows

    with monkeypatch.context() as patch:
        patch.setattr(engine.policy, "export_window", flip)
        with pytest.raises(
            WorkerError, match=r"bucket with 'model.embed_tokens.weight': received \S+, sent \S+ \(session"
        ):
            engine.refitter.bring_to(2)
    # Half of the weights may have arrived: also the version that was there is sent anew.
    engine.refitter.bring_to(1)
    after = engine.run(requests)
    assert {span.version for result in after for span in result.spans} == {1}
    assert without_place(after) == without_place(before)


def test_a_request_that_the_engine_refuses_fails_alone_and_by_name(engine: Colocated) -> None:
    good, bad = engine.requests(2)
    with pytest.raises(GenerationError, match=r"vllm \(rank 0, node [\d.]+\): request r1 failed: .*top_p"):
        engine.run([replace(bad, sampling=replace(bad.sampling, top_p=7.0))])
    assert engine.run([good])[0].finish_reason in ("stop", "length")
    assert engine.generation.router.requests(0) == 0


def test_a_killed_engine_fails_its_requests_by_name_within_seconds(engine: Colocated) -> None:
    pids = engine_pids(engine.generation)

    async def kill_while_busy() -> None:
        running = await many_running(engine)
        kill(pids[0])
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert failed and all(isinstance(outcome, GenerationError) for outcome in failed)
        assert "vllm (rank 0, node " in str(failed[0]) and "EngineDeadError" in str(failed[0])

    started = time.monotonic()
    asyncio.run(kill_while_busy())
    assert time.monotonic() - started < 60.0
    assert engine.generation.router.outstanding(0) == 0
    wait_until_gone(pids)


def test_ending_a_dead_engine_twice_is_no_error(engine: Colocated) -> None:
    engine.generation.shutdown()
    assert engine.generation.shutdown()
