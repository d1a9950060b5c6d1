"""Names and call shapes for scripts written for NeMo-RL, and a page about them."""
