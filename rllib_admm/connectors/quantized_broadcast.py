"""z on its way to EnvRunners, as the state of a ConnectorV2."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import gymnasium as gym
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable

from rllib_admm.consensus import Consensus, Layout, MessageError
from rllib_admm.learner.broadcast import Broadcast

BROADCAST = "broadcast"


class QuantizedBroadcast(ConnectorV2):
    """Receives z as quantised differences and acts with it: an env-to-module piece.

    The weights travel as this piece's *state*: `set_state({"broadcast": Broadcast(...)})`
    decodes them and writes them into the EnvRunner's RLModule at once, through a weak
    reference, so that the first action afterwards is already z's. Before the first reset the
    piece does not know the module yet; then they are written in its first `__call__`, which
    comes before the first forward pass. A difference that does not continue what this end
    holds, or any broken message, raises `MessageError` and changes nothing: the sender then
    sends a keyframe.

    It stands last in the pipeline and passes batches through untouched. `get_state` is empty:
    RLlib collects and merges the connector states of all EnvRunners, and an old payload must
    not come back that way.
    """

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_observation_space, input_action_space, **kwargs)
        self._consensus: dict[str, Consensus] = {}
        self._layouts: dict[str, Layout] = {}
        self._module: weakref.ref[Any] | None = None
        self._written = True
        self.round: int | None = None

    @override(ConnectorV2)
    def __call__(self, *, rl_module: Any, batch: dict[str, Any], **kwargs: Any) -> Any:
        """Returns `batch` as it is; makes sure that `rl_module` acts with the newest z."""
        if self._module is None or self._module() is not rl_module:
            self.bind(rl_module)
        return batch

    def bind(self, rl_module: Any) -> None:
        """Names the RLModule (or MultiRLModule) that z is written into from now on."""
        self._module = weakref.ref(rl_module)
        if self._consensus:
            self._write()

    @override(Checkpointable)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns nothing: z is the coordinator's to save and to send."""
        return {}

    @override(Checkpointable)
    def set_state(self, state: dict[str, Any]) -> None:
        """Takes in a `Broadcast` under "broadcast".

        Raises:
            MessageError: If it is broken or continues another round than the one held; this
                end's state is unchanged then.
        """
        broadcast = state.get(BROADCAST)
        if broadcast is None:
            return
        if broadcast.base_round is None:
            self._take_keyframe(broadcast)
        else:
            self._take_difference(broadcast)
        self.round = broadcast.round
        self._write()

    @override(ConnectorV2)
    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Merges nothing into nothing."""
        return {}

    def _take_keyframe(self, broadcast: Broadcast) -> None:
        assert broadcast.options is not None
        fresh = {}
        for module_id, snapshot in broadcast.snapshots.items():
            layout = broadcast.layouts[module_id]
            consensus = Consensus(
                torch.zeros(layout.size, dtype=layout.dtype), broadcast.options, layout.hash
            )
            consensus.load(snapshot)
            fresh[module_id] = consensus
        self._consensus, self._layouts = fresh, dict(broadcast.layouts)

    def _take_difference(self, broadcast: Broadcast) -> None:
        if self.round != broadcast.base_round or set(broadcast.moves) - set(self._consensus):
            held = "nothing" if self.round is None else f"round {self.round}"
            raise MessageError(
                f"A difference to round {broadcast.base_round} arrived, but this EnvRunner holds "
                f"{held}: it needs a keyframe."
            )
        # All are read before any is applied: a broken one must not leave some moved.
        read = {mid: self._consensus[mid].read(move) for mid, move in broadcast.moves.items()}
        for module_id, z_bar in read.items():
            self._consensus[module_id].advance(z_bar)

    def _write(self) -> None:
        module = self._module() if self._module is not None else None
        if module is None:
            return
        for module_id, consensus in self._consensus.items():
            if isinstance(module, MultiRLModule):
                if module_id not in module:
                    continue
                part = module[module_id]
            elif module_id == DEFAULT_MODULE_ID or len(self._consensus) == 1:
                part = module
            else:
                continue
            write_parameters(part, self._layouts[module_id], consensus.z)


@torch.no_grad()
def write_parameters(module: Any, layout: Layout, z: torch.Tensor) -> None:
    """Writes z, shape (P,), into the parameters of `module` that `layout` names.

    Names that an inference-only module does not have are left out.
    """
    own = dict(module.named_parameters())
    for name, view in zip(layout.names, layout.views(z), strict=True):
        if name in own:
            own[name].copy_(view)
