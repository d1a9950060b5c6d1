"""Worlds of ranks that tests start: what happens in one leaves nothing to the next."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.ranks import run_ranks


def told(name: str) -> tuple[str, str | None, str]:
    return os.environ["RANK"], os.environ.get(name), os.getcwd()


def fails_on_one(how: str) -> None:
    if os.environ["RANK"] != "1":
        time.sleep(60)
    if how == "raises":
        raise ValueError("planted")
    os._exit(3)


def test_ranks_have_the_environment_and_folder_of_each_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"NRL_TEST_{random.getrandbits(32)}"
    assert [rank[:2] for rank in run_ranks(told, 2, name)] == [("0", None), ("1", None)]
    monkeypatch.setenv(name, "set")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(told, 2, name) == [("0", "set", str(tmp_path)), ("1", "set", str(tmp_path))]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "message"), [("raises", "planted"), ("exits", r"ranks \[1\] gave no answer")])
def test_a_failed_rank_ends_its_world_and_costs_the_next_nothing(how: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_ranks(fails_on_one, 2, how)
    assert run_ranks(told, 1, "NRL_TEST_UNSET")[0][0] == "0"
