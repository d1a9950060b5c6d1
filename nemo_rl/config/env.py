"""Keys of `env.*`: one mapping per environment name, handed to the environment.

The built-in ones have a schema; any other name is a user's environment, whose mapping holds `class` (a dotted path) and
its own keys. Knows no environment's code.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, PositiveInt

from nemo_rl.config.section import NonEmptyStrings, NotYet, Section


class EnvironmentConfig(Section):
    """Keys that every environment has."""

    env_class: str | None = Field(None, alias="class")
    """Dotted path of the environment's class; null: the built-in of this name."""
    function: str | None = None
    """Dotted path of a function that rewards one response, instead of a class; further keys are its keyword arguments.
    """
    agent: str | None = None
    """Dotted path of an agent that plays whole episodes against the run's endpoint
    (policy.generation.vllm_cfg.expose_http_server), instead of a class; further keys are its arguments.
    """
    python: str | None = None
    """Interpreter of another virtual environment that plays the agent, for packages that do not go with those of a run;
    null: the run's own.
    """
    step_timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds that one call of the environment may take before the step fails; of an agent, a whole episode."""
    replicas: PositiveInt = 1
    """Actors, each a process of its own, that share the environment's conversations: for environments that keep a
    processor busy. What belongs to a conversation is in its metadata.
    """
    max_batch: PositiveInt | None = None
    """Most conversations of one call; null: all that wait. 1 for an environment that works on the conversations of a
    call one after the other.
    """

    @property
    def is_users(self) -> bool:
        """Whether a user's class, function or agent stands behind the name."""
        return self.env_class is not None or self.function is not None or self.agent is not None


class UserEnvironmentConfig(EnvironmentConfig):
    """A user's `env.<name>`: keys other than these reach the class as they are."""

    model_config = ConfigDict(extra="allow")

    max_concurrency: PositiveInt | None = None
    """Calls of `step` that one actor works on at once: in threads, or as coroutines where `step` is an `async def`.
    null: 64 for an `async def` and for agents, 1 otherwise, since other classes must be safe for threads.
    """


class MathEnvConfig(EnvironmentConfig):
    """`env.math` and its relatives."""

    num_workers: PositiveInt = Field(8, description="Verifier processes.")
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """Verifier of mathematical answers."""
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] = "math"
    """Kind of answer that is expected."""
    stop_strings: NonEmptyStrings | None = Field(None, description="Strings that end a response in this environment.")
    verify_timeout_s: float = Field(10.0, gt=0)
    """Seconds that verifying one response may take; past it the response earns 0."""


class DapoEnvConfig(MathEnvConfig):
    """`env.dapo`: `env.math` with DAPO's verifier, unless it names another."""

    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "dapo_math_verify"
    """Verifier of mathematical answers."""


class MathMultiRewardEnvConfig(EnvironmentConfig):
    """`env.math_multi_reward`."""

    num_workers: PositiveInt = Field(8, description="Accepted for NeMo-RL's recipes; texts are compared in one actor.")
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """Accepted for NeMo-RL's recipes; an answer is right where its text is equal."""
    stop_strings: NonEmptyStrings | None = Field(None, description="Strings that end a response in this environment.")


class CodeTestsEnvConfig(EnvironmentConfig):
    """`env.code_tests`."""

    num_workers: PositiveInt = Field(8, description="Processes that run code.")
    terminate_on_evaluation: bool = Field(True, description="End the episode once code has run.")
    run_timeout_s: float = Field(10.0, gt=0, description="Seconds that the code of one response may run.")
    sandbox: Literal["auto", "bubblewrap", "nsjail", "namespaces", "limits"] = "auto"
    """What keeps the code of a response from the machine: bubblewrap (needs bwrap), nsjail, namespaces of the kernel
    (no network, no other process), or limits on memory and files; auto: the first that works.
    """


class CodeEnvConfig(CodeTestsEnvConfig):
    """`env.code`."""

    packages: list[str] = Field(default_factory=lambda: ["numpy", "sympy"])
    """Packages that a cell may import, besides modules in its working directory and the standard library without os,
    sys and others that reach out of it.
    """


class CodeJaccardEnvConfig(EnvironmentConfig):
    """`env.code_jaccard`."""

    num_workers: PositiveInt = Field(8, description="Processes that compare code.")
    stop_strings: NonEmptyStrings | None = Field(None, description="Strings that end a response in this environment.")


