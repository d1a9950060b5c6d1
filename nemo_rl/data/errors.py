"""Mistakes in data, told to the user: what is missing or malformed, where, and the nearest name that exists.

Knows no dataset. Raised while data is being set up, so before anything is trained.
"""

from nemo_rl.config.errors import UserError


class DataError(UserError, ValueError):
    """A dataset, column, prompt file, tokenizer or processor cannot be used as configured."""
