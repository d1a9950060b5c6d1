"""The KubeRay manifests: a cluster by the operator's fields, its pods by the Kubernetes API's own models, every key of
both known.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from kubernetes import client

from nemo_rl.config import load_master_config
from nemo_rl.distributed.ray_runtime import NODE_ENV
from nemo_rl.time_sharing.__main__ import parser

ROOT = Path(__file__).parents[2]
PARAMETERS = {"type": "object", "additionalProperties": {"type": "string"}}
GROUP = {"rayStartParams": PARAMETERS, "template": {"type": "object"}}
# The fields of ray.io/v1 RayCluster that a manifest of ours may use, as the operator's API reference has them.
RAY_CLUSTER = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}},
        },
        "spec": {
            "type": "object",
            "required": ["headGroupSpec"],
            "additionalProperties": False,
            "properties": {
                "rayVersion": {"type": "string"},
                "enableInTreeAutoscaling": {"type": "boolean"},
                "suspend": {"type": "boolean"},
                "headGroupSpec": {
                    "type": "object",
                    "required": ["rayStartParams", "template"],
                    "additionalProperties": False,
                    "properties": GROUP | {"serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}},
                },
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["groupName", "rayStartParams", "template", "minReplicas", "maxReplicas"],
                        "additionalProperties": False,
                        "properties": GROUP
                        | {"groupName": {"type": "string"}}
                        | {
                            name: {"type": "integer", "minimum": 0}
                            for name in ("replicas", "minReplicas", "maxReplicas", "numOfHosts")
                        },
                    },
                },
            },
        },
    },
}

# The same of ray.io/v1 RayJob.
RAY_JOB = RAY_CLUSTER | {
    "properties": RAY_CLUSTER["properties"]
    | {
        "kind": {"const": "RayJob"},
        "spec": {
            "type": "object",
            "required": ["entrypoint", "rayClusterSpec"],
            "additionalProperties": False,
            "properties": {
                "rayClusterSpec": RAY_CLUSTER["properties"]["spec"],
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
            }
            | {name: {"type": "string"} for name in ("entrypoint", "runtimeEnvYAML", "jobId")}
            | {name: {"type": "boolean"} for name in ("shutdownAfterJobFinishes", "suspend")}
            | {
                name: {"type": "integer", "minimum": 0}
                for name in ("activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished")
            },
        },
    },
}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "infra" / "kuberay" / name).read_text())


def test_the_head_of_a_pool_is_in_a_queue_and_asks_for_no_gpus() -> None:
    head = read("pool_head.yaml")
    assert problems(head) == []
    assert head["metadata"]["labels"] == dict.fromkeys(("kueue.x-k8s.io/queue-name", "kai.scheduler/queue"), "research")
    (container,) = head["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {each["name"]: each["value"] for each in container["env"]} == NODE_ENV
    assert "nvidia.com/gpu" not in container["resources"]["limits"] and "workerGroupSpecs" not in head["spec"]


@pytest.mark.parametrize(
    ("name", "label", "scheduler"),
    [
        ("pool_node_kueue.yaml", "kueue.x-k8s.io/queue-name", None),
        ("pool_node_kai.yaml", "kai.scheduler/queue", "kai-scheduler"),
    ],
)
def test_a_node_of_a_pool_waits_in_its_queue_joins_and_is_drained_in_time(
    name: str, label: str, scheduler: str | None
) -> None:
    job = read(name)
    assert unknown_keys(job, "V1Job", "job") == []
    template = job["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    assert job["metadata"]["labels"] == template["metadata"]["labels"] == {label: "research"}
    assert pod.get("schedulerName") == scheduler
    head = f"{read('pool_head.yaml')['metadata']['name']}-head-svc:6379"
    assert f"--address={head}" in container["command"]
    assert {each["name"]: each["value"] for each in container["env"]} == NODE_ENV | {"RAY_ADDRESS": head}
    assert f"--num-gpus={container['resources']['limits']['nvidia.com/gpu']}" in container["command"]
    hooks = [container["lifecycle"][hook]["exec"]["command"][2] for hook in ("postStart", "preStop")]
    chosen = [
        parser().parse_args(re.split(r"python -m nemo_rl\.time_sharing |;| \|\|", hook)[1].split()) for hook in hooks
    ]
    assert [one.node for one in chosen] == ["$(hostname)"] * 2
    assert chosen[1].by + 60 < pod["terminationGracePeriodSeconds"]


@pytest.fixture(params=["raycluster.yaml", "rayjob.yaml"])
def manifest(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


def cluster(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"] if manifest["kind"] == "RayCluster" else manifest["spec"]["rayClusterSpec"]


def problems(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with a manifest, each with its place."""
    kind = RAY_CLUSTER if manifest["kind"] == "RayCluster" else RAY_JOB
    found = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in Draft202012Validator(kind).iter_errors(manifest)
    ]
    spec = cluster(manifest)
    for group in [spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])]:
        found += unknown_keys(group["template"], "V1PodTemplateSpec", "template")
    return found


