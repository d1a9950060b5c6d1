"""Sliding puzzles: numbered tiles and one gap on a square, shuffled by moves backwards from the solved board, so every
puzzle can be solved.

Also the rules of the game, which the environment plays by. Boards are lists of rows; 0 is the gap. Invariant: the same
settings give the same puzzles, and a puzzle is never solved to begin with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from pydantic import Field

from nemo_rl.config import DatasetConfig, Section
from nemo_rl.data.datasets.generated import GeneratedDataset, checked_settings, distinct_split, judged_by
from nemo_rl.data.datasets.raw import conversation

Board = list[list[int]]
# A direction is the one in which a tile moves into the gap: the gap moves the other way.
DIRECTIONS = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
_BACK = {"up": "down", "down": "up", "left": "right", "right": "left"}
_DRAWS_PER_PROBLEM = 20


class PuzzleSettings(Section):
    """`task_config` of a sliding puzzle."""

    size: int = Field(3, ge=2, le=8, description="Rows and columns.")
    shuffle_moves: int = Field(10, ge=1, description="Moves back from the solved board, at most.")


def solved_board(size: int) -> Board:
    """Tiles in order with the gap last.

    >>> solved_board(2)
    [[1, 2], [3, 0]]
    """
    tiles = [*range(1, size * size), 0]
    return [tiles[row * size : (row + 1) * size] for row in range(size)]


def moved(board: Board, direction: str) -> Board | None:
    """The board after a tile has moved into the gap; None where no tile can move in that direction.

    >>> moved([[1, 2], [3, 0]], "down")
    [[1, 0], [3, 2]]
    """
    row, column = next((r, c) for r, line in enumerate(board) for c, tile in enumerate(line) if tile == 0)
    rows, columns = DIRECTIONS[direction]
    other_row, other_column = row + rows, column + columns
    if not (0 <= other_row < len(board) and 0 <= other_column < len(board)):
        return None
    after = [list(line) for line in board]
    after[row][column], after[other_row][other_column] = after[other_row][other_column], 0
    return after


def slid(board: Board, row: int, column: int) -> Board | None:
    """The board after the tile at a row and column, counted from 1, has slid into the gap; None where there is no tile
    beside the gap.

    >>> slid([[1, 2], [3, 0]], 1, 2)
    [[1, 0], [3, 2]]
    """
    size = len(board)
    if not (1 <= row <= size and 1 <= column <= size) or not (tile := board[row - 1][column - 1]):
        return None
    moves = (moved(board, direction) for direction in DIRECTIONS)
    return next((after for after in moves if after is not None and after[row - 1][column - 1] == 0 != tile), None)


def action_for(board: Board, direction: str) -> str:
    """The action that moves a tile in a direction in which one can move.

    >>> action_for([[1, 2], [3, 0]], "down")
    'slide 1 2'
    """
    row, column = next((r, c) for r, line in enumerate(board, 1) for c, tile in enumerate(line, 1) if tile == 0)
    rows, columns = DIRECTIONS[direction]
    return f"slide {row + rows} {column + columns}"


def shown(board: Board) -> str:
    """The board as text, the gap as a dot.

    >>> print(shown([[1, 2], [3, 0]]))
    1 2
    3 .
    """
    width = len(str(len(board) ** 2 - 1))
    return "\n".join(" ".join(("." if tile == 0 else str(tile)).rjust(width) for tile in line) for line in board)


def instructions(board: Board) -> str:
    """The player's instructions."""
    return (
        f"Bring the tiles into order, the gap (.) last.\n{shown(board)}\nMove one tile into the gap at a time: answer "
        "with <action>slide ROW COLUMN</action>, the place of a tile beside the gap, counted from 1. "
        "<action>view</action> shows the board again.\n"
    )


class SlidingPuzzleDataset(GeneratedDataset):
    """Sliding puzzles; `task_config` has `size` and `shuffle_moves`. Raises DataError: a setting is wrong, or there are
    too few distinct puzzles.
    """

    def __init__(self, config: DatasetConfig, task_name: str, key: str = "data.train") -> None:
        judged_by("sliding_puzzle", config, key)
        settings = checked_settings(PuzzleSettings, config, key)
        puzzles = distinct_split(_puzzles(settings, config), config, key)
        rows = [
            {
                "messages": conversation(instructions(board), f"<action>{action_for(board, first)}</action>"),
                "state": json.dumps({"board": board, "moves": 0}),
            }
            for board, first in puzzles
        ]
        super().__init__(rows, task_name)


def _puzzles(settings: PuzzleSettings, config: DatasetConfig) -> Iterator[tuple[tuple[Board, str], str]]:
    """Puzzles, each with the first move of the way back to the solved board."""
    generator = random.Random(config.seed)
    solved = solved_board(settings.size)
    for _ in range((config.num_problems + config.held_out) * _DRAWS_PER_PROBLEM):
        board, last = solved, ""
        for _ in range(generator.randint(1, settings.shuffle_moves)):
            choices = [
                (name, after)
                for name in DIRECTIONS
                if name != _BACK.get(last) and (after := moved(board, name)) is not None
            ]
            last, board = generator.choice(choices)
        if board != solved:
            yield (board, _BACK[last]), json.dumps(board)
