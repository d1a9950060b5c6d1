"""One rank of a frozen base model with adapter slots: a DTensor backend whose passes serve several adapters at once.

Every slot has its own optimizer, schedule, clipping, step counter and `TrainStep`. Rows of several adapters share
packed microbatches; each adapter's loss sees its own rows alone. Invariants: an adapter's gradient is that of its rows
alone, up to the rounding of sums; a loss that fails or is not finite adds nothing to the pass and fails its own
adapter's step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from nemo_rl.config import PolicyConfig
from nemo_rl.config.world_sizes import ParallelSizes
from nemo_rl.distributed.accelerator_slots import CPU, CUDA
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.communicators import RankGroups
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.dtensor.dtensor_backend import DTensorBackend
from nemo_rl.models.dtensor.dtensor_checkpoint import SCHEDULE_FILE
from nemo_rl.models.dtensor.dtensor_lora import KEY, chosen_layers, chosen_of
from nemo_rl.models.dtensor.export import hf_name
from nemo_rl.models.dtensor.model_loading import load_scorer
from nemo_rl.models.dtensor.parallelize import ParallelMesh
from nemo_rl.models.dtensor.scorer import CausalLMScorer
from nemo_rl.models.multi_lora.messages import SLOT
from nemo_rl.models.multi_lora.slots import AdapterSlots, Span, spans_of
from nemo_rl.models.policy.checkpoint_files import BackgroundWriter, host_copy, write_adapter_directory
from nemo_rl.models.policy.lora import start_factors
from nemo_rl.models.policy.model_config import CheckpointMismatchError
from nemo_rl.models.policy.optimizer import advance_scheduler, build_optimizer, build_scheduler
from nemo_rl.models.policy.packed import PackedBatch, idle_microbatch, logprob_rows, microbatch_loss, pack
from nemo_rl.models.policy.scoring import LogitTransform, TokenScores, logit_transform
from nemo_rl.models.policy.train_step import MicrobatchResult, TrainStep
from nemo_rl.utils.adapter_files import AdapterInfo

OPTIMIZER_FILE = "adapter_optimizer.pt"


class SlotStepBackend:
    """One slot as the backend of a `TrainStep`: the step reads and changes this adapter's gradients alone."""

    def __init__(
        self, mesh: ParallelMesh, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self.groups: RankGroups = mesh
        self._mesh = mesh
        self._parameters, self._optimizer = list(parameters), optimizer

    def start_step(self) -> None:
        self.discard_gradients()

    def forward_backward(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], loss_fn: LossFunction, *, idle: int
    ) -> list[MicrobatchResult]:
        raise RuntimeError("slots are computed together: MultiLoraBackend.forward_backward_slots")

    def gradient_norm(self) -> torch.Tensor:
        """Sums this adapter's gradients over ranks, in place; their global L2 norm."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self._mesh.gradient_mesh.size() > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self._mesh.gradient_mesh.get_group())
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        squares = [torch.linalg.vector_norm(gradient).double().square() for gradient in gradients]
        return torch.stack(squares).sum().sqrt()

    @torch.no_grad()
    def apply_gradients(self, factor: float) -> None:
        torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)
        self._optimizer.step()
        self.discard_gradients()

    def trained_weights(self) -> list[torch.Tensor]:
        return list(self._parameters)

    def discard_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


@dataclass
class FilledSlot:
    """State of a filled slot besides its factors."""

    info: AdapterInfo
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    step: TrainStep
    transform: LogitTransform  # how its tokens are drawn
    max_grad_norm: float | None
    steps: int = 0  # steps of its optimizer
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)

    def rates(self) -> dict[str, float]:
        """`lr` and `wd` of its next step."""
        group = self.optimizer.param_groups[0]
        return {"lr": float(group["lr"]), "wd": float(group.get("weight_decay", 0.0))}

    def step_schedule(self) -> None:
        """Counts a step of the optimizer."""
        self.steps += 1
        if self.scheduler is not None:
            self.scheduler.step()


def build_backend(cfg: PolicyConfig, sizes: ParallelSizes) -> MultiLoraBackend:
    """This rank's frozen base model, without adapters. Collective. For errors see `load_scorer`."""
    accelerator = CUDA if torch.cuda.is_available() else CPU
    mesh = ParallelMesh(sizes, accelerator, dp_replicate=cfg.dtensor_cfg.dp_replicate_size)
    base = cfg.model_copy(deep=True)
    base.dtensor_cfg.lora_cfg.enabled = False
    # Spans differ from row to row, and each pattern of them would be compiled again.
    base.dtensor_cfg.torch_compile = False
    scorer = load_scorer(base, mesh)
    names = [hf_name(name) for name in chosen_layers(scorer.lm, cfg.dtensor_cfg.lora_cfg)]
    return MultiLoraBackend(scorer, mesh, base, AdapterSlots(scorer, names, mesh.device))


