"""Command-line arguments that several commands of time-sharing take, and variables that none of them reads."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.agents.host_use import bytes_of
from nemo_rl.time_sharing.agents.ray_reaper import NAMESPACE_VARIABLE, PIPELINE_VARIABLE, agent_namespace
from nemo_rl.time_sharing.protocol.types import Limits

DEFAULT_PORT = 8270
ON_END_VARIABLE = "NRL_POOL_ON_END"
_CONTROL_PLANE, _PLANE = "RLIX_CONTROL_PLANE", "rlix"
_PREFIXES = ("RLIX_", "ROLL_")
_INSTEAD = {
    "RLIX_BUCKET_SIZE_BYTES": "set weight_sync.bucket_bytes",
    "RLIX_MODEL_UPDATE_TRANSPORT": "set weight_sync.transport",
    "ROLL_SELECTIVE_MODEL_UPDATE_TIMEOUT_S": "set weight_sync.timeout_s",
    "ROLL_SELECTIVE_MODEL_UPDATE_PG_TIMEOUT_S": "set weight_sync.timeout_s",
    "RLIX_ENABLE_GPU_TRACING": "python -m nemo_rl.time_sharing trace writes the trace of any run's record",
    "RLIX_TRACE_OUTPUT_DIR": "python -m nemo_rl.time_sharing trace -o says where the trace goes",
    "RLIX_REQUIRED_GPUS_PER_NODE": "give --gpus",
    NAMESPACE_VARIABLE: "pipelines get namespaces of their own",
}


class ForeignVariable(UserError, RuntimeError):
    """A variable of another control plane is set, which asks for something that this one would not do."""


def add_pool_arguments(parser: argparse.ArgumentParser, *, knows_jobs: bool = False) -> None:
    """The shape of a pool. `knows_jobs`: whether all of its jobs are known before it opens."""
    parser.add_argument("--gpus", type=int, required=True, help="GPUs (or CPU slots) of each node of the pool")
    parser.add_argument(
        "--slots-per-gpu",
        type=slots,
        default=1,
        metavar="N",
        help="jobs that may use a GPU at the same time, each within an equal part of its memory, with one of them "
        "training at a time (default: %(default)s, the whole GPU to one job at a time); auto: as many as there are "
        "jobs for a GPU, up to 4, as long as their memory suffices"
        + ("" if knows_jobs else " (not here: a pool that stays does not know its jobs)"),
    )
    parser.add_argument(
        "--mps",
        choices=("auto", "off", "on"),
        default="auto",
        help="whether the jobs of a GPU use it through NVIDIA's Multi-Process Service (default: %(default)s, where "
        "GPUs have several slots and it is installed)",
    )
    parser.add_argument("--name", default="", help="of the pool, for people (default: that of its log's folder)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the pool (default: %(default)s)")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="kind of slot (default: %(default)s)"
    )
    parser.add_argument(
        "--log-dir", type=Path, default=Path("logs/time_sharing"), help="of the scheduler (default: %(default)s)"
    )
    parser.add_argument(
        "--quarantine",
        type=seconds,
        metavar="SECONDS",
        help="how long a rank or GPU that failed is left alone (default: 300)",
    )
    parser.add_argument(
        "--measure-every",
        type=seconds_or_none,
        default=Limits().measure_s,
        metavar="SECONDS",
        help="how often is measured, where GPUs have several slots, whether their jobs gain by running at the same "
        "time; those that do not then run in turn (default: %(default)g; 0: all always run at the same time)",
    )
    parser.add_argument(
        "--max-jobs",
        type=whole,
        default=0,
        metavar="N",
        help="jobs that run at once, at most; others wait for their turn (default: %(default)s, any number)",
    )
    parser.add_argument(
        "--max-waiting",
        type=whole,
        metavar="N",
        help="jobs that wait for their turn, at most; more are refused (default: any number)",
    )
    parser.add_argument(
        "--max-initialising",
        type=whole,
        default=0,
        metavar="N",
        help="jobs that load their models at the same time, at most (default: %(default)s, any number)",
    )


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """What a pool's jobs may take of their hosts, and who hears of their ends."""
    each = "; a job above it is ended, and says so (default: any)"
    parser.add_argument("--job-memory", type=size, metavar="SIZE", help=f"of a node's, for one job, as 64G{each}")
    parser.add_argument("--job-files", type=whole, metavar="N", help=f"open on a node by one job{each}")
    parser.add_argument("--job-disk", type=size, metavar="SIZE", help=f"of one job's logs and checkpoints{each}")
    parser.add_argument(
        "--keep-free",
        type=size,
        default=0,
        metavar="SIZE",
        help="host memory that stays free on each node: where less is, the job that exceeds a fair part by most is "
        "ended (default: none, and the system chooses)",
    )
    parser.add_argument(
        "--on-end",
        type=webhook,
        default=os.environ.get(ON_END_VARIABLE) or None,
        metavar="URL|@FILE",
        help="where each job's end is posted to as JSON, or a file with that address, which the machine's other users "
        f"would see on the command line (default: what {ON_END_VARIABLE} says, else nowhere)",
    )


