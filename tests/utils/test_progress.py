"""Progress on a terminal and in a plain file."""

import io

import pytest
from rich.console import Console

from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.text import printable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(console: Console, steps: int = 2, seconds: float = 20.0) -> None:
    clock = Clock()
    with RunProgress(5, console=console, clock=clock) as progress:
        for step in range(1, steps + 1):
            progress.phase("generation")
            clock.now += seconds
            progress.step_done(step, reward=0.25 * step, loss=-0.125, tokens=1000)
            progress.validated(0.5)


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    out = io.StringIO()
    run(Console(file=out, width=40))
    assert out.getvalue().splitlines() == [
        "step 1/5 reward=0.250 accuracy=- loss=-0.1250 tokens/s=50 step_s=20.0 left=1m 20s",
        "validation accuracy=0.500",
        "step 2/5 reward=0.500 accuracy=- loss=-0.1250 tokens/s=50 step_s=20.0 left=1m 00s",
        "validation accuracy=0.500",
    ]


def test_a_validation_is_told_below_the_step_that_it_belongs_to() -> None:
    out, clock = io.StringIO(), Clock()
    with RunProgress(5, console=Console(file=out, width=40), clock=clock) as progress:
        progress.validated(0.1, step=0)
        for step in (1, 2, 3):
            clock.now += 2.0
            if step == 2:
                progress.validated(0.5, step=step)
            progress.step_done(step, loss=0.0, tokens=0)
        progress.validated(0.7, step=3)
    shown = [line.split(" loss")[0] for line in out.getvalue().splitlines()]
    assert shown[1:3] == ["step 1/5 accuracy=-", "step 2/5 accuracy=0.500"], "a result is one of its own step"
    told = [line.split("/")[0] for line in out.getvalue().splitlines()]
    # The step of a validation is told, however quick the steps are.
    assert told == [
        "validation accuracy=0.100",
        "step 1",
        "step 2",
        "validation accuracy=0.500",
        "validation accuracy=0.700",
    ]


def test_without_a_terminal_quick_steps_are_not_all_told() -> None:
    out = io.StringIO()
    run(Console(file=out, width=40), steps=5, seconds=4.0)
    told = [line.split("/")[0] for line in out.getvalue().splitlines() if line.startswith("step")]
    assert told == ["step 1", "step 4", "step 5"], "the first, one each ten seconds, and the last"


def test_on_a_terminal_the_last_picture_stays() -> None:
    out = io.StringIO()
    run(Console(file=out, width=100, force_terminal=True, color_system=None))
    last = out.getvalue()
    for shown in ("GRPO", "2/5", "accuracy 0.500", "tokens/s", "0.500", "reward ▁█"):
        assert shown in last


def test_a_run_without_rewards_shows_none() -> None:
    out = io.StringIO()
    with RunProgress(2, title="SFT", console=Console(file=out, width=40), clock=Clock()) as progress:
        progress.validated(1.5, name="val_loss")
        progress.step_done(1, loss=0.5, tokens=0)
    assert out.getvalue().splitlines() == [
        "validation val_loss=1.500",
        "step 1/2 val_loss=- loss=+0.5000 tokens/s=0 step_s=0.0 left=0s",
    ]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("\x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("a\rb\x08c", r"a\rb\x08c"),
        ("\x9b31m", r"\x9b31m"),
        ("txt.\u202eexe", r"txt.\u202eexe"),
        ("half \ud800", r"half \ud800"),
        ("lines\nand\ttabs, ünïcode 👩‍🔬", "lines\nand\ttabs, ünïcode 👩‍🔬"),
    ],
)
def test_what_a_model_wrote_cannot_steer_the_terminal(written: str, shown: str) -> None:
    assert printable(written) == shown
    said = io.StringIO()
    progress = RunProgress(3, console=Console(file=said, width=200))
    progress.say(written)
    assert said.getvalue().expandtabs() == f"{shown}\n".expandtabs()


def test_lines_name_what_is_measured_before_the_first_validation() -> None:
    said = io.StringIO()
    progress = RunProgress(2, title="SFT", console=Console(file=said, width=200), measure="val_loss")
    progress.step_done(1, loss=1.0, tokens=4.0)
    assert "val_loss=-" in said.getvalue() and "accuracy" not in said.getvalue()


def test_a_step_that_takes_long_says_what_it_waits_for() -> None:
    now = [0.0]
    progress = RunProgress(
        9, console=Console(file=io.StringIO()), clock=lambda: now[0], details=lambda: "environment judge: 3 wait"
    )
    progress.phase("generation")
    now[0] = 59.0
    assert progress.long_step() is None
    now[0] = 130.0
    assert progress.long_step() == "step 1/9: generation after 2m 10s; environment judge: 3 wait"
    progress.step_done(1, reward=0.5, loss=0.1, tokens=9.0)
    assert progress.long_step() is None
    now[0] = 130.0 + 200.0
    assert progress.long_step() is None, "no longer than twice the usual"
    now[0] = 130.0 + 261.0
    assert progress.long_step() is not None
