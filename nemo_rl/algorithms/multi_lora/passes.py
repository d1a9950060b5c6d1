"""Training and scoring of several adapters in shared passes, and the policy as one adapter sees it.

An adapter's run calls its view as it would call a policy; one thread joins what several runs ask for. Invariants: an
adapter has at most one request under way; a failure of the workers reaches every adapter, a refused step its own alone.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.config.errors import UserError
from nemo_rl.config.master import MultiLoraConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import WorkerTimeoutError
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.multi_lora.messages import SLOT, StepRefused
from nemo_rl.models.multi_lora.multi_lora_policy import MultiLoraPolicy
from nemo_rl.models.policy.batches import tags_of
from nemo_rl.models.policy.interfaces import BatchHandle, Scores, TrainResult
from nemo_rl.utils.adapter_turns import Ready, Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.config import PolicyConfig
    from nemo_rl.utils.record_events import PolicyStarted
    from nemo_rl.utils.timer import Timer

_SAVE_TIMEOUT_S = 1800.0
_SAVE_POLL_S = 0.1


class AdapterRemoved(UserError, RuntimeError):
    """An adapter was removed while it ran; what its open step had is discarded."""


class AdapterStepRefused(UserError, RuntimeError):
    """An adapter's loss failed or was not finite; its weights are those of the step before."""


@dataclass(frozen=True)
class _Work:
    """What an adapter asked for."""

    slot: int
    rows: BatchedDataDict
    answer: Future[Any]
    loss_fn: LossFunction | None = None  # of a training step
    policy: bool = False  # which scores are wanted
    reference: bool = False
    asked: float = field(default_factory=time.monotonic)


class SharedPasses:
    """Joins what adapters ask for into passes, on a thread of its own.

    `policy`: runs the passes.
    """

    def __init__(self, policy: MultiLoraPolicy, cfg: MultiLoraConfig) -> None:
        self._policy = policy
        self._turns = Turns(cfg.pass_tokens, cfg.wait_s, cfg.pass_share)
        self._work: dict[str, _Work] = {}
        self._waited_s: dict[str, float] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="adapter-passes", daemon=True)
        self._thread.start()

    def join(self, adapter: str, weight: float) -> None:
        """An adapter takes part."""
        with self._changed:
            self._turns.join(adapter, weight)
            self._changed.notify()

    def leave(self, adapter: str) -> None:
        """An adapter takes part no more; what it waits for fails with AdapterRemoved."""
        with self._changed:
            self._turns.leave(adapter)
            work = self._work.pop(adapter, None)
            self._changed.notify()
        if work is not None:
            work.answer.set_exception(AdapterRemoved(f"adapter {adapter} was removed"))

    def waited_s(self, adapter: str) -> float:
        """Seconds for which an adapter has waited for passes so far, those of an earlier one of its name too."""
        return self._waited_s.get(adapter, 0.0)

    def put(self, adapter: str, work: _Work, kind: object) -> None:
        """An adapter asks for a pass; its answer is `work.answer`. `kind`: only equal ones share a pass."""
        tokens = int(work.rows["input_lengths"].sum())
        with self._changed:
            self._turns.put(Ready(adapter, tokens, time.monotonic(), kind))
            self._work[adapter] = work
            self._changed.notify()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (due := self._turns.due(time.monotonic())) != 0.0:
                    self._changed.wait(due)
                if self._closed:
                    return
                taken = {request.adapter: self._work.pop(request.adapter) for request in self._turns.take()}
                now = time.monotonic()
                for adapter, work in taken.items():
                    self._waited_s[adapter] = self._waited_s.get(adapter, 0.0) + now - work.asked
            try:
                self._run(list(taken.values()))
            except BaseException as error:  # noqa: BLE001 - every adapter that waits has to hear of it
                for work in taken.values():
                    if not work.answer.done():
                        work.answer.set_exception(error)

    def _run(self, works: list[_Work]) -> None:
        rows = BatchedDataDict.from_batches([_with_slot(work) for work in works])
        losses = {work.slot: work.loss_fn for work in works if work.loss_fn is not None}
        if losses:
            results = self._policy.train_adapters(rows, losses)
            for work in works:
                result = results[work.slot]
                if isinstance(result, StepRefused):
                    work.answer.set_exception(AdapterStepRefused(result.reason))
                else:
                    work.answer.set_result(result)
            return
        policy, reference = (any(getattr(work, of) for work in works) for of in ("policy", "reference"))
        scores = self._policy.score_adapters(rows, policy=policy, reference=reference)
        start = 0
        for work in works:
            size, width = work.rows["input_ids"].shape
            wanted = [name for name, of in (("logprobs", work.policy), ("reference_logprobs", work.reference)) if of]
            work.answer.set_result(
                BatchedDataDict({name: scores[name][start : start + size, :width] for name in wanted})
            )
            start += size

    def close(self) -> None:
        """Ends the thread; what still waits fails."""
        with self._changed:
            self._closed = True
            left = dict(self._work)
            self._work.clear()
            self._changed.notify()
        for adapter, work in left.items():
            work.answer.set_exception(AdapterRemoved(f"adapter {adapter}: the job ends"))
        self._thread.join()


