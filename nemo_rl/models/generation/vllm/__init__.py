"""Generation with vLLM; names are loaded when they are first used, so that importing this needs no engine."""

from nemo_rl.lazy import names_of

__getattr__, __dir__ = names_of(__name__)
