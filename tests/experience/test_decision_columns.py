"""What generation decided arrives in columns, aligned with the tokens, wherever the rows are stored; and what cannot be
replayed is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.data_plane.field_schema import ROUTE_FIELDS, SAMPLING_MASK_FIELDS, replayed_fields
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.data_plane_store import DataPlaneStore
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.rollout_source import LiveRollouts, RecordedRollouts, ReplayedRollouts, Rollout
from nemo_rl.experience.rollouts import RolloutRunner, number_samples, trajectory_of
from nemo_rl.experience.store import InProcessStore, rollout_columns, sample_starts
from nemo_rl.models.generation.decisions import RecordedDecisionsError, Recording, SamplingMasks, TokenRoutes
from nemo_rl.models.generation.endpoint.session import Session, SessionPlan
from nemo_rl.models.generation.interfaces import (
    GenerationRequest,
    GenerationResult,
    GenerationSamplingParams,
    VersionSpan,
)
from nemo_rl.models.policy.router_replay import VALIDATE
from tests.experience.plane_in_process import plane_in_process
from tests.experience.test_rollout_flow import Counts, Generator, Letters, plan, prompts

RECORDING = Recording(layers=(0, 2), experts=300, per_token=2, masks=True, vocabulary=128)
FIELDS = [*ROUTE_FIELDS, *SAMPLING_MASK_FIELDS]


def routes_after(ids: list[int], call: int) -> list[list[int]]:
    """Two layers x two experts, other ones at every call."""
    first = (7 * sum(ids) + 3 * len(ids) + call) % 298
    return [[first, first + 1], [first + 2, first]]


class Recorder(Generator):
    """Answers with routes from where they are asked for, and draws even positions from a part of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int | None] = []

    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        result = await super().generate_one(request)
        self.asked.append(request.record_from)
        if request.record_from is None:
            return result
        ids, call = [*request.prompt_ids, *result.token_ids], int(request.request_id[-1])
        asked = range(request.record_from, len(ids))
        routes = TokenRoutes(
            request.record_from,
            np.array([routes_after(ids[: n + 1], call) for n in asked[:-1]] + [[[0, 0], [0, 0]]], np.int16),
            np.array([True] * (len(asked) - 1) + [False]),
        )
        kept = [np.array([token - 1, token, 127]) if n % 2 == 0 else None for n, token in enumerate(result.token_ids)]
        return replace(result, routes=routes, masks=SamplingMasks.of(kept))


def rollout(generator: Any = None, recording: Recording | None = RECORDING, texts: str = "a bb cccc") -> Rollout:
    return live(generator or Recorder(), recording).roll_out(
        number_samples(prompts(*texts.split()), 2), replace(plan(), records=recording is not None), 0
    )


def live(generator: Any, recording: Recording | None = RECORDING) -> LiveRollouts:
    runner = RolloutRunner(generator, Letters(), {"count": EnvironmentHandle("count", (Counts(),))})
    return LiveRollouts(runner, pad_token_id=0, multiple=4, recording=recording)


def test_a_later_turn_brings_the_routes_that_were_unknown_and_changes_none() -> None:
    generator = Recorder()
    tokens = rollout(generator).columns.tokens
    assert isinstance(tokens, BatchedDataDict)
    assert tokens["routed_experts"].dtype == torch.int16
    for row, length in enumerate(tokens["input_lengths"].tolist()):
        ids = tokens["input_ids"][row].tolist()
        prompt = length - 10  # two turns of three tokens each, and two observations of two
        valid = tokens["routed_experts_valid"][row].tolist()
        # The second response's last token and the observation after it are computed by no engine.
        assert valid == [True] * (length - 3) + [False] * (len(ids) - length + 3)
        # The first response's last token and the observation after it are computed for the second turn.
        calls = [0] * (prompt + 2) + [1] * 5
        expected = [routes_after(ids[: n + 1], call) for n, call in enumerate(calls)]
        assert tokens["routed_experts"][row, : length - 3].tolist() == expected
        assert not tokens["routed_experts"][row, length - 3 :].any()
        assert tokens["sampling_mask_counts"][row].tolist() == [
            *([0] * prompt),
            *[3, 0, 3, 0, 0] * 2,
            *([0] * (len(ids) - length)),
        ]
        sampled = [ids[prompt], ids[prompt + 2], ids[prompt + 5], ids[prompt + 7]]
        assert tokens["sampling_mask_ids"][row].tolist() == [n for token in sampled for n in (token - 1, token, 127)]
    # The second turn is asked for what the first did not say, and no more.
    asked = [number for number in generator.asked if number is not None]
    assert sorted(asked) == [0] * 6 + [3, 3, 4, 4, 6, 6]


