"""Entry point of `python -m nemo_rl.time_sharing`; see `cli`."""

import sys

from nemo_rl.time_sharing.cli import main

if __name__ == "__main__":
    sys.exit(main())
