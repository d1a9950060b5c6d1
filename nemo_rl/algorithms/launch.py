"""The command lines of GRPO, distillation, SFT and evaluation: arguments, configuration, set-up, training, shutdown,
exit code.

User mistakes become one message without a traceback. Ctrl-C and SIGTERM end the run, or save and end it. Invariants: a
mistake in the configuration is reported before Ray or torch is imported; no process of the run is left behind, since
signals cannot interrupt the shutdown; the last line says how the run ended; Ctrl-C ends with exit code 130 and a usable
last checkpoint.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from nemo_rl.cli import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    add_config,
    log_to_stderr,
    usage_error,
)
from nemo_rl.config import (
    ClusterConfig,
    ConfigError,
    DistillationMasterConfig,
    EvalMasterConfig,
    MasterConfig,
    SFTMasterConfig,
    load_master_config,
)
from nemo_rl.config.errors import UserError, in_one_line
from nemo_rl.config.infrastructure import CheckpointingConfig
from nemo_rl.config.master import CompleteConfig, RootConfig
from nemo_rl.distributed.processes import collect_rarely, importing
from nemo_rl.distributed.ray_signals import RayWatch, end_at_once
from nemo_rl.utils import hub
from nemo_rl.utils.progress import StartPhases

if TYPE_CHECKING:
    from nemo_rl.algorithms.evaluation import Score
    from nemo_rl.algorithms.training_loop import TrainingRun
    from nemo_rl.utils.run_page import RunPage


logger = logging.getLogger("nemo_rl")

Config = TypeVar("Config", bound=CompleteConfig)
TrainingConfig = TypeVar("TrainingConfig", bound=RootConfig)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How long after a signal, and how often, it is looked whether the run ends.
_AGAIN_S = 0.1
_LOADS = ("create_module", "exec_module")
# Between two lines of these files a lock may be held that an exception would never give back.
_LOCKING_FILES = ("<frozen importlib", logging.__file__)
_INTERRUPTED_WHILE_STARTING = "interrupted while starting"
# Where Ray's processes were ended by the signal that interrupts a run, that reaches this process within so long.
_SIGNALLED_TOGETHER_S = 0.5


Run = TypeVar("Run", bound="TrainingRun[Any]")


@dataclass
class CommandLine(Generic[Config]):
    """A command line of one kind of run.

    Attributes:
        what: Description for `--help`.
        example: An override, for `--help`.
        run: Runs a checked configuration, with a live page at a port where the command has one; the exit code.
        has_page: Whether `--page` serves one.
    """

    kind: type[Config]
    what: str
    example: str
    run: Callable[..., int]
    has_page: bool = True

    def __call__(self, arguments: Sequence[str], *, default_config: Path, prog: str | None = None) -> int:
        """Parses the command line, loads the configuration, and runs.

        Args:
            arguments: Command-line arguments without the program's name.
            default_config: Used when `--config` is not given.
            prog: The program's name, for `--help`.

        Returns the process's exit code: 0 done, 1 the run failed, 2 the configuration is wrong, 130 interrupted.
        """
        return interruptible(lambda: self._main(arguments, default_config, prog))

    def _main(self, arguments: Sequence[str], default_config: Path, prog: str | None) -> int:
        collect_rarely()
        told = f"{self.what}; further arguments are overrides such as {self.example}."
        parser = argparse.ArgumentParser(prog=prog, description=told)
        add_config(parser, default_config)
        if self.has_page:
            parser.add_argument("--page", action="store_true", help="serve a live page of the run on this machine")
            parser.add_argument("--page-port", type=int, metavar="PORT", help="of the page; a free one by default")
        options, overrides = parser.parse_known_args(list(arguments))
        if options.config is None:
            options.config = default_config
            if own_values := _OWN_VALUES.get(default_config.name):
                sys.stderr.write(f"{default_config.name}: {own_values}; NeMo-RL's own file runs with --config\n")
        hub.calm()
        log_to_stderr()
        try:
            config = load_master_config(str(options.config), overrides, self.kind)
        except (UserError, OSError) as error:
            return usage_error(error)
        # Read when the hub's libraries are imported, which is from here on.
        named = config.policy.model_name if isinstance(config, RootConfig) else None
        if named is not None and (line := hub.use_cache_if_unreachable(named)) is not None:
            sys.stderr.write(f"{line}\n")
        if self.has_page and (options.page or options.page_port is not None):
            return self.run(config, options.page_port or 0)
        return self.run(config)


def interruptible(work: Callable[[], int]) -> int:
    """Starts and runs something; its exit code, or 130 if a signal interrupts the start."""
    with Interrupts() as interrupts, ending_with_ray(lambda: _INTERRUPTED_WHILE_STARTING):
        try:
            return work()
        except KeyboardInterrupt:
            interrupts.ending()
            sys.stderr.write(f"{_INTERRUPTED_WHILE_STARTING}\n")
            return EXIT_INTERRUPTED


def run_to_end(
    config: TrainingConfig,
    setup: Callable[[TrainingConfig, StartPhases], Run],
    drive: Callable[[Run], None],
    page_port: int | None = None,
) -> int:
    """Runs a checked configuration and writes its report; returns the exit code. `page_port` serves a live page; 0
    takes a free port.
    """
    from nemo_rl.utils.directory_lock import DirectoryInUse

    with ExitStack() as held:
        try:
            held.enter_context(directories_of_its_own(config))
            page = held.enter_context(_live_page(config, page_port))
        except (DirectoryInUse, UserError) as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            return EXIT_FAILED
        return _run_to_end(config, setup, drive, page)


@contextmanager
def _live_page(config: RootConfig, port: int | None) -> Generator[RunPage | None]:
    if port is None:
        yield None
        return
    # What serves it is imported by runs that are shown.
    from nemo_rl.utils.run_page import run_page

    with run_page(Path(config.logger.log_dir), port) as (page, url):
        sys.stderr.write(f"page: {url}\n")
        yield page


@contextmanager
def directories_of_its_own(config: RootConfig) -> Generator[None]:
    """Context manager that locks the run's log and checkpoint directories. Raises DirectoryInUse: another run uses one
    of them.
    """
    from nemo_rl.utils.directory_lock import locked

    named = {"logger.log_dir": config.logger.log_dir}
    if config.checkpointing.enabled:
        named["checkpointing.checkpoint_dir"] = config.checkpointing.checkpoint_dir
    # One directory for both is locked once.
    distinct = {Path(directory).resolve(): (directory, key) for key, directory in reversed(named.items())}
    with ExitStack() as held:
        for directory, key in reversed(distinct.values()):
            held.enter_context(locked(directory, key))
        yield


def _run_to_end(
    config: TrainingConfig,
    setup: Callable[[TrainingConfig, StartPhases], Run],
    drive: Callable[[Run], None],
    page: RunPage | None,
) -> int:
    from nemo_rl.algorithms.resume import NothingToDo
    from nemo_rl.utils.report import LiveReport, log_report

    run: Run | None = None
    code, errors = EXIT_FAILED, _ErrorPrinter()

    def saved() -> str:
        return _INTERRUPTED_WHILE_STARTING if run is None else what_is_saved(run, config.checkpointing)

    with Interrupts() as interrupts, ending_with_ray(saved):
        try:
            run = setup(config, StartPhases(failed=errors.print_once))
            if config.checkpointing.enabled and config.checkpointing.save_on_signal:
                interrupts.save_first(run.timeout.end_after_step)
            if page is not None:
                page.follow(run.progress, Path(config.logger.log_dir))
            with _monitor(config, run), LiveReport(Path(config.logger.log_dir)), run.progress:
                drive(run)
                # A signal in the middle of an import of what draws reports would leave half of it.
                interrupts.ending()
            log_report(run.logger)
            code = EXIT_INTERRUPTED if interrupts.save_asked else EXIT_OK
        except NothingToDo as nothing:
            errors.print_once(nothing)
            code = EXIT_OK
        except KeyboardInterrupt:
            interrupts.ending()
            sys.stderr.write(f"{'interrupted: ending workers' if run else _INTERRUPTED_WHILE_STARTING}\n")
            code = EXIT_INTERRUPTED
        except (UserError, OSError) as error:
            if not errors.print_once(error):
                raise
            logger.debug("run failed", exc_info=True)
            # What a signal ends beside this process fails for it; only a step that was to be saved first had to hold.
            code = EXIT_INTERRUPTED if interrupts.signalled and not interrupts.save_asked else EXIT_FAILED
        finally:
            interrupts.ending()
            if page is not None:
                page.ended = "ending"
            if run is not None:
                code = _closed(run, code)
        if run is not None:
            if code == EXIT_INTERRUPTED:
                sys.stderr.write(f"{what_is_saved(run, config.checkpointing)}\n")
            _report(Path(config.logger.log_dir), expected=code == EXIT_OK)
    return code


class _ErrorPrinter:
    """Prints each error once, in one line."""

    def __init__(self) -> None:
        self._printed: list[Exception] = []

    def print_once(self, error: Exception) -> bool:
        """Prints the error unless it was printed. Returns False for errors that need their traceback."""
        from nemo_rl.algorithms.resume import NothingToDo

        if any(error is known for known in self._printed):
            return True
        line = str(error) if isinstance(error, NothingToDo) else in_one_line(error)
        if line is None:
            return False
        self._printed.append(error)
        sys.stderr.write(f"{line}\n")
        return True


def _monitor(config: RootConfig, run: TrainingRun[Any]) -> AbstractContextManager[object]:
    if not config.logger.monitor_gpus:
        return nullcontext()
    from nemo_rl.distributed.node_monitor import NodeMonitor

    sampling = config.logger.gpu_monitoring
    return NodeMonitor(
        run.logger, sampling.collection_interval, sampling.flush_interval, show_memory=run.progress.gpu_memory
    )


def _closed(run: TrainingRun[Any], code: int) -> int:
    """Shuts the run down; returns the exit code, which a failed checkpoint turns into a failure."""
    try:
        run.close()
    except (UserError, OSError) as error:
        message = in_one_line(error)
        if message is None:
            raise
        sys.stderr.write(f"{message}\n")
        return code or EXIT_FAILED
    return code


def _report(log_dir: Path, *, expected: bool) -> None:
    """Writes the run's report, also after an error. A run that failed before its first step has none."""
    from nemo_rl.utils.metrics_file import NoMetrics
    from nemo_rl.utils.plots import NothingToShow
    from nemo_rl.utils.report import write_report

    try:
        paths = write_report(log_dir)
    except (NoMetrics, NothingToShow):
        if expected:
            sys.stderr.write(f"no report: no step was finished; what there is lies in {log_dir}\n")
        return
    except OSError as error:
        sys.stderr.write(f"no report: {log_dir} cannot be written ({error.strerror or error})\n")
        return
    sys.stderr.write("report: " + ", ".join(str(path) for path in paths) + "\n")


