"""The ledger of what stays in GPU memory refuse the pipeline that no longer fits, with the figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.time_sharing.pipelines.residents import PoolFull, Residents, SlotMemory

GIB = 1 << 30


def test_the_last_pipeline_that_does_not_fit_is_refused_with_the_figures() -> None:
    ledger = Residents()
    ledger.admit("a", {0: SlotMemory(2 * GIB, 80 * GIB)}, {0: 72 * GIB})
    ledger.admit("b", {0: SlotMemory(5 * GIB, 80 * GIB)}, {0: 40 * GIB})
    with pytest.raises(PoolFull) as refused:
        ledger.admit("c", {0: SlotMemory(9 * GIB, 80 * GIB), 1: SlotMemory(GIB, 80 * GIB)}, {0: 60 * GIB, 1: 60 * GIB})
    assert "GPU 0 cannot hold it: 9.0 GiB of 80.0 GiB" in str(refused.value)
    assert "(a 2.0 GiB, b 3.0 GiB, c 4.0 GiB), and a needs 72.0 GiB" in str(refused.value)
    # Where the one that needs most has left, there is room.
    ledger.leave("a")
    ledger.admit("c", {0: SlotMemory(7 * GIB, 80 * GIB)}, {0: 60 * GIB})


def test_a_pipeline_that_comes_again_is_entered_anew() -> None:
    ledger = Residents()
    for _ in range(50):
        ledger.admit("a", {0: SlotMemory(2 * GIB, 8 * GIB)}, {0: 6 * GIB})


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 60)), min_size=1, max_size=12))
def test_whatever_was_admitted_fits_together(pipelines: list[tuple[int, int]]) -> None:
    ledger, used, needs = Residents(), 0, [0]
    for number, (stays, need) in enumerate(pipelines):
        try:
            ledger.admit(str(number), {0: SlotMemory(used + stays, 64)}, {0: need})
        except PoolFull:
            assert used + stays + max([*needs, need]) > 64
        else:
            used += stays
            needs.append(need)
            assert used + max(needs) <= 64
