"""`python -m autoac` is the command line."""

from autoac.cli import app

app(prog_name="autoac")
