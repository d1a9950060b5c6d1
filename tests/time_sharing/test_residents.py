"""The ledger of what stays in GPU memory refuse the pipeline that no longer fits, with the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config import EvalMasterConfig
from nemo_rl.time_sharing.agents.runtime import EngineError
from nemo_rl.time_sharing.log.pool_state import Outcome, PoolState, PoolStateDamaged, Submission
from nemo_rl.time_sharing.pipelines.evaluation import EvaluationPipeline
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job, read_jobs
from nemo_rl.time_sharing.pipelines.residents import Part, PoolFull, Residents, SlotMemory
from nemo_rl.time_sharing.pipelines.vllm_engine import EngineSlot
from nemo_rl.time_sharing.pool import PoolActor
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import Limits
from nemo_rl.utils.record import read_record
from nemo_rl.utils.record_events import EngineBuilt

GIB = 1 << 30
ROOT = Path(__file__).parents[2]


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


def test_engines_and_trainer_of_a_pipeline_are_entered_beside_each_other() -> None:
    ledger = Residents()
    ledger.admit("a", {0: SlotMemory(2 * GIB, 80 * GIB)}, {0: 40 * GIB})
    for _ in range(3):  # an engine may be built anew
        ledger.admit("a", {0: SlotMemory(3 * GIB, 80 * GIB)}, {0: 60 * GIB}, Part.ENGINES)
    ledger.admit("a", {1: SlotMemory(GIB, 80 * GIB)}, {1: 60 * GIB}, Part.ENGINES)
    with pytest.raises(PoolFull, match=r"\(a 3.0 GiB, b 18.0 GiB\), and a needs 60.0 GiB"):
        ledger.admit("b", {0: SlotMemory(21 * GIB, 80 * GIB)}, {0: GIB}, Part.ENGINES)
    ledger.leave("a")
    ledger.admit("b", {0: SlotMemory(18 * GIB, 80 * GIB)}, {0: 62 * GIB}, Part.ENGINES)


def test_what_is_kept_of_a_pool_comes_back(tmp_path: Path) -> None:
    ledger, path = Residents(), tmp_path / "pool.json"
    ledger.admit("a", {0: SlotMemory(2 * GIB, 8 * GIB)}, {0: 5 * GIB})
    ledger.admit("a", {0: SlotMemory(3 * GIB, 8 * GIB)}, {0: GIB}, Part.ENGINES)
    assert PoolState.read(path) == PoolState()
    ended = Outcome("failed", "why", 2, 0.5)
    lives = [Submission("a", (0,), (0, 1), 1.5), Submission("b", (), (1,), 2.5, 3.5, ended, refused="full")]
    PoolState(lives, ledger.entries()).write(path)
    again = PoolState.read(path)
    assert again.submissions == lives and Residents(again.residents).entries() == ledger.entries()
    assert [file.name for file in tmp_path.iterdir()] == ["pool.json"]


@pytest.mark.parametrize("content", [b"", b'{"lives": [', b'{"lives": [{"name": 3}]}', b"\x00\x00"])
def test_a_damaged_pool_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "pool.json").write_bytes(content)
    with pytest.raises(PoolStateDamaged, match=r"pool\.json: is damaged .*move it away"):
        PoolState.read(tmp_path / "pool.json")


class Shards:
    """One engine of 60 GiB that leaves 2 GiB while it sleeps, beside `others` bytes."""

    def __init__(self, others: int) -> None:
        self.others, self.moves = others, list[str]()

    def build(self, ranks: list[int]) -> list[int]:
        if self.moves:
            return []
        self.moves.append("built")
        return ranks

    def sleep(self, ranks: list[int], level: int | None) -> None:
        self.moves.append(f"asleep at {level}")

    def wake(self, ranks: list[int]) -> None:
        self.moves.append("woken")

    def call(self, ranks: list[int], what: str) -> list[list[int]]:
        used = self.others + (62 * GIB if self.moves[-1] in ("built", "woken") else 2 * GIB)
        return [[used if what == "memory_in_use" else 80 * GIB - used]]


def evaluation(pool: PoolActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EvaluationPipeline:
    [job] = read_jobs([ROOT / "examples" / "configs" / "eval_arithmetic_cpu.yaml"], Pool(1, 2))
    assert isinstance(job.config, EvalMasterConfig)
    monkeypatch.chdir(tmp_path)
    handles = PoolHandles(None, Pool(1, 2), "cuda", Limits(), str(tmp_path))
    pipeline = EvaluationPipeline(Job("score", job.config, (), (0, 1), folder=str(tmp_path)), handles, 0)
    pipeline._record = pipeline.open_record()

    def enter(part: Part, gpus: Any, measured: list[SlotMemory], needs: list[int]) -> None:
        pool.report_memory("score", dict(zip(gpus, measured, strict=True)), dict(zip(gpus, needs, strict=True)), part)

    monkeypatch.setattr(pipeline, "_enter", enter)
    return pipeline


@pytest.mark.parametrize(("others", "fits"), [(10 * GIB, True), (20 * GIB, False)])
def test_the_engine_of_an_evaluation_is_entered_when_it_first_sleeps(
    others: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PoolActor(PoolHandles(None, Pool(1, 2), "cuda", Limits(), str(tmp_path)))
    pool._residents.admit("grpo", {1: SlotMemory(others, 80 * GIB)}, {1: 50 * GIB})
    ended: list[str] = []
    monkeypatch.setattr(pool, "unregister_pipeline", ended.append)
    pipeline = evaluation(pool, tmp_path, monkeypatch)
    pool._submissions["score"] = life = Submission("score", (), (0, 1), 0.0)
    shards: Any = Shards(others)
    engine = EngineSlot(pipeline.engine_built)
    engine.put(shards, fixed=True)
    if fits:
        for _ in range(2):
            engine.wake(1)
        assert shards.moves == ["built", "asleep at 1", "woken", "woken"]
        with pytest.raises(PoolFull, match=r"score 2.0 GiB, late 5.0 GiB\), and late needs 64.0 GiB"):
            pool._residents.admit("late", {1: SlotMemory(17 * GIB, 80 * GIB)}, {1: 64 * GIB})
    else:
        with pytest.raises(EngineError, match="GPU 1 cannot hold it"):
            engine.wake(1)
        assert ended == ["score"] and "score needs 60.0 GiB when it is awake" in life.refused
    assert pipeline._record is not None
    pipeline._record.close()
    [built] = [e.event for e in read_record(tmp_path / "score.0.jsonl") if isinstance(e.event, EngineBuilt)]
    assert (built.shard, built.left_bytes) == (1, (others + 2 * GIB,))


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