class Interrupts:
    """Signal handlers of a run; a context manager that restores the previous ones.

    SIGTERM, which job schedulers send, is handled like Ctrl-C: both raise KeyboardInterrupt in the main thread.
    Invariant: it is not lost, and more signals do not disturb the clean-up after it. In a bare `except`, a callback or
    `__del__` of a library it ends where it is raised; between two lines of the import system or of logging it leaves
    the lock of all imports or loggers held, and other threads, then the clean-up, wait for ever; C++ of an extension
    module may abort. So until the run is ending, a timer looks whether it is being handled, and raises it again, in a
    better place, if not.
    """

    received: ClassVar[bool] = False  # whether this process was interrupted

    def __init__(self) -> None:
        self.save_asked = self.signalled = False
        self._end_after_step: Callable[[], None] | None = None
        self._ending = self._warned = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        # Handlers can be set by the main thread only; a run inside another thread is ended by the owner of the process.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self.ending()
        if self.signalled:
            atexit.register(_ignore_signals)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]

    def save_first(self, end_after_step: Callable[[], None]) -> None:
        """Makes the first signal finish the step, save and end; `end_after_step` requests that."""
        self._end_after_step = end_after_step

    def ending(self) -> None:
        """Marks the run as shutting down: signals are ignored from here on."""
        self._ending = True
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        Interrupts.received = self.signalled = True
        # Where the signal reached loader processes, too, torch would raise an error about them here, wherever it is. A
        # handler that does nothing, not the default: Python prints an error for a signal that is pending when its
        # handler goes.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if self._ending or _is_unwinding():
            if not self._warned:
                self._warned = True
                sys.stderr.write("already ending: workers and files are being closed\n")
            return
        if self._end_after_step is not None and not self.save_asked:
            self.save_asked = True
            self._end_after_step()
            sys.stderr.write("interrupted: the step is finished and saved first; once more ends at once\n")
            return
        self._on_timer(number, frame)

    def _on_timer(self, _: int, frame: FrameType | None) -> None:
        if self._ending:
            return
        if signal.SIGALRM not in self._before:
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_timer)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        if not (_is_unwinding() or _loses(frame)):
            raise KeyboardInterrupt


