"""The command line: `autoac COMMAND`.

Results go to stdout, progress and messages to stderr; with `--json` stdout holds one JSON document and nothing else.

Exit codes:
    0   done
    1   an error, or a check that failed (gradients differ, a peak exceeds its budget)
    2   usage: the command line is invalid, or names something that does not exist
    3   the budget is infeasible: no plan meets it
    4   no plan was found in the time given
    130 interrupted (Ctrl-C)

A command is a file in `commands/` with a function `main`, and a line below. Importing torch, pandas or the solver takes
a second or more, so commands import them inside functions, and `--help` does not need them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from autoac._version import __version__
from autoac.cli.commands import calibrate, compare, demo, plan, profile, report, run, selfcheck, tradeoff
from autoac.cli.shell import Command, Commands

app = typer.Typer(
    name="autoac",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autoac {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Plan activation checkpointing for PyTorch: a peak memory budget in bytes, the least extra time.

    MODEL is package.module:factory or file.py:factory, a function (--arg gives
    it arguments) that returns (model, sample), (model, sample, loss), or a mapping
    with the keys model, sample, and if you like loss and optimizer.

    plan and tradeoff also take a file that `autoac profile` or `autoac plan`
    wrote, and then need no torch.

    Exit codes: 0 done, 1 error or a failed check, 2 usage, 3 infeasible
    budget, 4 no plan in the time given, 130 interrupted.
    """
    # Lines of at most 76 columns: typer keeps the line breaks of all paragraphs but the first.


app.command("profile", cls=Command)(profile.main)
app.command("plan", cls=Command)(plan.main)
app.command("tradeoff", cls=Command)(tradeoff.main)
app.command("report", cls=Command)(report.main)
app.command("run", cls=Command)(run.main)
app.command("compare", cls=Command)(compare.main)
app.command("calibrate", cls=Command)(calibrate.main)
app.command("selfcheck", cls=Command)(selfcheck.main)
app.command("demo", cls=Command)(demo.main)
