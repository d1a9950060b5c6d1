"""A pool that ends with its allocation and goes on in the next one: `serve --grace`, then `serve --continue-from`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import forks

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

MODULE = ["-m", "nemo_rl.time_sharing"]
_SAYS = "trap 'echo saved >> {marks}; exit 1' TERM; echo begun >> {marks}; sleep 600 & wait $!"


class Here:
    """Pools of one CPU slot in a folder, one after the other."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder = folder
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "NRL_P", "XDG_"))}
        self.environment = kept | {"TMPDIR": str(temporary), "HOME": str(temporary)}
        self.environment |= {"NRL_OBJECT_STORE_BYTES": str(128 << 20)} | forks.forking_environment()

    @contextmanager
    def pool(self, *words: str) -> Iterator[Any]:
        line = [*MODULE, "serve", "--gpus", "1", "--device", "cpu", "--port", "0", "--log-dir", "logs", *words]
        serving = forks.start(line, self.environment, subprocess.PIPE, folder=self.folder)
        try:
            self.until(lambda: self.states(serving) is not None)
            yield serving
        finally:
            serving.send_signal(signal.SIGTERM)
            serving.wait(90)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.3)

    def run(self, *words: str) -> Any:
        return forks.run([*MODULE, *words], self.environment, folder=self.folder, timeout_s=90)

    def states(self, serving: Any) -> dict[str, str] | None:
        """The jobs of the open pool; None before it is open."""
        assert serving.poll() is None
        shown = self.run("status", "--json")
        if shown.returncode:
            return None
        return {one["name"]: one["state"] for one in json.loads(shown.stdout)["pipelines"]}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    temporary = Path(tempfile.mkdtemp(prefix="pool-"))
    yield Here(tmp_path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def test_a_pool_goes_on_in_the_next_one_with_what_runs_and_what_waits(here: Here) -> None:
    marks = here.folder / "marks"
    for name in ("runs", "waits"):
        command = ["bash", "-c", _SAYS.format(marks=marks)]
        (here.folder / f"{name}.yaml").write_text(yaml.safe_dump({"external": {"command": command}}))
    with here.pool("--max-jobs", "1", "--grace", "60") as serving:
        assert here.run("submit", "runs.yaml").returncode == 0 and here.run("submit", "waits.yaml").returncode == 0
        here.until(marks.exists)
        refused = here.run("serve", "--gpus", "1", "--device", "cpu", "--continue-from", "logs/exp_000")
        assert refused.returncode == 2 and "is still open; end it first" in refused.stderr
    assert marks.read_text().split() == ["begun", "saved"]
    with here.pool("--max-jobs", "2", "--continue-from", "logs/exp_000") as serving:
        here.until(lambda: marks.read_text().split().count("begun") >= 2)
        states = here.states(serving)
        assert states is not None and set(states) == {"runs", "waits"} and "queued" not in states.values()
