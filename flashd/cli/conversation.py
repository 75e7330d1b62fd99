"""Asking the daemon: one question (``flashd run``) or a conversation (``flashd chat``)."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from flashd_client import BadRequest, Chunk, Client, DaemonNotRunning, FlashdClientError, Message, Usage

from flashd.cli.render import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    fail,
    human_duration,
    note,
    print_error,
    print_json,
    safe_text,
)
from flashd.config import default_socket

NO_CHAT_TEMPLATE = "no_chat_template"
# A base model goes on until its context is full.
RAW_MAX_TOKENS = 256
HELP = """\
/system TEXT  set the system message (without TEXT: show it)
/clear        forget the conversation, keep the system message
/exit         leave, as Ctrl-D does; Ctrl-C stops an answer
A message that starts with a slash needs a space in front."""

Write = Callable[[str], None]


class Output:
    """The answer on stdout, as it comes. On a terminal without control characters."""

    def __init__(self, silent: bool = False) -> None:
        self._silent = silent
        self._line_open = False
        self._filter = safe_text if sys.stdout.isatty() else str
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 is no reason to stop

    def write(self, text: str) -> None:
        """Print a piece of the answer."""
        text = self._filter(text)
        if text and not self._silent:
            self._line_open = not text.endswith("\n")  # first: Ctrl-C may come while we write
            sys.stdout.write(text)
            sys.stdout.flush()

    def end_line(self) -> None:
        """Make sure that the next thing printed starts a line."""
        if self._line_open:
            self.write("\n")


class Reply:
    """An answer as it comes in; what there is of it stays usable when it is stopped."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._texts: list[str] = []
        self._usage: Usage | None = None
        self._model = ""
        self._finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def read(self, chunks: Generator[Chunk, None, None], write: Write) -> None:
        """Read a stream to its end; however that comes about, the stream is closed then."""
        with closing(chunks):
            for chunk in chunks:
                self._add(chunk)
                write(chunk.text)

    def _add(self, chunk: Chunk) -> None:
        self._model = chunk.model or self._model
        self._usage = chunk.usage or self._usage
        self._finish_reason = chunk.finish_reason or self._finish_reason
        if chunk.text or chunk.finish_reason:
            self._last_s = time.monotonic()
            self._first_s = self._first_s or self._last_s
            self._texts.append(chunk.text)

    def facts(self) -> dict[str, Any]:
        """What ``--json`` prints. ``tokens_per_s`` leaves out the first token and its wait."""
        first_s, usage = self._first_s, self._usage
        decode_s = self._last_s - first_s if first_s is not None else 0.0
        rate = (usage.completion_tokens - 1) / decode_s if usage is not None and decode_s > 0 else None
        return {
            "text": self.text,
            "model": self._model,
            "finish_reason": self._finish_reason,
            "usage": usage,
            "time_to_first_token_s": None if first_s is None else first_s - self._start_s,
            "total_s": self._last_s - self._start_s,
            "tokens_per_s": rate,
        }

    def summary(self) -> str:
        """The facts in one line."""
        facts, usage = self.facts(), self._usage
        parts = [f"{usage.completion_tokens} tokens" if usage else "stopped"]
        if facts["time_to_first_token_s"] is not None:
            parts.append(f"first after {human_duration(facts['time_to_first_token_s'])}")
        if facts["tokens_per_s"] is not None:
            parts.append(f"{facts['tokens_per_s']:.1f} tokens/s")
        if usage:
            parts.append(f"prompt of {usage.prompt_tokens} tokens")
            parts.append(f"finish reason: {self._finish_reason}")
        return f"[{', '.join(parts)}]"


def ask(
    prompt: str | None,
    *,
    system: str | None,
    raw: bool,
    socket: Path | None,
    options: dict[str, Any],
    stats: bool,
    as_json: bool,
) -> None:
    """One question, one answer; leaves with exit code 1 (or 2, 130) if there is none."""
    if raw and system is not None:
        fail("--system needs the chat template that --raw leaves out; give one of them", EXIT_USAGE)
    text = _utf8(_prompt(prompt))
    output, reply = Output(silent=as_json), Reply()
    try:
        with Client(socket or default_socket()) as client:
            reply.read(_answer(client, text, system, raw, options), output.write)
    except FlashdClientError as exc:
        output.end_line()
        fail(exc)
    except KeyboardInterrupt:
        output.end_line()
        sys.exit(EXIT_INTERRUPTED)
    output.end_line()
    if as_json:
        print_json(reply.facts())
    elif stats:
        print(reply.summary(), file=sys.stderr)


def _answer(
    client: Client, prompt: str, system: str | None, raw: bool, options: dict[str, Any]
) -> Generator[Chunk, None, None]:
    if not raw:
        try:
            yield from client.stream_chat([*_system(system), _user(prompt)], **options)
            return
        except BadRequest as exc:
            if exc.code != NO_CHAT_TEMPLATE:
                raise
            ignored = "" if system is None else "; --system is ignored"
            note(f"this model has no chat template: it continues the prompt, as with --raw{ignored}")
    yield from client.stream_complete(prompt, **{"max_tokens": RAW_MAX_TOKENS} | options)