def unknown_keys(value: Any, kind: str, where: str) -> list[str]:
    """Keys and values that the Kubernetes API's model of that name refuses."""
    many = re.fullmatch(r"[Ll]ist\[(\w+)\]", kind)
    if many is not None:
        return [line for index, item in enumerate(value) for line in unknown_keys(item, many[1], f"{where}.{index}")]
    model = getattr(client, kind, None)
    if model is None or not isinstance(value, dict):
        return []
    fields = {json_name: model.openapi_types[name] for name, json_name in model.attribute_map.items()}
    lines = [f"{where}.{key}: unknown key of {kind}" for key in value if key not in fields]
    lines += [
        line
        for key, item in value.items()
        if key in fields
        for line in unknown_keys(item, fields[key], f"{where}.{key}")
    ]
    lines += [f"{where}.{name}: missing" for name in required(model) if name not in value]
    return lines


def required(model: Any) -> list[str]:
    """Keys without which the Kubernetes API refuses an object; its client knows them by refusing null."""
    names = []
    for name, json_name in model.attribute_map.items():
        try:
            model(**{name: None})
        except ValueError as error:
            if f"\n{json_name}\n" in str(error) or f"\n{name}\n" in str(error):
                names.append(json_name)
    return names


def test_the_manifest_is_one_the_operator_and_kubernetes_take(manifest: dict[str, Any]) -> None:
    assert problems(manifest) == []


def test_gpus_asked_for_are_gpus_offered(manifest: dict[str, Any]) -> None:
    for group in cluster(manifest)["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == group["rayStartParams"]["num-gpus"]


def test_ray_starts_on_every_node_as_in_clusters_of_a_run(manifest: dict[str, Any]) -> None:
    spec = cluster(manifest)
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert {each["name"]: each["value"] for each in container["env"]} == NODE_ENV


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"minReplicas"', '"minReplica"', "'minReplica' was unexpected"),
        ('"image"', '"img"', "unknown key of V1Container"),
        ('"mountPath"', '"path"', "unknown key of V1VolumeMount"),
        ('"num-gpus": "8"', '"num-gpus": 8', "8 is not of type 'string'"),
        ('"replicas": 2', '"replicas": "2"', "'2' is not of type 'integer'"),
    ],
)
def test_a_wrong_manifest_is_noticed(manifest: dict[str, Any], old: str, new: str, message: str) -> None:
    wrong = json.loads(json.dumps(manifest).replace(old, new))
    assert any(message in line for line in problems(wrong)), problems(wrong)


@pytest.mark.parametrize("key", ["entryPoint", "ttlSecondsAfterFinish", "runtimeEnv"])
def test_a_key_that_no_ray_job_has_is_noticed(key: str) -> None:
    wrong = read("rayjob.yaml")
    wrong["spec"][key] = "x"
    assert any(f"'{key}' was unexpected" in line for line in problems(wrong))


def test_the_job_runs_on_the_cluster_that_the_manifest_makes() -> None:
    job, same = read("rayjob.yaml"), read("raycluster.yaml")
    assert cluster(job) == cluster(same)
    python, script, *overrides = job["spec"]["entrypoint"].split()
    home = re.search(r"^WORKDIR (\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert python == "python" and home is not None
    assert (ROOT / Path(script).relative_to(home[1])).is_file()
    config = load_master_config(str(ROOT / "examples" / "configs" / "grpo_math_1B.yaml"), overrides)
    (workers,) = cluster(job)["workerGroupSpecs"]
    assert config.cluster.num_nodes == workers["replicas"]
    assert config.cluster.gpus_per_node == int(workers["rayStartParams"]["num-gpus"])
    (container,) = workers["template"]["spec"]["containers"]
    mounts = tuple(f"{mount['mountPath']}/" for mount in container["volumeMounts"])
    assert config.checkpointing.checkpoint_dir.startswith(mounts) and config.logger.log_dir.startswith(mounts)
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["HF_HOME"].startswith(mounts)