def test_nothing_is_recorded_where_nothing_is_replayed() -> None:
    generator = Recorder()
    tokens = rollout(generator, None).columns.tokens
    assert set(generator.asked) == {None} and replayed_fields(tokens) == []
    assert replayed_fields(FIELDS) == FIELDS
    assert replayed_fields(FIELDS, routes=False) == list(SAMPLING_MASK_FIELDS)


def test_the_columns_are_the_same_bits_in_process_and_on_the_data_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for store in (InProcessStore(0, 4), DataPlaneStore(plane_in_process(monkeypatch), 0, 4)):
        typed: Any = store
        with typed.step():
            handle = typed.write_pending(rollout().columns)
            # Parts of a step, as streaming and dynamic sampling make them: rows left out, others joined, in another
            # width.
            handle = typed.write(handle)
            short, long = typed.select(handle, [1, 0]), typed.select(handle, [5, 2])
            joined = typed.concat([short, long])
            seen.append([typed.read(part, FIELDS) for part in (short, joined)])
            assert set(FIELDS) <= set(typed.columns(joined))
    for one, other in zip(*seen, strict=True):
        for name in FIELDS[:-1]:
            assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])
        for left, right in zip(one[FIELDS[-1]], other[FIELDS[-1]], strict=True):
            assert left.dtype == right.dtype == torch.int32 and torch.equal(left, right)
    shards = seen[0][1].shard_by_batch_size(2)
    assert [len(ids) for shard in shards for ids in shard["sampling_mask_ids"]] == [12] * 4


def test_a_recorded_rollout_is_replayed_with_its_routes_and_masks(tmp_path: Path) -> None:
    batch, chosen = number_samples(prompts("a", "bb"), 2), replace(plan(), records=True)
    recorded = RecordedRollouts(live(Recorder()), str(tmp_path)).roll_out(batch, chosen, 0)
    replayed = ReplayedRollouts(str(tmp_path), RECORDING).roll_out(batch, chosen, 0)
    assert not set(FIELDS) & set(ReplayedRollouts(str(tmp_path)).roll_out(batch, chosen, 0).columns.tokens)
    for name in FIELDS:
        one, other = recorded.columns.tokens[name], replayed.columns.tokens[name]
        assert all(map(torch.equal, one, other)) and len(one) == len(other) == 4
    assert recorded.metrics["sampling_mask_size"] == 3.0
    assert recorded.metrics["routed_tokens_share"] == 1.0


def test_a_recording_without_routes_is_not_replayed_with_them(tmp_path: Path) -> None:
    batch = number_samples(prompts("a"), 1)
    RecordedRollouts(live(Recorder(), None), str(tmp_path)).roll_out(batch, plan(), 0)
    with pytest.raises(RecordedDecisionsError, match=r"rollout_step8_0.pt: the columns \['routed_experts', .* missing"):
        ReplayedRollouts(str(tmp_path), RECORDING).roll_out(batch, plan(), 0)


class Spoiled(Recorder):
    """Answers with something wrong from some call on."""

    def __init__(self, spoil: Any, after: int = 0) -> None:
        super().__init__()
        self._spoil, self._after = spoil, after

    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        result = await super().generate_one(request)
        return self._spoil(result) if len(self.asked) > self._after else result


def with_routes(change: Any) -> Any:
    def spoil(result: GenerationResult) -> GenerationResult:
        assert result.routes is not None
        return replace(result, routes=replace(result.routes, experts=change(result.routes.experts.copy())))

    return spoil


def outside(experts: Any) -> Any:
    experts[0, 1, 0] = 300
    return experts


def doubled(experts: Any) -> Any:
    experts[0, 1] = 5
    return experts


