"""Judges answers of one turn by a verifier: mathematical and multiple-choice answers (reward 0 or 1), and those to
reasoning-gym problems with the task's own verifier (a score from 0 to 1).

The response is what the assistant said in this rollout (`response_of`); the expected answer is `ground_truth` of its
metadata, or the reference of its problem. Which verifier is meant by the configuration is decided here; verifying is
done by `VerifierPool`, in processes with a deadline per answer. A process that exceeds its deadline is replaced and its
answer earns 0. One that dies otherwise or hangs is replaced too, and its answer is verified once more, since something
outside may have killed it. Invariants: every conversation ends with the step; the pool returns one verdict per pair, in
order, within (2 * answers / workers + 1) * deadline.
"""

from __future__ import annotations

import json
import logging
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import IO

import torch
from typing_extensions import override

from nemo_rl.config import MathEnvConfig, ReasoningGymEnvConfig
from nemo_rl.config.env import MathMultiRewardEnvConfig
from nemo_rl.data.datasets.generated import ProblemReference
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.processes import OutputTail, plain_environment
from nemo_rl.environments.interfaces import (
    EnvironmentFailure,
    EnvironmentInterface,
    EnvironmentReturn,
    judged,
    response_of,
)
from nemo_rl.environments.verifiers import Verdict, quick
from nemo_rl.lazy import names_of

logger = logging.getLogger(__name__)
_START_UP_S = 120.0
# The process ends itself at the deadline; only one that cannot be woken is ended from here, this much later.
_GRACE_S = 2.0
_STARTS_KILLED = 3
_TRIES = 2
_CHUNK = 1 << 16


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    replies: IO[bytes]
    task: int | None
    give_up_at: float
    output_tail: OutputTail
    ready: bool = False
    outgoing: bytes = b""
    incoming: bytearray = field(default_factory=bytearray)


_LOST = Verdict(0.0, None, given_up=True)


