"""`python -m nemo_rl.config` and the generated reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nemo_rl.config import MasterConfig
from nemo_rl.config.__main__ import main
from nemo_rl.config.reference import reference_page

ROOT = Path(__file__).parents[2]


def test_the_committed_reference_is_current() -> None:
    assert (ROOT / "docs/config.md").read_text() == reference_page(), "run `python -m nemo_rl.config docs`"


def test_show_prints_a_file_that_loads_as_the_same_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "grpo.seed=9", "policy.max_total_sequence_length=64"]) == 0
    config = MasterConfig(**yaml.safe_load(capsys.readouterr().out))
    assert config.grpo.seed == 9 and config.policy.generation.vllm_cfg.max_model_len == 64


def test_diff_prints_what_differs_and_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("grpo: {seed: 7}\n")
    assert main(["diff", str(tmp_path / "a.yaml"), "loss_fn.ratio_clip_c=3"]) == 0
    assert capsys.readouterr().out.splitlines() == ["loss_fn.ratio_clip_c: null -> 3.0", "grpo.seed: 42 -> 7"]


def test_explain_names_the_file_or_override_a_value_came_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("grpo: {seed: 7, val_period: 0}\n")
    (tmp_path / "child.yaml").write_text("defaults: base.yaml\ngrpo: {val_period: 5}\n")
    main(["explain", "grpo.seed", str(tmp_path / "child.yaml")])
    assert f"from:    {tmp_path / 'base.yaml'}" in capsys.readouterr().out
    main(["explain", "grpo.val_period", str(tmp_path / "child.yaml"), "grpo.val_period=6"])
    out = capsys.readouterr().out
    assert "value:   6" in out and "from:    override 'grpo.val_period=6'" in out
    main(["explain", "policy.generation.max_new_tokens", str(tmp_path / "child.yaml")])
    out = capsys.readouterr().out
    assert "default: ${policy.max_total_sequence_length}" in out and "from:    the default" in out


def test_explain_tells_what_is_not_built_yet(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "policy.draft.loss_weight"])
    assert "not yet (draft models)" in capsys.readouterr().out


def test_mistakes_go_to_stderr_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "grpo.sed=1"]) == 2
    assert "Did you mean 'seed'?" in capsys.readouterr().err
    assert main(["explain", "grpo.sead"]) == 2
    assert "Did you mean 'seed'?" in capsys.readouterr().err
