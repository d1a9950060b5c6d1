"""Faults outside time-sharing after which a number is wrong or a sample is lost, each with the tests beside its code.

`python tools/mutants.py tests/planted_faults.py` plants them one at a time; a test must fail for each.
"""

# ruff: noqa: E501 - a fault is a line, and code is quoted as it stands

from __future__ import annotations

LOSS = ("tests/loss/test_clipped_pg.py", "tests/loss/test_gradients.py")
STEP = ("tests/models/test_train_step.py",)
STAGES = (
    "tests/algorithms/test_grpo_rows.py",
    "tests/algorithms/test_advantages.py",
    "tests/algorithms/test_estimators.py",
    "tests/algorithms/test_scored_groups.py",
)
METRICS = ("tests/algorithms/test_grpo_metrics.py", "tests/algorithms/test_scored_groups.py")
STALE = ("tests/algorithms/test_async_driver.py",)
SHARDS = (
    "tests/distributed/test_batched_data_dict.py",
    "tests/models/test_policy_batches.py",
    "tests/models/test_scored_rows.py",
)
RECEIVER = ("tests/weight_sync/test_session.py", "tests/weight_sync/test_receiver.py")
RESUME = ("tests/algorithms/test_resume.py", "tests/algorithms/test_counters.py", "tests/data/test_loader.py")
QUEUE = ("tests/experience/test_failures.py",)
ENVIRONMENT = (
    "tests/environments/test_call.py",
    "tests/experience/test_environment_batcher.py",
    "tests/experience/test_rollout_flow.py",
)
META = ("tests/data_plane/test_meta.py", "tests/data_plane/test_plans.py", "tests/data_plane/test_tags.py")
SUBMITTERS = ("tests/time_sharing/test_run_as_submitter.py",)
SCORES = ("tests/models/test_packed.py", "tests/models/test_policy_batches.py")

_KL_WEIGHT = "current_BT - (tokens.generation_BT if self.cfg.use_on_policy_kl_approximation else current_BT.detach())"