class VerifierPool:
    """Verifies answers in processes of its own, started at first use.

    Args:
        verifier: a name in `verifiers.VERIFIERS`.
        deadline_s: seconds per answer.
    """

    def __init__(self, verifier: str, num_workers: int, deadline_s: float) -> None:
        self._verifier = verifier
        self._num_workers = num_workers
        self._deadline_s = deadline_s
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._starts_killed = 0
        self.timeouts = 0

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts on pairs of response and expected answer. Raises EnvironmentFailure: verifier processes cannot
        start.
        """
        verdicts: list[Verdict | None] = [None] * len(pairs)
        waiting = list(range(len(pairs)))[::-1]
        lost: Counter[int] = Counter()
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._end(worker)
        while any(verdict is None for verdict in verdicts):
            while len(self._workers) < min(self._num_workers, len(pairs)):
                self._start()
            for worker in self._workers:
                if worker.ready and worker.task is None and waiting:
                    self._assign(worker, waiting.pop(), pairs)
            for worker in self._answered_or_late():
                task = worker.task
                if (verdict := self._collect(worker)) is None or task is None:
                    continue
                lost[task] += verdict is _LOST
                if verdict is _LOST and lost[task] < _TRIES:
                    waiting.append(task)
                else:
                    verdicts[task] = verdict
        return [verdict for verdict in verdicts if verdict is not None]

    def shutdown(self) -> None:
        """Ends all processes."""
        for worker in list(self._workers):
            self._end(worker)
        self._selector.close()

    def _start(self) -> None:
        command = [sys.executable, "-m", "nemo_rl.environments.verifiers", self._verifier]
        # The process must find this package wherever this one found it, installed or not.
        environment = {**plain_environment(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        if process.stdin is None or process.stdout is None:
            raise EnvironmentFailure("a verifier process has no pipes")
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        give_up_at = time.monotonic() + _START_UP_S
        worker = _Worker(process, process.stdin, process.stdout, None, give_up_at, OutputTail(process))
        self._workers.append(worker)
        self._selector.register(worker.replies, selectors.EVENT_READ, worker)

    def _assign(self, worker: _Worker, task: int, pairs: Sequence[tuple[str, str]]) -> None:
        response, expected = pairs[task]
        request = {
            "verifier": self._verifier,
            "response": response,
            "expected": expected,
            "deadline_s": self._deadline_s,
        }
        worker.task, worker.give_up_at = task, time.monotonic() + self._deadline_s + _GRACE_S
        worker.outgoing = json.dumps(request).encode() + b"\n"
        self._selector.register(worker.requests, selectors.EVENT_WRITE, worker)

    def _answered_or_late(self) -> list[_Worker]:
        busy = [worker for worker in self._workers if worker.task is not None or not worker.ready]
        timeout_s = max(0.0, min(worker.give_up_at for worker in busy) - time.monotonic())
        answered = []
        for key, events in self._selector.select(timeout_s):
            if events & selectors.EVENT_WRITE:
                self._send(key.data)
            else:
                answered.append(key.data)
        now = time.monotonic()
        late = [worker for worker in busy if worker.give_up_at <= now and worker not in answered]
        return answered + late

    def _send(self, worker: _Worker) -> None:
        try:
            worker.outgoing = worker.outgoing[os.write(worker.requests.fileno(), worker.outgoing[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # It died, which shows as the end of its replies.
            worker.outgoing = b""
        if not worker.outgoing:
            self._selector.unregister(worker.requests)

    def _collect(self, worker: _Worker) -> Verdict | None:
        """A worker's answer; `_LOST` if none will come, None if it is still pending."""
        try:
            said = os.read(worker.replies.fileno(), _CHUNK)
        except BlockingIOError:
            said = None
        if not said:
            return self._lost(worker, late=said is None)
        worker.incoming += said
        if not said.endswith(b"\n"):
            return None
        reply = json.loads(worker.incoming)
        worker.incoming.clear()
        if not worker.ready:
            worker.ready, self._starts_killed = True, 0
            return None
        if reply["problem"]:
            logger.debug("verifier=%s event=unreadable problem=%s", self._verifier, reply["problem"])
        worker.task = None
        return Verdict(float(reply["reward"]), reply["answer"])

    def _lost(self, worker: _Worker, *, late: bool) -> Verdict | None:
        how = f"was not ready after {_START_UP_S:g} s" if late else f"ended {worker.output_tail.of_ended()}"
        self._end(worker)
        code = worker.process.returncode
        if not worker.ready:
            self._starts_killed += 1
            if late or code >= 0 or self._starts_killed >= _STARTS_KILLED:
                raise EnvironmentFailure(f"a process that verifies by {self._verifier} {how}")
        timed_out = not late and code == -signal.SIGALRM
        self.timeouts += timed_out
        logger.warning(
            "verifier=%s event=%s deadline_s=%g exit_code=%s",
            self._verifier,
            "deadline_passed" if timed_out else "stood_still" if late else "died",
            self._deadline_s,
            code,
        )
        return Verdict(0.0, None, given_up=True) if timed_out else _LOST

    def _end(self, worker: _Worker) -> None:
        self._selector.unregister(worker.replies)
        if worker.outgoing:
            self._selector.unregister(worker.requests)
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.wait()
        worker.requests.close()
        worker.replies.close()


# Forms that a prompt has to ask for.
_FORMS = {
    "dapo_math_verify": "the last line `Answer: ...`",
    "english_multichoice": "`Answer:` with a letter behind it",
    "multilingual_multichoice": "the word for answer, a colon and a letter",
}
_THINK_THEN_ANSWER = re.compile(
    r"^<think>(?:(?!</?think>).)*</think>\n<answer>(?:(?!</?answer>).)*</answer>$", re.DOTALL
)


