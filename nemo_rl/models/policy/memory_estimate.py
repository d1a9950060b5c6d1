"""GPU memory that training takes: estimated before it starts, and explained where it runs out.

The estimate is of the DTensor backend with compiled layers. Per token and layer a compiled Llama-shaped layer keeps the
inputs of its norms, its attention's queries, keys, values and output, and three times its feed-forward width, in half
precision; measured peaks of Qwen2.5 0.5B and 1.5B with rows of 8,192 to 32,768 tokens on an H200 are within 6 % of it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.config.errors import UserError
from nemo_rl.config.world_sizes import ParallelSizes, compiles_layers
from nemo_rl.distributed.devices import free_memory, total_memory
from nemo_rl.models.policy.scoring import FUSED_CHUNK_BYTES
from nemo_rl.utils.flops import TransformerShape

_GIB = 1 << 30
ASLEEP_BYTES = int(2.3 * _GIB)
"""What a sleeping engine and its CUDA context keep, measured at 1.5B with CUDA graphs."""
KEPT_SHARE = 0.1
"""Share of a device's memory that gathered weights may take between passes."""
_SURE = 0.85
_CPU_WORKER_BYTES = int(0.6e9)
_WARM_UP_BYTES = 6 * _GIB


class GpuMemoryError(UserError, RuntimeError):
    """A GPU has less memory than training needs."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest GPU of training, by what holds them. `activations` is None where layers are not compiled or
    the backend is not DTensor: then it is not known.
    """

    device_bytes: int  # of the GPU
    engines: int  # that sleep on it
    weights: int
    optimizer: int
    gradients: int
    gathered: int  # weights in the precision of the passes
    scoring: int  # logits of a chunk, and the gradient of the output projection
    row_tokens: int  # tokens of the longest row
    activations: int | None

    @property
    def state(self) -> int:
        """Bytes that every step needs, whatever the row."""
        return self.weights + self.optimizer + self.gradients + self.gathered + self.scoring

    @property
    def peak(self) -> int:
        """Bytes at the end of a forward pass over the longest row; without activations where they are not known."""
        return self.state + (self.activations or 0)

    def line(self) -> str:
        """The estimate in words."""
        row = "activations are not known" if self.activations is None else f"activations {_gib(self.activations)}"
        several = "s" * (self.engines > 1)
        asleep = (
            f"; {self.engines} sleeping engine{several} {_gib(self.engines * ASLEEP_BYTES)}" if self.engines else ""
        )
        return (
            f"memory of a training GPU, estimated: {_gib(self.peak)} at most, of {_gib(self.device_bytes)} GiB: "
            f"weights {_gib(self.weights)}, optimizer {_gib(self.optimizer)}, gradients {_gib(self.gradients)}, "
            f"weights of the passes {_gib(self.gathered)}, scoring {_gib(self.scoring)}, a row of "
            f"{self.row_tokens:,} tokens: {row}{asleep}"
        )

    def check(self, policy: PolicyConfig) -> str | None:
        """A warning where it is close. Raises GpuMemoryError: it cannot fit."""
        left = self.device_bytes - self.engines * ASLEEP_BYTES
        if self.state > left:
            raise GpuMemoryError(
                f"{policy.model_name} cannot be trained here: {self.line()}. Take more GPUs (cluster.gpus_per_node, "
                "cluster.num_nodes), over which weights and optimizer are cut, or train adapters "
                "(policy.dtensor_cfg.lora_cfg.enabled=true), or keep the weights on the host "
                "(policy.dtensor_cfg.cpu_offload=true)"
            )
        if self.activations is None or self.peak <= left:
            return None
        fits = int(self.row_tokens * (left - self.state) / self.activations / 256) * 256
        advice = f"lower {row_key(policy, training=True)} to {max(fits, 256):,}"
        if self.state + _SURE * self.activations > left:
            raise GpuMemoryError(
                f"the longest row does not fit: {self.line()}; {advice}, or set "
                "policy.dtensor_cfg.activation_checkpointing=true"
            )
        return f"the longest row may not fit: {self.line()}; if it does not, {advice}"

    def starts_beside_engines(self, share: float) -> bool:
        """Whether weights, gradients (in both precisions) and the passes of the warm-up fit while engines that are
        awake take `share` of the GPU.
        """
        first = self.weights + self.gradients + 2 * self.gathered + _WARM_UP_BYTES
        return first < (1.0 - share) * self.device_bytes


def estimate(
    policy: PolicyConfig,
    shape: TransformerShape,
    sizes: ParallelSizes,
    *,
    parameters: int,
    device_bytes: int,
    engines: int = 0,
) -> MemoryEstimate:
    """Memory of a training GPU by use, in bytes.

    Args:
        shape: Sizes of the model.
        parameters: Number of its weights.
        device_bytes: Memory of a GPU.
        engines: That sleep on each GPU.
    """
    half = 2 if policy.precision in ("bfloat16", "float16") else 4
    tokens = row_tokens(policy)
    trains = policy.optimizer is not None or policy.megatron_cfg.enabled
    if policy.megatron_cfg.enabled:
        held = parameters / (sizes.tp * sizes.pp)
        return MemoryEstimate(
            device_bytes,
            engines,
            weights=int(half * held),
            # Weights and two moments in float32, cut over the data.
            optimizer=int(12 * held / sizes.dp) if trains else 0,
            gradients=int(4 * held),
            gathered=0,
            scoring=_scoring_bytes(shape, tokens, half, trains_head=True) // sizes.tp,
            row_tokens=tokens,
            activations=None,
        )
    backend = policy.dtensor_cfg
    ranks = sizes.dp * sizes.cp * sizes.tp / backend.dp_replicate_size
    adapted = 14 * shape.layers * shape.hidden * backend.lora_cfg.dim
    trained = (adapted if backend.lora_cfg.enabled else parameters) / ranks
    resident = 0 if backend.cpu_offload else 1
    gathered = half * parameters / sizes.tp
    if gathered > KEPT_SHARE * device_bytes:
        # A layer at a time and the next one, beside the embeddings.
        embeddings = shape.vocabulary * shape.hidden
        gathered = half * (embeddings + 2 * (parameters - embeddings) / shape.layers) / sizes.tp
    compiled = compiles_layers(policy, sizes, cuda=True)
    return MemoryEstimate(
        device_bytes,
        engines,
        weights=int(4 * parameters / ranks) * resident,
        optimizer=int(8 * trained) * resident if trains else 0,
        gradients=int(4 * trained) * resident,
        gathered=int(gathered),
        scoring=_scoring_bytes(shape, tokens, half, trains_head=not backend.lora_cfg.enabled) // sizes.tp,
        row_tokens=tokens,
        activations=_activations(policy, shape, sizes, tokens, half) if compiled else None,
    )


