"""A worker extension whose waking fails while a file exists: an engine that finds its memory taken."""

from __future__ import annotations

import os

from nemo_rl.models.generation.vllm.extension import VllmInternalWorkerExtension


class FailingExtension(VllmInternalWorkerExtension):
    """Mixed into vLLM's worker class in place of `engine_actors.EXTENSION`."""

    def nrl_restore_memory(self) -> None:
        if os.path.exists(os.environ["NRL_TEST_NO_MEMORY"]):
            raise MemoryError("planted: no memory is left")
        super().nrl_restore_memory()
