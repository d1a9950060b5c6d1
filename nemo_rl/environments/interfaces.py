"""Interface of environments: from conversations to rewards, observations and termination flags.

A user's environment is one class that derives from `EnvironmentInterface`; named in YAML as `env.<name>.class`, it
becomes a Ray actor. Invariant: entry i of everything returned belongs to conversation i.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple

import torch
from typing_extensions import TypeVar

from nemo_rl.config.errors import UserError
from nemo_rl.data.interfaces import LLMMessageLogType, Message
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

MetadataT = TypeVar("MetadataT", default=object)
Observation = dict[str, str]
METADATA_FLAGS = ("mask_sample", "invalid_tool_call")
"""Keys, true or false, by which an environment's last metadata say that a sample is not to be trained on as it is."""
GIVEN_UP = "verification_given_up"
"""Key by which an environment's last metadata say that nothing judged a sample in time, so that it earns 0 unjudged."""


class EnvironmentFailure(UserError, RuntimeError):
    """An environment raised, took too long, or returned something of the wrong shape."""


class UnknownEnvironment(UserError, ValueError):
    """A name that no environment has."""


@dataclass(frozen=True)
class AgentSession:
    """Endpoint of an agent's model: for OpenAI's client, `OpenAI(base_url=base_url, api_key=session.api_key)`."""

    id: str
    base_url: str  # of this session alone: ends with /v1
    model: str  # the name to ask for
    api_key: str = field(repr=False)
    seed: int = 0  # a number of this sample, for the agent's own draws


class Conversation(list[Message]):
    """Messages {role, content} of the prompt and the rollout, as environments get them.

    The prompt may contain assistant messages; `response_of` separates them from the rollout's.
    """

    prompt_length: int | None = None  # number of messages of the prompt; None where a caller did not say

    @classmethod
    def of(cls, message_log: LLMMessageLogType) -> Conversation:
        """A rollout's log without its tensors: environments judge text, and tensors cost more to send than text.

        Responses of a rollout are known by their `generation_logprobs`.
        """
        conversation = cls(
            {key: value for key, value in message.items() if not isinstance(value, torch.Tensor)}
            for message in message_log
        )
        responses = (index for index, message in enumerate(message_log) if "generation_logprobs" in message)
        conversation.prompt_length = next(responses, None)
        return conversation


def response_of(message_log: LLMMessageLogType) -> str:
    """The assistant's messages of this rollout, joined; without those of the prompt. For a plain list, which does not
    mark the prompt, those after the last system or user message.
    """
    start = getattr(message_log, "prompt_length", None)
    if start is None:
        asked = (index for index, message in enumerate(message_log) if message["role"] in _PROMPT_ROLES)
        start = max(asked, default=-1) + 1
    return "".join(str(message["content"]) for message in message_log[start:] if message["role"] == "assistant")


_PROMPT_ROLES = ("system", "developer", "user")


_EXPECTED = ("ground_truth", "expected_answer", "answer")


def expected_of(metadata: object) -> object:
    """The expected answer that a prompt's metadata hold; None without one."""
    if not isinstance(metadata, Mapping):
        return None
    return next((metadata[name] for name in _EXPECTED if metadata.get(name) is not None), None)


def judged(metadata: Mapping[str, object], *, in_time: bool) -> dict[str, object]:
    """Metadata of a conversation whose newest response was judged in time, or was not (`GIVEN_UP`)."""
    kept = {name: value for name, value in metadata.items() if name != GIVEN_UP}
    return kept if in_time else {**kept, GIVEN_UP: True}


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """Result of one step, for B conversations.

    Attributes:
        observations: B messages {role, content} that follow the responses; content may be empty. The last one of an
            episode ends the sample's log, and is not trained on.
        next_stop_strings: B lists of strings that end the next response; None per item, or in all, leaves the run's
            own.
        rewards: float [B]; or several components, each under a name `reward/<name>`.
    """

    observations: Sequence[Observation]
    metadata: Sequence[MetadataT | None]  # b items for the next step; None per item leaves what it was
    next_stop_strings: Sequence[Sequence[str] | None] | None
    rewards: torch.Tensor | Mapping[str, torch.Tensor]
    terminateds: torch.Tensor  # bool [B]
    answers: Sequence[str | None] | None = None  # b extracted answers, for logs; None where there is none


class ActorOnRequest(abc.ABCMeta):
    """Classes that also start as Ray actors by themselves, as NeMo-RL's environments do: `Env.remote(cfg)` and
    `Env.options(...).remote(cfg)`. `Env(cfg)` stays a plain object.
    """

    def remote(cls, *args: object, **kwargs: object) -> Any:
        """Starts an actor of this class; the handle."""
        return cls.options().remote(*args, **kwargs)

    def options(cls, **options: object) -> Any:
        """The actor class with Ray's options; without any it takes no CPU slot and no accelerator, as it waits for its
        own helpers.
        """
        return ray_actor(cls).options(**{"num_cpus": 0, "num_gpus": 0, **options})


def ray_actor(cls: type) -> Any:
    """The Ray actor class of an environment class."""
    import ray

    # Ray warns that an actor's `remote` hides the class's own, which is what is meant.
    logging.getLogger("ray.actor").addFilter(_hides_nothing)
    return ray.remote(cls)


def _hides_nothing(record: logging.LogRecord) -> bool:
    return "attribute remote of that class" not in record.getMessage()


class EnvironmentInterface(abc.ABC, Generic[MetadataT], metaclass=ActorOnRequest):
    """Judges responses. Its one argument is the mapping `env.<name>` (without `class` and `step_timeout_s`).

    Attributes:
        shareable: Whether several runs of one process, such as adapters of a job, may use one actor: its answers
            depend on nothing but the conversations and the metadata of the call.
        needs: Names in a row's metadata without which it cannot judge; rows without them are refused at the start.
    """

    shareable: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[MetadataT]
    ) -> EnvironmentReturn[MetadataT]:
        """Judges B conversations that end with an assistant message.

        The last message is the newest response; `response_of` joins all responses of the rollout. Other assistant
        messages belong to the prompt.
        """

    def global_post_process_and_metrics(self, batch: BatchedDataDict) -> tuple[BatchedDataDict, dict[str, float]]:
        """The environment's metrics of a finished validation, logged as `validation/<environment>/<name>`. `batch`:
        `rewards`, `generated_lengths`, `truncated`, `prompt_number` (equal for samples of one prompt) and each
        `reward/<name>` that `step` gave [B], and `task_name`. Returns the batch, and the metrics; none unless
        overridden.
        """
        return batch, {}

    def shutdown(self) -> None:
        """Releases the environment's resources."""
        return
