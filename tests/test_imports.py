"""Importing the library starts nothing, needs no optional package, and loads no more than the part needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys, threading

OPTIONAL = {
    "vllm", "megatron", "transfer_queue", "mooncake", "wandb", "mlflow", "swanlab", "transformer_engine", "flash_attn",
}  # fmt: skip

# Parts of Megatron's model, which only the Megatron backend imports and which can but derive from Megatron's classes.
DERIVED = {"nemo_rl.models.megatron.packed_layers"}

# Python takes None here for a module that is not installed.
sys.modules.update(dict.fromkeys(OPTIONAL))

import nemo_rl.config, nemo_rl.time_sharing.planning.planner
heavy = {"ray", "torch"} & set(sys.modules)
assert not heavy, f"configuration and the scheduler's core import {heavy}"

import nemo_rl.algorithms.grpo.assembly, nemo_rl.algorithms.multi_lora.job, nemo_rl.algorithms.sft.assembly
backends = {"torch._dynamo", "triton", "nemo_rl.models.dtensor.dtensor_backend"} & set(sys.modules)
assert not backends, f"drivers import {backends}"

for module in pkgutil.walk_packages(nemo_rl.__path__, "nemo_rl."):
    if not module.name.endswith("__main__") and module.name not in DERIVED:
        importlib.import_module(module.name)

import psutil, ray, torch
assert not ray.is_initialized(), "Ray was started"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert not torch.distributed.is_initialized(), "a process group was made"
assert not psutil.Process().children(), f"processes were started: {psutil.Process().children()}"
others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
assert not others, f"threads were started: {others}"
"""


@pytest.mark.slow
def test_importing_every_module_starts_nothing_and_each_part_takes_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir()), "importing wrote files"


def test_no_module_imports_itself_through_others() -> None:
    """Not even inside functions or for types alone."""
    graph = grimp.build_graph("nemo_rl", cache_dir=None)
    imports = [(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)]
    circles = sorted(
        f"{module} imports {other}, which leads back to it"
        for module, other in imports
        if graph.chain_exists(importer=other, imported=module)
    )
    assert imports and not circles, "\n".join(circles)