def policy_bytes_on_cpu(policy: PolicyConfig, parameters: int, ranks: int, *, reference: bool) -> int:
    """Host memory of a policy worker of the DTensor backend on a CPU slot, without its activations; of SmolLM2 135M
    within 5 % of what was measured.

    Args:
        parameters: Number of the model's weights.
        ranks: Workers, over which weights, gradients and optimizer are cut.
        reference: Whether it keeps the reference's weights.
    """
    adapted = policy.dtensor_cfg.lora_cfg.enabled
    # Weights, and the optimizer's memory for each: gradient, two moments, and a copy while it steps.
    held = parameters * (1 + reference + (0 if adapted or policy.optimizer is None else 4)) / ranks
    # FSDP gathers the weights for a pass, and the gradients as long.
    gathered = parameters * (1 if adapted or policy.optimizer is None else 2)
    return int(4 * (held + gathered)) + _CPU_WORKER_BYTES


def _scoring_bytes(shape: TransformerShape, tokens: int, half: int, *, trains_head: bool) -> int:
    chunk = min(tokens * shape.vocabulary, FUSED_CHUNK_BYTES // 4)
    head = shape.vocabulary * shape.hidden if trains_head else 0
    return 2 * half * chunk + (4 + half) * head


def _activations(policy: PolicyConfig, shape: TransformerShape, sizes: ParallelSizes, tokens: int, half: int) -> int:
    feed_forward = shape.mlp_operations / (3 * shape.hidden)
    cut = 3 * feed_forward + 3 * shape.query_width + 4 * shape.key_value_width
    whole = 5.0 * shape.hidden
    layer = cut / sizes.tp + whole / (sizes.tp if policy.dtensor_cfg.sequence_parallel else 1)
    kept = layer * shape.layers
    if policy.dtensor_cfg.activation_checkpointing:
        kept = shape.hidden * shape.layers + layer
    return int(half * kept * tokens / sizes.cp)


def row_tokens(policy: PolicyConfig) -> int:
    """Tokens of the longest row of training."""
    if policy.sequence_packing.enabled:
        return policy.sequence_packing.train_mb_tokens
    if policy.dynamic_batching.enabled:
        return policy.dynamic_batching.train_mb_tokens
    return policy.train_micro_batch_size * policy.max_total_sequence_length


def row_key(policy: PolicyConfig, *, training: bool) -> str:
    """The key that says how long rows are."""
    tokens = "train_mb_tokens" if training else "logprob_mb_tokens"
    if policy.sequence_packing.enabled:
        return f"policy.sequence_packing.{tokens}"
    if policy.dynamic_batching.enabled:
        return f"policy.dynamic_batching.{tokens}"
    return "policy.train_micro_batch_size" if training else "policy.logprob_batch_size"


def _gib(count: float) -> str:
    return f"{count / _GIB:.1f}"


@contextmanager
def explained(policy: PolicyConfig, device: torch.device, doing: str, *, training: bool) -> Generator[None]:
    """Turns PyTorch's out-of-memory error into one that names the holders of the memory and the key to change.

    Args:
        doing: The worker's activity, such as `training`.
        training: Whether rows of training are computed, rather than rows to score.

    Raises GpuMemoryError: the memory was not enough.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise GpuMemoryError(_why(policy, device, doing, str(error), training=training)) from None


def _why(policy: PolicyConfig, device: torch.device, doing: str, said: str, *, training: bool) -> str:
    asked = said.partition("Tried to allocate ")[2].partition(". ")[0] or "more memory"
    key = row_key(policy, training=training)
    advice = (
        f"lower {key} (now {_value(policy, key)}), or set policy.dtensor_cfg.activation_checkpointing=true, or lower "
        "policy.generation.vllm_cfg.gpu_memory_utilization where engines are awake beside training"
    )
    if device.type != "cuda":
        return f"out of memory while {doing}: {asked} asked for; {advice}"
    total, free = total_memory(device), free_memory(device)
    own, kept = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return (
        f"out of GPU memory while {doing}: {asked} asked for, {_gib(free)} GiB free of {_gib(total)} GiB. This "
        f"worker's tensors hold {_gib(own)} GiB and its allocator {_gib(kept - own)} GiB more; engines and other "
        f"processes hold {_gib(total - free - kept)} GiB. If the worker's part grew from step to step "
        f"(gpu/trainer_allocated_gib), something is never freed; else {advice}"
    )


def _value(policy: PolicyConfig, key: str) -> object:
    section: object = policy
    for part in key.split(".")[1:]:
        section = getattr(section, part)
    return section