class MathEnvironment(EnvironmentInterface[dict[str, object]]):
    """`env.math`. `cfg`: the keys of `env.math`."""

    shareable = True
    needs = ("ground_truth",)

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = MathEnvConfig.model_validate(dict(cfg))
        self._is_math = self.cfg.verifier_type == "math"
        verifier = self.cfg.math_verify_impl if self._is_math else self.cfg.verifier_type
        self._reads_plain_integers = verifier == "hf_math_verify"
        self._pool = VerifierPool(verifier, self.cfg.num_workers, self.cfg.verify_timeout_s)

    @classmethod
    def start_line(cls, cfg: Mapping[str, object]) -> str | None:
        """Line printed at a run's start: the form in which answers are expected."""
        settings = MathEnvConfig.model_validate(dict(cfg))
        form = _FORMS.get(settings.math_verify_impl if settings.verifier_type == "math" else settings.verifier_type)
        return None if form is None else f"answers are read from {form}; a response without it earns 0"

    @override
    def step(
        self,
        message_log_batch: Sequence[LLMMessageLogType],
        metadata: Sequence[dict[str, object]],
        return_extracted_answer: bool = True,
    ) -> EnvironmentReturn[dict[str, object]]:
        """Verifies B responses. `return_extracted_answer`: give the answers that were read."""
        verdicts = self._verify(
            [
                (response_of(log), str(item["ground_truth"]))
                for log, item in zip(message_log_batch, metadata, strict=True)
            ]
        )
        rewards = torch.tensor([verdict.reward for verdict in verdicts])
        result = _finished(verdicts, metadata, rewards, self.cfg.stop_strings)
        return result if return_extracted_answer else result._replace(answers=None)

    @override
    def global_post_process_and_metrics(self, batch: BatchedDataDict) -> tuple[BatchedDataDict, dict[str, float]]:
        """Adds shares and lengths of right answers, and how many answers were given up at the deadline."""
        metrics = {"verify_timeouts": float(self._pool.timeouts)}
        columns = {
            name: torch.as_tensor(batch[name]).float()
            for name in ("rewards", "generated_lengths", "truncated", "prompt_number")
            if name in batch and len(batch[name])
        }
        if "rewards" not in columns:
            return batch, metrics
        right_B = columns["rewards"] >= 1
        metrics["accuracy"] = columns["rewards"].mean().item()
        if "prompt_number" in columns:
            prompts = columns["prompt_number"]
            metrics["pass@samples_per_prompt"] = len(prompts[right_B].unique()) / len(prompts.unique())
        if "truncated" in columns:
            metrics["fraction_of_samples_properly_ended"] = 1 - columns["truncated"].mean().item()
        if "generated_lengths" in columns:
            lengths = columns["generated_lengths"]
            metrics["generation_lengths"] = lengths.mean().item()
            metrics["correct_solution_generation_lengths"] = lengths[right_B].mean().item() if right_B.any() else 0.0
        return batch, metrics

    @override
    def shutdown(self) -> None:
        """Ends the verifier processes."""
        self._pool.shutdown()

    def _verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        verdicts = [quick(*pair) if self._reads_plain_integers else None for pair in pairs]
        hard = [index for index, verdict in enumerate(verdicts) if verdict is None]
        for index, verdict in zip(hard, self._pool.verify([pairs[index] for index in hard]), strict=True):
            verdicts[index] = verdict
        return [verdict for verdict in verdicts if verdict is not None]


class MathMultiRewardEnvironment(EnvironmentInterface[dict[str, object]]):
    """`env.math_multi_reward`: three reward components for responses of the form `<think>..</think>`, a line break,
    `<answer>..</answer>`.

    `reward/correctness` is 1 if the last `<answer>` equals the expected answer; `reward/integer` if it contains only
    digits; `reward/format` if the response has the form above.
    """

    shareable = True
    needs = ("ground_truth",)

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = MathMultiRewardEnvConfig.model_validate(dict(cfg))

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, object]]
    ) -> EnvironmentReturn[dict[str, object]]:
        """Compares B responses."""
        responses = [response_of(log) for log in message_log_batch]
        answers = [answer_in(response) for response in responses]
        verdicts = [
            Verdict(float(answer == str(item["ground_truth"])), answer)
            for answer, item in zip(answers, metadata, strict=True)
        ]
        rewards = {
            "reward/correctness": torch.tensor([verdict.reward for verdict in verdicts]),
            "reward/integer": torch.tensor([float(answer.isdigit()) for answer in answers]),
            "reward/format": torch.tensor([float(_THINK_THEN_ANSWER.search(text) is not None) for text in responses]),
        }
        return _finished(verdicts, metadata, rewards, self.cfg.stop_strings)


