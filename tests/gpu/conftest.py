"""Kernels of the GPU tests are compiled in the tests' own process: torch's pool of compilers outlives a session."""

from __future__ import annotations

import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
