"""NeMo-RL's import path for evaluation, which is `nemo_rl.algorithms.evaluation`."""
