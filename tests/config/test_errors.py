"""Errors that a user can act on have one base, so that no entry point needs a list of them."""

from __future__ import annotations

import ast
import errno
import pickle
from pathlib import Path

import pytest

import nemo_rl
from nemo_rl.config.errors import ConfigError, NotBuilt, OverridesError, UserError, in_one_line

PACKAGE = Path(nemo_rl.__file__).parent
# What these say is for the developer (a broken protocol, a wrong definition), or they never leave the package.
FOR_DEVELOPERS = {
    "BufferProtocolError",
    "EventDefinitionError",
    "InconsistentLog",
    "MissingColumnsError",
    "MissingRowsError",
    "PipelineStageError",
    "SpentHandleError",
    "NothingRecordedError",
    "ProtocolError",
    "RouterReplayError",
    "SamplingMaskError",
    "QueueProtocolError",
    "StaleGroupError",
    "StorageFull",
    "SyncProtocolError",
    "TimerError",
    "TrainStepStateError",
    "UnknownArchitecture",
    "UnknownKeys",
    "UnsupportedColumnsError",
    "Dismissed",
    "RequestEnded",
}


def classes() -> dict[str, list[str]]:
    """Every class of the package with the names of its bases."""
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    return found


def derives(name: str, base: str, known: dict[str, list[str]]) -> bool:
    return name == base or any(derives(parent, base, known) for parent in known.get(name, []))


@pytest.mark.slow
def test_every_public_error_is_one_for_the_user_or_for_the_developer() -> None:
    known = classes()
    raised = [
        name
        for name in known
        if not name.startswith("_")
        and any(
            derives(name, kind, known) for kind in ("Exception", "RuntimeError", "ValueError", "KeyError", "OSError")
        )
    ]
    assert {"KernelUnavailableError", "LayoutError", "HooksError", "DataPlaneError"} <= set(raised)
    lost = {name for name in raised if not derives(name, "UserError", known)} - FOR_DEVELOPERS
    assert lost == set(), "derive it from UserError, or say here that it is for developers"


def test_a_user_error_speaks_for_itself_and_a_bug_keeps_its_traceback() -> None:
    assert in_one_line(ConfigError(["a.b: no"])) == "ConfigError: The configuration has a mistake:\n  - a.b: no"
    assert in_one_line(RuntimeError("a bug")) is None
    assert issubclass(ConfigError, UserError) and issubclass(ConfigError, ValueError)


def test_of_a_file_that_fails_path_and_cause_are_said(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        (tmp_path / "gone" / "file").write_text("x")
    assert in_one_line(caught.value) == f"{tmp_path}/gone/file: No such file or directory"
    assert "No space left" in str(in_one_line(OSError(errno.ENOSPC, "No space left on device")))
    assert in_one_line(ConnectionResetError("peer gone")) is None


@pytest.mark.parametrize("kind", [ConfigError, OverridesError])
def test_the_mistakes_of_a_configuration_reach_another_process(kind: type[ConfigError]) -> None:
    error = kind(["grpo.x: unknown", NotBuilt("policy.draft", "draft models", "leave it out")], "a.yaml")
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is kind and str(there) == str(error)
    assert (there.problems, there.not_built, there.source) == (error.problems, error.not_built, error.source)
