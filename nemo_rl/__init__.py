"""RL post-training for language models on Ray."""

from nemo_rl.lazy import find_paths_of_nemo_rl

find_paths_of_nemo_rl()