def answer_in(response: str) -> str:
    """The content of a response's last `<answer>`, whose end tag may be missing; without the tag the whole response."""
    return response.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def _judged(metadata: Sequence[dict[str, object]], verdicts: Sequence[Verdict]) -> list[dict[str, object]]:
    return [judged(item, in_time=not verdict.given_up) for item, verdict in zip(metadata, verdicts, strict=True)]


def _finished(
    verdicts: Sequence[Verdict],
    metadata: Sequence[dict[str, object]],
    rewards: torch.Tensor | dict[str, torch.Tensor],
    stop_strings: list[str] | None,
) -> EnvironmentReturn[dict[str, object]]:
    size = len(verdicts)
    said = ["Environment: correct" if verdict.reward == 1.0 else "Environment: incorrect" for verdict in verdicts]
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": text} for text in said],
        metadata=_judged(metadata, verdicts),
        next_stop_strings=[stop_strings] * size,
        rewards=rewards,
        terminateds=torch.ones(size, dtype=torch.bool),
        answers=[verdict.answer for verdict in verdicts],
    )


# NeMo-RL's names besides.
__getattr__, __dir__ = names_of(__name__)


class ReasoningGymEnvironment(EnvironmentInterface[dict[str, object]]):
    """`env.reasoning_gym`. `cfg`: the keys of `env.reasoning_gym`."""

    shareable = True
    needs = tuple(field.name for field in fields(ProblemReference))

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = ReasoningGymEnvConfig.model_validate(dict(cfg))
        self._pool = VerifierPool("reasoning_gym", self.cfg.num_workers, self.cfg.verify_timeout_s)

    @classmethod
    def start_line(cls, cfg: Mapping[str, object]) -> str:
        """Line printed at a run's start: the form in which answers are expected."""
        if (tag := cfg.get("answer_tag")) is not None:
            return f"env.reasoning_gym: the answer is what stands in <{tag}></{tag}>; a response without it earns 0"
        return (
            "env.reasoning_gym: the answer is the whole response, so that a right answer within a sentence earns 0 in "
            "most tasks; with env.reasoning_gym.answer_tag=answer it is what stands in <answer></answer>, which the "
            "prompt (data.*.prompt_file) has to ask for"
        )

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, object]]
    ) -> EnvironmentReturn[dict[str, object]]:
        """Verifies B responses."""
        tag = {"tag": self.cfg.answer_tag}
        verdicts = self._pool.verify(
            [
                (
                    response_of(log),
                    json.dumps({name: value for name, value in item.items() if name in self.needs} | tag),
                )
                for log, item in zip(message_log_batch, metadata, strict=True)
            ]
        )
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": f"Environment: score {verdict.reward:g}"} for verdict in verdicts
            ],
            metadata=_judged(metadata, verdicts),
            next_stop_strings=None,
            rewards=torch.tensor([verdict.reward for verdict in verdicts]),
            terminateds=torch.ones(len(verdicts), dtype=torch.bool),
            answers=[verdict.answer for verdict in verdicts],
        )

    @override
    def global_post_process_and_metrics(self, batch: BatchedDataDict) -> tuple[BatchedDataDict, dict[str, float]]:
        """Adds how many answers were given up at the deadline."""
        return batch, {"verify_timeouts": float(self._pool.timeouts)}

    @override
    def shutdown(self) -> None:
        """Ends the verifier processes."""
        self._pool.shutdown()
