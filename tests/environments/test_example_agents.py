"""The agents of examples/ for packages with environments of their own, as far as they need no package."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

_EXAMPLES = Path(__file__).parents[2] / "examples"
_ROW = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Help."}, {"role": "user", "content": [{"text": "1+2?"}]}],
        "temperature": 0.5,
        "metadata": {"extra_body": '{"chat_template_kwargs": {"x": 1}}', "kept": "yes"},
    },
    "agent_ref": {"name": "adder"},
}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, _EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_of_nemo_gym_become_prompts_that_bring_the_row_along(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(_ROW) + "\n\n")
    command = [sys.executable, str(_EXAMPLES / "nemo_gym_agent.py"), str(rows)]
    (line,) = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    written = json.loads(line)
    assert written["input"] == "Help.\n1+2?" and json.loads(written["output"]) == _ROW


def test_requests_of_nemo_gym_name_their_session_and_leave_sampling_to_the_run() -> None:
    params = example("nemo_gym_agent")._of_session(_ROW, "s-1")
    assert "temperature" not in params and params["metadata"]["kept"] == "yes"
    assert json.loads(params["metadata"]["extra_body"]) == {"chat_template_kwargs": {"x": 1}, "session": "s-1"}
