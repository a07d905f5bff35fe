"""What surrounds every command: where its results go, and what becomes of its errors."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from autoac.cli.failures import Failure

RESULTS = "autoac.results"
"""Where a context keeps the stdout that results go to."""


class Command(TyperCommand):
    """A command whose results alone go to stdout: what the user's model prints goes to stderr."""

    def invoke(self, ctx: Any) -> Any:
        ctx.meta[RESULTS] = sys.stdout
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch's profiler reports its start and stop
        with contextlib.redirect_stdout(sys.stderr):
            return super().invoke(ctx)


class Commands(TyperGroup):
    """All commands. An error becomes one readable line and a hint on stderr, and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if ctx.meta.get("verbose"):
                traceback.print_exc()
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            # typer's own (usage errors, exits) and a pipe that nobody reads are typer's business.
            if hasattr(error, "exit_code") or isinstance(error, (typer.Abort, BrokenPipeError)):
                raise
            if ctx.meta.get("verbose"):
                traceback.print_exc()
            from autoac.cli.failures import understand  # it knows the solver, which takes a while to import

            failure = understand(error)
            _tell(failure, as_json=bool(ctx.meta.get("as_json")), verbose=bool(ctx.meta.get("verbose")))
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
