"""``flashd run`` and ``flashd chat`` as a person meets them: processes, pipes and terminals.

The daemon's side is played byte by byte; against the real daemon they run in the server's tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients.raw_server import (
    DONE,
    STREAM_HEAD,
    WAIT_FOR_CLIENT_CLOSE,
    RawServer,
    answer,
    delta,
    error,
    event,
    piece,
    usage,
)

COMMAND = [sys.executable, "-c", "from flashd.cli.main import main; main()"]
PROMPT = ">\x1b[0m "
OK = answer({"status": "ok"})
MODELS = answer({"object": "list", "data": [{"id": "tiny-model"}]})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RawServer]:
    running = RawServer(tmp_path / "d.sock")
    yield running
    running.close()


def chat_answer(*texts: str) -> tuple[bytes, ...]:
    pieces = [delta(text) for text in texts]
    return (STREAM_HEAD, delta(None), *pieces, delta("", "stop"), usage(9, len(texts)), DONE)


def flashd(
    server: RawServer, *arguments: str | bytes, stdin: bytes = b"", code: int = 0, **env: str
) -> subprocess.CompletedProcess[bytes]:
    environ = {**os.environ, "FLASHD_SOCKET": str(server.path), **env}
    done = subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, env=environ, timeout=60)
    assert done.returncode == code, done
    assert b"Traceback" not in done.stderr
    return done


def one_line_error(done: subprocess.CompletedProcess[bytes]) -> str:
    text = done.stderr.decode()
    assert text.startswith("flashd: error: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1
    return text


def test_run_prints_the_answer_and_its_stats(server: RawServer) -> None:
    server.reply(*chat_answer("Par", "is."))
    done = flashd(
        server, "run", "Capital?", "--system", "Be brief", "--temperature", "0", "--max-tokens", "9",
        "--top-p", "0.5", "--top-k", "3", "--seed", "4", "--stats",
    )  # fmt: skip
    assert done.stdout == b"Paris.\n"
    stats = r"\[2 tokens, first after \d+ ms, [\d.]+ tokens/s, prompt of 9 tokens, finish reason: stop\]\n"
    assert re.fullmatch(stats, done.stderr.decode())
    body = server.requests[0].body
    assert body["messages"] == [
        {"role": "system", "content": "Be brief"}, {"role": "user", "content": "Capital?"},
    ]  # fmt: skip
    expected = {"temperature": 0, "max_tokens": 9, "top_p": 0.5, "top_k": 3, "seed": 4, "stream": True}
    assert {key: body[key] for key in expected} == expected


def test_run_streams(server: RawServer) -> None:
    server.reply(STREAM_HEAD, delta("early"), 2.0, delta(" late", "stop"), usage(1, 2), DONE)
    command = [*COMMAND, "run", "x", "--socket", str(server.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert os.read(child.stdout.fileno(), 100) == b"early"
        assert child.poll() is None
        assert child.stdout.read() == b" late\n"


def test_run_json(server: RawServer) -> None:
    server.reply(*chat_answer("Grüße", "."))
    facts = json.loads(flashd(server, "run", "x", "--json").stdout)
    assert facts["text"] == "Grüße."
    assert facts["usage"] == {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    assert (facts["model"], facts["finish_reason"]) == ("tiny", "stop")
    assert 0 < facts["time_to_first_token_s"] <= facts["total_s"]
    assert facts["tokens_per_s"] > 0


@pytest.mark.parametrize("arguments", [("run",), ("run", "-")])
def test_run_reads_stdin(server: RawServer, arguments: tuple[str, ...]) -> None:
    server.reply(*chat_answer("ok"))
    flashd(server, *arguments, stdin="zwei\nZeilen ä\n".encode())
    assert server.requests[0].body["messages"][0]["content"] == "zwei\nZeilen ä"


def test_run_raw(server: RawServer) -> None:
    server.reply(STREAM_HEAD, piece(" upon", "length"), usage(1, 1), DONE)
    assert flashd(server, "run", "--raw", "Once").stdout == b" upon\n"
    request = server.requests[0]
    assert (request.path, request.body["prompt"]) == ("/v1/completions", "Once")
    assert request.body["max_tokens"] == 256


def test_run_without_a_chat_template_continues_the_text(server: RawServer) -> None:
    server.reply(error(400, "no template", "no_chat_template"))
    server.reply(STREAM_HEAD, piece(" upon", "stop"), usage(1, 1), DONE)
    done = flashd(server, "run", "Once", "--system", "x", "--max-tokens", "7")
    assert done.stdout == b" upon\n"
    assert b"note: this model has no chat template" in done.stderr
    assert b"--system is ignored" in done.stderr
    assert server.requests[1].body["max_tokens"] == 7


def test_run_errors_are_one_line(server: RawServer, tmp_path: Path) -> None:
    server.reply(error(400, "prompt of 9000 tokens,\ncontext of 2048", "context_length_exceeded"))
    assert "tokens, context of 2048" in one_line_error(flashd(server, "run", "x", code=1))
    server.reply(STREAM_HEAD, delta("half"), event({"error": {"message": "disk failed"}}), DONE)
    done = flashd(server, "run", "x", code=1)
    assert (done.stdout, "disk failed" in one_line_error(done)) == (b"half\n", True)
    done = flashd(server, "run", "x", "--socket", str(tmp_path / "none"), code=1)
    assert "flashd start --model DIR" in one_line_error(done)


def test_run_usage_errors(server: RawServer) -> None:
    assert "--raw" in one_line_error(flashd(server, "run", "x", "--raw", "--system", "y", code=2))
    assert "not UTF-8" in one_line_error(flashd(server, "run", b"\xff", code=2))
    assert "not UTF-8" in one_line_error(flashd(server, "run", stdin=b"\xff", code=2, PYTHONUTF8="1"))
    assert b"max-tokens" in flashd(server, "run", "x", "--max-tokens", "0", code=2).stderr
    assert server.requests == []


def test_run_interrupted(server: RawServer) -> None:
    server.reply(STREAM_HEAD, delta("half"), WAIT_FOR_CLIENT_CLOSE)
    command = [*COMMAND, "run", "x", "--socket", str(server.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert os.read(child.stdout.fileno(), 100) == b"half"
        child.send_signal(signal.SIGINT)
        rest, errors = child.communicate(timeout=20)
    assert (rest, errors, child.returncode) == (b"\n", b"", 130)
    assert server.client_closed.wait(5)


def test_run_into_a_closed_pipe(server: RawServer) -> None:
    server.reply(STREAM_HEAD, delta("a"), 0.5, delta("b"), WAIT_FOR_CLIENT_CLOSE)
    command = [*COMMAND, "run", "x", "--socket", str(server.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert os.read(child.stdout.fileno(), 100) == b"a"
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(20) == 1
    assert server.client_closed.wait(5)


def test_chat_without_a_terminal(server: RawServer) -> None:
    server.reply(OK)
    server.reply(*chat_answer("Hello", " Ann"))
    server.reply(*chat_answer("Ann"))
    server.reply(*chat_answer("?"))
    lines = b"I am Ann\n\nWho am I?\n/clear\n/system Be rude\n/nonsense\nWho?\n/exit\nnever sent\n"
    done = flashd(server, "chat", "--system", "Be kind", "--temperature", "0", stdin=lines)
    assert done.stdout == b"Hello Ann\nAnn\n?\n"
    assert b"unknown command '/nonsense'" in done.stderr
    bodies = [request.body for request in server.requests[1:]]
    turns = [[(turn["role"], turn["content"]) for turn in body["messages"]] for body in bodies]
    assert turns == [
        [("system", "Be kind"), ("user", "I am Ann")],
        [("system", "Be kind"), ("user", "I am Ann"), ("assistant", "Hello Ann"), ("user", "Who am I?")],
        [("system", "Be rude"), ("user", "Who?")],
    ]
    assert [body["temperature"] for body in bodies] == [0, 0, 0]


def test_chat_errors_without_a_terminal(server: RawServer, tmp_path: Path) -> None:
    server.reply(answer({"status": "loading"}, 503))
    assert "loading" in one_line_error(flashd(server, "chat", stdin=b"hi\n", code=1))
    for message, code, expected in (
        ("too long", "context_length_exceeded", "too long"),
        ("no template", "no_chat_template", "flashd run --raw"),
    ):
        server.reply(OK)
        server.reply(error(400, message, code))
        assert expected in one_line_error(flashd(server, "chat", stdin=b"hi\nho\n", code=1))
    done = flashd(server, "chat", "--socket", str(tmp_path / "none"), code=1)
    assert "flashd start" in one_line_error(done)


class Terminal:
    """A ``flashd chat`` on a pseudo terminal."""

    def __init__(self, server: RawServer) -> None:
        self._fd, child_fd = pty.openpty()
        environ = {**os.environ, "TERM": "xterm", "FLASHD_SOCKET": str(server.path)}
        self.child: subprocess.Popen[bytes] = subprocess.Popen(
            [*COMMAND, "chat"], stdin=child_fd, stdout=child_fd, stderr=child_fd, env=environ,
            preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(child_fd)
        self._seen = ""

    def expect(self, text: str, timeout_s: float = 20) -> str:
        """Read until ``text`` appears; what came before and with it."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self._seen:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"{text!r} did not appear in {self._seen!r}"
            self._seen += os.read(self._fd, 4096).decode()
        before, _, self._seen = self._seen.partition(text)
        return before + text

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def ctrl_c_until(self, text: str) -> None:
        """Press Ctrl-C as a person does: again, when nothing happens. A signal that comes just before
        CPython waits for a key is only noticed with the next key."""
        for _ in range(10):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.expect(text, 2)
                return
        self.expect(text, 0)

    def close(self) -> None:
        self.child.kill()
        self.child.wait(20)
        os.close(self._fd)


