"""The commands as a person runs them, against real files and a real daemon."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support import SMOLLM2_GGUF, Daemon, flashd_command, flashd_env

from flashd.testing.bundles import make_bundle


def flashd(runtime_dir: Path, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        flashd_command(*args),
        env=flashd_env(runtime_dir),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=runtime_dir,
    )


def test_run_answers_and_counts(daemon: Daemon, tmp_path: Path) -> None:
    args = ("run", "--socket", str(daemon.socket), "--temperature", "0", "--max-tokens", "32")
    answer = flashd(tmp_path, *args, "What is the capital of France?", "--stats")
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout
    assert "tokens/s" in answer.stderr
    piped = flashd(tmp_path, *args, stdin="What is the capital of France?")
    assert piped.stdout == answer.stdout
    facts = json.loads(flashd(tmp_path, *args, "What is the capital of France?", "--json").stdout)
    assert "Paris" in facts["text"]


def test_chat_keeps_the_conversation(daemon: Daemon, tmp_path: Path) -> None:
    lines = "The capital of France is which city?\nWhat did I ask you about?\n/exit\n"
    args = ("--socket", str(daemon.socket), "--temperature", "0", "--max-tokens", "40")
    talk = flashd(tmp_path, "chat", *args, stdin=lines)
    assert talk.returncode == 0, talk.stderr
    assert "Paris" in talk.stdout


def test_no_daemon_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    result = flashd(tmp_path, "run", "hello")
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert "flashd start" in result.stderr


def test_closed_outputs_are_no_error(tmp_path: Path) -> None:
    """``flashd inspect DIR >&- 2>&-``: nobody wants to hear what it says; the exit code tells."""
    made = make_bundle(tmp_path / "bundle")
    for where, code in ((made.directory, 0), (tmp_path / "nothing", 1)):
        command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *flashd_command("inspect", str(where))]
        assert subprocess.run(command, env=flashd_env(tmp_path), timeout=60).returncode == code


@pytest.mark.parametrize("store", ["file", "zarr"])
def test_convert_inspect_verify(tmp_path: Path, store: str) -> None:
    made = flashd(tmp_path, "convert", str(SMOLLM2_GGUF), "bundle", "--store", store, "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["store"] == store
    facts = json.loads(flashd(tmp_path, "inspect", "bundle", "--json").stdout)
    assert "30 layers" in flashd(tmp_path, "inspect", "bundle").stdout
    assert facts["calibrated"] is False
    good = flashd(tmp_path, "verify", "bundle")
    assert good.returncode == 0, good.stderr
    assert "all checksums right" in good.stdout
    again = flashd(tmp_path, "convert", str(SMOLLM2_GGUF), "bundle")
    assert again.returncode == 1
    assert "--overwrite" in again.stderr
    victim = max((tmp_path / "bundle").rglob("*"), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as file:
        file.seek(victim.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    bad = flashd(tmp_path, "verify", "bundle")
    assert bad.returncode == 1
    assert victim.name in bad.stderr
    shutil.rmtree(tmp_path / "bundle")


def test_an_unknown_choice_names_the_known_ones(tmp_path: Path) -> None:
    for args, known in ((("--dtype", "int3"), "auto, f32, f16, bf16"), (("--store", "tape"), "file, zarr")):
        result = flashd(tmp_path, "convert", str(SMOLLM2_GGUF), "x", *args)
        assert result.returncode == 2
        assert known in result.stderr
    assert not list(tmp_path.glob("x*"))


def test_no_room_on_stdout_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            flashd_command("ps", "--json"), env=flashd_env(tmp_path), stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"No space left" in done.stderr


def test_help_shows_defaults_and_environment_twins(tmp_path: Path) -> None:
    shown = " ".join(flashd(tmp_path, "start", "-h").stdout.split())
    for text in ("[default: auto; env: FLASHD_BACKEND]", "[default: 4; env: FLASHD_MAX_SESSIONS]"):
        assert text in shown
    assert "env: FLASHD_SOCKET" in flashd(tmp_path, "stop", "--help").stdout
    assert "default: 0.7" in " ".join(flashd(tmp_path, "run", "--help").stdout.split())


def test_version_and_help(tmp_path: Path) -> None:
    assert flashd(tmp_path, "--version").stdout.startswith("flashd 0.")
    assert flashd(tmp_path).returncode == 2
    listed = flashd(tmp_path, "--help").stdout
    for command in ("convert", "inspect", "verify", "start", "ps", "stop", "run", "chat", "doctor", "bench"):
        assert command in listed