def without_the_token(result: GenerationResult) -> GenerationResult:
    assert result.masks is not None
    ids = result.masks.ids.copy()
    ids[1] = 126
    return replace(result, masks=replace(result.masks, ids=ids))


BAD = {
    "other layers": (with_routes(lambda e: e[:, :1]), "routes of 1 layers x 2 experts per token"),
    "other experts": (with_routes(lambda e: e[:, :, :1]), "2 layers x 1 experts per token, and policy.model"),
    "outside": (outside, r"decoder layer 2 has the experts \[300, \d+\], but the model's are numbered from 0 to 299"),
    "doubled": (doubled, r"decoder layer 2 has the experts \[5, 5\], one of them twice"),
    "mask": (without_the_token, "row 0, token 1: the recorded set of . ids does not contain the sampled token"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_replayed_is_refused_with_its_place(name: str) -> None:
    spoil, message = BAD[name]
    spoil = with_routes(spoil) if spoil in (outside, doubled) else spoil
    with pytest.raises(RecordedDecisionsError, match=message):
        rollout(Spoiled(spoil))


def test_only_the_first_batch_is_looked_at_unless_all_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, chosen = number_samples(prompts("a"), 1), replace(plan(), records=True)
    for asked in (False, True):
        source = live(Spoiled(with_routes(outside), after=2))
        source.roll_out(batch, chosen, 0)
        monkeypatch.setenv(VALIDATE, str(int(asked)))
        if asked:
            with pytest.raises(RecordedDecisionsError, match="rollouts of step 8: routed_experts of row 0, token 0"):
                source.roll_out(batch, chosen, 1)
        else:
            source.roll_out(batch, chosen, 1)


def test_branches_of_an_agent_bring_the_routes_of_all_tokens_and_the_masks_of_those_they_train() -> None:
    session = Session(SessionPlan("0-0-0", GenerationSamplingParams(), 9, 99, records=True))

    def ask(call: int, prompt: list[int], response: list[int]) -> list[int]:
        """A turn, recorded from where the session does not know the routes."""
        ids, start = [*prompt, *response], session.routes_of(session.parent_of(prompt)).known_until()
        asked = range(start, len(ids))
        routes = TokenRoutes(
            start,
            np.array([routes_after(ids[: n + 1], call) for n in asked[:-1]] + [[[0, 0], [0, 0]]], np.int16),
            np.array([True] * (len(asked) - 1) + [False]),
        )
        masks = SamplingMasks.of([np.array([token, 127]) for token in response])
        spans = (VersionSpan(0, 0, len(response)),)
        session.add(prompt, GenerationResult("r", response, [-1.0] * len(response), "stop", spans, 0, routes, masks))
        return ids

    first = ask(0, [1, 2], [3, 4])
    longest = ask(1, [*first, 5], [6, 7, 8])
    other = ask(2, [*first, 9], [10])
    done = trajectory_of(session, Letters())  # type: ignore[arg-type]
    columns = rollout_columns(number_samples(prompts("a"), 1), [done], pad_token_id=0, recording=RECORDING)
    tokens = columns.tokens
    assert isinstance(tokens, BatchedDataDict) and sample_starts(columns.rows).tolist() == [True, False]
    for row, (ids, calls) in enumerate([(longest, [0, 0, 0, 1, 1, 1, 1, 1]), (other, [0, 0, 0, 2, 2, 2])]):
        assert tokens["input_ids"][row][: len(ids)].tolist() == ids
        valid = tokens["routed_experts_valid"][row].tolist()
        assert valid[: len(ids)] == [True] * (len(ids) - 1) + [False] and not any(valid[len(ids) :])
        expected = [routes_after(ids[: n + 1], call) for n, call in enumerate(calls[: len(ids) - 1])]
        assert tokens["routed_experts"][row][: len(ids) - 1].tolist() == expected
        trained = tokens["token_mask"][row] != 0
        assert tokens["sampling_mask_counts"][row].tolist() == (2 * trained).int().tolist()
        of_trained = tokens["input_ids"][row][trained].tolist()
        assert tokens["sampling_mask_ids"][row].tolist() == [one for token in of_trained for one in (token, 127)]
    assert [int(mask.sum()) for mask in tokens["token_mask"]] == [5, 1]
