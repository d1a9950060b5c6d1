"""The path under which NeMo-RL's scripts import data set-up; it is defined in `nemo_rl.environments.setup`, which starts the environments."""

from nemo_rl.environments.setup import setup_response_data

__all__ = ["setup_response_data"]