def _ignore_signals() -> None:
    """Lets an interrupted process end, with its exit code, whatever signals follow."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _is_unwinding() -> bool:
    """Whether this thread is cleaning up because of a KeyboardInterrupt."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _loses(frame: FrameType | None) -> bool:
    """Whether an exception raised here leaves a lock of imports or loggers held, ends in a `__del__`, or aborts the
    process in the C++ of an extension module that is being loaded.
    """
    if frame is not None and frame.f_code.co_filename.startswith(_LOCKING_FILES):
        return True
    while frame is not None:
        loads = frame.f_code.co_name in _LOADS and isinstance(frame.f_locals.get("self"), ExtensionFileLoader)
        if loads or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextmanager
def ending_with_ray(saved: Callable[[], str]) -> Generator[None]:
    """Inside the block the process ends at once, with one line, when something else ends the Ray cluster that it
    started: a scheduler that signals every process of a job, or the system when memory runs out. `saved`: what is left
    of the run.
    """

    def end(names: str) -> None:
        time.sleep(_SIGNALLED_TOGETHER_S)
        cause = "the signal reached Ray's processes, too" if Interrupts.received else f"Ray's {names} was ended"
        hint = "" if Interrupts.received else ", by a signal or for want of memory (see dmesg)"
        sys.stderr.write(f"{cause}{hint}: nothing more can be saved; {saved()}\n")
        sys.stderr.flush()
        end_at_once(EXIT_INTERRUPTED if Interrupts.received else EXIT_FAILED)

    with RayWatch.calling(end):
        yield


