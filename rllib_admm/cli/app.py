"""The command's structure: its subcommands and their options. The work is done elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rllib_admm.cli.errors import errors_reported

app = typer.Typer(
    name="rllib",
    help="Train and evaluate RLlib algorithms, ADMMDQN among them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
train_app = typer.Typer(help="Train an algorithm.", no_args_is_help=True)
app.add_typer(train_app, name="train")


@app.callback()
def _root() -> None:
    """Train and evaluate RLlib algorithms, ADMMDQN among them."""


@train_app.command("file")
def train_file(
    file: Annotated[Path, typer.Argument(help="YAML file with one or more experiments.")],
    storage_path: Annotated[
        str | None,
        typer.Option(help="Folder (or URI) for results; wins over the file's. Default: results/"),
    ] = None,
    ray_num_cpus: Annotated[
        int | None,
        typer.Option(min=1, help="CPUs of the local Ray cluster. Default: all of this machine."),
    ] = None,
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            show_default=False,
            help="-v: show Ray's logs as well; -vv: also show tracebacks of errors.",
        ),
    ] = 0,
) -> None:
    """Train the experiments of a YAML file, one after the other.

    Ends with the result folder, the checkpoint folder and the greedy return of the last
    checkpoint over 20 episodes.
    """
    with errors_reported(verbose):
        from rllib_admm.cli.experiment_file import read_experiments

        # Before the import of Ray: a mistake in the file is then reported at once.
        experiments = read_experiments(file)

        from rllib_admm.cli.run import run_experiments

        run_experiments(
            experiments,
            storage_path=storage_path,
            ray_num_cpus=ray_num_cpus,
            verbosity=verbose,
        )


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="rllib")
