"""Output of actors, one readable file each."""

import sys
import time
from pathlib import Path

import pytest
import ray

from nemo_rl.distributed.actor_logs import collect_actor_logs

pytestmark = pytest.mark.ray


class Talker:
    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stderr.write(f"{text} aside\n")
        sys.stdout.flush()


def test_each_actor_that_printed_has_a_file_of_its_own(ray_session: None, tmp_path: Path) -> None:
    loud, quiet = ray.remote(Talker).remote(), ray.remote(Talker).remote()
    ray.get(loud.say.remote("seven green bottles"))
    ray.get(quiet.__ray_ready__.remote())
    deadline = time.monotonic() + 120
    while not (said := [path for path in collect_actor_logs(tmp_path / "actors") if "seven green" in path.read_text()]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert said[0].name.startswith("Talker-")
    text = said[0].read_text()
    assert ":actor_name:" not in text
    assert "seven green bottles aside" in text
    ray.kill(loud)
    ray.kill(quiet)