def what_is_saved(run: TrainingRun[Any], cfg: CheckpointingConfig) -> str:
    """Where an interrupted run would resume, and how many steps are lost. Call it after shutdown."""
    step = run.state.step
    done = f"interrupted after step {step}"
    if not cfg.enabled:
        return f"{done}: checkpointing.enabled is false, so nothing is saved"
    newest = run.checkpointer.get_latest_checkpoint_path()
    saved = 0 if newest is None else int(newest.name.removeprefix("step_"))
    lost = step - saved
    hint = "" if cfg.save_on_signal or lost == 0 else "; checkpointing.save_on_signal=true would save first"
    if newest is None:
        return f"{done}: no checkpoint was written yet, {_steps(lost)} lost{hint}"
    if lost == 0:
        return f"{done}: all of it is in {newest}; the same command goes on from there"
    return f"{done}: the newest checkpoint is {newest}, {_steps(lost)} lost{hint}; the same command goes on from there"


def _steps(count: int) -> str:
    return f"{count} step is" if count == 1 else f"{count} steps are"


_PROMPT = "its prompt is examples/prompts/step_by_step.txt, because NeMo-RL's prompts are not shipped"
# What the configurations of NeMo-RL's names have otherwise than NeMo-RL's.
_OWN_VALUES = {
    "grpo_math_1B.yaml": _PROMPT,
    "grpo_math_1B_single_controller.yaml": "values of our own, and the prompt examples/prompts/step_by_step.txt",
    "grpo_sliding_puzzle.yaml": "puzzles, words and values of our own",
    "distillation_math.yaml": f"{_PROMPT}; models, lengths and rates may differ",
    "sft.yaml": "model, data, lengths and rates of our own",
    "eval.yaml": f"{_PROMPT}; model and problems may differ",
}


