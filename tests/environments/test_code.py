"""Code in responses is run, within limits, and its output comes back."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_rl.config import ConfigError
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.call import step_environment
from nemo_rl.environments.code_environment import CodeEnvironment, CodeTestsEnvironment, code_in
from nemo_rl.environments.code_sandbox import running
from nemo_rl.environments.code_sandbox.cell import BLOCKED_IMPORTS
from nemo_rl.environments.code_sandbox.running import STATE, run_cell, run_python, usable_sandbox
from nemo_rl.environments.interfaces import GIVEN_UP, EnvironmentFailure
from tests import forks
from tests.conftest import ROOT


def stepped(responses: list[str], metadata: list[dict[str, Any]], **cfg: Any) -> Any:
    environment = CodeTestsEnvironment({"num_workers": 2, **cfg})
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_code_that_does_not_end_is_ended_with_what_it_started() -> None:
    before = time.monotonic()
    run = run_python("import subprocess\nprint('began', flush=True)\nsubprocess.run(['sleep', '60'])", 4.0)
    assert not run.succeeded and run.output == "began\n[ended after 4 s]"
    left_running = run_python("import subprocess\nsubprocess.Popen(['sleep', '60'])", 1.0)
    assert not left_running.succeeded and left_running.output == "[ended after 1 s]"
    assert time.monotonic() - before < 30


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", ["auto", "limits"])
def test_nothing_that_a_response_started_stays_behind(sandbox: str) -> None:
    mark = f"{secrets.randbelow(10**9) + 10**9}"
    sleep = f"['sleep', '{mark}']"
    double_fork = (
        "import os\nfor _ in range(20):\n  if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"      os.closerange(0, 256)\n      os.execvp('sleep', {sleep})\n    os._exit(0)\n"
    )
    ways = [
        double_fork,
        f"import subprocess\nsubprocess.Popen({sleep}, start_new_session=True, stdout=-3, stderr=-3, env={{}}, cwd='/')",
        "import os, signal, subprocess\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
        f"subprocess.Popen({sleep}, process_group=0)",
        f"{double_fork}\nos.kill(os.getpid(), 9)",
        f"{double_fork}\nimport time\ntime.sleep(60)",
        f"import multiprocessing, os\nmultiprocessing.Process(target=os.execvp, args=('sleep', {sleep})).start()\nos._exit(0)",
        f"import subprocess, os, time\nsubprocess.Popen({sleep}, start_new_session=True, stdout=-3, stderr=-3)\n"
        "os.kill(int(open(f'/proc/{os.getppid()}/stat').read().split()[3]), 9) if os.getppid() > 1 else None",
    ]
    named = usable_sandbox(sandbox)
    with ThreadPoolExecutor(len(ways)) as threads:
        list(threads.map(lambda code: run_python(code, 3.0, sandbox=named), ways))
    assert [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])] == []


@pytest.mark.slow
def test_a_response_reads_no_secret_of_the_run(tmp_path: Path) -> None:
    reads = (
        "import os\nfound = [dict(os.environ)]\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "  for name in ('environ', 'fd', 'mem'):\n    try:\n"
        "      found.append(os.listdir(f'/proc/{pid}/fd') if name == 'fd' else open(f'/proc/{pid}/{name}', 'rb').read(10**5))\n"
        "    except OSError: pass\nprint('SECRET' if b'hf_secret' in repr(found).encode() else 'none')"
    )
    run = (
        "from nemo_rl.environments.code_environment import *\nfor sandbox in ('auto', 'limits'):\n"
        f"  environment = CodeTestsEnvironment({{'sandbox': sandbox}})\n  print(run_python({reads!r}, 30.0, '', environment.sandbox))"
    )
    script = tmp_path / "run.py"
    script.write_text(run)
    ended = forks.run([str(script)], {**os.environ, "HF_TOKEN": "hf_secret", "PYTHONPATH": str(ROOT)}, timeout_s=100)
    assert ended.stdout.count("output='none', succeeded=True") == 2


NSJAIL = """#!{python}
import json, os, sys
options, program = sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:]
values = lambda name: [value for option, value in zip(options, options[1:]) if option == name]
kept = {{0, 1, 2, *map(int, values("--pass_fd"))}}
for descriptor in map(int, os.listdir("/proc/self/fd")):
    if descriptor not in kept:
        try:
            os.close(descriptor)
        except OSError:
            pass