def _own_terminal() -> None:
    """Make the pseudo terminal the one whose Ctrl-C reaches the child."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(server: RawServer) -> Iterator[Terminal]:
    server.reply(OK)
    server.reply(MODELS)
    opened = Terminal(server)
    yield opened
    opened.close()


def wait_for_request(server: RawServer, count: int) -> Any:
    deadline_s = time.monotonic() + 20
    while len(server.requests) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return server.requests[count - 1].body


def test_chat_on_a_terminal(server: RawServer, terminal: Terminal) -> None:
    server.reply(*chat_answer("Hi\x1b[2J", " Ann"))
    server.reply(error(400, "too long", "context_length_exceeded"))
    terminal.expect("tiny-model - /help")
    terminal.expect(PROMPT)
    terminal.type("I am Anm\x7fn\n")  # line editing: delete the m
    shown = terminal.expect("Hi[2J Ann\r\n")  # the escape character itself is gone
    assert "\x1b[2J" not in shown
    assert wait_for_request(server, 3)["messages"] == [{"role": "user", "content": "I am Ann"}]
    terminal.type("/help\n")
    terminal.expect("/system TEXT")
    terminal.type("\x1b[A\x1b[A\n")  # history: two lines up
    terminal.expect("too long; /clear starts a new conversation")
    assert wait_for_request(server, 4)["messages"][-1]["content"] == "I am Ann"
    terminal.expect(PROMPT)
    terminal.type("\x04")
    assert terminal.child.wait(20) == 0


def test_ctrl_c_stops_the_answer_not_the_program(server: RawServer, terminal: Terminal) -> None:
    server.reply(STREAM_HEAD, delta("one two"), WAIT_FOR_CLIENT_CLOSE)
    server.reply(*chat_answer("three"))
    terminal.expect(PROMPT)
    terminal.type("count\n")
    terminal.expect("one two")
    terminal.ctrl_c_until("[stopped]")
    assert server.client_closed.wait(5)
    terminal.expect(PROMPT)
    terminal.ctrl_c_until("Ctrl-D or /exit leaves")
    terminal.type("go on\n")
    terminal.expect("three")
    contents = [turn["content"] for turn in wait_for_request(server, 4)["messages"]]
    assert contents == ["count", "one two", "go on"]
    terminal.expect(PROMPT)
    terminal.type("/exit\n")
    assert terminal.child.wait(20) == 0


def test_the_daemon_dies_during_a_chat(server: RawServer, terminal: Terminal) -> None:
    terminal.expect(PROMPT)
    server.path.unlink()
    terminal.type("hello\n")
    terminal.expect("flashd: error: no flashd answers on")
    assert terminal.child.wait(20) == 1
