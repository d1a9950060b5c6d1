"""What a group's samples are worth: components of a reward go their own ways, and shaping decides no group."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.algorithms.grpo.advantages import row_advantages
from nemo_rl.algorithms.grpo.stages import score_rewards
from nemo_rl.config import AdvEstimatorConfig, GRPOConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

GROUP = 4
VALUES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=2 * GROUP, max_size=2 * GROUP)


def rows_of(
    components: dict[str, list[float]], invalid: list[bool], lengths: list[int] | None = None
) -> BatchedDataDict:
    size = len(invalid)
    columns = {f"reward/{name}": torch.tensor(values) for name, values in components.items()}
    return BatchedDataDict(
        total_reward=torch.stack(list(columns.values())).sum(0),
        response_lengths=torch.tensor(lengths or [1] * size),
        prompt_number=torch.arange(size) // GROUP,
        sample_mask=torch.ones(size),
        truncated=torch.zeros(size, dtype=torch.bool),
        mask_sample=torch.zeros(size, dtype=torch.bool),
        invalid_tool_call=torch.tensor(invalid),
        **columns,
    )


@given(VALUES, VALUES, st.lists(st.booleans(), min_size=2 * GROUP, max_size=2 * GROUP))
def test_an_invalid_call_earns_nothing_of_any_component(a: list[float], b: list[float], invalid: list[bool]) -> None:
    """So a sample whose call is invalid is worth what one with zeros would be."""
    cfg = GRPOConfig.read({"invalid_tool_call_strategy": "zero_reward", "adv_estimator": {"name": "gdpo"}})
    scored, zeroed = rows_of({"a": a, "b": b}, invalid), [0.0 if bad else 1.0 for bad in invalid]
    kept = {name: [x * keep for x, keep in zip(values, zeroed, strict=True)] for name, values in (("a", a), ("b", b))}
    expected = rows_of(kept, [False] * len(invalid))
    score_rewards(scored, cfg)
    score_rewards(expected, cfg)
    for name in ("reward/a", "reward/b", "reward", "row_advantages", "baseline", "std"):
        torch.testing.assert_close(scored[name], expected[name])


@given(VALUES, st.lists(st.integers(1, 30), min_size=2 * GROUP, max_size=2 * GROUP))
def test_the_spread_of_a_group_is_that_of_what_the_environment_said(rewards: list[float], lengths: list[int]) -> None:
    shaping = {"enabled": True, "overlong_buffer_length": 10, "max_response_length": 20, "overlong_buffer_penalty": 1.0}
    shaped, plain = (rows_of({"a": rewards}, [False] * len(rewards), lengths) for _ in range(2))
    score_rewards(shaped, GRPOConfig.read({"reward_shaping": shaping}))
    score_rewards(plain, GRPOConfig.read({}))
    assert torch.equal(shaped["std"], plain["std"])
    assert torch.equal(shaped["unshaped_reward"], plain["reward"])
    late = torch.tensor(lengths) > 10
    assert bool((shaped["reward"] < plain["reward"])[late].all()) and torch.equal(
        shaped["reward"][~late], plain["reward"][~late]
    )


@given(VALUES, VALUES, st.permutations(["b", "a"]))
def test_weights_of_components_go_by_their_names_in_whatever_order_they_stand(
    a: list[float], b: list[float], order: list[str]
) -> None:
    weights = {"a": 3.0, "b": 0.25}
    groups, valid = torch.arange(len(a)) // GROUP, torch.ones(len(a), dtype=torch.bool)
    columns = {"reward/a": torch.tensor(a), "reward/b": torch.tensor(b)}

    def advantages(given_weights: Any) -> torch.Tensor:
        cfg = AdvEstimatorConfig.read({"name": "gdpo", "reward_weights": given_weights})
        return row_advantages(cfg, columns["reward/a"] + columns["reward/b"], columns, groups, valid)

    in_order = advantages([weights["a"], weights["b"]])
    torch.testing.assert_close(advantages({name: weights[name] for name in order}), in_order)
    torch.testing.assert_close(advantages({f"reward/{name}": weights[name] for name in order}), in_order)
