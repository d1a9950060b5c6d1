"""Mistakes in data, told to the user: what is missing or malformed, where, and the nearest name that exists.

Knows no dataset. Raised while data is being set up, so before anything is trained.
"""


class DataError(ValueError):
    """A dataset, column, prompt file, tokenizer or processor cannot be used as configured."""
