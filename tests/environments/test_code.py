"""Code in responses is run, within limits, and its output comes back."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

from nemo_rl.environments.call import step_environment
from nemo_rl.environments.code_environment import CodeEnvironment, code_in, run_python


def stepped(responses: list[str], metadata: list[dict[str, Any]], **cfg: Any) -> Any:
    environment = CodeEnvironment({"num_workers": 2, **cfg})
    try:
        return step_environment(
            environment,
            [[{"role": "assistant", "content": text}] for text in responses],
            metadata,
            timeout_s=60,
            name="code",
        )
    finally:
        environment.shutdown()


def test_code_is_found_between_tags_and_fences_even_when_a_stop_string_cut_it() -> None:
    assert code_in("a <code>x = 1</code> b <code>y = 2</code>") == "x = 1\ny = 2"
    assert code_in("```python\nx = 1\n```") == "x = 1\n"
    assert code_in("<code>print(1)") == "print(1)"
    assert code_in("no code") is None


def test_output_tests_and_failures_decide_the_reward() -> None:
    responses = [
        "<code>print(6*7)</code>",
        "<code>print(6*7)</code>",
        "<code>def f(): return 1</code>",
        "<code>def f(): return 2</code>",
        "<code>1/0</code>",
        "talk",
    ]
    metadata: list[dict[str, Any]] = [
        {"ground_truth": " 42\n"},
        {},
        {"tests": "assert f() == 1"},
        {"tests": "assert f() == 1"},
        {"ground_truth": ""},
        {},
    ]
    result = stepped(responses, metadata)
    assert result.rewards.tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert (
        result.observations[0]["content"] == "\n<result>\n42\n</result>\n" and result.observations[5]["content"] == ""
    )
    assert "ZeroDivisionError" in result.observations[4]["content"]
    assert result.terminateds.all()


def test_conversations_go_on_until_there_is_no_code() -> None:
    assert stepped(["<code>1</code>", "done"], [{}, {}], terminate_on_evaluation=False).terminateds.tolist() == [
        False,
        True,
    ]


def test_code_that_does_not_end_is_ended_with_what_it_started() -> None:
    before = time.monotonic()
    run = run_python("import subprocess\nprint('began', flush=True)\nsubprocess.run(['sleep', '60'])", 8.0)
    assert not run.succeeded and run.output == "began\n[ended after 8 s]"
    left_running = run_python("import subprocess\nsubprocess.Popen(['sleep', '60'])", 1.0)
    assert not left_running.succeeded and left_running.output == "[ended after 1 s]"
    assert time.monotonic() - before < 30


def test_memory_and_output_are_limited() -> None:
    assert "MemoryError" in run_python("x = bytearray(8 * 1024**3)", 20).output
    assert len(run_python("print('x' * 100_000)", 20).output) < 4100


def test_a_response_that_prints_for_ever_takes_no_memory_of_the_host() -> None:
    tracemalloc.start()
    try:
        run = run_python("print('first')\nwhile True: print('x' * 1_000_000)", 6.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not run.succeeded and run.output.startswith("first\nxxx") and run.output.endswith("x\n[ended after 6 s]")
    assert len(run.output) < 4100
    assert peak < 8 * 1024**2


def test_a_response_cannot_fill_the_disk() -> None:
    run = run_python("with open('big', 'wb') as file:\n    for _ in range(1024): file.write(bytes(1024**2))", 20.0)
    assert not run.succeeded and "File too large" in run.output


def test_code_longer_than_a_pipe_and_output_of_many_letters_come_through_whole() -> None:
    assert run_python("#" + "x" * 300_000 + "\nprint('ä' * 3000)", 20.0).output == "ä" * 3000
    assert (
        run_python("import os; os.close(1); os.close(2); import time; time.sleep(60)", 1.0).output
        == "[ended after 1 s]"
    )
