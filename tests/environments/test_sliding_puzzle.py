"""The sliding puzzle as an environment: legal and illegal moves, the end, and the reward."""

from typing import Any

from nemo_rl.environments.sliding_puzzle_environment import SlidingPuzzleEnvironment

ALMOST = [[1, 2], [0, 3]]


def play(response: str, board: Any = ALMOST, moves: int = 0, max_moves: int = 5) -> Any:
    log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": response}]
    return SlidingPuzzleEnvironment({"max_moves": max_moves}).step([log], [{"board": board, "moves": moves}])


def test_the_solving_move_is_rewarded_and_ends_the_puzzle() -> None:
    result = play("I think <action>up</action> no, <action> left </action>")
    assert (result.rewards.tolist(), result.terminateds.tolist(), result.answers) == ([1.0], [True], ["left"])
    assert result.metadata == [{"board": [[1, 2], [3, 0]], "moves": 1}]


def test_another_legal_move_goes_on_without_reward() -> None:
    result = play("<action>down</action>")
    assert (result.rewards.tolist(), result.terminateds.tolist()) == ([0.0], [False])
    assert result.metadata[0]["board"] == [[0, 2], [1, 3]]
    assert ". 2\n1 3" in result.observations[0]["content"]


def test_what_is_no_move_is_answered_and_costs_a_turn() -> None:
    for response, said in (
        ("hm", "No action"),
        ("<action>north</action>", "no action"),
        ("<action>slide 1</action>", "no action"),
        ("<action>up</action>", "No tile can move by 'up'"),
        ("<action>slide 1 2</action>", "No tile can move by 'slide 1 2'"),
        ("<action>slide 2 1</action>", "No tile can move"),
        ("<action>slide 0 1</action>", "No tile can move"),
        ("<action>slide -1 1</action>", "No tile can move"),
        ("<action>slide 3 1</action>", "No tile can move"),
    ):
        result = play(response)
        assert said in result.observations[0]["content"]
        assert result.metadata == [{"board": ALMOST, "moves": 1}]


def test_the_last_move_ends_an_unsolved_puzzle() -> None:
    assert play("hm", moves=4).terminateds.tolist() == [True]
    assert play("hm", moves=3).terminateds.tolist() == [False]


def test_a_tile_slides_from_its_place_and_view_shows_the_board() -> None:
    slid = play("<action>Slide  2 2</action>")
    assert (slid.rewards.tolist(), slid.metadata[0]["board"]) == ([1.0], [[1, 2], [3, 0]])
    other = play("<action>slide 1 1</action>")
    assert (other.rewards.tolist(), other.metadata[0]["board"]) == ([0.0], [[0, 2], [1, 3]])
    viewed = play("<action>view</action>")
    assert viewed.metadata == [{"board": ALMOST, "moves": 1}] and "1 2\n. 3" in viewed.observations[0]["content"]
