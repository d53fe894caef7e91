"""The Learner of ADMMDQN: DQN's losses, a replay shard of its own, K local steps per call.

Owns the RLlib side of one learner: which tensors take part in the consensus, minibatches,
gradients, targets. The consensus' formulas are in `rllib_admm.consensus`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.algorithms.dqn.torch.dqn_torch_learner import DQNTorchLearner
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    LAST_TARGET_UPDATE_TS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_TARGET_UPDATES,
)
from torch import Tensor, nn

from rllib_admm.consensus import (
    Layout,
    LocalState,
    MessageError,
    NonFiniteError,
)
from rllib_admm.learner.ddp import GradientAveraging
from rllib_admm.learner.local_steps import LocalSteps
from rllib_admm.learner.metrics import MutedMetrics
from rllib_admm.learner.module_tensors import ModuleTensors, module_tensors
from rllib_admm.learner.q_learning import direct_loss, overrides
from rllib_admm.learner.replay import LearnerReplay
from rllib_admm.learner.round import RoundRequest, RoundResult


class ADMMDQNTorchLearner(GradientAveraging, LocalSteps):
    """A DQN Learner that owns its data and agrees with others once per round.

    One call of `run_round` settles the last round's reply, takes in new fragments, takes K
    local proximal steps on minibatches from the own replay shard and returns one packed
    upload per RLModule. Between calls nothing is in flight except that upload, which stays
    pending until the next call brings its reply.

    A subclass may override what any DQN Learner may (`compute_loss_for_module`,
    `configure_optimizers_for_module`, `postprocess_gradients_for_module`, ...); the short
    paths below step aside then. Not called are `update` and `compute_gradients`; the hooks
    before and after an update run once per round.
    """

    metrics: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._consensus: dict[str, LocalState] = {}
        self._tensors: dict[str, ModuleTensors] = {}
        self._last_target_update: dict[str, int] = {}
        self._replay: LearnerReplay | None = None
        self._muted = MutedMetrics(self.metrics)
        self._diverged: set[str] = set()
        self._anchors: dict[str, list[Tensor]] = {}
        # Env steps that the round in progress was asked with; its reply is settled with them.
        self._settled_env_steps = 0

    # ---- Building -------------------------------------------------------------------

    @property
    @override(Learner)
    def distributed(self) -> bool:
        """False: there is no torch process group, whatever `num_learners` is."""
        return False

    @override(TorchLearner)
    def _make_modules_ddp_if_necessary(self) -> None:
        """Does nothing: learners agree on parameters, not on every gradient."""

    @override(DQNTorchLearner)
    def build(self) -> None:
        """Builds module, optimizers, target networks, layouts and the empty shard.

        Raises:
            ValueError: If a module holds what the consensus can not carry (buffers).
        """
        if self._is_built:
            return
        super().build()
        self._register_tensors()
        self._replay = self._make_replay()

    def _make_replay(self) -> LearnerReplay:
        """Makes the replay that this learner draws from."""
        seed = self.config.seed
        return LearnerReplay(
            self.config,
            stateful=[mid for mid, m in self.module._rl_modules.items() if m.is_stateful()],
            seed=None if seed is None else seed + 7919 * self._learner_index,
        )

    @override(DQNTorchLearner)
    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Registers Adam, as DQN does, in torch's fused implementation."""
        params = self.get_parameters(self._module[module_id])
        fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params)
        self.register_optimizer(
            module_id=module_id,
            optimizer=torch.optim.Adam(params, eps=config.adam_epsilon, fused=fused),
            params=params,
            lr_or_lr_schedule=config.lr,
        )

    def _register_tensors(self) -> None:
        self._tensors.clear()
        for module_id, module in self.module._rl_modules.items():
            if not isinstance(module, nn.Module) or not self.should_module_be_updated(module_id):
                continue
            tensors = module_tensors(module_id, module, self._params)
            if not overrides(self, LocalSteps, "compute_losses", "compute_loss_for_module"):
                tensors.direct_loss = direct_loss(module)
            self._check_metric(module_id)
            self._tensors[module_id] = tensors
            self._last_target_update.setdefault(module_id, 0)

    def _check_metric(self, module_id: str) -> None:
        optimizers = [optimizer for _, optimizer in self.get_optimizers_for_module(module_id)]
        adams = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam)
        if self.config.proximal_metric == "adam" and not all(
            isinstance(optimizer, adams) for optimizer in optimizers
        ):
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise ValueError(
                f"proximal_metric='adam' needs an Adam optimizer, but RLModule {module_id!r} is "
                f"trained by {names}. Use proximal_metric='euclidean'."
            )

    @property
    def layouts(self) -> dict[str, Layout]:
        """Per ModuleID to be trained, the layout of what is agreed on."""
        return {mid: tensors.layout for mid, tensors in self._tensors.items()}

    def theta(self, module_id: str) -> Tensor:
        """Returns a copy of the local parameters, shape (P,)."""
        tensors = self._tensors[module_id]
        return tensors.layout.flatten(tensors.params)

    def write_theta(self, module_id: str, theta: Tensor) -> None:
        """Sets the local parameters from `theta`, shape (P,)."""
        tensors = self._tensors[module_id]
        tensors.layout.write(theta, tensors.params)

    def join(self, name: str, rho: float, options: Any, num_threads: int | None = None) -> None:
        """Makes this learner `name` in a consensus that starts from its present parameters."""
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._consensus = {
            mid: LocalState(name, self.theta(mid), options, layout.hash, rho)
            for mid, layout in self.layouts.items()
        }

    # ---- One round ------------------------------------------------------------------

    def run_round(self, request: RoundRequest) -> RoundResult:
        """Settles the last round, takes in data, takes K local steps, uploads.

        Args:
            request: See `RoundRequest`.

        Raises:
            ReplayDataError: If a fragment holds data that must not be learned from.
        """
        result = RoundResult()
        self._begin(request, result)
        if request.local_steps:
            steps = self._local_steps(request, result)
            for module_id, state in self._consensus.items():
                weight = float(steps.get(module_id, 0))
                result.metric_scale[module_id] = self._metric_scale(module_id)
                result.uploads[module_id] = self._upload(module_id, state, weight, result)
        self._finish(request, result)
        return result

    def _begin(self, request: RoundRequest, result: RoundResult) -> None:
        assert self._replay is not None
        for module_id, reply in request.replies.items():
            state = self._consensus[module_id]
            theta = self.theta(module_id)
            had_data = state.pending is not None and state.pending.weight > 0
            try:
                result.norms[module_id] = state.complete(reply, theta)
            except MessageError as error:
                result.rejected[module_id] = str(error)
                continue
            # Without a pull nothing but this makes the learners agree.
            if self.config.local_start == "z" or not had_data or state.rho <= 0:
                self.write_theta(module_id, state.consensus.z)
        for module_id, snapshot in request.snapshots.items():
            state = self._consensus[module_id]
            state.load(snapshot)
            self.write_theta(module_id, state.consensus.z)
        if request.replies:
            self._update_targets(self._settled_env_steps)
        self._settled_env_steps = request.env_steps
        for source, reference in request.fragments:
            try:
                episodes = ray.get(reference) if isinstance(reference, ray.ObjectRef) else reference
            except ray.exceptions.RayError:
                # The fragment died with the EnvRunner that held it: nobody else has it.
                result.fragments_lost += 1
                continue
            self._replay.add(episodes, source=source)

    def _finish(self, request: RoundRequest, result: RoundResult) -> None:
        assert self._replay is not None
        if request.local_steps:
            self._weights_seq_no += 1
            result.metrics = self.metrics.reduce()
        for module_id in self._tensors:
            result.lr[module_id] = float(self._get_optimizer_lr(self._optimizer(module_id)))
        result.shard_steps = len(self._replay)
        result.last_target_update = dict(self._last_target_update)

    def _upload(
        self, module_id: str, state: LocalState, weight: float, result: RoundResult
    ) -> bytes:
        try:
            if module_id in self._diverged:
                raise NonFiniteError(f"The Q-values of {module_id} are not finite.")
            return state.upload(self.theta(module_id), weight)
        except NonFiniteError:
            self._diverged.discard(module_id)
            self._reset_to_z(module_id, state)
            result.non_finite.append(module_id)
            return state.upload(state.consensus.z, 0.0)

    def _reset_to_z(self, module_id: str, state: LocalState) -> None:
        # Adam's moments saw what made theta non-finite, so they start anew as well.
        self.write_theta(module_id, state.consensus.z)
        for _, optimizer in self.get_optimizers_for_module(module_id):
            optimizer.state.clear()

    # ---- Targets ----------------------------------------------------------------------

    @torch.no_grad()
    def _update_targets(self, env_steps: int) -> None:
        """Moves the target networks towards z by as many steps as have come due.

        The Bellman target belongs to the consensus: it is the same on every learner and is
        never communicated. Within a round z stands still, so that n due updates of
        `tau` are one of 1 - (1 - tau)^n.
        """
        for module_id, tensors in self._tensors.items():
            config = self.config.get_config_for_module(module_id)
            elapsed = env_steps - self._last_target_update[module_id]
            due = elapsed // max(1, config.target_network_update_freq)
            if due < 1 or not tensors.targets:
                continue
            tau = 1.0 - (1.0 - config.tau) ** due
            z = self._consensus[module_id].consensus.z if self._consensus else self.theta(module_id)
            views = tensors.layout.views(z)
            for index, target in tensors.targets:
                target.lerp_(views[index].to(target.device), tau)
            for source, target in tensors.target_copies:
                target.copy_(source)
            self._last_target_update[module_id] = env_steps
            self.metrics.log_value((module_id, NUM_TARGET_UPDATES), due, reduce="lifetime_sum")
            self.metrics.log_value((module_id, LAST_TARGET_UPDATE_TS), env_steps, reduce="max")

    @override(DQNTorchLearner)
    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Updates learning rates; target networks follow z in `run_round`, not theta here."""
        TorchLearner.after_gradient_based_update(self, timesteps=timesteps)

    # ---- State ------------------------------------------------------------------------

    def get_local_state(self, with_replay: bool) -> dict[str, Any]:
        """Returns what only this learner holds: theta, u, h, optimizer, targets, RNG, replay."""
        assert self._replay is not None
        return {
            "theta": {mid: self.theta(mid).numpy() for mid in self._tensors},
            "consensus": {
                mid: {
                    k: v.numpy() if isinstance(v, Tensor) else v for k, v in s.get_state().items()
                }
                for mid, s in self._consensus.items()
            },
            "round": {mid: s.consensus.round for mid, s in self._consensus.items()},
            "optimizer": self._get_optimizer_state(),
            "last_target_update": dict(self._last_target_update),
            "env_steps": self._settled_env_steps,
            "weights_seq_no": self._weights_seq_no,
            "torch_rng": torch.get_rng_state().numpy(),
            "replay": self._replay.get_state(with_rows=with_replay),
        }

    def set_local_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_local_state` returned."""
        assert self._replay is not None
        for module_id, theta in state["theta"].items():
            self.write_theta(module_id, torch.from_numpy(np.array(theta)))
        for module_id, local in state["consensus"].items():
            self._consensus[module_id].set_state(local)
        self._set_optimizer_state(state["optimizer"])
        self._last_target_update.update(state["last_target_update"])
        self._settled_env_steps = state["env_steps"]
        self._weights_seq_no = state["weights_seq_no"]
        torch.set_rng_state(torch.from_numpy(np.array(state["torch_rng"])))
        self._replay.set_state(state["replay"])

    def set_module_state(self, state: dict[str, Any]) -> None:
        """Sets all RLModules' weights, target networks included."""
        self.module.set_state(state)

    def set_schedule(self, last_target_update: Mapping[str, int], env_steps: int) -> None:
        """Puts target updates and learning rates where the other learners' are."""
        self._last_target_update.update(last_target_update)
        self._settled_env_steps = env_steps
        timesteps = {NUM_ENV_STEPS_SAMPLED_LIFETIME: env_steps}
        TorchLearner.after_gradient_based_update(self, timesteps=timesteps)

    @torch.no_grad()
    def copy_targets(self) -> None:
        """Copies the parameters into the target networks."""
        for tensors in self._tensors.values():
            for index, target in tensors.targets:
                target.copy_(tensors.params[index])

    @override(DQNTorchLearner)
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores `state`, also one that is older than the present weights."""
        # RLlib keeps the newer weights silently; restoring an earlier state must restore it.
        self._weights_seq_no = 0
        super().set_state(state)

    def consensus_state(self, module_id: str) -> dict[str, np.ndarray]:
        """Returns copies of theta, u, h and z, each of shape (P,), for inspection."""
        state = self._consensus[module_id]
        return {
            "theta": self.theta(module_id).numpy(),
            "u": state.u.numpy().copy(),
            "h": state.h.numpy().copy(),
            "z": state.consensus.z.numpy().copy(),
        }

    def pid(self) -> int:
        """Returns this process' ID."""
        return os.getpid()
