"""Which workers start under Nsight Systems, and how."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ray.runtime_env import RuntimeEnv

from nemo_rl.config.nsight_variables import Profile, asked_profile
from nemo_rl.distributed import worker_groups
from nemo_rl.distributed.accelerator_slots import CPU, CUDA, Accelerator
from nemo_rl.distributed.nsight import ProfilerUnavailable, check_profiler, runtime_env
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

GROUPS = ("lm_policy", "vllm")


def asked(patterns: str, steps: str = "3:5") -> Profile:
    variables = {"NRL_NSYS_WORKER_PATTERNS": patterns, "NRL_NSYS_PROFILE_STEP_RANGE": steps}
    profile = asked_profile(variables, GROUPS)
    assert profile is not None
    return profile


@pytest.mark.parametrize(
    ("patterns", "workers"),
    [
        ("*policy*", {("lm_policy", 0), ("lm_policy", 1), ("lm_policy", 10)}),
        ("vllm", {("vllm", 0), ("vllm", 1), ("vllm", 10)}),
        ("vllm-0, lm_policy-[01]", {("vllm", 0), ("lm_policy", 0), ("lm_policy", 1)}),
        ("*-1", {("vllm", 1), ("lm_policy", 1)}),
        ("nobody,vllm-1*", {("vllm", 1), ("vllm", 10)}),
    ],
)
def test_workers_are_chosen_by_the_name_of_their_group_or_their_own(
    patterns: str, workers: set[tuple[str, int]]
) -> None:
    profile = asked(patterns)
    assert {(group, rank) for group in GROUPS for rank in (0, 1, 10) if profile.wants(group, rank)} == workers


def test_a_range_of_steps_leaves_out_its_end_and_nothing_asks_for_nothing() -> None:
    assert [step for step in range(8) if asked("*", "3:5").covers(step)] == [3, 4]
    assert asked_profile({}, GROUPS) is None and asked_profile({"NRL_NSYS_WORKER_PATTERNS": " "}, GROUPS) is None


def test_a_profiled_worker_starts_under_nsys_with_this_interpreter_and_others_as_ever() -> None:
    variables = {"RANK": "1"}
    assert runtime_env(variables, None) == {"env_vars": {"RANK": "1"}}
    profiled = runtime_env(variables, "job a/vllm-1")
    assert profiled["env_vars"]["RANK"] == "1"
    assert profiled["env_vars"]["PATH"].split(":") == [str(Path(sys.executable).parent), "${PATH}"]
    options = RuntimeEnv(**profiled).nsight()
    assert isinstance(options, dict)
    assert options["o"] == "job_a_vllm-1_%p" and options["capture-range"] == "cudaProfilerApi"


class Cluster:
    """Two slots of one node, and what is asked of a cluster to start actors there."""

    max_colocated_worker_groups = 1
    slot_bytes = None
    worker_env: ClassVar[dict[str, str]] = {}

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def slots(self) -> list[Any]:
        return [SimpleNamespace(node_rank=0, bundle_index=i, node_ip="here", device_index=i) for i in range(2)]

    def get_master_address_and_port(self) -> tuple[str, int]:
        return "here", 1

    def strategy_for(self, node_rank: int, bundle_index: int) -> None:
        return None

    def actor_name(self, group: str, rank: int) -> dict[str, str]:
        return {}


def test_a_group_starts_those_of_its_workers_under_nsys(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    def options(**given: Any) -> Any:
        started.append(given["runtime_env"])
        return SimpleNamespace(remote=lambda: None)

    monkeypatch.setattr(worker_groups.ray, "remote", lambda kind: SimpleNamespace(options=options))
    builder = RayWorkerBuilder("tests.distributed.ray_workers.Probe")

    def group(accelerator: Accelerator, profile: Profile | None) -> RayWorkerGroup:
        started.clear()
        cluster: Any = Cluster(accelerator)
        return RayWorkerGroup(cluster, builder, name_prefix="vllm", profile=profile)

    assert group(CUDA, asked("vllm-1")).profiled == [1]
    assert [env.get("nsight", {}).get("o") for env in started] == [None, "vllm-1_%p"]
    assert [env["env_vars"]["RANK"] for env in started] == ["0", "1"] and "PATH" not in started[0]["env_vars"]
    assert group(CPU, asked("lm_policy")).profiled == group(CUDA, None).profiled == []
    assert not any("nsight" in env for env in started)
    with pytest.raises(ProfilerUnavailable, match="the run has none"):
        group(CPU, asked("vllm-1"))
    assert started == []


def test_where_nothing_can_be_profiled_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProfilerUnavailable, match="the run has none; unset the variable"):
        check_profiler(cuda=False)
    with pytest.raises(ProfilerUnavailable, match="nsys is not on PATH; install"):
        check_profiler(cuda=True)
    (tmp_path / "nsys").write_text("#!/bin/sh\n")
    (tmp_path / "nsys").chmod(0o755)
    check_profiler(cuda=True)
