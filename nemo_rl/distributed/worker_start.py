"""What every Ray worker process of a run does first.

Moves it to the directory where the command was typed, so that relative paths in a configuration mean the same in every
process. Ray runs workers where its node was started, which is elsewhere when a run joins a cluster.
"""

from __future__ import annotations

import os

WORKING_DIRECTORY = "NRL_WORKING_DIRECTORY"
# Ray's setup hook of worker processes, by name.
HOOK = f"{__name__}.enter_working_directory"


def enter_working_directory() -> None:
    """Enters the driver's directory; a node that has no such directory keeps its own."""
    directory = os.environ.get(WORKING_DIRECTORY)
    if directory and os.path.isdir(directory):
        os.chdir(directory)