Value = TypeVar("Value")
AUTO = "auto"


def _type(read: Callable[[str], Value], expected: str, fits: Callable[[Value], bool]) -> Callable[[str], Value]:
    """The type of an argument whose text `read` takes without a ValueError or OSError."""

    def checked(text: str) -> Value:
        with suppress(ValueError, OSError):
            if fits(value := read(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}")

    return checked


def _digits(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def _slots(text: str) -> int | str:
    return text if text == AUTO else _digits(text)


def _address(text: str) -> str:
    return Path(text[1:]).read_text().strip() if text.startswith("@") else text


def _is_address(text: str) -> bool:
    parts = urlsplit(text)
    known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    return bool(known) and not re.search(r"\s", text)


count = _type(_digits, "a whole number from 1", lambda number: number >= 1)
whole = _type(_digits, "a whole number from 0", lambda number: number >= 0)
slots = _type(_slots, "a whole number from 1, or auto", lambda number: number != 0)
size = _type(bytes_of, "a size above 0, as 64G, 500M or 2T", lambda _: True)
events_count = _type(float, "a number from 1, such as 5e7", lambda number: 1 <= number < math.inf)
seconds = _type(float, "seconds above 0", lambda number: 0 < number < math.inf)
seconds_or_none = _type(float, "seconds above 0, or 0", lambda number: 0 <= number < math.inf)
webhook = _type(_address, "an address as https://example.com/path, or @FILE with one in it", _is_address)

_CLOCK, _DURATION = re.compile(r"(\d{1,2}):(\d{2})"), re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)?")


def from_now(text: str) -> float:
    """Seconds until a clock time, as 18:30, or of a duration, as 90, 10m or 2h."""
    if (clock := _CLOCK.fullmatch(text)) and int(clock[1]) < 24 and int(clock[2]) < 60:
        now = datetime.now()
        left = now.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0) - now
        return left.total_seconds() % 86400
    if duration := _DURATION.fullmatch(text):
        return float(duration[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[duration[2] or "s"]
    raise argparse.ArgumentTypeError(f"{text}: expected a time as 18:30, or a duration as 90, 10m or 2h")


def add_page_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the web page."""
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="of the web page and /metrics, 0 for a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve on; from any but this machine's own a token is asked for, which NRL_POOL_TOKEN may "
        "choose (default: %(default)s)",
    )


def check_variables(environment: Mapping[str, str], named: Mapping[str, str] | None = None) -> None:
    """Checks the variables of a process that opens a pool or submits to one. `named`: those that a job gets. Raises
    ForeignVariable: one is of another control plane, or is the pool's to set.
    """
    given = {name: value for name, value in (named or {}).items() if name in (PIPELINE_VARIABLE, NAMESPACE_VARIABLE)}
    refused = [*refused_variables({**environment, **(named or {})})]
    refused += [
        f"{name}={value} is the pool's to set in a job's processes; leave it out" for name, value in given.items()
    ]
    if refused:
        raise ForeignVariable("\n".join(dict.fromkeys(refused)))


def refused_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """One line for each environment variable that is set wrongly, with the remedy."""
    plane, pipeline = environment.get(_CONTROL_PLANE, ""), environment.get(PIPELINE_VARIABLE, "")
    if plane not in ("", _PLANE):
        yield f"{_CONTROL_PLANE}={plane} is no control plane; set it to {_PLANE} or unset it"
    for name, value in sorted(environment.items()):
        if not value or not name.startswith(_PREFIXES) or name == _CONTROL_PLANE:
            continue
        if name == NAMESPACE_VARIABLE and pipeline and value == agent_namespace(pipeline):
            continue  # this process belongs to a job of ours
        instead = _INSTEAD.get(name)
        why = f"is not read here: {instead}" if instead is not None else "is no variable of this package"
        yield f"{name}={value} {why}; unset it"
