"""The output of this node's actors, one file per actor, beside the run's metrics.

Ray names its workers' files by ids; these are named by actor. An actor without output has no file.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import ray

logger = logging.getLogger(__name__)

_WORKER_FILE = re.compile(r"worker-.*-(\d+)\.(?:out|err)")
_ACTOR_LINE = re.compile(rb"^:actor_name:(.+)$", re.MULTILINE)
_MARK = re.compile(rb"^:(?:job_id|actor_name|task_name):.*\n?", re.MULTILINE)
_TAIL_BYTES = 4 << 20


def collect_actor_logs(target: Path) -> list[Path]:
    """Copies the output of the actors of this run that ran on this node.

    Args:
        target: directory, made when there is something to put into it.

    Returns the files written: `<class>-<pid>.log`, each at most the last 4 MiB of one stream after the other.
    """
    if not ray.is_initialized():
        return []
    job = ray.get_runtime_context().get_job_id()
    written: dict[Path, None] = {}
    for path in sorted(_log_dir().glob(f"worker-*-{job}-*")):
        match = _WORKER_FILE.fullmatch(path.name)
        data = path.read_bytes()[-_TAIL_BYTES:] if match is not None else b""
        names = _ACTOR_LINE.findall(data)
        text = _MARK.sub(b"", data)
        if match is None or not names or not text.strip():
            continue
        name = re.sub(r"[^\w.-]", "_", names[-1].decode(errors="replace").strip())
        file = target / f"{name}-{match[1]}.log"
        try:
            target.mkdir(parents=True, exist_ok=True)
            with file.open("ab" if file in written else "wb") as out:
                out.write(text)
        except OSError as error:
            logger.warning("actor_logs=not_copied directory=%s: %s", target, error)
            break
        written[file] = None
    return list(written)


def _log_dir() -> Path:
    node = ray._private.worker.global_worker.node  # Ray offers no public name for the directory that `ray logs` reads
    return Path(node.get_logs_dir_path()) if node is not None else Path("/nonexistent")
