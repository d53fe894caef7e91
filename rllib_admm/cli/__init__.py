"""The command `rllib`.

Importing this package must stay cheap: Ray, RLlib and torch are imported by the functions that
need them, so that `rllib --help` answers at once.
"""

from rllib_admm.cli.app import main

__all__ = ["main"]
