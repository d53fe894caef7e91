"""What the command says when something is wrong, and how it ends then.

Owns the exit codes and the form of an error; knows nothing of what can fail.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import typer

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """An error the user can act on: its text is the whole message, on one line."""


def one_line(text: object) -> str:
    """Returns `text` with every run of white space as one space."""
    return " ".join(str(text).split())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean `x`?"`` for the known name nearest to `name`, or ``""``."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean `{nearest[0]}`?" if nearest else ""


@contextmanager
def errors_reported(verbosity: int) -> Iterator[None]:
    """Turns exceptions into one line on stderr and an exit code.

    Args:
        verbosity: From 2 on, the traceback is printed before the line.

    Raises:
        typer.Exit: With code 2 for any error, 130 if interrupted by the user.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as interrupt:
        print(f"rllib: {one_line(interrupt) or 'interrupted'}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:
        if verbosity >= 2:
            traceback.print_exc()
        if isinstance(error, CommandError):
            message = one_line(error)
        else:
            message = f"unexpected {type(error).__name__}: {one_line(error)}"
            if verbosity < 2:
                message += " (-vv shows the traceback)"
        print(f"rllib: error: {message}", file=sys.stderr)
        raise typer.Exit(EXIT_ERROR) from None
