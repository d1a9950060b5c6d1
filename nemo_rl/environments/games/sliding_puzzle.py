"""NeMo-RL's import path for the sliding puzzle; see `nemo_rl.compat.names`."""

from nemo_rl.lazy import names_of

__getattr__, __dir__ = names_of(__name__)
