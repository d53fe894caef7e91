"""The learner of Ape-X: that of ADMMDQN, with its replay in other processes."""

from __future__ import annotations

from ray.rllib.utils.annotations import override

from rllib_admm.learner.remote_replay import RemoteReplay
from rllib_admm.learner.replay import LearnerReplay
from rllib_admm.learner.round import RoundRequest, RoundResult
from rllib_admm.learner.torch_learner import ADMMDQNTorchLearner


class ApexDQNTorchLearner(ADMMDQNTorchLearner):
    """Takes its minibatches from replay actors, a bounded number ahead."""

    @override(ADMMDQNTorchLearner)
    def _make_replay(self) -> LearnerReplay:
        return RemoteReplay(self.config)

    @override(ADMMDQNTorchLearner)
    def _begin(self, request: RoundRequest, result: RoundResult) -> None:
        assert isinstance(self._replay, RemoteReplay)
        self._replay.connect(request.replay_actors)
        super()._begin(request, result)

    @override(ADMMDQNTorchLearner)
    def _finish(self, request: RoundRequest, result: RoundResult) -> None:
        super()._finish(request, result)
        assert isinstance(self._replay, RemoteReplay)
        result.replay = self._replay.take_counters()
