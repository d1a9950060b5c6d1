"""What all tests share: one Ray cluster, one tiny model, and the check that no process outlives the session.

Hypothesis examples have no time limit of their own, since a busy machine is no failure.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import logging
import os
import runpy
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import hypothesis
import psutil
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from nemo_rl.distributed.processes import collect_rarely

ROOT = Path(__file__).parents[1]
_SESSION_MARK = "NRL_TEST_SESSION"
_GRACE_S = 60.0
_OBJECT_STORE_BYTES = 512 << 20

hypothesis.settings.register_profile("nemo_rl", deadline=None, print_blob=True, max_examples=40)
hypothesis.settings.load_profile("nemo_rl")

# Not while tests are collected, which imports torch and much else: a quarter of the time went into this search.
gc.disable()

# Cores are shared with other sessions and with what tests start. A thread that waits would else spin meanwhile, in this
# process and in all that it starts, and take up to twenty times the processor seconds of its work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The session has a cluster of its own, whatever else runs on this machine.
os.environ.setdefault("RAY_ADDRESS", "local")


def pytest_collection_finish() -> None:
    """From here on this process searches for cycles of objects as rarely as the product's do."""
    gc.freeze()
    # Bindings report objects as leaked that are frozen when Python ends. Not earlier: pytest collects five times then.
    atexit.register(gc.unfreeze)
    gc.enable()
    collect_rarely()
    if (torch := sys.modules.get("torch")) is not None:
        # Each session has about one core.
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """All sessions fork one process, where they run everything."""
    if not config.option.markexpr:
        from tests.forks import begin_template, end_template

        begin_template()
        config.add_cleanup(end_template)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Of several sessions side by side all but one start engines, and mostly wait for them; the other does the rest."""
    return _EnginesApart(config, log)


class _EnginesApart(LoadScopeScheduling):
    """Gives each file to one session. The last session takes files that start no engine, the others those that do; one
    that has none of its own left takes the others'. Files with few tests, which are the longest, come first: a session
    is given its next file while the last two tests of one run, so that a long one at the end would leave the other
    sessions idle.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.numnodes > 1:
            engines = [path for path in reversed(self.workqueue) if _starts_engines(path)]
            others = [path for path in reversed(self.workqueue) if not _starts_engines(path)]
            mine, theirs = (engines, others) if node != self.nodes[-1] else (others, engines[::-1])
            self.workqueue.move_to_end((mine or theirs)[0], last=False)
        super()._assign_work_unit(node)


@functools.cache
def _starts_engines(path: str) -> bool:
    return "pytest.mark.vllm" in (ROOT / path).read_text()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells why tests that were tried again had failed, which `--reruns` keeps to itself."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first try of {report.nodeid}")
        terminalreporter.line(report.longreprtext)


@pytest.fixture(autouse=True)
def _loggers_speak() -> None:
    """Libraries imported by earlier tests may configure logging and thereby silence loggers that exist already."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("nemo_rl") and isinstance(logger, logging.Logger):
            logger.disabled = False
            logger.propagate = True


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    """Everything that the session starts inherits a mark; at the end nobody may carry it any more."""
    mark = os.environ[_SESSION_MARK] = uuid.uuid4().hex
    yield
    if (ranks := sys.modules.get("tests.ranks")) is not None:
        ranks.end_launcher()
    if (forks := sys.modules.get("tests.forks")) is not None:
        forks.end_template()
    deadline = time.monotonic() + _GRACE_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, "processes outlived the tests: " + "; ".join(left)


def _marked(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            # Python's own resource tracker lives as long as this process.
            if process.environ().get(_SESSION_MARK) == mark and "multiprocessing.resource_tracker" not in command:
                found.append(f"{process.pid} {command[:120]}")
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="session")
def user_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory from which this process and Ray's workers import modules that a test writes there."""
    folder = tmp_path_factory.mktemp("user_modules")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    ).rstrip(os.pathsep)
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def ray_session(_no_process_is_left_behind: None, user_modules: Path) -> Iterator[None]:
    """The session's one Ray cluster: local, four CPU slots. Commands that its workers start fork the workers of their
    own clusters, too.
    """
    from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
    from tests.forks import forked_workers, forking_environment

    os.environ.setdefault("NRL_OBJECT_STORE_BYTES", str(_OBJECT_STORE_BYTES))
    search_path = os.pathsep.join([forking_environment()["PYTHONPATH"], os.environ["PYTHONPATH"]])
    with forked_workers(), patch.dict(os.environ, PYTHONPATH=search_path):
        init_ray(device="cpu", cpu_slots=4)
    yield
    shutdown_ray()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a two-layer, 128-wide Qwen3 model with a byte-level tokenizer; narrower heads than 32 vLLM does not
    run on CPU.
    """
    folder = tmp_path_factory.mktemp("models") / "tiny"
    example("make_tiny_model").save_tiny_model(folder, layers=2, hidden=128)
    return folder


@pytest.fixture(scope="session")
def tiny_moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `tiny_model`, a Qwen3-MoE with four experts in each layer."""
    folder = tmp_path_factory.mktemp("models") / "tiny_moe"
    example("make_tiny_model").save_tiny_model(folder, layers=2, hidden=128, experts=4)
    return folder


@pytest.fixture(scope="session")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A `Command` of `tests.end_to_end.test_runs` that ran to its end undisturbed, with its rollouts recorded."""
    from tests.end_to_end.test_runs import Command

    command = Command(tiny_model, tmp_path_factory.mktemp("whole"))
    command.finish(f"grpo.rollout_record={command.folder}/rollouts")
    return command


def example(name: str) -> ModuleType:
    """`examples/<name>.py` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(file: Path, *arguments: str) -> int:
    """Runs a Python file in this process, which has imported much of what it needs; its exit code."""
    with patch.object(sys, "argv", [str(file), *arguments]):
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0
