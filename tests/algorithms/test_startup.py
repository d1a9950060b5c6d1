"""Threads of a start that import transformers at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Does what the real package does: it takes a while, and puts another module in its own place at the end.
PACKAGE = """
import sys, time, types
time.sleep(0.5)
lazy = types.ModuleType(__name__)
lazy.__spec__ = __spec__
lazy.AutoConfig = object()
sys.modules[__name__] = lazy
"""
SCRIPT = """
import threading, time
import nemo_rl.algorithms.startup as startup
failed = []

def load():
    try:
        if {first}:
            startup.import_transformers()
        from transformers import AutoConfig
    except ImportError as error:
        failed.append(error)

threads = [threading.Thread(target=load) for _ in range(2)]
for thread in threads:
    thread.start()
    time.sleep(0.1)
for thread in threads:
    thread.join()
print(len(failed))
"""


def _failures(tmp_path: Path, first: bool) -> str:
    (tmp_path / "transformers.py").write_text(PACKAGE)
    script = SCRIPT.format(first=first)
    root = Path(__file__).resolve().parents[2]
    line = f"import sys; sys.path[:0] = [{str(root)!r}, {str(tmp_path)!r}]\n{script}"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


@pytest.mark.slow
def test_two_threads_find_the_names_of_transformers(tmp_path: Path) -> None:
    assert _failures(tmp_path, first=False) == "1", "Python no longer hands out the module before its replacement"
    assert _failures(tmp_path, first=True) == "0"
