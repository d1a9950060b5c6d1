"""One checked call of an environment: in time, without an exception, and with one answer per conversation.

Invariant: the result has B entries everywhere, each of the type that `EnvironmentReturn` names.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, nullcontext
from threading import BoundedSemaphore, Thread
from typing import Any, TypeGuard

import numpy as np
import torch

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.interfaces import GIVEN_UP, METADATA_FLAGS, EnvironmentFailure, EnvironmentReturn

_turns: dict[object, BoundedSemaphore] = {}


def take_turns(handle: object, calls: int) -> None:
    """From here on so many calls of an actor run at once, and others wait in this process: the deadline of a call
    begins with the call.
    """
    _turns[handle] = BoundedSemaphore(calls)


def end_turns(handle: object) -> None:
    """Ends `take_turns`; nothing to do for an actor without."""
    _turns.pop(handle, None)


def _turn(handle: object) -> AbstractContextManager[object]:
    return _turns.get(handle) or nullcontext()


def step_environment(
    handle: Any, message_logs: Sequence[LLMMessageLogType], metadata: Sequence[object], *, timeout_s: float, name: str
) -> EnvironmentReturn[object]:
    """Calls `step` and validates its result.

    Args:
        handle: a Ray actor handle, or the environment itself.
        message_logs: B conversations that end with an assistant message.
        timeout_s: seconds the call may take.
        name: the environment's name, for messages.

    Returns the environment's answer, with rewards as float32 and terminateds as bool tensors [B], and None lists filled
    in. Raises EnvironmentFailure: it raised, died, took longer than the deadline, or returned a wrong number or type of
    anything.
    """
    if len(message_logs) != len(metadata):
        raise ValueError(f"environment {name}: {len(message_logs)} conversations and {len(metadata)} metadata")
    if hasattr(handle.step, "remote"):
        returned = _call_actor(handle, message_logs, metadata, timeout_s, name)
    else:
        returned = _call_object(handle, message_logs, metadata, timeout_s, name)
    return _checked(returned, len(message_logs), name)


def environment_metrics(handle: Any, batch: Mapping[str, object], *, timeout_s: float, name: str) -> dict[str, float]:
    """An environment's metrics of a finished batch (`global_post_process_and_metrics`).

    Args:
        batch: columns of the batch; what the environment changes there is not read.
        timeout_s: seconds the call may take.
        name: the environment's name, for messages.

    Raises EnvironmentFailure: it raised, died, took longer than the deadline, or returned something else.
    """
    import ray

    try:
        with _turn(handle):
            returned = ray.get(handle.global_post_process_and_metrics.remote(batch), timeout=timeout_s)
    except ray.exceptions.RayError as error:
        cause = f"took longer than {timeout_s:g} s" if isinstance(error, TimeoutError) else f"failed: {error}"
        raise EnvironmentFailure(f"environment {name}: global_post_process_and_metrics {cause}") from error
    try:
        _, measured = returned
        return {str(key): float(value) for key, value in measured.items()}
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise EnvironmentFailure(
            f"environment {name}: global_post_process_and_metrics returned {returned!r:.200}; expected the batch and a "
            "dict of numbers"
        ) from error


def _call_actor(
    handle: Any, message_logs: Sequence[LLMMessageLogType], metadata: Sequence[object], timeout_s: float, name: str
) -> object:
    import ray

    reference = None
    try:
        with _turn(handle):
            reference = handle.step.remote(list(message_logs), list(metadata))
            return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        ray.cancel(reference, force=False)
        raise _too_slow(name, len(message_logs), timeout_s) from error
    except ray.exceptions.RayTaskError as error:
        raise EnvironmentFailure(
            f"environment {name} raised on {len(message_logs)} conversations: {error.cause!r}\n{error}"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise EnvironmentFailure(
            f"environment {name} died while judging {len(message_logs)} conversations: {error}"
        ) from error


def _call_object(
    environment: object,
    message_logs: Sequence[LLMMessageLogType],
    metadata: Sequence[object],
    timeout_s: float,
    name: str,
) -> object:
    future: Future[object] = Future()
    # A daemon, so that an environment that never returns cannot keep the process alive.
    Thread(
        target=_run, args=(future, environment, message_logs, metadata), name=f"environment-{name}", daemon=True
    ).start()
    try:
        error = future.exception(timeout=timeout_s)
    except FutureTimeout:
        raise _too_slow(name, len(message_logs), timeout_s) from None
    if error is not None:
        raise EnvironmentFailure(
            f"environment {name} raised on {len(message_logs)} conversations: {error!r}"
        ) from error
    return future.result()


def _run(
    future: Future[object], environment: Any, message_logs: Sequence[LLMMessageLogType], metadata: Sequence[object]
) -> None:
    try:
        returned = environment.step(list(message_logs), list(metadata))
        future.set_result(asyncio.run(returned) if inspect.iscoroutine(returned) else returned)
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything; it is handed to the caller, which names the environment
        future.set_exception(error)


def _too_slow(name: str, count: int, timeout_s: float) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"environment {name} did not answer for {count} conversations within {timeout_s:g} s; it hangs, or "
        f"env.{name}.step_timeout_s is too short"
    )


def _checked(returned: object, size: int, name: str) -> EnvironmentReturn[object]:
    if not isinstance(returned, tuple) or not 5 <= len(returned) <= 6:
        raise EnvironmentFailure(f"environment {name} returned a {type(returned).__name__}, not an EnvironmentReturn")
    result = EnvironmentReturn(*returned)
    stops = result.next_stop_strings if result.next_stop_strings is not None else [None] * size
    answers = result.answers if result.answers is not None else [None] * size
    for what, values, problem_of in (
        ("observations", result.observations, _problem_of_observation),
        ("metadata", result.metadata, _problem_of_metadata),
        ("next_stop_strings", stops, _problem_of_stops),
        ("answers", answers, _problem_of_answer),
    ):
        if not _is_list(values) or len(values) != size:
            raise EnvironmentFailure(f"environment {name} returned {_count(values)} {what} for {size} conversations")
        for row, value in enumerate(values):
            if (problem := problem_of(value)) is not None:
                raise EnvironmentFailure(f"environment {name}: {what} of conversation {row}: {problem}")
    terminateds = _tensor(result.terminateds, "terminateds", size, name)
    _refuse_rows(~((terminateds == 0) | (terminateds == 1)), terminateds, "terminateds", "neither true nor false", name)
    return EnvironmentReturn(
        result.observations, result.metadata, stops, _rewards(result.rewards, size, name), terminateds.bool(), answers
    )


_MADE_HERE = ("token_ids", "token_loss_mask", "generation_logprobs")


def _problem_of_observation(observation: object) -> str | None:
    if not isinstance(observation, Mapping) or not {"role", "content"} <= set(observation):
        return f"{_shown(observation)} is not a message with role and content"
    for key in ("role", "content"):
        if not isinstance(observation[key], str):
            return f"{key} must be text, not {_shown(observation[key])}"
    if not observation["role"]:
        return "role is empty; environments speak as 'environment', 'tool' or 'user'"
    made_here = [key for key in _MADE_HERE if key in observation]
    return f"{made_here[0]} is not an environment's to give; content is tokenised here" if made_here else None


def _problem_of_metadata(metadata: object) -> str | None:
    if not isinstance(metadata, Mapping):
        return None
    for flag in (*METADATA_FLAGS, GIVEN_UP):
        value = metadata.get(flag)
        if value is not None and not (isinstance(value, (bool, int, np.generic)) and value in (0, 1)):
            return f"{flag} must be true or false, not {_shown(value)}"
    return None


def _problem_of_stops(stops: object) -> str | None:
    if stops is None or (_is_list(stops) and all(isinstance(stop, str) and stop for stop in stops)):
        return None
    return f"{_shown(stops)} is not a list of texts that are not empty"


def _problem_of_answer(answer: object) -> str | None:
    return None if answer is None or isinstance(answer, str) else f"{_shown(answer)} is neither text nor None"


def _rewards(rewards: object, size: int, name: str) -> torch.Tensor | dict[str, torch.Tensor]:
    if not isinstance(rewards, Mapping):
        return _finite(_tensor(rewards, "rewards", size, name).float(), "rewards", name)
    wrong = [key for key in rewards if not str(key).startswith("reward/")]
    if wrong or not rewards:
        raise EnvironmentFailure(
            f"environment {name} returned rewards named {', '.join(map(str, rewards)) or 'nothing'}; "
            "components are named reward/<name>"
        )
    return {
        str(key): _finite(_tensor(values, str(key), size, name).float(), str(key), name)
        for key, values in rewards.items()
    }


def _tensor(values: object, what: str, size: int, name: str) -> torch.Tensor:
    if _is_list(values):
        for row, value in enumerate(values):
            if not isinstance(value, (bool, int, float, np.generic, np.ndarray, torch.Tensor, list, tuple)):
                raise EnvironmentFailure(
                    f"environment {name} returned {what} that are no numbers: conversation {row} has {_shown(value)}"
                )
    try:
        tensor = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise EnvironmentFailure(
            f"environment {name} returned {what} that are no numbers, in a {type(values).__name__}: {error}"
        ) from error
    if tensor.shape != (size,):
        raise EnvironmentFailure(
            f"environment {name} returned {what} of shape {list(tensor.shape)} for {size} conversations; "
            f"expected [{size}]"
        )
    if tensor.is_complex():
        raise EnvironmentFailure(f"environment {name} returned {what} of {tensor.dtype}; expected real numbers")
    return tensor.cpu()


def _finite(rewards: torch.Tensor, what: str, name: str) -> torch.Tensor:
    _refuse_rows(~torch.isfinite(rewards), rewards, what, "not finite", name)
    return rewards


def _refuse_rows(bad: torch.Tensor, values: torch.Tensor, what: str, problem: str, name: str) -> None:
    rows = bad.nonzero().flatten().tolist()
    if rows:
        raise EnvironmentFailure(
            f"environment {name} returned {what} that are {problem}, for conversations {rows[:8]}: "
            f"{values[rows[0]].item()}"
        )


def _is_list(values: object) -> TypeGuard[Sequence[object]]:
    return isinstance(values, Sequence) and not isinstance(values, (str, bytes))


def _shown(value: object) -> str:
    return f"{value!r:.100} ({type(value).__name__})"


def _count(values: object) -> str:
    return str(len(values)) if _is_list(values) else f"a {type(values).__name__} as"
