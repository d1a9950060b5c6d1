"""The seam between a policy's worker and the framework that runs its model, and the registry of those frameworks.

A backend owns the model of one rank: its forward and backward passes, its weights, its optimizer and schedule, where
they lie, and its process groups. The worker owns steps, batches and sync sessions. Invariant: every method that is
collective is called on all ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.config.world_sizes import ParallelSizes
from nemo_rl.distributed.processes import importing
from nemo_rl.distributed.worker_groups import resolve_fqn
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.policy.checkpoint_files import BackgroundWriter
from nemo_rl.models.policy.train_step import MicrobatchResult, StepBackend

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nemo_rl.weight_sync.layout import TensorMeta


@dataclass(frozen=True)
class BackendOptions:
    """A policy's requests to its backend besides the configuration."""

    init_optimizer: bool = True
    init_reference_model: bool = True  # whether the weights that the run started from are kept
    weights_path: str | None = None  # checkpoint weights to start from
    optimizer_path: str | None = None  # checkpoint optimizer state to start from
    steps_done: int = 0  # steps behind the weights: where the schedule is if there is no optimizer state
    last_step: int | None = None  # of the run: where schedules end that have no length of their own


class Backend(StepBackend, Protocol):
    """One rank's model on a training framework."""

    snapshots: BackgroundWriter
    _reference: Callable[[], AbstractContextManager[None]] | None

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def sizes(self) -> ParallelSizes:
        return self.groups.sizes

    @property
    def device(self) -> torch.device:
        return self.groups.device

    @property
    def model_config(self) -> PretrainedConfig:
        """The model's Hugging Face configuration."""
        ...

    def kernels(self) -> str:
        """Which implementation of the layers runs, for the log and the run record."""
        ...

    def router_metrics(self) -> dict[str, float]:
        """Metrics of this step's mixture-of-experts routers; empty without experts. Collective."""
        ...

    # -- passes without gradients -------------------------------------------------------------------------------------

    def evaluate(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], loss_fn: LossFunction, *, idle: int
    ) -> list[MicrobatchResult]:
        """Losses and metrics without a backward pass, in evaluation mode."""
        ...

    def logprobs(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], *, filtered: bool, idle: int
    ) -> list[torch.Tensor]:
        """[B, S] log-probabilities of each microbatch on the host, with or without generation's filters."""
        ...

    def topk_logits(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], k: int, *, idle: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probabilities (before generation's filters) and ids [B, S, k] of the k most likely tokens after each
        position of each microbatch, on the host.
        """
        ...

    def reference_weights(self) -> AbstractContextManager[None]:
        """The model computes with the weights that the run started from inside the block. Raises RuntimeError: they
        were not kept.
        """
        if self._reference is None:
            raise RuntimeError("this policy keeps no reference weights (init_reference_model=False)")
        return self._reference()

    def warm_up(
        self, rows: Mapping[str, torch.Tensor], long_rows: Mapping[str, torch.Tensor] | None, loss_fn: LossFunction
    ) -> bool:
        """Scores and trains on rows to trigger compilation, and drops the result. Returns whether there was something
        to compile. Collective.

        Args:
            long_rows: As many tokens as a row of the run has, for some layers alone: compilers choose other kernels for
                long rows. None where `rows` are as long.
        """
        return False

    # -- weights ------------------------------------------------------------------------------------------------------

    def tensor_metas(self, dtype: torch.dtype) -> list[TensorMeta]:
        """Names, shapes and dtypes of what `export` yields, in order; the same on every rank."""
        ...

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that a refit sends: `full_weights`, or less where engines have the rest. Collective."""
        ...

    def full_weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and full tensors. Collective: every rank consumes it. `dtype` may be applied by a rank
        that gathers; None keeps the precision of the weights.
        """
        ...

    # -- optimizer and schedule ---------------------------------------------------------------------------------------

    def rates(self) -> dict[str, float]:
        """`lr` and `wd` of the next step; nothing for a policy that does not train."""
        ...

    def step_schedule(self) -> None:
        """Steps the learning-rate schedule once."""
        ...

    # -- residency ----------------------------------------------------------------------------------------------------

    def to_device(self, *, optimizer: bool) -> None:
        """Model, and optimizer state if asked for, on the device."""
        ...

    def offload(self, *, model: bool, optimizer: bool, keep_gradients: bool) -> None:
        """Moves model or optimizer state to the host and frees memory. `keep_gradients`: whether an open step needs its
        gradients restored.
        """
        ...

    def drop_communicators(self) -> None:
        """Frees the memory of device communicators. Collective."""
        self.groups.communicators.drop()

    def rebuild_communicators(self) -> None:
        """Makes dropped communicators usable again, if any. Collective."""
        self.groups.communicators.rebuild()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, weights_path: str, optimizer_path: str | None, save_format: str) -> None:
        """Snapshots weights (a Hugging Face directory) and optimizer state; files follow in the background."""
        ...

    def poll_saved(self) -> bool:
        """Whether everything is on disk. Raises OSError: the disk is full or the directory cannot be written."""
        return self.snapshots.poll()

    def wait_saved(self) -> None:
        """Waits until everything is on disk. Raises OSError: the disk is full or the directory cannot be written."""
        self.snapshots.wait()


@dataclass(frozen=True)
class BackendSpec:
    """A training framework. `checker`: dotted name of `(policy section, Hugging Face configuration) -> None`, called by
    the driver before anything starts; raises a typed error for a model or package that does not fit.
    """

    name: str  # for messages and the run record
    builder: str  # dotted name of `(policy section, parallel sizes, BackendOptions) -> Backend`, called on every rank
    checker: str
    device_checker: str  # dotted name of `(policy section, cuda) -> None`, called once the kind of slot is known

    def load(self) -> None:
        """Imports what `build` needs, which takes seconds; touches no accelerator."""
        with importing():
            resolve_fqn(self.builder)
            resolve_fqn("transformers.AutoModelForCausalLM")

    def build(self, cfg: PolicyConfig, sizes: ParallelSizes, options: BackendOptions) -> Backend:
        """This rank's backend. Collective."""
        return cast(Backend, resolve_fqn(self.builder)(cfg, sizes, options))

    def check(self, cfg: PolicyConfig, model: PretrainedConfig) -> None:
        """Whether the model can be trained as configured, before anything starts.

        Args:
            model: The model's Hugging Face configuration.

        Raises UnsupportedModelError: its sizes do not divide, it is of an unknown kind, or its weights are quantised;
        KernelUnavailableError: a package is asked for and not installed; OptimizerConfigError: optimizer or schedule do
        not exist or refuse their arguments.
        """
        resolve_fqn(self.checker)(cfg, model)

    def check_device(self, cfg: PolicyConfig, *, cuda: bool) -> None:
        """Whether the accelerators can run the kernels. Raises KernelUnavailableError: they cannot."""
        resolve_fqn(self.device_checker)(cfg, cuda=cuda)


BACKENDS = {
    "dtensor": BackendSpec(
        "dtensor",
        "nemo_rl.models.dtensor.dtensor_backend.build_backend",
        "nemo_rl.models.dtensor.dtensor_checks.check_policy",
        "nemo_rl.models.dtensor.dtensor_checks.check_device",
    ),
    "megatron": BackendSpec(
        "megatron",
        "nemo_rl.models.megatron.megatron_backend.build_backend",
        "nemo_rl.models.megatron.megatron_checks.check_policy",
        "nemo_rl.models.megatron.megatron_checks.check_device",
    ),
}


def backend_spec(cfg: PolicyConfig) -> BackendSpec:
    """The framework that the policy section enables."""
    return BACKENDS["megatron" if cfg.megatron_cfg.enabled else "dtensor"]
