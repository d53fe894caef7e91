"""`rllib evaluate`: greedy episodes of a checkpoint, as numbers, rows or a moving picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rllib_admm.cli.checkpoints import checkpoint_config
from rllib_admm.cli.errors import CommandError
from rllib_admm.cli.greedy import GreedyReturn, evaluation_runner, greedy_return, load_module

# A GIF shows at most 50 frames per second.
_FRAME_MS = 20
_MOST_FRAMES = 2000


def evaluate_checkpoint(
    checkpoint: Path,
    *,
    episodes: int,
    steps: int | None = None,
    env: str | None = None,
    render: Path | None = None,
    out: Path | None = None,
    seed: int | None = None,
    verbosity: int = 0,
) -> GreedyReturn:
    """Runs greedy episodes of a checkpoint and prints their mean return.

    Args:
        checkpoint: Folder.
        episodes: How many episodes, each in an environment of its own.
        steps: Most env steps of an episode; None: as many as it takes.
        env: An environment in place of the one trained in.
        render: GIF file for a first episode.
        out: Parquet file for (episode, return) rows.
        seed: Seed; None: that of the training, as at the end of `rllib train`.
        verbosity: As in `rllib train`.

    Raises:
        CommandError: If the checkpoint can not be read, or the environment not be drawn.
    """
    from rllib_admm.cli.run import set_up_logs

    set_up_logs(verbosity)
    config = checkpoint_config(checkpoint)
    if env is not None:
        config.environment(env)
    if seed is not None:
        config.debugging(seed=seed)
    returns = greedy_return(config, checkpoint, episodes, max_steps=steps)
    print(f"greedy return:     {returns}", flush=True)
    if out is not None:
        table = pa.table(
            {"episode": list(range(len(returns.returns))), "return": list(returns.returns)}
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, out)
        print(f"rows:              {out}", flush=True)
    if render is not None:
        frames, total = _film(config, checkpoint, steps)
        render.parent.mkdir(parents=True, exist_ok=True)
        frames[0].save(
            render,
            save_all=True,
            append_images=frames[1:],
            duration=_FRAME_MS,
            loop=0,
            optimize=True,
        )
        print(f"film:              {render} ({len(frames)} frames, return {total:.2f})", flush=True)
    return returns


class _Camera:
    """Stands between an environment and its wrappers, and keeps a picture of every frame."""

    def __init__(self) -> None:
        self.frames: list[Image.Image] = []

    def watch(self, env: Any) -> None:
        """Takes a picture after each step of the innermost environment."""
        inner = env.unwrapped
        step = inner.step

        def filmed(action: Any) -> Any:
            result = step(action)
            self.take(inner)
            return result

        inner.step = filmed

    def take(self, env: Any) -> None:
        """Takes one picture."""
        picture = env.render()
        if picture is None:
            raise CommandError(
                "--render: the environment draws nothing; it must support render_mode='rgb_array'"
            )
        if len(self.frames) < _MOST_FRAMES:
            self.frames.append(
                Image.fromarray(picture).convert("P", palette=Image.Palette.ADAPTIVE)
            )


def _film(config: Any, checkpoint: Path, steps: int | None) -> tuple[list[Image.Image], float]:
    """Runs one episode and returns its frames and its return."""
    config = config.copy(copy_frozen=False)
    config.environment(env_config={**config.env_config, "render_mode": "rgb_array"})
    runner = evaluation_runner(config, 1)
    camera = _Camera()
    try:
        load_module(runner, checkpoint)
        for env in runner.env.unwrapped.envs:
            camera.watch(env)
        total, count, first = 0.0, 0, True
        while steps is None or count < steps:
            (*_, fragment) = runner.sample(num_timesteps=1, explore=False, force_reset=first)
            first = False
            total += float(fragment.get_return())
            count += 1
            if fragment.is_done or len(camera.frames) >= _MOST_FRAMES:
                break
    finally:
        runner.stop()
    return camera.frames, total
