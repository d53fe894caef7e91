"""The command's structure: its subcommands and their options. The work is done elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rllib_admm.cli.errors import CommandError, errors_reported, one_line

app = typer.Typer(
    name="rllib",
    help="Train and evaluate RLlib algorithms, ADMMDQN and Ape-X among them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
train_app = typer.Typer(help="Train an algorithm.", invoke_without_command=True)
app.add_typer(train_app, name="train")
example_app = typer.Typer(help="The tuned examples of this package.", no_args_is_help=True)
app.add_typer(example_app, name="example")

StoragePath = Annotated[
    str | None,
    typer.Option(help="Folder (or URI) for results; wins over the file's. Default: results/"),
]
RayNumCpus = Annotated[
    int | None,
    typer.Option(min=1, help="CPUs of the local Ray cluster. Default: all of this machine."),
]
RayNumGpus = Annotated[
    int | None,
    typer.Option(min=0, help="GPUs of the local Ray cluster. Default: all of this machine."),
]
RayAddress = Annotated[str | None, typer.Option(help="Connect to this Ray cluster instead.")]
Restore = Annotated[str | None, typer.Option(help="Checkpoint folder to start from.")]
Resume = Annotated[
    str | None, typer.Option(help="Result folder of an interrupted run to go on with.")
]
Scheduler = Annotated[str | None, typer.Option(help="Tune scheduler: asha, pbt, ...")]
SchedulerConfig = Annotated[str, typer.Option(help="JSON: the scheduler's arguments.")]
Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        show_default=False,
        help="-v: show Ray's logs as well; -vv: also show tracebacks of errors.",
    ),
]


@app.callback()
def _root() -> None:
    """Train and evaluate RLlib algorithms, ADMMDQN and Ape-X among them."""


@train_app.callback()
def train(
    context: typer.Context,
    algo: Annotated[
        str | None, typer.Option("--algo", "--run", help="Algorithm, or package.module:Class.")
    ] = None,
    env: Annotated[str | None, typer.Option(help="Environment.")] = None,
    config: Annotated[str, typer.Option(help="JSON: the algorithm's settings.")] = "{}",
    stop: Annotated[str, typer.Option(help="JSON: metrics at which training ends.")] = "{}",
    config_file: Annotated[
        Path | None, typer.Option("-f", hidden=True, help="Old spelling of `rllib train file`.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the result folder.")] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="How many times to run it.")] = 1,
    checkpoint_freq: Annotated[
        int, typer.Option(min=0, help="Iterations between checkpoints; 0: at the end only.")
    ] = 0,
    keep_checkpoints_num: Annotated[
        int | None, typer.Option(min=1, help="How many checkpoints to keep.")
    ] = None,
    storage_path: StoragePath = None,
    restore: Restore = None,
    resume: Resume = None,
    ray_num_cpus: RayNumCpus = None,
    ray_num_gpus: RayNumGpus = None,
    ray_address: RayAddress = None,
    scheduler: Scheduler = None,
    scheduler_config: SchedulerConfig = "{}",
    verbose: Verbose = 0,
) -> None:
    """Train an algorithm in an environment: `rllib train --algo ADMMDQN --env CartPole-v1 ...`.

    Ends with the result folder, the checkpoint folder and the greedy return of the last
    checkpoint over 20 episodes.
    """
    if context.invoked_subcommand is not None:
        with errors_reported(verbose):
            if algo or env or config != "{}" or stop != "{}" or config_file:
                raise CommandError(
                    f"options stand behind `{context.invoked_subcommand}`; what is trained "
                    "stands in the file"
                )
        return
    with errors_reported(verbose):
        from rllib_admm.cli.experiment_file import experiments

        if config_file is not None:
            _hint(f"`-f` is now `rllib train file {config_file}`")
            read = _read(config_file)
        elif algo is None:
            raise CommandError("say what to train: --algo and --env, or `rllib train file FILE`")
        else:
            body: dict[str, Any] = {
                "run": algo,
                "config": _json("--config", config),
                "stop": _json("--stop", stop),
                "num_samples": num_samples,
                "checkpoint_config": {"checkpoint_frequency": checkpoint_freq},
            }
            if env is not None:
                body["env"] = env
            if keep_checkpoints_num is not None:
                body["checkpoint_config"]["num_to_keep"] = keep_checkpoints_num
            label = name or f"{algo.rpartition(':')[2].lower()}-{env or 'env'}".replace("/", "-")
            read = experiments(label, body, Path("command line"), {}, _hint)

        from rllib_admm.cli.run import RunOptions, run_experiments

        run_experiments(
            read,
            RunOptions(
                storage_path=storage_path,
                ray_num_cpus=ray_num_cpus,
                ray_num_gpus=ray_num_gpus,
                ray_address=ray_address,
                restore=restore,
                resume=resume,
                scheduler=scheduler,
                scheduler_config=_json("--scheduler-config", scheduler_config),
                verbosity=verbose,
            ),
        )


@train_app.command("file")
def train_file(
    file: Annotated[
        Path, typer.Argument(help="YAML, JSON or Python file with one or more experiments.")
    ],
    storage_path: StoragePath = None,
    restore: Restore = None,
    resume: Resume = None,
    ray_num_cpus: RayNumCpus = None,
    ray_num_gpus: RayNumGpus = None,
    ray_address: RayAddress = None,
    scheduler: Scheduler = None,
    scheduler_config: SchedulerConfig = "{}",
    verbose: Verbose = 0,
) -> None:
    """Train the experiments of a YAML, JSON or Python file, one after the other.

    Ends with the result folder, the checkpoint folder and the greedy return of the last
    checkpoint over 20 episodes.
    """
    with errors_reported(verbose):
        # Before the import of Ray: a mistake in the file is then reported at once.
        experiments = _read(file)

        from rllib_admm.cli.run import RunOptions, run_experiments

        run_experiments(
            experiments,
            RunOptions(
                storage_path=storage_path,
                ray_num_cpus=ray_num_cpus,
                ray_num_gpus=ray_num_gpus,
                ray_address=ray_address,
                restore=restore,
                resume=resume,
                scheduler=scheduler,
                scheduler_config=_json("--scheduler-config", scheduler_config),
                verbosity=verbose,
            ),
        )


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder of an Algorithm.")],
    episodes: Annotated[int, typer.Option(min=1, help="Greedy episodes.")] = 20,
    steps: Annotated[
        int | None, typer.Option(min=1, help="End each episode after that many env steps.")
    ] = None,
    env: Annotated[str | None, typer.Option(help="Another environment than trained in.")] = None,
    render: Annotated[
        Path | None, typer.Option(help="Write the first episode as a GIF to this file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a row per episode to this Parquet file.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed. Default: that of the training.")] = None,
    verbose: Verbose = 0,
) -> None:
    """Measure the greedy return of a checkpoint, without any actor."""
    with errors_reported(verbose):
        from rllib_admm.cli.evaluate import evaluate_checkpoint

        evaluate_checkpoint(
            checkpoint,
            episodes=episodes,
            steps=steps,
            env=env,
            render=render,
            out=out,
            seed=seed,
            verbosity=verbose,
        )


@app.command()
def report(
    result_dirs: Annotated[
        list[Path], typer.Argument(help="Result folders: trials, experiments, or folders of those.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.png and report.html.")] = Path(
        "report"
    ),
    threshold: Annotated[
        float | None,
        typer.Option(help="Return that counts as solved. Default: the environment's own."),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="Path in a result of what counts as the return.")
    ] = "env_runners/episode_return_mean",
    verbose: Verbose = 0,
) -> None:
    """Compare the runs in result folders of Ray Tune: a table, and curves as PNG and HTML."""
    with errors_reported(verbose):
        from rllib_admm.cli.report import write

        write(result_dirs, out=out, threshold=threshold, metric=metric)


@example_app.command("list")
def example_list() -> None:
    """List the tuned examples."""
    from rllib_admm.cli.examples import examples

    for path in examples():
        print(path.stem)


@example_app.command("get")
def example_get(
    name: Annotated[str, typer.Argument(help="Name as `rllib example list` prints it.")],
    folder: Annotated[Path, typer.Argument(help="Where to put it.")] = Path("."),
) -> None:
    """Copy a tuned example into a folder."""
    with errors_reported(0):
        from rllib_admm.cli.examples import copy_example

        print(copy_example(name, folder))


@example_app.command("run")
def example_run(
    name: Annotated[str, typer.Argument(help="Name as `rllib example list` prints it.")],
    storage_path: StoragePath = None,
    ray_num_cpus: RayNumCpus = None,
    verbose: Verbose = 0,
) -> None:
    """Train a tuned example."""
    with errors_reported(verbose):
        from rllib_admm.cli.examples import find_example

        experiments = _read(find_example(name))

        from rllib_admm.cli.run import RunOptions, run_experiments

        run_experiments(
            experiments,
            RunOptions(storage_path=storage_path, ray_num_cpus=ray_num_cpus, verbosity=verbose),
        )


def _read(file: Path) -> list[Any]:
    if file.suffix == ".py":
        from rllib_admm.cli.python_file import read_python_file

        return read_python_file(file, _hint)
    from rllib_admm.cli.experiment_file import read_experiments

    return read_experiments(file, _hint)


def _json(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CommandError(f"{option}: not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise CommandError(f"{option} must be a JSON object, is {text}")
    return value


def _hint(sentence: str) -> None:
    print(f"rllib: hint: {sentence}", file=sys.stderr)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="rllib")
