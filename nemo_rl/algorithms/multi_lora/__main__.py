"""`python -m nemo_rl.algorithms.multi_lora`: see `commands.main`."""

from __future__ import annotations

import sys

from nemo_rl.algorithms.multi_lora.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