def _system(text: str | None) -> list[Message]:
    return [] if text is None else [{"role": "system", "content": _utf8(text)}]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _prompt(argument: str | None) -> str:
    """The prompt from the command line or stdin, which loses one line end, as ``$(...)`` has it."""
    if argument not in (None, "-"):
        assert argument is not None
        return argument
    if sys.stdin is None or (argument is None and sys.stdin.isatty()):
        fail('no prompt: give one (flashd run "...") or pipe it in', EXIT_USAGE)
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as exc:
        fail(f"stdin is not UTF-8 text ({exc.reason} at byte {exc.start})", EXIT_USAGE)


def _utf8(text: str) -> str:
    """Arguments that are not UTF-8 arrive as lone surrogates, which no JSON can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        fail("the prompt is not UTF-8 text; convert it, for example with iconv", EXIT_USAGE)
    return text


def converse(*, system: str | None, socket: Path | None, options: dict[str, Any], stats: bool) -> None:
    """A conversation until the end of input; leaves with exit code 1 if the daemon is gone."""
    try:
        with Client(socket or default_socket()) as client:
            health = client.health()
            if not health.ready:
                fail(f"the daemon is not ready yet ({health.status}); try again in a moment")
            chat = Conversation(client, system, options, stats)
            if chat.interactive:
                names = ", ".join(model.id for model in client.models())
                print(f"{safe_text(names)} - /help lists what else there is", file=sys.stderr)
            while chat.step():
                pass
    except FlashdClientError as exc:
        fail(exc)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


class Conversation:
    """Turns with history. Without a terminal every line of stdin is a turn, and errors end it.

    Args:
        client: of a daemon that is ready.
        system: system message, if any.
        options: of every turn.
        stats: print a summary after each answer.
    """

    def __init__(self, client: Client, system: str | None, options: dict[str, Any], stats: bool) -> None:
        self.interactive = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        self._client = client
        self._system = system
        self._options = options
        self._stats = stats
        self._history: list[Message] = []
        self._read_line = _terminal_reader() if self.interactive else _pipe_reader

    def step(self) -> bool:
        """One line of input and what follows from it; False when the person wants to leave."""
        try:
            line = self._read_line()
            if line is None:
                return False
            if line.startswith("/"):
                return self._command(*line[1:].split(maxsplit=1))
            if line.strip():
                self._turn(line.strip())
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            print("\nCtrl-D or /exit leaves", file=sys.stderr)
        return True

    def _command(self, name: str = "", argument: str = "") -> bool:
        if name == "exit":
            return False
        if name == "clear":
            self._history.clear()
        elif name == "system" and argument.strip():
            self._system = argument.strip()
        elif name == "system":
            print(self._system or "no system message", file=sys.stderr)
        elif name == "help":
            print(HELP, file=sys.stderr)
        else:
            print_error(f"unknown command '/{name}'; /help lists what there is")
        return True

    def _turn(self, text: str) -> None:
        question = _user(_utf8(text))
        output, reply = Output(), Reply()
        messages = [*_system(self._system), *self._history, question]
        try:
            reply.read(self._client.stream_chat(messages, **self._options), output.write)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            output.end_line()
            print("[stopped]", file=sys.stderr)
        except FlashdClientError as exc:
            output.end_line()
            self._report(exc)
            return
        output.end_line()
        if self._stats:
            print(reply.summary(), file=sys.stderr)
        if reply.text:
            self._history += [question, {"role": "assistant", "content": reply.text}]

    def _report(self, exc: FlashdClientError) -> None:
        code = getattr(exc, "code", None)
        if code == NO_CHAT_TEMPLATE:
            fail("this model has no chat template and can't hold a conversation; use: flashd run --raw")
        if not self.interactive or isinstance(exc, DaemonNotRunning):
            fail(exc)
        hint = "; /clear starts a new conversation" if code == "context_length_exceeded" else ""
        print_error(f"{exc}{hint}")


def _pipe_reader() -> str | None:
    try:
        return sys.stdin.readline() or None if sys.stdin is not None else None
    except UnicodeDecodeError as exc:
        fail(f"stdin is not UTF-8 text ({exc.reason} at byte {exc.start})", EXIT_USAGE)


def _terminal_reader() -> Callable[[], str | None]:
    """Line editing and, within this conversation, history; None is Ctrl-D."""
    import readline  # noqa: F401  # importing it is what gives input() line editing

    from rich.console import Console

    console = Console()
    with console.capture() as drawn:
        console.print("[bold cyan]>[/] ", end="")
    # readline must know what takes no room, or it redraws long lines in the wrong place.
    prompt = re.sub(r"(\x1b\[[0-9;]*m)", "\x01\\1\x02", drawn.get())

    def read() -> str | None:
        try:
            return input(prompt)
        except EOFError:
            print()
            return None

    return read
