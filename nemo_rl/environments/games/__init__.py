"""NeMo-RL's import path for games."""