def _ray_ahead(cluster: ClusterConfig) -> AbstractContextManager[None]:
    from nemo_rl.distributed.ray_runtime import starting_ahead

    return starting_ahead(device=cluster.device, cpu_slots=cluster.cpu_slots)


def grpo_to_end(config: MasterConfig, page_port: int | None = None) -> int:
    """Runs a checked configuration; the exit code. `page_port`: see `run_to_end`."""
    with _ray_ahead(config.cluster):
        with importing():
            from nemo_rl.algorithms.grpo.assembly import setup
            from nemo_rl.algorithms.grpo.loop import drive

        return run_to_end(config, setup, drive, page_port)


def sft_to_end(config: SFTMasterConfig, page_port: int | None = None) -> int:
    """Runs a checked configuration; the exit code. `page_port`: see `run_to_end`."""
    with _ray_ahead(config.cluster):
        with importing():
            from nemo_rl.algorithms.sft.assembly import setup
            from nemo_rl.algorithms.sft.driver import sft_train

        return run_to_end(config, setup, sft_train, page_port)


def evaluate_to_end(config: EvalMasterConfig) -> int:
    """Runs a checked configuration and prints its score; the exit code."""
    from nemo_rl.algorithms.evaluation import evaluate

    interrupted = "interrupted: engines are ended; nothing was written"
    try:
        with Interrupts(), ending_with_ray(lambda: interrupted):
            score = evaluate(config)
    except KeyboardInterrupt:
        sys.stderr.write(f"{interrupted}\n")
        return EXIT_INTERRUPTED
    except (UserError, OSError) as error:
        message = in_one_line(error)
        if message is None:
            raise
        logger.debug("evaluation failed", exc_info=True)
        sys.stderr.write(f"{message}\n")
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    _show(config, score)
    return EXIT_OK


def _show(config: EvalMasterConfig, score: Score) -> None:
    from rich.console import Console
    from rich.table import Table

    from nemo_rl.algorithms.evaluation import lines_of

    for line in lines_of(config, score):
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    table = Table(title=f"{config.generation.model_name} on {config.data.dataset_name}", title_justify="left")
    for column in (score.metric, "problems", "answers each", "mean reward", "cut off", "seconds"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{score.value:.4f}",
        str(score.problems),
        str(score.answers_per_problem),
        f"{score.mean_reward:.4f}",
        f"{score.truncated:.1%}",
        f"{score.seconds:.1f}",
    )
    Console().print(table)
    if config.eval.save_path is not None:
        Console().print(f"summary.json and samples.jsonl are in {config.eval.save_path}", soft_wrap=True)


grpo = CommandLine(MasterConfig, "Trains a policy with GRPO", "grpo.max_num_steps=5", grpo_to_end)
distillation = CommandLine(
    DistillationMasterConfig,
    "Distils a teacher into a policy, on the policy's own samples",
    "distillation.max_num_steps=5",
    grpo_to_end,
)
sft = CommandLine(SFTMasterConfig, "Fine-tunes a policy on conversations", "sft.max_num_steps=5", sft_to_end)
evaluate = CommandLine(
    EvalMasterConfig,
    "Evaluates a model on problems with known answers",
    "generation.model_name=results/grpo",
    evaluate_to_end,
    has_page=False,
)
