"""What exists only so that scripts written for NeMo-RL import and run: names, call shapes and a page about them."""
