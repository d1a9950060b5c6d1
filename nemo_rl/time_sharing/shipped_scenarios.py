"""The scenarios that are shipped, by letter, and wrapper files for other pools than they were written for.

Invariant: files that are given are never changed; those that take their place are written into the caller's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from nemo_rl.config import ConfigError
from nemo_rl.config.layers import merge, read_layers
from nemo_rl.time_sharing.pipelines.adapters import ADAPTERS
from nemo_rl.time_sharing.pipelines.wrapper import CONFIG_PATH, MAPPINGS, OVERRIDES, Wrapper, read_wrapper
from nemo_rl.time_sharing.protocol.topology import Pool

ALL = "all"
SCALE = "--scale"
_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "time_sharing" / "pipelines"
_ON_CPU = "_cpu"


def shipped_scenarios() -> dict[str, list[Path]]:
    """The files of each scenario, by its letter."""
    found: dict[str, list[Path]] = {}
    for file in sorted(_FOLDER.glob("scenario_*.yaml")):
        found.setdefault(file.stem.split("_")[1].upper(), []).append(file)
    return found


def fitted(files: Sequence[Path], pool: Pool, folder: Path, *, scale: bool = False, on_cpu: bool = False) -> list[Path]:
    """The files, or what takes their place on a pool: wrappers whose GPUs are scaled to the pool's, or whose
    configurations are those for CPU slots.

    Args:
        files: Wrappers and ordinary configurations; the latter name no GPUs and stay as they are.
        pool: Where they are to run.
        folder: Where changed wrappers are written.
        scale: Whether GPUs are scaled; without it files that name more than the pool has are refused.
        on_cpu: Whether a configuration NAME.yaml is replaced by the NAME_cpu.yaml beside it, where there is one.

    Raises ConfigError: a file is wrong, or needs more GPUs than there are; or the GPUs cannot be scaled evenly.
    """
    read = [_Given(file, read_wrapper(file)) for file in files]
    needs = {each.file: each.gpus() for each in read if each.wrapper}
    most = max(needs.values(), default=0)
    if most > pool.gpus and not scale:
        raise ConfigError(
            [
                f"{file}: needs {gpus} GPUs (its device mappings, or its cluster section), and the pool has "
                f"{pool.gpus}; give --gpus {gpus}, or {SCALE} to run it on the GPUs that there are"
                for file, gpus in needs.items()
                if gpus > pool.gpus
            ]
        )
    if scale and most and pool.gpus % most and most % pool.gpus:
        raise ConfigError(
            [f"{SCALE}: these files are for {most} GPUs, of which {pool.gpus} are no whole part or multiple"]
        )
    return [
        _written(each, folder / str(number), most if scale else pool.gpus, pool, on_cpu=on_cpu)
        for number, each in enumerate(read)
    ]


class _Given(NamedTuple):
    """A file, and the keys of its wrapper; none where it is an ordinary configuration."""

    file: Path
    wrapper: Wrapper

    @property
    def inner(self) -> Path:
        """The configuration."""
        return (self.file.parent / self.wrapper[CONFIG_PATH]).resolve()

    def gpus(self) -> int:
        """How many GPUs a pool needs for it, as far as it names any."""
        named = [gpu + 1 for key in MAPPINGS for gpu in self.wrapper.get(key) or ()]
        # A job of adapters takes those of its `cluster` section, wherever they are.
        return max(named, default=_cluster_of(self.inner) if self.wrapper.get(ADAPTERS) else 0)


def _cluster_of(base: Path) -> int:
    cluster = merge(read_layers(base)).get("cluster")
    per_node = cluster.get("gpus_per_node") if isinstance(cluster, dict) else None
    return per_node if isinstance(per_node, int) else 1


def _written(given: _Given, folder: Path, made_for: int, pool: Pool, *, on_cpu: bool) -> Path:
    if not given.wrapper:
        return given.file
    inner, small = given.inner, given.inner.with_stem(given.inner.stem + _ON_CPU)
    if on_cpu and small.is_file():
        inner = small
    if inner == given.inner and made_for == pool.gpus:
        return given.file
    content = dict(given.wrapper) | {CONFIG_PATH: str(inner)}
    for key, section in MAPPINGS.items():
        if content[key] is not None:
            content[key] = _scaled(content[key], made_for, pool.gpus)
            content[section] = {k: v for k, v in (content.get(section) or {}).items() if k != "device_mapping"}
    if made_for != pool.gpus and content.get("num_gpus_per_node") is not None:
        content["num_gpus_per_node"] = pool.gpus_per_node
    if content.get(ADAPTERS):
        # The command has a Ray cluster of its own, with CPU slots as its configuration says.
        gpus = max(1, _cluster_of(inner) * pool.gpus // made_for)
        own = [f"cluster.gpus_per_node={gpus}", *([f"cluster.cpu_slots={gpus}"] if inner == small else [])]
        content[OVERRIDES] = [*(content.get(OVERRIDES) or []), *own]
    folder.mkdir(parents=True)
    path = folder / given.file.name
    path.write_text(yaml.safe_dump(content))
    return path


def _scaled(mapping: Sequence[int], before: int, now: int) -> list[int]:
    """The GPUs of a mapping on another number of them, of which one is a whole multiple of the other.

    >>> _scaled([2, 3], 4, 2), _scaled([1], 4, 8), _scaled([0, 1], 4, 1)
    ([1], [2, 3], [0])
    """
    if now < before:
        return sorted({gpu * now // before for gpu in mapping})
    return [each for gpu in mapping for each in range(gpu * now // before, (gpu + 1) * now // before)]
