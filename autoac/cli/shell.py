"""Wrapper of every command: redirects its output, and handles its errors."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from autoac.cli.failures import Failure

RESULTS = "autoac.results"
"""Key under which a context keeps the stdout for results."""


class Command(TyperCommand):
    """A command with only its results on stdout: prints of the user's model go to stderr."""

    def invoke(self, ctx: Any) -> Any:
        ctx.meta[RESULTS] = sys.stdout
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch's profiler reports its start and stop
        with contextlib.redirect_stdout(sys.stderr):
            return super().invoke(ctx)


class Commands(TyperGroup):
    """All commands. An error becomes one readable line and a hint on stderr, and an exit code."""

    def make_context(self, *arguments: Any, **others: Any) -> Any:
        with _readable_errors({}):
            return super().make_context(*arguments, **others)

    def invoke(self, ctx: Any) -> Any:
        with _readable_errors(ctx.meta):
            return super().invoke(ctx)


@contextlib.contextmanager
def _readable_errors(options: Mapping[str, Any]) -> Iterator[None]:
    """Context that prints errors and exits with their code.

    Args:
        options: "as_json" and "verbose" as the command was given them; filled while it runs.
    """
    try:
        yield
    except KeyboardInterrupt:
        if options.get("verbose"):
            traceback.print_exc()
        if options.get("as_json"):
            interrupted = {"kind": "interrupted", "message": "Interrupted.", "hint": "", "exit_code": 130}
            typer.echo(json.dumps({"error": interrupted}, indent=2))
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        # Typer handles its own exits, its help, and a broken pipe.
        usage = hasattr(error, "format_message") and type(error).__name__ != "NoArgsIsHelpError"
        if isinstance(error, (typer.Exit, typer.Abort, BrokenPipeError)) or (
            hasattr(error, "exit_code") and not usage
        ):
            raise
        if options.get("verbose"):
            traceback.print_exc()
        from autoac.cli.failures import understand  # it imports the solver, which takes a while

        failure = understand(error)
        _tell(failure, as_json=bool(options.get("as_json")), verbose=bool(options.get("verbose")))
        raise typer.Exit(failure.exit_code) from None


def _tell(failure: Failure, as_json: bool, verbose: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"error": failure.as_json()}, indent=2))
    typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
    typer.echo(failure.line, err=True)
    for line in failure.details:
        typer.echo(f"  {line}", err=True)
    hints = [failure.hint] if failure.hint else []
    if failure.is_unexpected and not verbose:
        hints.append("--verbose shows the traceback.")
    if hints:
        typer.secho("hint: ", fg=typer.colors.CYAN, err=True, nl=False)
        typer.echo(" ".join(hints), err=True)