class MultiLoraBackend(DTensorBackend):
    """One rank: the base model, its slots and their optimizers."""

    def __init__(self, scorer: CausalLMScorer, mesh: ParallelMesh, cfg: PolicyConfig, slots: AdapterSlots) -> None:
        super().__init__(scorer, mesh, cfg)
        self.slots = slots
        self.adapters: dict[int, FilledSlot] = {}

    # -- slots --------------------------------------------------------------------------------------------------------

    def fill(
        self, slot: int, cfg: PolicyConfig, weights_path: str | None, optimizer_path: str | None, steps_done: int = 0
    ) -> int:
        """Puts an adapter into an empty slot, at its start or from a checkpoint; the bytes that it takes with its
        optimizer's state.

        Args:
            cfg: The adapter's policy section.
            weights_path: A PEFT directory to start from.
            optimizer_path: Directory of the optimizer's state to start from.
            steps_done: Steps behind the weights, for a start without optimizer state.

        Raises CheckpointMismatchError: the checkpoint is of another base, rank or optimizer.
        """
        if slot in self.adapters:
            raise RuntimeError(f"slot {slot} holds an adapter; clear it first")
        lora = cfg.dtensor_cfg.lora_cfg
        sizes = self.slots.sizes()
        sizes = {name: sizes[name] for name in chosen_of(list(sizes), lora, "the base")}
        info = AdapterInfo.of(cfg.model_name, lora.dim, lora.alpha, sizes)
        self.slots.fill(slot, start_factors(weights_path, info, sizes, lora.lora_A_init, KEY), info.scale)
        parameters = self.slots.parameters(slot)
        if cfg.optimizer is None:
            raise RuntimeError("an adapter without policy.optimizer cannot train")
        optimizer = build_optimizer(cfg.optimizer, parameters)
        scheduler = build_scheduler(cfg.scheduler, optimizer)
        generation = cfg.generation
        transform = logit_transform(generation.temperature, generation.top_p, generation.top_k, self.scorer.lm.config)
        adapter = FilledSlot(
            info,
            optimizer,
            scheduler,
            TrainStep(SlotStepBackend(self.mesh, parameters, optimizer)),
            transform,
            cfg.max_grad_norm,
        )
        if optimizer_path is not None:
            _load_optimizer(adapter, dict(self.slots.named(slot)), optimizer_path)
        else:
            adapter.steps = steps_done
            if scheduler is not None:
                advance_scheduler(scheduler, steps_done)
        self.adapters[slot] = adapter
        # Factors, their gradients and two moments.
        return 4 * sum(parameter.numel() * parameter.element_size() for parameter in parameters)

    def clear(self, slot: int) -> None:
        """Empties a slot; nothing to do when it is empty."""
        if slot in self.adapters:
            self.adapters.pop(slot).step.abort()
            self.slots.clear(slot)

    # -- passes -------------------------------------------------------------------------------------------------------

    def forward_backward_slots(
        self,
        microbatches: Sequence[BatchedDataDict],
        losses: Mapping[int, LossFunction],
        *,
        idle: int,
    ) -> tuple[dict[int, list[tuple[BatchedDataDict, MicrobatchResult]]], dict[int, str]]:
        """Adds the gradients of the plain-sum losses of all rows to their slots'.

        Args:
            microbatches: Rows of one logit transform, with a column `SLOT`; rows of a slot are neighbours.
            losses: The loss of each slot.
            idle: Microbatches that other ranks have and this one has not.

        Returns per slot its rows of each microbatch and what came of them; and the error of slots whose loss raised.
        """
        self.scorer.train()
        outcomes: dict[int, list[tuple[BatchedDataDict, MicrobatchResult]]] = {slot: [] for slot in losses}
        failed: dict[int, str] = {}
        for data in microbatches:
            spans, _, output = self._score_slots(data, trained_only=True, transform=None)
            # Every rank runs a backward pass, also where all losses raise.
            total = torch.nan_to_num(output.logprobs_T).sum() * 0.0
            for slot, start, end in spans:
                rows = (data[SLOT] == slot).nonzero().flatten()
                own = _without_slot(data.select_indices(rows))
                part = TokenScores(output.logprobs_T[start:end], output.unfiltered_T[start:end])
                filters = self.adapters[slot].transform.filters
                try:
                    batch = pack(own, self.device, share=self._share_prompts)
                    loss, result = microbatch_loss(own, losses[slot], batch, part, filters=filters, device=self.device)
                except Exception as error:  # noqa: BLE001 - a user's loss may raise anything; it ends its adapter alone
                    failed[slot] = f"{type(error).__name__}: {error}"
                    continue
                outcomes[slot].append((own, result))
                # A loss that is not finite reaches only its own rows, and so only the gradients of its own slot.
                total = total + loss
            total.backward()
        for _ in range(idle):
            self._idle_slots(next(iter(losses)))
        self.scorer.drop_gathered()
        return outcomes, failed

    def _score_slots(
        self, data: BatchedDataDict, *, trained_only: bool, transform: LogitTransform | None, adapted: bool = True
    ) -> tuple[list[Span], PackedBatch, TokenScores]:
        """The spans of a microbatch, its row and the scores of that, by default under its adapters' transform."""
        batch = pack(
            _without_slot(data),
            self.device,
            multiple=self._row_multiple,
            trained_only=trained_only,
            share=self._share_prompts,
            # Adapters may be at the same prompt, whose keys and values differ between them.
            apart=((data[SLOT].diff() != 0).nonzero().flatten() + 1).tolist(),
        )
        spans = spans_of(data[SLOT].tolist(), batch.ends)
        self.slots.plan.aim(spans if adapted else ())
        return spans, batch, self.scorer(batch, transform or self.adapters[spans[0][0]].transform)

    def _idle_slots(self, slot: int) -> None:
        """A pass of zeros through an adapter: without one there is nothing to run backward."""
        self.slots.plan.aim([(slot, 0, 2)])
        scores: TokenScores = self.scorer(
            pack(idle_microbatch(), self.device, multiple=self._row_multiple), LogitTransform()
        )
        (scores.unfiltered_T.sum() * 0.0).backward()

    @torch.no_grad()
    def logprobs_of_slots(
        self, microbatches: Sequence[BatchedDataDict], *, reference: bool, idle: int
    ) -> list[torch.Tensor]:
        """[B, S] log-probabilities of each microbatch on the host: of its adapters under generation's filters, or of
        the base model without filters (`reference`).
        """
        self.scorer.eval()
        rows = []
        for data in microbatches:
            own = self.adapters[int(data[SLOT][0])].transform
            transform = own.unfiltered() if reference else own
            _, batch, scores = self._score_slots(data, trained_only=False, transform=transform, adapted=not reference)
            rows.append(logprob_rows(data, batch, scores))
        self.slots.plan.aim(())
        self._idle_passes(idle)
        return rows

    # -- an adapter's state for others --------------------------------------------------------------------------------

    def factors(self, slot: int) -> dict[str, torch.Tensor]:
        """Copies of a slot's factors on the host, by `<layer>.lora_A` and `<layer>.lora_B`."""
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.slots.named(slot)}

    def save_adapter(self, slot: int, weights_path: str, optimizer_path: str | None) -> None:
        """Snapshots an adapter; its PEFT directory, and its optimizer's state, are written in the background."""
        adapter = self.adapters[slot]
        adapter.writer.drop()
        if self.rank != 0:
            return
        adapter.writer.submit(
            write_adapter_directory, self.factors(slot), self.model_config, weights_path, adapter.info
        )
        if optimizer_path is not None:
            state = {
                name: dict(adapter.optimizer.state[parameter])
                for name, parameter in self.slots.named(slot)
                if parameter in adapter.optimizer.state
            }
            adapter.writer.submit(_write_optimizer, host_copy(state), adapter.steps, optimizer_path)