json.dump(options, open("{seen}", "w"))
os.chdir(values("--cwd")[0])
os.execve(program[0], program, dict(os.environ) if "--keep_env" in options else {{}})
"""


@pytest.mark.slow
def test_nsjail_gets_the_mounts_and_files_that_a_response_needs(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "nsjail").write_text(NSJAIL.format(python=sys.executable, seen=tmp_path / "seen"))
    (tmp_path / "nsjail").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    code = "import os\nopen('made', 'w').write('1')\nprint(os.getcwd() == os.environ['HOME'])\ndef f(): return 7"
    run = run_python(code, 30.0, "assert f() == 7", "nsjail")
    assert run.succeeded and run.output == "True"
    assert not run_python(code, 30.0, "assert f() == 8", "nsjail").succeeded
    options = json.loads((tmp_path / "seen").read_text())
    at = options.index
    folder = options[at("--cwd") + 1]
    assert options[at("--chroot") + 1] == "/" and "--rw" not in options and "--disable_clone_newnet" not in options
    # Hidden first, then what is needed of it, then the one place to write to.
    hidden = [number for number, option in enumerate(options) if option == "--tmpfsmount"]
    assert {options[number + 1] for number in hidden} == {"/tmp", str(Path.home())}
    writable = [options[number + 1] for number, option in enumerate(options) if option == "--bindmount"]
    assert writable == [folder] and max(hidden) < at("--bindmount")


@pytest.mark.skipif(shutil.which("nsjail") is None, reason="nsjail is not installed")
def test_nsjail_hides_the_system_and_the_network() -> None:
    assert running.problem_with("nsjail") is None
    run = run_python(
        "import os\nprint(os.listdir('/tmp'), len(os.listdir(os.path.expanduser('~root'))))", 30.0, "", "nsjail"
    )
    assert run.output.startswith("['nemo_rl_code_")


def test_a_sandbox_that_this_machine_lacks_is_refused_and_the_one_in_use_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    running.problem_with.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"env\.code\.sandbox: bubblewrap does not work .*bwrap is not installed"):
            CodeEnvironment({"sandbox": "bubblewrap"})
        with pytest.raises(ConfigError, match=r"nsjail does not work .*nsjail is not installed"):
            CodeEnvironment({"sandbox": "nsjail"})
    finally:
        running.problem_with.cache_clear()
    assert "sandbox limits" in CodeEnvironment.start_line({"sandbox": "limits"})


@pytest.mark.slow
def test_memory_and_output_are_limited() -> None:
    assert "MemoryError" in run_python("x = bytearray(8 * 1024**3)", 20).output
    assert len(run_python("print('x' * 100_000)", 20).output) < 4100


@pytest.mark.slow
def test_a_response_that_prints_for_ever_takes_no_memory_of_the_host() -> None:
    tracemalloc.start()
    try:
        run = run_python("print('first')\nwhile True: print('x' * 1_000_000)", 3.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not run.succeeded and run.output.startswith("first\nxxx") and run.output.endswith("x\n[ended after 3 s]")
    assert len(run.output) < 4100
    assert peak < 8 * 1024**2


def test_a_response_cannot_fill_the_disk() -> None:
    run = run_python("with open('big', 'wb') as file:\n    for _ in range(1024): file.write(bytes(1024**2))", 20.0)
    assert not run.succeeded and "File too large" in run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "for n in range(100):\n  with open(f'big{n}', 'wb') as file: file.write(bytes(48 * 1024**2))",
        "from pathlib import Path\nPath('a/b').mkdir(parents=True)\nfor n in range(100):\n"
        "  with open(f'a/b/{n}', 'wb') as f: f.write(bytes(48 * 1024**2))",
        "for n in range(10**6): open(f'f{n}', 'w').close()",
        "from pathlib import Path\nfor n in range(10**6): Path(f'd{n}').mkdir()",
    ],
)
def test_a_response_cannot_fill_the_temporary_folder_by_many_files(code: str, tmp_path: Path) -> None:
    used = shutil.disk_usage("/tmp").used
    run = run_python(f"{code}\nimport time\ntime.sleep(60)", 50.0)
    assert not run.succeeded and "it wrote more than 256 MiB or 10000 files" in run.output
    cell = run_cell(f"{code}\nimport time\ntime.sleep(60)", {}, str(tmp_path), 50.0)
    assert not cell.succeeded and "it wrote more than" in cell.result
    shutil.rmtree(tmp_path)
    assert shutil.disk_usage("/tmp").used - used < 512 * 1024**2, "what it wrote is removed with its folder"


@pytest.mark.slow
def test_code_longer_than_a_pipe_and_output_of_many_letters_come_through_whole() -> None:
    assert run_python("#" + "x" * 300_000 + "\nprint('ä' * 3000)", 20.0).output == "ä" * 3000
    assert (
        run_python("import os; os.close(1); os.close(2); import time; time.sleep(60)", 1.0).output
        == "[ended after 1 s]"
    )


class Notebook:
    """One conversation with `env.code`."""

    def __init__(self, **metadata: Any) -> None:
        self.environment = CodeEnvironment({"num_workers": 1, "terminate_on_evaluation": False, "run_timeout_s": 60})
        self.metadata: dict[str, Any] = metadata

    def said(self, code: str) -> str:
        result = self.environment.step([[{"role": "assistant", "content": f"<code>{code}</code>"}]], [self.metadata])
        self.metadata = result.metadata[0]
        assert not result.terminateds.any()
        content = result.observations[0]["content"]
        return content.replace("\n<result>\n", "<result>").removeprefix("<result>").partition("</result>")[0].strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["x = 20 + 1\nx"], ["21"]),
        (["x = 1", "x += 1\nx", "x"], ["", "2", "2"]),
        (["print('a')\n'b'", "print('a')"], ["'b'", "a"]),
        (["n = 1\ndef f(): return n", "n = 5\nf()"], ["", "5"]),
        (["class A:\n  def __init__(self): self.v = [1]\na = A(); b = a.v", "b.append(2); a.v"], ["", "[1, 2]"]),
        (["import math", "math.floor(2.5)"], ["", "2"]),
        (["open('f.txt', 'w').write('hi')", "open('f.txt').read()"], ["2", "'hi'"]),
        (["open('own.py', 'w').write('v = 3')", "import own\nown.v"], ["5", "3"]),
        (["g = (i for i in range(3))\nk = 1", "k"], ["[not kept for the next cell: g]", "1"]),
        (["exit()\n", "1"], ["", "1"]),
    ],
)
def test_a_notebook_shows_the_last_value_and_goes_on_with_names_and_files(cells: list[str], said: list[str]) -> None:
    notebook = Notebook()
    assert [notebook.said(cell) for cell in cells] == said
    notebook.environment.shutdown()
    assert not Path(notebook.metadata["working_dir"]).exists()


@pytest.mark.slow
def test_a_notebooks_context_and_folder_are_those_of_the_metadata(tmp_path: Path) -> None:
    notebook = Notebook(context={"data": [3, 1]}, working_dir=str(tmp_path), ground_truth="x")
    assert notebook.said("data.sort(); total = sum(data)\nopen('out', 'w').close()\ntotal") == "4"
    assert (tmp_path / "out").exists() and notebook.metadata["ground_truth"] == "x"
    plain = {name: value for name, value in notebook.metadata["context"].items() if name != STATE}
    assert plain == {"data": [1, 3], "total": 4}
    notebook.metadata["context"]["total"] = 9
    assert notebook.said("total") == "9"
    assert notebook.said("1/0") == "ZeroDivisionError('division by zero')" and notebook.said("total") == "9"
    for blocked, error in (
        ("import torch", "ImportError"),
        ("def f():\n  import psutil\nf()", "ImportError"),
        *((f"import {name}", "ImportError") for name in BLOCKED_IMPORTS),
        ("import os.path", "ImportError"),
        ("from importlib import import_module", "ImportError"),
        ("__import__('subprocess')", "ImportError"),
        ("open('/etc/hostname')", "PermissionError"),
        ("open('../x', 'w')", "PermissionError"),
    ):
        assert error in notebook.said(blocked), blocked
    assert notebook.said("import numpy as np\nint(np.arange(3).sum())") == "3"
    notebook.environment.shutdown()
    assert tmp_path.exists()


@pytest.mark.slow
def test_a_notebooks_rewards_ends_and_refusals() -> None:
    environment = CodeEnvironment({"num_workers": 2, "run_timeout_s": 60})
    logs = [[{"role": "assistant", "content": text}] for text in ("<code>6*7</code>", "<code>6*6</code>", "no code")]
    result = environment.step(logs, [{"ground_truth": 42}] * 3)
    assert result.rewards.tolist() == [1.0, 0.0, 0.0] and result.terminateds.tolist() == [True, True, False]
    assert result.metadata[2] == {"ground_truth": 42}
    assert [one["content"] for one in result.observations] == ["<result>42</result>", "<result>36</result>", ""]
    # Only what is an answer ends an episode.
    cells = ("x = 42", "1/0", "print(42)", "print(41)", "'a\\nb'", "print('a\\nb')", "def f(:")
    logs = [[{"role": "assistant", "content": f"<code>{cell}</code>"}] for cell in cells]
    result = environment.step(logs, [{"ground_truth": 42}] * len(cells))
    assert result.terminateds.tolist() == [False, False, True, False, True, False, False]
    assert result.rewards.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    told = [one["content"] for one in result.observations]
    assert told[:2] == ["", "<result>ZeroDivisionError('division by zero')</result>"]
    assert told[5] == "\n<result>\na\nb\n</result>\n" and told[6].startswith("<result>SyntaxError(")
    assert result.next_stop_strings == [["</code>"]] * len(cells)
    logs = [[{"role": "assistant", "content": text}] for text in ("<code>6*7</code>",)]
    for metadata, said in (
        ({"tests": "assert f()"}, "code_tests"),
        ({"context": [1]}, "mapping"),
        ({"working_dir": 1}, "path"),
    ):
        with pytest.raises(EnvironmentFailure, match=said):
            environment.step(logs[:1], [metadata])
    environment.shutdown()


@pytest.mark.slow
def test_what_a_cell_writes_as_its_answer_is_never_followed_or_unpickled(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"value": "secret"}')
    tricks = (
        f"os = __import__('pathlib').os\nhome = os.environ['HOME']\nos.symlink('{tmp_path}/secret', home + '/answer.json')",
        "os = __import__('pathlib').os\nos.mkfifo(os.environ['HOME'] + '/answer.json')\nos._exit(0)",
        "os = __import__('pathlib').os\nos.symlink('/dev/zero', os.environ['HOME'] + '/answer.json')\nos._exit(0)",
        "import io; os = __import__('pathlib').os\nio.open(os.environ['HOME'] + '/answer.json', 'w').write('[[[')\nos._exit(0)",
    )
    for trick in tricks:
        cell = run_cell(trick, {"kept": 1}, str(tmp_path), 20.0)
        assert "secret" not in cell.result and cell.context["kept"] == 1
    late = run_cell("while True: pass", {"kept": 1}, str(tmp_path), 1.0)
    assert not late.succeeded and late.context == {"kept": 1} and "ended after" in late.result


@pytest.mark.parametrize("environment", [CodeEnvironment, CodeTestsEnvironment])
def test_code_that_runs_past_its_deadline_is_counted_as_not_judged(environment: Any) -> None:
    judge = environment({"num_workers": 2, "run_timeout_s": 4.0, "terminate_on_evaluation": False})
    logs = [[{"role": "assistant", "content": f"<code>{code}</code>"}] for code in ("while True: pass", "1/0")]
    logs.append([{"role": "assistant", "content": "no code"}])
    rows: list[Any] = [{"ground_truth": "1"}, {"ground_truth": "1"}, {}]
    metadata = list(judge.step(logs, rows).metadata)
    assert [item.get(GIVEN_UP) for item in metadata] == [True, None, None]
    assert judge.global_post_process_and_metrics(BatchedDataDict())[1] == {"verify_timeouts": 1.0}
    # A later turn that ends in time is judged.
    (last,) = judge.step(logs[1:2], metadata[:1]).metadata
    assert GIVEN_UP not in last
    judge.shutdown()
