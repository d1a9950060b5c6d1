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
import sys, threading, time
import nemo_rl.algorithms.startup as startup

def load(first, failed):
    try:
        if first:
            startup.import_transformers()
        from transformers import AutoConfig
    except ImportError as error:
        failed.append(error)

for first in (False, True):
    sys.modules.pop("transformers", None)
    failed = []
    threads = [threading.Thread(target=load, args=(first, failed)) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    print(len(failed))
"""


@pytest.mark.slow
def test_two_threads_find_the_names_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text(PACKAGE)
    root = Path(__file__).resolve().parents[2]
    line = f"import sys; sys.path[:0] = [{str(root)!r}, {str(tmp_path)!r}]\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=120, check=True)
    without, with_it = done.stdout.split()
    assert without == "1", "Python no longer hands out the module before its replacement"
    assert with_it == "0"