class ReasoningGymEnvConfig(EnvironmentConfig):
    """`env.reasoning_gym`."""

    num_workers: PositiveInt = Field(2, description="Verifier processes.")
    answer_tag: str | None = None
    """Tag around the answer, such as answer for <answer>..</answer>; null takes the whole response."""
    verify_timeout_s: float = Field(10.0, gt=0)
    """Seconds that verifying one response may take; past it the response earns 0."""


class SlidingPuzzleEnvConfig(EnvironmentConfig):
    """`env.sliding_puzzle`."""

    max_moves: PositiveInt = Field(20, description="Actions after which an unsolved puzzle ends.")


class NemoGymEnvConfig(UserEnvironmentConfig):
    """`env.nemo_gym`: keys other than these are NeMo-Gym's own configuration and reach it as they are."""

    agent: str | None = "nemo_gym_agent.NemoGym"
    """Dotted path of what plays the rows, for the interpreter of python."""
    python: str | None = None
    """Interpreter (Python 3.12) of a virtual environment that has the package nemo-gym; null: the run's own."""
    config_paths: list[str] = Field(default_factory=list)
    """NeMo-Gym's configurations: of a model server named policy_model, of agents and of resources."""
    start_timeout_s: float = Field(540.0, gt=0, allow_inf_nan=False)
    """Seconds that NeMo-Gym's servers may take to start, as a part of the first episodes; the first start installs
    their packages.
    """
    num_gpu_nodes: Annotated[int, NotYet("nodes of GPUs for NeMo-Gym's own models")] = 0
    """Nodes for models that NeMo-Gym serves."""
    is_trajectory_collection: Annotated[bool, NotYet("collecting trajectories without training")] = False
    """Collect trajectories alone."""
    pad_dynamic_image_shapes: Annotated[bool, NotYet("vision-language and audio models")] = False
    """Pad images to one shape."""
    invalid_tool_call_patterns: list[str] | None = None
    """Accepted with any value; it is for penalties, which are refused by their own keys."""
    thinking_tags: list[str] | None = None
    """Accepted with any value; it is for penalties, which are refused by their own keys."""


class EnvConfig(Section):
    """`env.*`; names besides these are users' environments."""

    model_config = ConfigDict(extra="allow")
    # pydantic's documented way to give extra keys a type; its base class declares them as Any.
    __pydantic_extra__: dict[str, UserEnvironmentConfig]  # pyrefly: ignore[bad-override-mutable-attribute]

    math: MathEnvConfig = Field(MathEnvConfig(), description="Answers checked by math-verify.")
    math_default: MathEnvConfig | None = Field(None, description="The same under the name some recipes use.")
    dapo: DapoEnvConfig | None = Field(None, description="The same with DAPO's verifier.")
    math_multi_reward: MathMultiRewardEnvConfig | None = None
    """Three reward components per answer: correctness (equal texts), integer and format."""
    code: CodeEnvConfig | None = None
    """A Python notebook: the value of a cell's last expression comes back, names go on."""
    code_tests: CodeTestsEnvConfig | None = None
    """Runs generated Python from its beginning, and judges it by tests or by what it prints."""
    code_jaccard: CodeJaccardEnvConfig | None = Field(None, description="Overlap of words with reference code.")
    reasoning_gym: ReasoningGymEnvConfig | None = None
    """Answers checked by the reasoning-gym task they belong to."""
    sliding_puzzle: SlidingPuzzleEnvConfig | None = Field(None, description="The sliding puzzle, move by move.")
    reward_model: dict[str, object] | None = None
    """A reward model as judge; not built, and refused where an entry of data names it."""
    vlm: dict[str, object] | None = None
    """Answers about images; not built, and refused where an entry of data names it."""
    nemo_gym: NemoGymEnvConfig | None = None
    """Rows of NeMo-Gym, played by its own agents, tools and verifiers against the run's endpoint."""
    should_use_nemo_gym: bool = False
    """NeMo-Gym plays every row. Entries of data say so too (env_name), which it must equal."""
    should_log_nemo_gym_responses: bool = False
    """Accepted with any value; samples show every message of an episode."""

    def of(self, name: str) -> EnvironmentConfig | None:
        """The section of environment `name`, a user's or a built-in one; None when there is none."""
        value = getattr(self, name, None)
        return value if isinstance(value, EnvironmentConfig) else None
