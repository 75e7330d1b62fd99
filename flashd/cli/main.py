"""The ``flashd`` command: flags -> config -> one call."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from flashd import __version__
from flashd.cli import (
    bench,
    bench_token,
    bench_window,
    bundle,
    calibrate,
    daemon,
    doctor,
    evaluate,
    plan,
    reorder,
    steady,
    synth,
    talk,
)
from flashd.cli.render import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, fail, note
from flashd.config import traceback_wanted
from flashd.errors import ConfigError, FlashdError

# typer carries click under a private name or depends on it, by version; this is its base error.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="flashd",
    help="Generate text with language models larger than the machine's free RAM.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts say [default: ...], which markup would swallow
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(bundle.convert)
app.command()(calibrate.calibrate)
app.command()(reorder.reorder)
app.command()(bundle.inspect)
app.command()(bundle.verify)
app.command("eval")(evaluate.evaluate)
app.command()(synth.synth)
app.command()(plan.plan)
app.command()(doctor.doctor)
bench.bench.command("steady")(steady.steady)
bench.bench.command("token")(bench_token.bench_token)
bench.bench.command("window")(bench_window.bench_window)
app.add_typer(bench.bench)
app.command()(daemon.start)
app.command()(daemon.ps)
app.command()(daemon.stop)
app.command()(talk.run)
app.command()(talk.chat)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashd {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USAGE)


def main() -> None:
    """Entry point: every error a person is meant to read is one line.

    Exit codes: 0, 1 for what went wrong, 2 for wrong usage, 130 for Ctrl-C.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever has started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # until the process ends
    try:
        code = app(standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # newer typers make this of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except _ClickException as exc:
        context = getattr(exc, "ctx", None)
        command = "flashd" if context is None else context.command_path
        fail(f"{exc.format_message().rstrip('.')}; see {command} --help", EXIT_USAGE)
    except ConfigError as exc:
        fail(exc, EXIT_USAGE)
    except FlashdError as exc:
        fail(exc)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing left to flush to
        sys.exit(EXIT_FAILURE)
    except OSError as exc:
        fail(exc)
    except (typer.Abort, KeyboardInterrupt):
        note("interrupted")  # a command with more to say has said it and left
        sys.exit(EXIT_INTERRUPTED)
    except Exception as exc:  # our own bug; the daemon's log has the traceback of its own ones
        if traceback_wanted():
            raise
        fail(f"internal error: {exc!r}; FLASHD_TRACEBACK=1 shows where; please report it")
