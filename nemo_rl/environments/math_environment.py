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
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from typing import Any

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


# What stands for the verdict of a process that exceeded its deadline, and of one that ended otherwise.
_LATE, _LOST = Verdict(0.0, None, given_up=True), Verdict(0.0, None, given_up=True)


class _Verifier:
    """A process that verifies answers, asked by one thread. `late`: whether it was ended because it did not answer."""

    def __init__(self, verifier: str) -> None:
        command = [sys.executable, "-m", "nemo_rl.environments.verifiers", verifier]
        # The process must find this package wherever this one found it, installed or not.
        environment = {**plain_environment(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        if self.process.stdin is None or self.process.stdout is None:
            raise EnvironmentFailure("a verifier process has no pipes")
        self._requests, self._replies = self.process.stdin, self.process.stdout
        self.output_tail = OutputTail(self.process)
        self.late = False

    def reply(self, within_s: float, request: Mapping[str, object] | None = None) -> dict[str, Any] | None:
        """Sends a request, if there is one; returns the next message. None: the process ended, or was ended late."""
        bound = threading.Timer(within_s, self._give_up)
        bound.start()
        try:
            if request is not None:
                self._requests.write(json.dumps(request).encode() + b"\n")
                self._requests.flush()
            said = self._replies.readline()
        except BrokenPipeError:
            return None
        finally:
            bound.cancel()
        return json.loads(said) if said.endswith(b"\n") else None

    def _give_up(self) -> None:
        self.late = True
        self.process.kill()

    def end(self) -> None:
        """Ends the process. Safe to call twice."""
        self.process.kill()
        self.process.wait()
        with suppress(BrokenPipeError):
            self._requests.close()
        self._replies.close()


class VerifierPool:
    """Verifies answers in processes of its own, started at first use.

    Args:
        verifier: a name in `verifiers.VERIFIERS`.
        deadline_s: seconds per answer.
    """

    def __init__(self, verifier: str, num_workers: int, deadline_s: float) -> None:
        self._verifier = verifier
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="verifier")
        self._own = threading.local()
        self._workers: set[_Verifier] = set()
        self.timeouts = 0

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts on pairs of response and expected answer. Raises EnvironmentFailure: verifier processes cannot
        start.
        """
        verdicts = list(self._threads.map(self._judge, pairs))
        self.timeouts += sum(verdict is _LATE for verdict in verdicts)
        return verdicts

    def shutdown(self) -> None:
        """Ends all processes."""
        self._threads.shutdown(cancel_futures=True)
        for worker in list(self._workers):
            self._end(worker)

    def _judge(self, pair: tuple[str, str]) -> Verdict:
        request = {"verifier": self._verifier, "response": pair[0], "expected": pair[1], "deadline_s": self._deadline_s}
        for _ in range(_TRIES):
            worker = self._ready()
            reply = worker.reply(self._deadline_s + _GRACE_S, request)
            if reply is not None:
                if reply["problem"]:
                    logger.debug("verifier=%s event=unreadable problem=%s", self._verifier, reply["problem"])
                return Verdict(float(reply["reward"]), reply["answer"])
            code = self._end(worker)
            timed_out = code == -signal.SIGALRM
            logger.warning(
                "verifier=%s event=%s deadline_s=%g exit_code=%s",
                self._verifier,
                "deadline_passed" if timed_out else "stood_still" if worker.late else "died",
                self._deadline_s,
                code,
            )
            if timed_out:
                return _LATE
        return _LOST

    def _ready(self) -> _Verifier:
        """This thread's process. Raises EnvironmentFailure: it does not start."""
        worker: _Verifier | None = getattr(self._own, "worker", None)
        if worker is not None:
            if worker.process.poll() is None:
                return worker
            self._end(worker)
        how = ""
        for _ in range(_STARTS_KILLED):
            worker = self._own.worker = _Verifier(self._verifier)
            self._workers.add(worker)
            if worker.reply(_START_UP_S) is not None:
                return worker
            how = f"was not ready after {_START_UP_S:g} s" if worker.late else f"ended {worker.output_tail.of_ended()}"
            if self._end(worker) >= 0 or worker.late:
                break
        raise EnvironmentFailure(f"a process that verifies by {self._verifier} {how}")

    def _end(self, worker: _Verifier) -> int:
        worker.end()
        self._workers.discard(worker)
        return worker.process.returncode


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


def _finished(
    verdicts: Sequence[Verdict],
    metadata: Sequence[dict[str, object]],
    rewards: torch.Tensor | dict[str, torch.Tensor],
    stop_strings: list[str] | None,
    said: Sequence[str] | None = None,
) -> EnvironmentReturn[dict[str, object]]:
    size = len(verdicts)
    said = said or ["correct" if verdict.reward == 1.0 else "incorrect" for verdict in verdicts]
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": f"Environment: {text}"} for text in said],
        metadata=[judged(item, in_time=not one.given_up) for item, one in zip(metadata, verdicts, strict=True)],
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
        said = [f"score {verdict.reward:g}" for verdict in verdicts]
        return _finished(verdicts, metadata, torch.tensor([verdict.reward for verdict in verdicts]), None, said)

    @override
    def global_post_process_and_metrics(self, batch: BatchedDataDict) -> tuple[BatchedDataDict, dict[str, float]]:
        """Adds how many answers were given up at the deadline."""
        return batch, {"verify_timeouts": float(self._pool.timeouts)}

    @override
    def shutdown(self) -> None:
        self._pool.shutdown()
