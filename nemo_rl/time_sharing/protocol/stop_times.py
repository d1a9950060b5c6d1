"""How long a command may take to give its GPUs back; real jobs and simulated ones have the same times."""

from __future__ import annotations

LONGEST_STOP_S = 1800.0
"""How long a command may have, at most, to finish what it does when its GPUs are wanted back."""
ADAPTERS_STOP_S = 900.0
"""How long a job of adapters has for its steps then, where its file does not say."""
KILLED_S = 30.0
"""How long processes that are killed may take to be gone."""
