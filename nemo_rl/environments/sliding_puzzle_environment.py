"""The sliding puzzle: one action per turn, reward 1 for solving it.

The last `<action>..</action>` of a response counts: `slide ROW COLUMN` moves the tile there, counted from 1, into the
gap, as do `up`, `down`, `left` and `right`; `view` shows the board. Every turn counts as a move; an illegal one is
answered with the reason. The board is kept in the conversation's metadata. A puzzle ends when solved or after
`max_moves` actions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from typing_extensions import override

from nemo_rl.config import SlidingPuzzleEnvConfig
from nemo_rl.data.datasets.sliding_puzzle import DIRECTIONS, Board, moved, shown, slid, solved_board
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

_ACTION = re.compile(r"<action>\s*(.*?)\s*</action>", re.DOTALL)
_SLIDE = re.compile(r"slide\s+(-?\d{1,3})\s+(-?\d{1,3})")
_STOP = ["</action>"]


class PuzzleState(TypedDict):
    """A puzzle's board and the number of moves made."""

    board: Board
    moves: int


class SlidingPuzzleEnvironment(EnvironmentInterface[PuzzleState]):
    """`env.sliding_puzzle`. `cfg`: the keys of `env.sliding_puzzle`."""

    shareable = True
    needs = tuple(PuzzleState.__annotations__)

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = SlidingPuzzleEnvConfig.model_validate(dict(cfg))

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[PuzzleState]
    ) -> EnvironmentReturn[PuzzleState]:
        """Plays one action in each of B puzzles."""
        turns = [
            self._play(str(log[-1]["content"]), state) for log, state in zip(message_log_batch, metadata, strict=True)
        ]
        solved = torch.tensor([board == solved_board(len(board)) for board, _, _ in turns])
        over = torch.tensor([state["moves"] + 1 >= self.cfg.max_moves for state in metadata])
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": said} for _, said, _ in turns],
            metadata=[
                {"board": board, "moves": state["moves"] + 1}
                for (board, _, _), state in zip(turns, metadata, strict=True)
            ],
            next_stop_strings=[_STOP] * len(turns),
            rewards=solved.float(),
            terminateds=solved | over,
            answers=[action for _, _, action in turns],
        )

    def _play(self, response: str, state: PuzzleState) -> tuple[Board, str, str | None]:
        board = state["board"]
        actions = _ACTION.findall(response)
        if not actions:
            return board, "\nNo action was found; answer with <action>slide ROW COLUMN</action>.\n", None
        action = " ".join(actions[-1].lower().split())
        if action == "view":
            return board, f"\n{shown(board)}\n", action
        slide = _SLIDE.fullmatch(action)
        if slide is None and action not in DIRECTIONS:
            return board, f"\n{action!r} is no action; there are slide ROW COLUMN and view.\n", action
        after = slid(board, int(slide[1]), int(slide[2])) if slide else moved(board, action)
        if after is None:
            return board, f"\nNo tile can move by {action!r}.\n{shown(board)}\n", action
        return after, f"\n{shown(after)}\n", action
