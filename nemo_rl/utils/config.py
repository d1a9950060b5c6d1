"""The path under which NeMo-RL's scripts import configuration loading; everything here is defined in `nemo_rl.config`."""

from nemo_rl.config.errors import OverridesError
from nemo_rl.config.load import load_config, load_master_config
from nemo_rl.config.overrides import parse_hydra_overrides
from nemo_rl.config.resolvers import register_omegaconf_resolvers

__all__ = ["OverridesError", "load_config", "load_master_config", "parse_hydra_overrides", "register_omegaconf_resolvers"]
