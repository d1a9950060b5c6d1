"""The asynchronous arithmetic run on the data plane while parts of it are killed at random: nothing may be lost by it.

Kills an engine, all engines, the scheduler beside the run, a training worker, a storage unit or the driver, each once
in a round, in an order of its own; with `--kinds all` it also stops an engine, a worker or a storage unit, damages the
newest checkpoint, and fills the disk of the logs. The run must survive the death of engines and of the scheduler, and
goes on from its last intact checkpoint after any other. At the end every prompt must have been trained once, every
record keep every invariant, the accuracy be that of an undisturbed run of as many steps, and no process, file or shared
memory be left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos_run import DAMAGES, ENDS_AFTER_S, STOPPED, TARGETS, TOGETHER, Failed, Run

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.utils.record import read_record
from nemo_rl.utils.record_events import GroupAdmitted, GroupTrained, StepFinished

# What the run survives.
SURVIVED = ("engine", "engines", "scheduler", "engine stopped")
KINDS = (*TARGETS, *STOPPED, *DAMAGES)
_HANGS_AFTER_S = 120
FOREVER = 10**6


@dataclass(frozen=True)
class Kill:
    """One part that was killed.

    Attributes:
        kind: Of part.
        shared: Whether the run was a pipeline of a pool.
        stepped_s: Seconds until the run finished its next step.
        whole_s: Seconds until all parts were at work again.
    """

    kind: str
    shared: bool
    stepped_s: float
    whole_s: float


def schedule(kinds: list[str], draw: random.Random) -> Iterator[str]:
    """Kinds without end, each once in a round. What the run survives comes early, as it costs no new start; what dies
    together comes in the round's second life, which is one without a pool.
    """
    while True:
        order = draw.sample(kinds, len(kinds))
        ends = [kind for kind in order if kind not in SURVIVED]
        yield from (kind for kind in order if kind in SURVIVED and kind not in TOGETHER)
        yield from ends[:1]
        yield from (kind for kind in order if kind in TOGETHER)
        yield from ends[1:]


def disturb(run: Run, options: argparse.Namespace) -> tuple[list[Kill], int]:
    """Drives the run for some minutes, and for at least one round, and kills; what was killed, and the run's last step.

    Raises:
        Failed: The run did what it must not.
    """
    if "full disk" in options.kinds.split(","):
        run.small_log_disk()
    draw, kills, kinds = random.Random(options.seed), list[Kill](), options.kinds.split(",")
    end = time.monotonic() + 60 * options.minutes
    # Lives with a pool and without one take turns; the scheduler is killed in one that has it.
    run.start(FOREVER, shared=True)
    run.wait_until_whole()
    steps = FOREVER
    for number, kind in enumerate(schedule(kinds, draw), start=1):
        began_at = run.saved()
        run.wait_for(lambda saved=began_at + 2: run.saved() >= saved, f"checkpoint {began_at + 2}")
        time.sleep(draw.uniform(0.5, 1.5) * options.every)
        if kind == "scheduler" and not run.shared:
            stop(run)
            run.start(FOREVER, shared=True)
            run.wait_until_whole()
        last = number >= len(kinds) and time.monotonic() > end
        if last and kind not in SURVIVED:
            steps = run.saved() + options.last_steps
        kills.append((damage if kind in DAMAGES else kill)(run, kind, draw, steps))
        if last:
            break
    if steps == FOREVER:
        stop(run)
        steps = run.saved() + options.last_steps
        run.start(steps, shared=False)
    if code := run.ended(3600.0):
        raise Failed(f"the run ended with exit code {code}; see {run.folder}/output.txt")
    run.wait_until_gone()
    return kills, steps


def kill(run: Run, kind: str, draw: random.Random, steps: int) -> Kill:
    """Kills one part, and waits until the run is what it was; goes on up to a step where it has to be started anew.

    Raises:
        Failed: The run did what it must not.
    """
    victims = run.processes((STOPPED | TARGETS)[kind])
    if not victims:
        raise Failed(f"there is no {kind} to kill")
    if kind not in TOGETHER:
        victims = [draw.choice(sorted(victims, key=lambda process: process.pid))]
    shared, titles = run.shared, [" ".join(victim.cmdline()).strip()[:60] for victim in victims]
    run.note_shared_memory()
    print(f"{time.strftime('%X')} step={run.saved()} shared={shared} kill={kind} {titles}", flush=True)
    began = time.monotonic()
    for victim in victims:
        victim.suspend() if kind in STOPPED else victim.kill()
    if kind not in SURVIVED:
        run.ended(ENDS_AFTER_S)
        run.wait_until_gone()
        run.start(steps, shared=not run.shared)
    ended_s = time.monotonic() - began
    stepped_s, whole_s = run.wait_until_whole(victims)
    return Kill(kind, shared, ended_s + stepped_s, ended_s + whole_s)


def damage(run: Run, kind: str, draw: random.Random, steps: int) -> Kill:
    """Damages files, sees that the run notices, and goes on.

    Raises:
        Failed: It does not notice, or lost what it need not lose.
    """
    shared, began, more = run.shared, time.monotonic(), [] if kind == "full disk" else ["checkpointing.resume=[intact]"]
    run.note_shared_memory()
    print(f"{time.strftime('%X')} step={run.saved()} shared={shared} damage={kind}", flush=True)
    if kind == "full disk":
        recorded = last_step(run)
        filler = run.fill_log_disk()
        if run.ended(ENDS_AFTER_S) == 0 or not run.said("cannot be written: no space left on the disk"):
            raise Failed(f"the run did not say that the disk of its logs is full; see {run.folder}/output.txt")
        run.wait_until_gone()
        filler.unlink()
        if run.saved() <= recorded:
            raise Failed(f"step {recorded} was finished, and the last checkpoint is of step {run.saved()}")
        run.unlogged |= set(range(last_step(run) + 1, run.saved()))
    else:
        stop(run)
        newest = run.saved()
        name = run.damage(kind, draw)
        run.start(steps, shared=False)
        if run.ended(ENDS_AFTER_S) == 0 or not run.said(f"step_{newest} is damaged: {name}"):
            raise Failed(f"{name} of step_{newest} is damaged, and the run did not say so; see {run.folder}/output.txt")
        run.wait_until_gone()
    ended_s = time.monotonic() - began
    run.start(steps, shared=not shared, more=more)
    stepped_s, whole_s = run.wait_until_whole()
    return Kill(kind, shared, ended_s + stepped_s, ended_s + whole_s)


def last_step(run: Run) -> int:
    """The last step that the records know to be finished; -1 without one."""
    paths = sorted(run.folder.glob("logs/exp_*/record.jsonl"))
    entries = (entry.event for path in paths for entry in read_record(path, recover=True))
    return max((event.step for event in entries if isinstance(event, StepFinished)), default=-1)


def stop(run: Run) -> None:
    """Interrupts the run, as Ctrl-C does.

    Raises:
        Failed: It does not end.
    """
    run.note_shared_memory()
    if run.process is not None and run.process.poll() is None:
        run.process.send_signal(signal.SIGINT)
    run.ended(ENDS_AFTER_S)
    run.wait_until_gone()


def check_prompts(run: Run, steps: int) -> int:
    """How many prompts were trained, each once and in one step.

    Raises:
        Failed: One was trained twice, or a step is missing.
    """
    parts = [list(read_record(path, recover=True)) for path in sorted(run.folder.glob("logs/exp_*/record.jsonl"))]
    firsts = [next((e.event.step for e in part if isinstance(e.event, StepFinished)), None) for part in parts]
    trained: Counter[str] = Counter()
    seen: set[int] = set()
    for index, part in enumerate(parts):
        # What a part trained behind the step from which a later one went on is lost, and trained anew there.
        until = min((first for first in firsts[index + 1 :] if first is not None), default=steps)
        prompt_of = {e.event.group_id: e.event.prompt_id for e in part if isinstance(e.event, GroupAdmitted)}
        for entry in part:
            if isinstance(entry.event, GroupTrained) and entry.event.step < until:
                trained[prompt_of[entry.event.group_id]] += 1
                seen.add(entry.event.step)
    if twice := [prompt for prompt, count in trained.items() if count > 1]:
        raise Failed(f"{len(twice)} prompts were trained more than once: {twice[:5]}")
    if missing := set(range(steps)) - seen - run.unlogged:
        raise Failed(f"steps {sorted(missing)[:5]} trained nothing")
    return len(trained)


def check_records(run: Run) -> int:
    """How many lives of the run there are, the records of each of which keep every invariant.

    Raises:
        Failed: Some do not.
    """
    pools = [sorted(folder.glob("*.jsonl")) for folder in sorted(run.folder.glob("pool/exp_*"))]
    shared = {path.resolve() for pool in pools for path in pool}
    alone = [[path] for path in sorted(run.folder.glob("logs/exp_*/record.jsonl")) if path.resolve() not in shared]
    for life in [*pools, *alone]:
        # A life that was killed has ended nothing that was open.
        if violations := check(list(merge_by_machine_time(life, recover=True)), ended=False):
            raise Failed(f"{life[0].parent}: {len(violations)} violations, the first: {violations[0]}")
    return len(pools) + len(alone)


def table(kills: list[Kill]) -> str:
    """What was killed, how often, and what it cost."""
    lines = [f"{'kind':<14} kills  in a pool  next step s (median, worst)  whole again s (median, worst)"]
    for kind in sorted({kill.kind for kill in kills}):
        of = [kill for kill in kills if kill.kind == kind]
        stepped, whole = [kill.stepped_s for kill in of], [kill.whole_s for kill in of]
        lines.append(
            f"{kind:<14} {len(of):>5}  {sum(kill.shared for kill in of):>9}  "
            f"{statistics.median(stepped):>18.1f} {max(stepped):>8.1f}  "
            f"{statistics.median(whole):>20.1f} {max(whole):>8.1f}"
        )
    return "\n".join(lines)


def compare(run: Run, undisturbed: Run, steps: int, band: float) -> str:
    """Runs as many steps undisturbed; both accuracies.

    Raises:
        Failed: They are too far apart, or the undisturbed run did not end well.
    """
    undisturbed.start(steps, shared=False)
    if code := undisturbed.ended(3600.0):
        raise Failed(f"the undisturbed run ended with exit code {code}; see {undisturbed.folder}/output.txt")
    undisturbed.wait_until_gone()
    ours, theirs = run.accuracy(), undisturbed.accuracy()
    if abs(ours - theirs) > band:
        raise Failed(f"accuracy {ours:.3f}, undisturbed {theirs:.3f}: further apart than {band}")
    return f"accuracy={ours:.3f} undisturbed={theirs:.3f}"


def main() -> int:
    """Runs, and says what came of it; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long parts are killed; 0 for one round")
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds of training between two kills")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--kinds", default=",".join(TARGETS), help="what happens; all for everything that can")
    parser.add_argument("--model", default="results/arithmetic/sft/latest", help="as `make demo` warm-starts it")
    parser.add_argument("--folder", type=Path, default=Path("results/chaos"), help="a new folder")
    parser.add_argument(
        "--band", type=float, default=0.1, help="by how much the accuracy may differ; 1 to compare with nothing"
    )
    parser.add_argument("--last-steps", type=int, default=8, help="trained after the last kill, whose accuracy counts")
    options, overrides = parser.parse_known_args()
    if options.folder.exists():
        parser.error(f"{options.folder} exists; remove it, or name another with --folder")
    options.kinds = ",".join(KINDS) if options.kinds == "all" else options.kinds
    if unknown := sorted(set(options.kinds.split(",")) - set(KINDS)):
        parser.error(f"--kinds: unknown {unknown}; there are {list(KINDS)}")
    if set(options.kinds.split(",")) & set(STOPPED):
        for variable in ("NRL_WORKER_TIMEOUT_SECONDS", "NRL_VLLM_ASYNC_TIMEOUT_SECONDS"):
            os.environ.setdefault(variable, str(_HANGS_AFTER_S))
    folder, model = options.folder.resolve(), str(Path(options.model).resolve())
    run, undisturbed = Run(folder / "disturbed", model, overrides), Run(folder / "undisturbed", model, overrides)
    compared = ""
    try:
        kills, steps = disturb(run, options)
        print(table(kills), flush=True)
        prompts, lives = check_prompts(run, steps), check_records(run)
        run.check_nothing_is_left()
        if options.band < 1:
            compared = f" {compare(run, undisturbed, steps, options.band)}"
    except Failed as error:
        print(f"chaos=failed {error}")
        return 1
    finally:
        run.close()
        undisturbed.close()
    print(f"chaos=passed steps={steps} prompts={prompts} kills={len(kills)} lives={lives}{compared}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