def _with_slot(work: _Work) -> BatchedDataDict:
    slots = torch.full((work.rows.size,), work.slot)
    return BatchedDataDict({**work.rows, SLOT: slots})


class AdapterPolicy:
    """The policy as the run of one adapter sees it; see `PolicyInterface`.

    Args:
        cfg: The adapter's policy section.
        removed: Set when the adapter was removed; calls raise AdapterRemoved from then on.
        tokenizer: Saved with checkpoints.
    """

    def __init__(
        self,
        passes: SharedPasses,
        policy: MultiLoraPolicy,
        cfg: PolicyConfig,
        name: str,
        slot: int,
        removed: threading.Event,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._passes, self._policy, self.cfg = passes, policy, cfg
        self._name, self._slot, self._removed, self._tokenizer = name, slot, removed, tokenizer
        generation = cfg.generation
        # A pass has one transform of logits.
        self._transform = (generation.temperature, generation.top_p, generation.top_k)

    @property
    def started(self) -> PolicyStarted | None:
        """What runs the base model."""
        return self._policy.started

    def require_present(self) -> None:
        """Raises AdapterRemoved: the adapter was removed."""
        if self._removed.is_set():
            raise AdapterRemoved(f"adapter {self._name} was removed")

    def _ask(self, rows: BatchHandle, kind: str, **wanted: Any) -> Future[Any]:
        self.require_present()
        if not isinstance(rows, BatchedDataDict):
            raise TypeError("an adapter's policy takes batches of this process")
        answer: Future[object] = Future()
        self._passes.put(self._name, _Work(self._slot, rows, answer, **wanted), (kind, self._transform, *sorted(rows)))
        return answer

    def _score(self, rows: BatchHandle, *, policy: bool, reference: bool) -> Scores:
        kind = f"scores {policy} {reference}"
        if isinstance(rows, BatchedDataDict):
            rows = BatchedDataDict({name: rows[name] for name in ("input_ids", "input_lengths", *tags_of(rows))})
        return self._ask(rows, kind, policy=policy, reference=reference).result()

    def get_logprobs(self, data: BatchHandle, timer: Timer | None = None) -> Scores:
        return self._score(data, policy=True, reference=False)

    def get_reference_policy_logprobs(
        self, data: BatchHandle, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> Scores:
        return self._score(data, policy=False, reference=True)

    def get_policy_and_reference_logprobs(self, data: BatchHandle, timer: Timer | None = None) -> Scores:
        return self._score(data, policy=True, reference=True)

    def submit_train(self, data: BatchHandle, loss_fn: LossFunction, timer: Timer | None = None) -> Future[TrainResult]:
        """Asks for a step of this adapter's optimizer on the rows. The result raises AdapterStepRefused,
        AdapterRemoved: the weights are those before the step; WorkerError: a worker failed.
        """
        return self._ask(data, "train", loss_fn=loss_fn)

    def prepare_for_training(self) -> None:
        """Does nothing: base and adapters stay on the device."""

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Does nothing: base and adapters stay on the device."""

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        save_format: str = "safetensors",
    ) -> None:
        """Snapshots the adapter as a PEFT directory; the files are complete after `finalize_async_save`."""
        self._policy.save_slot(self._slot, weights_path, optimizer_path)
        for path in (tokenizer_path, weights_path):
            if path is not None:
                self._tokenizer.save_pretrained(path)

    def finalize_async_save(self) -> None:
        """Waits until the last snapshot is on disk. Raises WorkerError: it cannot be written; WorkerTimeoutError: it is
        not complete after half an hour.
        """
        deadline = time.monotonic() + _SAVE_TIMEOUT_S
        while not self._policy.slot_written(self._slot):
            if time.monotonic() > deadline:
                raise WorkerTimeoutError(f"adapter {self._name}: its checkpoint is not on disk after half an hour")
            time.sleep(_SAVE_POLL_S)

    def shutdown(self) -> bool:
        """Does nothing: the job ends the policy."""
        return True
