"""The trace of router replay says whether routes arrive at training as rollouts made them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.config.errors import ConfigError
from nemo_rl.utils import route_trace as traced
from nemo_rl.utils.route_trace import RouteTrace
from tests.conftest import run_script
from tools.check_r3_trace import check_trace

TOOL = Path(__file__).parents[2] / "tools" / "check_r3_trace.py"


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    traced.route_trace.cache_clear()
    yield
    traced.route_trace.cache_clear()


def columns(*lengths: int, width: int = 8) -> dict[str, Any]:
    """Rows of different tokens; what is beyond a row's length is never the same twice."""
    places = torch.arange(width).expand(len(lengths), width)
    inside = places < torch.tensor(lengths)[:, None]
    routes = (torch.tensor(lengths)[:, None] + places)[..., None, None].expand(-1, -1, 2, 3) % 7
    noise = torch.randint(7, (len(lengths), width))
    return {
        "input_ids": torch.where(inside, 10 * torch.tensor(lengths)[:, None] + places, noise),
        "input_lengths": torch.tensor(lengths),
        "routed_experts": torch.where(inside[..., None, None], routes, noise[..., None, None]).to(torch.uint8),
        "routed_experts_valid": inside & (places < torch.tensor(lengths)[:, None] - 1),
    }


def test_routes_that_arrive_in_another_order_and_width_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver, worker = RouteTrace(tmp_path, 1, 2), RouteTrace(tmp_path, 1, 2)
    driver.produced(0, columns(3, 5, 4))
    driver.produced(1, columns(6))
    assert check_trace(tmp_path) == (2, [f"step 1, row {row}, train: it did not arrive with routes" for row in (0, 1)])
    worker.fetched("prev_lp", columns(4, 5, 3, width=6))
    worker.fetched("train", columns(5, 4, width=5))
    worker.fetched("train", columns(3, width=12))
    assert check_trace(tmp_path) == (2, [])
    worker.step_done()
    before = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    worker.fetched("train", columns(7))
    assert [path.stat().st_size for path in sorted(tmp_path.iterdir())] == before
    assert run_script(TOOL, str(tmp_path)) == 0
    assert capsys.readouterr().out == "2 samples arrived with the routes that rollouts recorded\n"


@pytest.mark.parametrize("column", ["routed_experts", "routed_experts_valid"])
def test_routes_that_changed_on_the_way_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str
) -> None:
    trace, arrived = RouteTrace(tmp_path, 1, 2), columns(3, 5)
    trace.produced(0, columns(3, 5))
    trace.fetched("prev_lp", columns(3, 5))
    changed = arrived[column].clone()
    changed[1, 2] = 0 if column == "routed_experts_valid" else 6 - changed[1, 2]
    trace.fetched("train", arrived | {column: changed})
    expected = "step 1, row 1, train: its routes did not arrive as they were made"
    assert check_trace(tmp_path) == (2, [expected])
    assert (run_script(TOOL, str(tmp_path)), capsys.readouterr().out.strip()) == (1, expected)


def test_a_trace_is_written_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced.route_trace() is None
    traced.route_trace.cache_clear()
    monkeypatch.setenv("NRL_R3_TRACE", "1")
    monkeypatch.setenv("NRL_R3_TRACE_DIR", str(tmp_path / "r3"))
    trace = traced.route_trace()
    assert trace is not None and (tmp_path / "r3").is_dir()
    assert "no rollout_payload_sample was written; run with NRL_R3_TRACE=1" in check_trace(tmp_path / "r3")[1][0]
    traced.route_trace.cache_clear()
    monkeypatch.setenv("NRL_R3_TRACE_STEPS", "0")
    with pytest.raises(ConfigError, match="NRL_R3_TRACE_STEPS is '0'; it counts what is traced: 1 or more"):
        traced.route_trace()