MUTANTS = [
    # loss
    ("kl-weight-detached", "loss/clipped_pg.py", _KL_WEIGHT, f"({_KL_WEIGHT}).detach()", "the KL term loses its score-function gradient", LOSS),
    ("kl-weight-of-previous", "loss/clipped_pg.py", "tokens.generation_BT if self.cfg.use_on_policy_kl", "tokens.previous_BT if self.cfg.use_on_policy_kl", "the KL is weighted against the wrong engine", LOSS),
    ("kl-clamped-weight-keeps-gradient", "loss/clipped_pg.py", "torch.where(raw.abs() > input_clamp_value, weight.detach(), weight)", "weight", "a token that the input clamp cut pushes the policy", LOSS),
    ("kl-weight-after-output-clamp", "loss/clipped_pg.py", "    return kl if output_clamp_value is None else kl.clamp(-output_clamp_value, output_clamp_value)", "    return kl if output_clamp_value is None else kl.clamp(-output_clamp_value, output_clamp_value).detach() + (kl - kl.detach())", "the output clamp lets the gradient through", LOSS),
    ("kl-of-filtered", "loss/clipped_pg.py", "        current_BT = tokens.current_unfiltered_BT\n", "        current_BT = tokens.current_BT\n", "the KL is taken of filtered log-probabilities", LOSS),
    ("kl-input-clamp-one-sided", "loss/clipped_pg.py", "raw.clamp(-input_clamp_value, input_clamp_value)", "raw.clamp(max=input_clamp_value)", "a log-ratio far below zero is not clamped", LOSS),
    ("cispo-clip-not-detached", "loss/clipped_pg.py", "clamped_BT.detach() * tokens.current_BT", "clamped_BT * tokens.current_BT", "CISPO's weight has a gradient", LOSS),
    ("dual-clip-for-all", "loss/clipped_pg.py", "            advantages_BT < 0, torch.minimum(clipped_BT", "            advantages_BT < 2, torch.minimum(clipped_BT", "the dual clip bounds good samples too", LOSS),
    ("on-policy-not-detached", "loss/clipped_pg.py", "current_BT.detach() if self.cfg.force_on_policy_ratio", "current_BT if self.cfg.force_on_policy_ratio", "an on-policy ratio has no gradient", LOSS),
    ("icepop-open-below", "loss/clipped_pg.py", "outside_BT = (weights_BT < lower) | (weights_BT > truncation.upper)", "outside_BT = weights_BT > truncation.upper", "IcePop keeps weights below its bound", LOSS),
    ("sequence-weight-mean", "loss/clipped_pg.py", "log_weights_BT = (log_ratio_BT * mask_BT).sum(dim=-1, keepdim=True)", "log_weights_BT = (log_ratio_BT * mask_BT).mean(dim=-1, keepdim=True)", "a sequence's weight is no product", LOSS),
    ("importance-gradient", "loss/clipped_pg.py", "(previous_BT - generation_BT).detach()", "(previous_BT - generation_BT)", "importance weights carry a gradient", LOSS),
    # step
    ("clip-before-normalising", "models/policy/train_step.py", "max_grad_norm / (grad_norm + 1e-6)", "max_grad_norm / (grad_norm * divisor + 1e-6)", "gradients are clipped by their norm before normalisation", STEP),
    ("norm-not-divided", "models/policy/train_step.py", "float(self._backend.gradient_norm()) / divisor", "float(self._backend.gradient_norm())", "grad_norm grows with the batch", STEP),
    ("counts-of-last-chunk", "models/policy/train_step.py", "step.counts += torch.stack(count_valid(data))", "step.counts = torch.stack(count_valid(data))", "the step is normalised by its last chunk", STEP),
    ("untrained-batch-steps", "models/policy/train_step.py", "if counts[1] <= 0:", "if counts[1] < 0:", "a batch without a trained token moves the optimizer", STEP),
    ("abort-keeps-gradients", "models/policy/train_step.py", "            self._open = None\n            self._backend.discard_gradients()", "            self._open = None", "gradients of an aborted step reach the next", STEP),
    ("first-column-counts", "loss/interfaces.py", '(data["token_mask"][:, 1:].double() * sample_mask_B[:, None]).sum()', '(data["token_mask"].double() * sample_mask_B[:, None]).sum()', "a token without prediction counts", (*STEP, *LOSS)),
    ("masked-rows-count", "loss/interfaces.py", '(data["token_mask"][:, 1:].double() * sample_mask_B[:, None]).sum()', '(data["token_mask"][:, 1:].double() + 0 * sample_mask_B[:, None]).sum()', "tokens of masked samples count", (*STEP, *LOSS)),
    # stages
    ("components-unscaled", "algorithms/grpo/advantages.py", "scaled = {name: scale_rewards(column, cfg.reward_scaling) for name, column in scaled.items()}", 'scaled["total"] = scale_rewards(rewards_B, cfg.reward_scaling)', "components keep their unscaled values", (*STAGES, *METRICS)),
    ("component-not-zeroed", "algorithms/grpo/stages.py", "components = {name: column.masked_fill(invalid_B, 0) for name, column in components.items()}", "pass", "components of an invalid call keep their reward", STAGES),
    ("shaped-std", "algorithms/grpo/stages.py", "group_statistics(processed.unshaped_B, groups_B, valid_B, leave_one_out=False)", "group_statistics(processed.rewards_B, groups_B, valid_B, leave_one_out=False)", "groups are judged by shaped rewards", STAGES),
    ("branches-count-again", "algorithms/grpo/stages.py", 'rows["valid"] = rows["valid"] & starts_B', 'rows["valid"] = rows["valid"] | starts_B', "a branch counts as a sample of its own", STAGES),
    ("error-nan-passes", "algorithms/grpo/stages.py", "valid_B & ~(error_B <= threshold)", "valid_B & (error_B > threshold)", "a sample whose error is not a number is trained", STAGES),
    ("sequence-error-on-prompt", "algorithms/grpo/stages.py", 'mask = columns["token_mask"][:, 1:]\n    gap', 'mask = torch.ones_like(columns["token_mask"][:, 1:])\n    gap', "prompt tokens dilute a sample's error", STAGES),
    ("mask-keeps-oldest", "algorithms/grpo/stages.py", "versions_BS, -1).amax(dim=1)", "versions_BS, 1 << 30).amin(dim=1)", "the oldest tokens are kept", STALE),
    ("drop-keeps-mixed", "algorithms/grpo/stages.py", '(~mixed_B).to(rows["sample_mask"].dtype)', 'mixed_B.to(rows["sample_mask"].dtype)', "samples of one version are dropped", STALE),
    ("gdpo-weights-of-order", "algorithms/grpo/advantages.py", "return [by_name[name] for name in names]", "return list(by_name.values())", "weights go to other components", STAGES),
    ("gdpo-invalid-counted", "algorithms/grpo/advantages.py", "counted = total_B[valid_B.bool()]", "counted = total_B", "masked samples shift the whole batch", STAGES),
    ("whitening-population", "algorithms/grpo/advantages.py", 'rows["sum_of_squares"].sum().item() / count - mean**2', 'rows["sum_of_squares"].sum().item() / count', "advantages are not divided by their deviation", STAGES),
    ("kl-in-reward-added", "algorithms/grpo/advantages.py", "advantages_BS = advantages_BS - kl_penalty * calculate_kl(", "advantages_BS = advantages_BS + kl_penalty * calculate_kl(", "distance from the reference is rewarded", STAGES),
    ("self-in-own-baseline", "algorithms/grpo/advantages.py", "all_PGG & ~torch.eye(width, dtype=torch.bool) if leave_one_out", "all_PGG if leave_one_out", "a sample is in its own baseline", STAGES),
    # cutting
    ("unsort-forwards", "distributed/batched_data_dict.py", "self.data = self.select_indices(inverse).data", "self.data = self.select_indices(target).data", "log-probabilities go to other samples", SHARDS),
    ("chunk-order-dropped", "models/policy/batches.py", "order += [own[place] for place in (inside if inside is not None else range(len(own)))]", "order += own", "packed log-probabilities go to other samples", SHARDS),
    ("budget-of-training", "models/policy/batches.py", "tokens = dynamic.train_mb_tokens if training else dynamic.logprob_mb_tokens", "tokens = dynamic.train_mb_tokens", "scoring runs with training's budget", (*SHARDS, *META)),
    ("packing-budget-of-training", "models/policy/batches.py", '"max_tokens_per_microbatch": packing.train_mb_tokens if training else packing.logprob_mb_tokens', '"max_tokens_per_microbatch": packing.train_mb_tokens', "scoring packs with training's budget", (*SHARDS, *META)),
    ("stored-budget-of-scores", "models/policy/tq_policy.py", "return self._shard(self._trained, batch_size, self._ranks, training=True)", "return self._shard(self._trained, batch_size, self._ranks, training=False)", "rows of the data plane are trained with scoring's budget", (*SHARDS, *META)),
    ("stored-scores-train-budget", "models/policy/tq_policy.py", 'return CutToScore(self._chunk(seed, training=False)', 'return CutToScore(self._chunk(seed, training=True)', "rows of the data plane are scored with training's budget", (*SHARDS, *META)),
    ("short-part-lost", "models/policy/batches.py", "for start in range(0, data.size, size)]", "for start in range(0, data.size - size + 1, size)]", "the last short microbatch is not trained", SHARDS),
    ("padding-of-others", "distributed/batched_data_dict.py", "pad_value = (pad_value_dict or {}).get(key, 0)", "pad_value = 0", "tokens are padded with token 0", SHARDS),
    # data plane
    ("tags-shared", "data_plane/meta.py", "[dict(tag) for part in tags for tag in part or []]", "[tag for part in tags for tag in part or []]", "a tag set on joined rows changes the parts", META),
    ("tags-in-other-order", "data_plane/meta.py", "[dict(tag) for part in tags for tag in part or []]", "[dict(tag) for part in reversed(tags) for tag in part or []]", "rows get tags of others", META),
    ("tags-replaced", "data_plane/client.py", "[dict(old) | dict(new) for old, new in zip(rows.tags, tags, strict=True)]", "[dict(new) for old, new in zip(rows.tags, tags, strict=True)]", "a later write drops earlier tags", ("tests/data_plane/test_client.py", "tests/data_plane/test_tags.py")),
    ("old-tag-wins", "data_plane/client.py", "[dict(old) | dict(new) for old, new in zip(rows.tags, tags, strict=True)]", "[dict(new) | dict(old) for old, new in zip(rows.tags, tags, strict=True)]", "a tag keeps its first value", ("tests/data_plane/test_client.py", "tests/data_plane/test_tags.py")),
    # submitters
    ("groups-of-root", "distributed/unix_users.py", "os.initgroups(name, user.pw_gid)", "pass", "a job keeps the groups of root", SUBMITTERS),
    ("closed-to-siblings", "distributed/unix_users.py", "ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)", "pass", "workers cannot share GPU memory", SUBMITTERS),
    ("imported-as-root", "distributed/private_variables.py", "(_PATH,) if RUN_AS in variables or RUN_AS in os.environ else ()", "()", "root imports a submitter's modules", SUBMITTERS),
    ("folders-not-asked", "distributed/unix_users.py", "os.W_OK | os.X_OK if number else os.X_OK", "os.X_OK", "a job begins that cannot save", SUBMITTERS),
    # weights
    ("staged-not-copied", "weight_sync/receiver.py", "replace(arrived.window, bytes_B=arrived.window.bytes_B.clone())", "arrived.window", "a kept window is overwritten by the next", RECEIVER),
    ("skipped-window", "weight_sync/receiver.py", 'if self._opener is None or window["index"] != self._next_window:', "if self._opener is None:", "a window that never came goes unnoticed", RECEIVER),
    ("finish-early", "weight_sync/receiver.py", 'if not self._session or self._next_window != self._session["windows"]:', "if not self._session:", "an engine serves half of the new weights", RECEIVER),
    ("last-window-unverified", "weight_sync/receiver.py", "    def _take(self, arrived: _Arrived) -> None:\n        self._verify(arrived)\n", "    def _take(self, arrived: _Arrived) -> None:\n        if not self._session.get(\"staged\"):\n            self._verify(arrived)\n", "staged windows are not verified", RECEIVER),
    ("arriving-lost", "weight_sync/receiver.py", "        if self._arriving is not None:\n            self._take(self._arriving)\n        self._arriving = arrived", "        self._arriving = arrived", "all windows but the last are lost where bytes travel", RECEIVER),
    ("abort-takes-version", "weight_sync/receiver.py", "        try:\n            if self._loading:\n                self._target.abandon_load()", '        self.version = self._session.get("version", self.version)\n        try:\n            if self._loading:\n                self._target.abandon_load()', "a failed sync counts as done", RECEIVER),
    # resume and loading
    ("resumed-swapped", "algorithms/resume.py", 'totals = (info["consumed_samples"], info["total_valid_tokens"])', 'totals = (info["total_valid_tokens"], info["consumed_samples"])', "samples and tokens change places at a resume", RESUME),
    ("batch-not-converted", "algorithms/resume.py", "state.step_in_epoch = state.step_in_epoch * self.rows_before // rows_per_step", "pass", "the epoch ends elsewhere after another batch size", RESUME),
    ("batch-converted-backwards", "algorithms/resume.py", "state.step_in_epoch * self.rows_before // rows_per_step", "state.step_in_epoch * rows_per_step // self.rows_before", "the epoch ends elsewhere after another batch size", RESUME),
    ("epoch-counted-twice", "algorithms/sft/driver.py", "last_epoch_done = state.epoch == cfg.max_num_epochs - 1 and", "last_epoch_done = state.epoch == cfg.max_num_epochs and", "a resumed run makes an empty epoch", RESUME),
    ("filler-is-trained", "algorithms/sft/driver.py", 'filler["sample_mask"] = filler["sample_mask"] * 0', "pass", "copies of the first row weigh in the validation loss", RESUME),
    ("loader-resumes-seed", "data/loader.py", 'self._seed = state["seed"]', "pass", "an epoch goes on in another order", RESUME),
    ("loader-row-forgotten", "data/loader.py", 'self._row = state["next_row"]', "self._row = 0", "a resumed epoch begins again", RESUME),
    # rollouts
    ("success-keeps-row", "experience/rollout_tasks.py", "self._in_a_row = self._skipped_in_a_row = 0", "self._skipped_in_a_row = 0", "failures far apart end the run", QUEUE),
    ("skips-never-in-a-row", "experience/rollout_tasks.py", "self._in_a_row = self._skipped_in_a_row = 0", "self._in_a_row = 0", "dropped prompts far apart end the run", QUEUE),
    ("one-more-failure", "experience/rollout_tasks.py", "if self._in_a_row > self._policy.in_a_row:", "if self._in_a_row >= self._policy.in_a_row:", "a run ends one failure early", QUEUE),
    ("gone-are-called", "experience/environment_batcher.py", "self._waiting = deque(waiting for waiting in self._waiting if not waiting.answer.done())", "pass", "an environment judges samples that nobody waits for", ENVIRONMENT),
    ("slow-call-runs-on", "environments/call.py", "        ray.cancel(reference, force=False)\n", "", "a call past its deadline keeps the environment busy", ENVIRONMENT),
    ("components-of-last-turn", "experience/rollouts.py", "trajectory.components[name] = trajectory.components.get(name, 0.0) + value", "trajectory.components[name] = value", "only the last turn's parts of a reward count", ENVIRONMENT),
    ("reward-of-first-component", "experience/environment_batcher.py", "reward = sum(components.values()) if components", "reward = next(iter(components.values())) if components", "one part of a reward is all of it", ENVIRONMENT),
    ("absent-component-left-out", "experience/rollouts.py", "[s.components.get(name, 0.0) for s in samples]", "[s.components[name] for s in samples if name in s.components]", "the mean of a part is over fewer samples", (*ENVIRONMENT, *METRICS)),
    # scores
    ("last-score-on-padding", "models/policy/packed.py", "return logprobs_BS.masked_fill(padding_BS, 0.0)", "return logprobs_BS", "padding gets a log-probability", SCORES),
    ("trained-position-shifted", "models/policy/packed.py", "before_BS[:, :-1] = trained_BS[:, 1:]", "before_BS[:, 1:] = trained_BS[:, :-1]", "scores of other positions are trained", SCORES),
    ("masked-sample-scored", "models/policy/packed.py", '& (data["sample_mask"].cpu() != 0)[:, None]', '& (data["sample_mask"].cpu() >= 0)[:, None]', "masked samples cost the projection", SCORES),
]  # fmt: skip

EQUIVALENT = {
    "importance-gradient": "neither side has a gradient: both are columns of the batch, or detached",
    "masked-sample-scored": "its scores have weight 0 in every loss; only time is lost",
}
