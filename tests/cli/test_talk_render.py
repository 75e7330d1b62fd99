"""What all commands print with."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flashd.cli import render


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1023 * 1024, "1023 KiB"),
        ((1 << 20) - 1, "1 MiB"), (92 << 20, "92 MiB"), (int(2.945 * 2**30), "2.94 GiB"), (3 << 40, "3 TiB"),
        (1 << 62, "4096 PiB"), (100 << 20, "100 MiB"),
    ],
)  # fmt: skip
def test_human_bytes(n_bytes: int, text: str) -> None:
    assert render.human_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms"), (0.9996, "1.00 s"), (1.5, "1.50 s"), (59.996, "1 min 0 s"), (75.4, "1 min 15 s")],
)
def test_human_duration(seconds: float, text: str) -> None:
    assert render.human_duration(seconds) == text


def test_fail_is_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        render.fail(ValueError("a\nb\x1b[2J"), render.EXIT_USAGE)
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", "flashd: error: a b[2J\n")


def test_safe_text_keeps_text() -> None:
    assert render.safe_text("ä\t\U0001f999\n\r\x07\x1b[1m\x9b") == "ä\t\U0001f999\n[1m"


def test_print_json(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Inner:
        path: Path

    @dataclass(frozen=True)
    class Outer:
        inner: Inner
        sizes: tuple[int, ...]

    render.print_json({"a": Outer(Inner(Path("ä")), (1, 2)), "n": np.int64(3), "s": {"y", "x"}})
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"a": {"inner": {"path": "ä"}, "sizes": [1, 2]}, "n": 3, "s": ["x", "y"]}
    with pytest.raises(TypeError, match="object has no JSON form"):
        render.print_json(object())


def test_table_for_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    render.table(("PID", "NAME"), [(7, "a\tb"), (8, "c")])
    assert capsys.readouterr().out == "PID\tNAME\n7\ta b\n8\tc\n"


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Count:
        phase: str
        done_bytes: int
        total_bytes: int

    with render.ByteProgress() as progress:
        progress("layers", 0, 2048)
        progress("layers", 1024, 2048)  # too soon for another line
        progress(Count("sums", 5, 10))
    expected = "flashd: note: layers: 0 B of 2 KiB\nflashd: note: sums: 5 B of 10 B\n"
    assert capsys.readouterr() == ("", expected)
    with render.ByteProgress(enabled=False) as progress:
        progress("layers", 0, 2048)
    assert capsys.readouterr() == ("", "")


DRAW = """
from flashd.cli.render import ByteProgress, table
with ByteProgress() as progress:
    progress("FFN [rows]", 1 << 20, 4 << 20)
    progress("FFN [rows]", 4 << 20, 4 << 20)
table(("PID", "NAME"), [(7, "[red]a"), (12345, "b")])
"""


def test_on_a_terminal() -> None:
    fd, child_fd = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    child = subprocess.Popen([sys.executable, "-c", DRAW], stdout=child_fd, stderr=child_fd, env=environ)
    os.close(child_fd)
    shown = b""
    try:
        while block := os.read(fd, 4096):
            shown += block
    except OSError:  # EIO: the child has closed its end
        pass
    finally:
        os.close(fd)
    assert child.wait(20) == 0
    text = shown.decode()
    assert "FFN [rows]" in text
    assert "4.2/4.2 MB" in text or "4.0/4.0 MiB" in text
    assert "│     7 │ [red]a │" in text
    assert "│ 12345 │ b      │" in text
