"""The tuned examples that come with the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from rllib_admm.cli.errors import CommandError, did_you_mean


def _folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    # In a wheel they lie inside the package, in a checkout beside it.
    inside = package / "tuned_examples"
    return inside if inside.is_dir() else package.parent / "tuned_examples"


def examples() -> list[Path]:
    """Returns the files of all tuned examples, sorted by name."""
    return sorted(_folder().glob("*.yaml"))


def find_example(name: str) -> Path:
    """Returns the file of an example, by its name with or without `.yaml`.

    Raises:
        CommandError: If there is none; names the nearest.
    """
    known = {path.stem: path for path in examples()}
    stem = name.removesuffix(".yaml")
    if stem not in known:
        hint = did_you_mean(stem, known) or f"; known are {', '.join(known)}"
        raise CommandError(f"no tuned example `{name}`{hint}")
    return known[stem]


def copy_example(name: str, folder: Path) -> Path:
    """Copies an example into a folder and returns the copy.

    Raises:
        CommandError: If there is no such example, or the file exists.
    """
    source = find_example(name)
    target = folder / source.name
    if target.exists():
        raise CommandError(f"{target} exists already")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target
