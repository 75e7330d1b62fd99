"""The ``flashd`` command: flags -> config -> one call."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flashd import __version__
from flashd.cli import bundle, daemon, talk
from flashd.cli.render import fail
from flashd.errors import FlashdError

app = typer.Typer(
    name="flashd",
    help="Generate text with language models larger than the machine's free RAM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(bundle.convert)
app.command()(bundle.inspect)
app.command()(bundle.verify)
app.command()(daemon.start)
app.command()(daemon.ps)
app.command()(daemon.stop)
app.command()(talk.run)
app.command()(talk.chat)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashd {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: every error a person is meant to read is one line and exit code 1."""
    try:
        app()
    except FlashdError as exc:
        fail(str(exc))
    except KeyboardInterrupt:
        sys.exit(130)
