"""Local steps of one learner: minibatches, DQN's losses, gradients, the proximal pull."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.dqn.dqn_learner import (
    QF_LOSS_KEY,
    QF_MAX_KEY,
    QF_MEAN_KEY,
    QF_MIN_KEY,
    TD_ERROR_MEAN_KEY,
)
from ray.rllib.algorithms.dqn.torch.dqn_torch_learner import DQNTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    ALL_MODULES,
    MODULE_TRAIN_BATCH_SIZE_MEAN,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_TRAINED,
    NUM_ENV_STEPS_TRAINED_LIFETIME,
    NUM_MODULE_STEPS_TRAINED,
    NUM_MODULE_STEPS_TRAINED_LIFETIME,
    TD_ERROR_KEY,
    WEIGHTS_SEQ_NO,
)
from torch import Tensor

from rllib_admm.consensus import (
    LocalState,
    adam_metric,
    pull,
)
from rllib_admm.learner.branching_q_learning import branching_q_learning_loss
from rllib_admm.learner.metrics import CapturingMetrics, MutedMetrics
from rllib_admm.learner.module_tensors import ModuleTensors
from rllib_admm.learner.q_learning import overrides
from rllib_admm.learner.replay import LearnerReplay
from rllib_admm.learner.round import RoundRequest, RoundResult
from rllib_admm.replay import Sample
from rllib_admm.replay.errors import ReplayDataError
from rllib_admm.rl_modules.branching_q import NEXT_Q_VALUES, Q_VALUES, TARGET_NEXT_Q_VALUES


class LocalSteps(DQNTorchLearner):
    """The part of `ADMMDQNTorchLearner` that takes K local steps on its own shard."""

    metrics: Any

    # Of the Learner that this is a part of.
    _anchors: dict[str, list[Tensor]]
    _consensus: dict[str, LocalState]
    _diverged: set[str]
    _muted: MutedMetrics
    _replay: LearnerReplay | None
    _tensors: dict[str, ModuleTensors]

    def _optimizer(self, module_id: str) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.get_optimizers_for_module(module_id)[0][1]
        return optimizer

    def _local_steps(self, request: RoundRequest, result: RoundResult) -> dict[str, int]:
        """Takes K local steps; returns per ModuleID how many of them had data."""
        timesteps = {NUM_ENV_STEPS_SAMPLED_LIFETIME: request.env_steps}
        self.before_gradient_based_update(timesteps=timesteps)
        self._anchors = {
            mid: self._tensors[mid].layout.views(state.anchor().to(self._device or "cpu"))
            for mid, state in self._consensus.items()
            if state.rho > 0
        }
        began = time.perf_counter()
        logger, steps = self.metrics, dict.fromkeys(self._tensors, 0)
        try:
            for k in range(request.local_steps):
                if k + 1 < request.local_steps:
                    self.metrics = self._muted
                else:
                    self.metrics = logger
                for module_id in self._gradients():
                    steps[module_id] += 1
                self._apply(self._anchors)
                if self._diverged:
                    break
        finally:
            self.metrics = logger
            self._anchors = {}
        result.busy_s = time.perf_counter() - began
        result.gradient_steps = max(steps.values(), default=0)
        self._log_round(steps, timesteps)
        return steps

    def _gradients(self) -> list[str]:
        """Computes one minibatch gradient into every `.grad`; returns the modules with data."""
        assert self._replay is not None
        if self._replay.needs_pipeline(self):
            batch, samples = self._pipeline_batch()
        else:
            samples = self._replay.sample(self._tensors)
            batch = {mid: self._columns(mid, sample) for mid, sample in samples.items()}
        if not batch:
            return []
        for module_id in batch:
            for _, optimizer in self.get_optimizers_for_module(module_id):
                optimizer.zero_grad(set_to_none=True)
        losses, td_errors = self._losses(batch)
        total = sum(losses.values())
        assert isinstance(total, Tensor)
        total.backward()  # type: ignore[no-untyped-call]
        for module_id, loss in losses.items():
            self.metrics.log_value((module_id, self.TOTAL_LOSS_KEY), loss.detach(), window=1)
        for module_id, errors in td_errors.items():
            try:
                self._replay.update_priorities(module_id, samples[module_id], errors)
            except ReplayDataError:
                # Data are checked on arrival: it is the network that is not finite any more.
                self._diverged.add(module_id)
        return list(batch)

    def _columns(self, module_id: str, sample: Sample) -> dict[str, Any]:
        """Returns `sample` as the batch that DQN's learner pipeline would have made, (B, ...)."""
        device = self._device

        def tensor(array: Any) -> Any:
            if isinstance(array, np.ndarray):
                return torch.from_numpy(array).to(device)
            if isinstance(array, Mapping):
                return {key: tensor(value) for key, value in array.items()}
            return type(array)(tensor(value) for value in array)

        return {
            Columns.OBS: tensor(sample.obs),
            Columns.NEXT_OBS: tensor(sample.next_obs),
            Columns.ACTIONS: tensor(sample.actions),
            Columns.REWARDS: tensor(sample.rewards),
            Columns.TERMINATEDS: tensor(sample.terminateds),
            Columns.TRUNCATEDS: tensor(sample.truncateds),
            "weights": tensor(sample.weights),
            "n_step": tensor(sample.n_step),
        }

    def _pipeline_batch(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs the user's learner connector pipeline on episodes rebuilt from the shard."""
        assert self._replay is not None
        samples, episodes = self._replay.sample_episodes(self._tensors)
        if not episodes:
            return {}, {}
        shared: dict[str, Any] = {}
        columns = self._learner_connector(
            rl_module=self.module,
            batch={},
            episodes=episodes,
            shared_data=shared,
            metrics=self.metrics,
        )
        batch = MultiAgentBatch(
            {mid: SampleBatch(data) for mid, data in columns.items()},
            env_steps=sum(len(e) for e in episodes),
        )
        converted = self._convert_batch_type(batch).policy_batches
        return {mid: converted[mid] for mid in samples if mid in converted}, samples

    def _losses(self, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns per ModuleID the loss and the absolute TD errors, shape (B,)."""
        losses: dict[str, Tensor] = {}
        errors: dict[str, Tensor] = {}
        general: dict[str, Any] = {}
        for module_id, columns in batch.items():
            direct_loss = self._tensors[module_id].direct_loss
            if direct_loss is not None and Columns.LOSS_MASK not in columns:
                config = self.config.get_config_for_module(module_id)
                losses[module_id], errors[module_id], q = direct_loss(columns, config)
                self._log_loss(module_id, losses[module_id], errors[module_id], q)
            else:
                general[module_id] = columns
        if general:
            captured = CapturingMetrics(self.metrics)
            logger, self.metrics = self.metrics, captured
            try:
                fwd_out = self.module.forward_train(general)
                losses.update(self.compute_losses(fwd_out=fwd_out, batch=general))
            finally:
                self.metrics = logger
            errors.update(captured.td_errors)
        return losses, errors

    @override(DQNTorchLearner)
    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Any, fwd_out: Mapping[str, Any]
    ) -> Tensor:
        """Returns DQN's loss, or for a `BranchingQRLModule` decoupled Q-learning's."""
        if NEXT_Q_VALUES not in fwd_out:
            loss: Tensor = super().compute_loss_for_module(
                module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
            )
            return loss
        loss, td_error, q = branching_q_learning_loss(
            fwd_out[Q_VALUES], fwd_out[NEXT_Q_VALUES], fwd_out[TARGET_NEXT_Q_VALUES], batch, config
        )
        self.metrics.log_value((module_id, TD_ERROR_KEY), td_error, reduce="item_series")
        self._log_loss(module_id, loss, td_error, q)
        return loss

    def _log_loss(self, module_id: str, loss: Tensor, td_error: Tensor, q: Tensor) -> None:
        if self.metrics is not self._muted:
            self.metrics.log_dict(
                {
                    QF_LOSS_KEY: loss.detach(),
                    QF_MEAN_KEY: q.mean(),
                    QF_MAX_KEY: q.max(),
                    QF_MIN_KEY: q.min(),
                    TD_ERROR_MEAN_KEY: td_error.mean(),
                },
                key=module_id,
                window=1,
            )

    def _apply(self, anchors: Mapping[str, Sequence[Tensor]]) -> None:
        """Clips, steps every optimizer, then pulls towards z - u."""
        if self._uses_stock_updates():
            gradients = {p: p.grad for p in self._params.values() if p.grad is not None}
            self.apply_gradients(self.postprocess_gradients(gradients))
        else:
            for module_id, tensors in self._tensors.items():
                self._clip(module_id, tensors.params)
                for _, optimizer in self.get_optimizers_for_module(module_id):
                    optimizer.step()
        if self._lr_schedulers:
            super().after_gradient_based_update(timesteps={})
        for module_id, anchor in anchors.items():
            self._pull(module_id, anchor)

    def _uses_stock_updates(self) -> bool:
        return (
            self._grad_scalers is not None
            or self._lr_scheduler_classes is not None
            or overrides(self, DQNTorchLearner, "postprocess_gradients", "apply_gradients")
            or overrides(self, DQNTorchLearner, "postprocess_gradients_for_module")
        )

    def _clip(self, module_id: str, params: Sequence[Tensor]) -> None:
        config = self.config.get_config_for_module(module_id)
        if config.grad_clip is None and not config.log_gradients:
            return
        grads = [p.grad for p in params if p.grad is not None]
        if not grads:
            return
        if config.grad_clip is not None and config.grad_clip_by == "value":
            for grad in grads:
                grad.clamp_(-config.grad_clip, config.grad_clip)
        elif config.grad_clip is not None and config.grad_clip_by == "norm":
            for grad, norm in zip(grads, torch._foreach_norm(grads), strict=True):
                if norm > config.grad_clip:
                    grad.mul_(config.grad_clip / norm)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if config.grad_clip is not None and config.grad_clip_by == "global_norm":
            scale = config.grad_clip / torch.clamp(norm + 1e-6, min=config.grad_clip)
            torch._foreach_mul_(grads, scale)
        if self.metrics is not self._muted:
            name = f"gradients_{self.get_optimizers_for_module(module_id)[0][0]}_global_norm"
            self.metrics.log_value((module_id, name), norm, window=1)

    def _pull(self, module_id: str, anchors: Sequence[Tensor]) -> None:
        state, tensors = self._consensus[module_id], self._tensors[module_id]
        optimizer = self._optimizer(module_id)
        lr_rho = float(self._get_optimizer_lr(optimizer)) * state.rho
        if self.config.proximal_metric != "adam":
            pull(tensors.params, anchors, lr_rho)
            return
        rows, metric = self._adam_metric(module_id)
        if rows:
            params = [tensors.params[i] for i in rows]
            pull(params, [anchors[i] for i in rows], lr_rho, metric)

    def _adam_metric(self, module_id: str) -> tuple[list[int], list[Tensor]]:
        """Returns Adam's metric of the parameters that Adam has moved so far, and their rows.

        A parameter that never had a gradient has no second moment and needs no pull.
        """
        params = self._tensors[module_id].params
        position = {id(p): i for i, p in enumerate(params)}
        rows: list[int] = []
        metric: list[Tensor] = []
        for _, optimizer in self.get_optimizers_for_module(module_id):
            for group in optimizer.param_groups:
                moved = [p for p in group["params"] if "exp_avg_sq" in optimizer.state.get(p, {})]
                if not moved:
                    continue
                squares = [optimizer.state[p]["exp_avg_sq"] for p in moved]
                step = float(optimizer.state[moved[0]]["step"])
                rows.extend(position[id(p)] for p in moved)
                metric.extend(adam_metric(squares, step, group["betas"][1], group["eps"]))
        return rows, metric

    def _metric_scale(self, module_id: str) -> float:
        if self.config.proximal_metric != "adam":
            return 1.0
        _, metric = self._adam_metric(module_id)
        if not metric:
            return 0.0
        total = sum(float(m.reciprocal().sum()) for m in metric)
        return total / sum(m.numel() for m in metric)

    def _log_round(self, steps: Mapping[str, int], timesteps: dict[str, Any]) -> None:
        """Logs what stock DQN logs per update, once per round."""
        total = 0
        for module_id, count in steps.items():
            batch_size = self.config.get_config_for_module(module_id).train_batch_size_per_learner
            rows = count * batch_size
            total += rows
            if not count:
                continue
            log = self.metrics.log_value
            log((module_id, WEIGHTS_SEQ_NO), self._weights_seq_no + 1, window=1)
            log((module_id, MODULE_TRAIN_BATCH_SIZE_MEAN), batch_size, reduce="mean")
            log((module_id, NUM_MODULE_STEPS_TRAINED), rows, reduce="sum")
            log(
                (module_id, NUM_MODULE_STEPS_TRAINED_LIFETIME),
                rows,
                reduce="lifetime_sum",
                with_throughput=True,
            )
        for key in (NUM_MODULE_STEPS_TRAINED, NUM_ENV_STEPS_TRAINED):
            self.metrics.log_value((ALL_MODULES, key), total, reduce="sum", with_throughput=True)
        for key in (NUM_MODULE_STEPS_TRAINED_LIFETIME, NUM_ENV_STEPS_TRAINED_LIFETIME):
            self.metrics.log_value(
                (ALL_MODULES, key), total, reduce="lifetime_sum", with_throughput=True
            )
        if not self._lr_schedulers:
            self.after_gradient_based_update(timesteps=timesteps)