def _without_slot(data: BatchedDataDict) -> BatchedDataDict:
    return BatchedDataDict({name: column for name, column in data.items() if name != SLOT})


def _write_optimizer(state: object, steps: int, path: str) -> None:
    Path(path).mkdir(parents=True, exist_ok=True)
    torch.save(state, Path(path) / OPTIMIZER_FILE)
    (Path(path) / SCHEDULE_FILE).write_text(json.dumps({"steps": steps}), encoding="utf-8")


def _load_optimizer(adapter: FilledSlot, named: Mapping[str, torch.nn.Parameter], path: str) -> None:
    """Restores the optimizer's state and brings the schedule to the step of the checkpoint, in place. Raises
    CheckpointMismatchError: the state is of other layers or of another optimizer.
    """
    try:
        state = torch.load(Path(path) / OPTIMIZER_FILE, weights_only=True, map_location="cpu")
        steps = json.loads((Path(path) / SCHEDULE_FILE).read_text(encoding="utf-8"))["steps"]
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointMismatchError(f"{path}: holds no optimizer state of an adapter ({error})") from error
    if steps and state.keys() != named.keys():
        raise CheckpointMismatchError(f"{path}: optimizer state does not fit the adapter's layers")
    for name, values in state.items():
        parameter = named[name]
        adapter.optimizer.state[parameter] = {
            key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in values.items()
        }
    adapter.steps = steps
    if adapter.scheduler is not None:
        advance_scheduler(adapter.scheduler, steps)
