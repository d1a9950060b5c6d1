"""RL post-training for language models on Ray."""
