"""Every command and program of the README, run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import REPO, SMOLLM2_GGUF, flashd_env

README = (REPO / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
SHELL = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines() if line]
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that looks like the repository's root to the README's commands."""
    path = tmp_path_factory.mktemp("readme")
    (path / "models").mkdir()
    (path / "models" / SMOLLM2_GGUF.name).symlink_to(SMOLLM2_GGUF)
    (path / "ops").symlink_to(REPO / "ops")
    yield path
    run(path, "flashd stop || true")


def run(place: Path, command: str) -> subprocess.CompletedProcess[str]:
    env = flashd_env(place)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return subprocess.run(
        ["sh", "-ec", command], cwd=place, env=env, capture_output=True, text=True, timeout=280
    )


@pytest.mark.slow
def test_every_shell_command_works_in_the_order_of_the_page(place: Path) -> None:
    commands = [line for line in SHELL if not line.startswith("make ")]
    assert len(commands) >= 8
    assert commands[-1] == "flashd stop"
    outputs = {}
    for command in commands:
        done = run(place, command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        outputs[command.split()[1]] = outputs.get(command.split()[1], "") + done.stdout
    assert "Paris" in outputs["run"]
    assert "flashd_neurons_requested_total" in outputs["-s"]


@pytest.mark.slow
def test_every_python_program_works(place: Path) -> None:
    assert len(PROGRAMS) == 2
    if not (place / "my-bundle").exists():
        assert run(place, "flashd convert models/*.gguf my-bundle").returncode == 0
    assert run(place, "flashd start --model my-bundle").returncode == 0
    for program in PROGRAMS:
        (place / "program.py").write_text(program)
        done = run(place, f"{sys.executable} program.py")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


@pytest.mark.slow
def test_make_run_answers_and_may_be_repeated(tmp_path: Path) -> None:
    """In the environment of this test run: the install step has nothing left to do."""
    assert "make run" in SHELL
    assert "make test" in SHELL
    venv = Path(sys.prefix)
    if not (venv / ".installed").exists():
        pytest.fail("run the tests with `make test`: `make run` needs the environment that it makes")
    env = {k: v for k, v in flashd_env(tmp_path).items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    try:
        for _ in range(2):
            done = subprocess.run(
                ["make", "run", f"VENV={venv}", f"BUNDLE={tmp_path / 'bundle'}", f"GGUF={SMOLLM2_GGUF}"],
                cwd=REPO,
                env=env,
                capture_output=True,
                text=True,
                timeout=280,
            )
            assert done.returncode == 0, done.stderr
            assert "Paris" in done.stdout
            assert "tokens/s" in done.stdout + done.stderr
    finally:
        subprocess.run([str(venv / "bin" / "flashd"), "stop"], env=env, capture_output=True, check=True)
