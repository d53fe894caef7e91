"""`python -m rllib_admm` is the command `rllib`."""

from rllib_admm.cli import main

if __name__ == "__main__":
    main()
