"""RLModules and action grids that stock DQN lacks."""

from rllib_admm.rl_modules.action_grid import ACTION_GRIDS, ActionGrid
from rllib_admm.rl_modules.branching_q import BranchingQRLModule

__all__ = ["ACTION_GRIDS", "ActionGrid", "BranchingQRLModule"]
