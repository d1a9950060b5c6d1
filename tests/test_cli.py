"""The `nemo-rl` command."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from nemo_rl import cli

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_says_how_it_is_used(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: nemo-rl {name} [-h]")


def test_an_unknown_command_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["gpro"])
    assert ended.value.code == cli.EXIT_USAGE and "'distillation'" in capsys.readouterr().err


def test_the_installed_command_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["nemo-rl"].partition(":")
    assert getattr(import_module(module), name) is cli.main


@pytest.mark.parametrize(("gate", "starts"), [("", "launch"), ("rlix", "pool")])
def test_a_run_starts_here_or_under_the_gate_on_the_open_pool(
    gate: str, starts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl.algorithms import launch
    from nemo_rl.time_sharing import pool_commands

    started: list[tuple[object, ...]] = []
    for module, name in ((launch, "sft"), (pool_commands, "run_under_control_plane")):
        where = "launch" if module is launch else "pool"
        monkeypatch.setattr(module, name, lambda *a, where=where, **named: started.append((where, a, named)) or 0)
    monkeypatch.setenv("RLIX_CONTROL_PLANE", gate)
    assert cli.main(["sft", "sft.seed=3"]) == 0
    named = {"default_config": ROOT / "examples" / "configs" / "sft.yaml", "prog": "nemo-rl sft"}
    assert started == [(starts, (["sft.seed=3"],), named)]


def test_without_a_checkout_a_configuration_has_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_CONFIGS", tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["grpo", "grpo.seed=1"])
    assert ended.value.code == cli.EXIT_USAGE and "required: --config" in capsys.readouterr().err
