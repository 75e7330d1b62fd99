"""Start, signals, sockets and the end of a daemon."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support import Daemon, flashd_command, flashd_env, serving, wait_until

from flashd.errors import SocketError
from flashd.server.listener import Listener, lock_path, read_record

Tiny = Callable[[str], tuple[Any, Path]]
ENDLESS = {
    "prompt": [5, 6],
    "max_tokens": 8000,
    "ignore_eos": True,
    "stream": True,
    "return_tokens": True,
}


@pytest.fixture(scope="module")
def bundle(tiny: Tiny) -> Path:
    return tiny("llama_gqa")[1]


def flashd(runtime_dir: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        flashd_command(*args), env=flashd_env(runtime_dir), capture_output=True, text=True, timeout=60
    )


def running(folder: Path) -> list[dict[str, Any]]:
    """What ``ps`` says, less this user's daemons elsewhere: `make run` may have left one."""
    return [row for row in json.loads(flashd(folder, "ps", "--json").stdout) if str(folder) in row["socket"]]


def stream_until_end(daemon: Daemon, started: threading.Event, out: list[str]) -> None:
    with daemon.http() as http, http.stream("POST", "/v1/completions", json=ENDLESS) as response:
        for line in response.iter_lines():
            out.append(line)
            started.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_during_generation_ends_the_stream_and_the_daemon(
    smollm2: Path, tmp_path: Path, number: int
) -> None:
    with serving(smollm2, tmp_path) as daemon:
        out: list[str] = []
        started = threading.Event()
        reader = threading.Thread(target=stream_until_end, args=(daemon, started, out))
        reader.start()
        assert started.wait(30)
        start = time.monotonic()
        assert daemon.stop(number) == 0
        took_s = time.monotonic() - start
        reader.join(5)
        assert not reader.is_alive()
        lines = [line for line in out if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert took_s < 2
        assert not daemon.socket.exists()
        assert list(daemon.socket.parent.glob("*.lock")) == []


def test_a_short_answer_is_finished_before_the_daemon_ends(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path) as daemon, daemon.http() as http:
        body = {**ENDLESS, "max_tokens": 150}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            daemon.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert daemon.process.wait(2) == 0


def test_a_second_signal_does_not_wait_for_answers(smollm2: Path, tmp_path: Path) -> None:
    with serving(smollm2, tmp_path, "--drain-ms", "60000") as daemon:
        out: list[str] = []
        started = threading.Event()
        reader = threading.Thread(target=stream_until_end, args=(daemon, started, out))
        reader.start()
        assert started.wait(30)
        daemon.process.send_signal(signal.SIGTERM)
        count = len(out)
        wait_until(lambda: len(out) > count + 4, what="the answer goes on while the daemon drains")
        start = time.monotonic()
        assert daemon.stop(signal.SIGTERM) == 0
        assert time.monotonic() - start < 2
        reader.join(5)
        assert not reader.is_alive()


def test_a_signal_that_means_nothing_is_ignored(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path) as daemon, daemon.http() as http:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            daemon.process.send_signal(number)
        assert http.get("/health").status_code == 200
        assert daemon.stop() == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.2, 0.4, 0.6])
def test_a_signal_at_any_moment_of_the_start_is_a_clean_end(
    bundle: Path, tmp_path: Path, delay_s: float
) -> None:
    process = subprocess.Popen(
        flashd_command("start", "--foreground", "--model", str(bundle)),
        env=flashd_env(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    # The interpreter's own start is nobody's; our handlers are there before the kernels are loaded.
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(lambda: "_native" in maps.read_text(), what="import")
    time.sleep(delay_s)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=5)
    assert process.returncode == 0, stderr.decode()
    assert not list((tmp_path / "flashd").glob("*.sock*"))


def test_a_signal_while_loading_ends_the_daemon(smollm2: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        flashd_command("start", "--foreground", "--model", str(smollm2)),
        env=flashd_env(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    socket_path = tmp_path / "flashd" / "flashd.sock"
    wait_until(socket_path.exists, what="socket")
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=3)
    assert process.returncode == 0, stderr.decode()
    assert not socket_path.exists()


def test_health_is_503_until_the_model_is_loaded(smollm2: Path, tmp_path: Path) -> None:
    """The socket answers before the model is there: poll from the moment it exists."""
    process = subprocess.Popen(
        flashd_command("start", "--foreground", "--model", str(smollm2)),
        env=flashd_env(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        path = tmp_path / "flashd" / "flashd.sock"
        wait_until(path.exists, what="socket")
        seen: list[int] = []
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://flashd", timeout=10) as http:
            loading = http.post("/v1/completions", json={"prompt": "x"})
            while not seen or seen[-1] != 200:
                seen.append(http.get("/health").status_code)
        assert loading.status_code == 503
        assert loading.json()["error"]["code"] == "loading"
        assert set(seen) == {503, 200}
    finally:
        process.terminate()
        assert process.wait(5) == 0


def test_start_ps_stop(bundle: Path, tmp_path: Path) -> None:
    started = flashd(tmp_path, "start", "--model", str(bundle))
    assert started.returncode == 0, started.stderr
    path = tmp_path / "flashd" / "flashd.sock"
    assert started.stdout.startswith(f"flashd ready: {bundle.name} on {path} (pid ")
    try:
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        again = flashd(tmp_path, "start", "--model", str(bundle), "--json")
        assert json.loads(again.stdout)["status"] == "already running"
        other = flashd(tmp_path, "start", "--model", str(bundle), "--name", "another")
        assert other.returncode == 1
        assert "already served" in other.stderr
        assert len(other.stderr.strip().splitlines()) == 1
        listed = running(tmp_path)
        assert [row["socket"] for row in listed] == [str(path)]
        assert str(listed[0]["pid"]) in flashd(tmp_path, "ps").stdout
    finally:
        stopped = flashd(tmp_path, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert not path.exists()
    pid = listed[0]["pid"]
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert running(tmp_path) == []
    nobody = flashd(tmp_path, "stop")
    assert nobody.returncode == 1
    assert "no daemon serves this socket" in nobody.stderr


def test_what_a_killed_daemon_leaves_is_replaced(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path) as daemon:
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        assert daemon.socket.exists()
        assert read_record(daemon.socket) is None
    assert running(tmp_path) == []
    with serving(bundle, tmp_path) as daemon, daemon.http() as http:
        assert http.get("/health").status_code == 200


def test_stop_ends_daemons_whose_files_were_removed_and_no_other_program(
    bundle: Path, tmp_path: Path
) -> None:
    path = tmp_path / "flashd" / "flashd.sock"
    for victim in (path, lock_path(path)):
        assert flashd(tmp_path, "start", "--model", str(bundle)).returncode == 0
        victim.unlink()
        if victim == path:
            again = flashd(tmp_path, "start", "--model", str(bundle))
            assert again.returncode == 1
            assert "somebody has removed the socket" in again.stderr
        assert flashd(tmp_path, "ps").returncode == 0  # looking must not make it forgotten
        stopped = flashd(tmp_path, "stop")
        assert stopped.returncode == 0, stopped.stderr
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(path))
        foreign.listen()
        refused = flashd(tmp_path, "stop")
    assert refused.returncode == 1
    assert "no daemon serves this socket" in refused.stderr


def test_junk_among_the_records_does_not_disturb_ps(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path) as daemon:
        records = tmp_path / "flashd" / "daemons"
        (records / "1.json").write_text("[" * 100_000)
        (records / "2.json").write_text('{"socket": 7}')
        (records / "3.json").mkdir()
        listed = running(tmp_path)
        assert [row["pid"] for row in listed] == [daemon.process.pid]


@pytest.mark.parametrize(
    ("code", "args", "message"),
    [
        (1, ["--model", "missing"], "no such directory; give a directory made by"),
        (1, ["--model", "FILE"], "a file, not a bundle directory; make one with: flashd convert"),
        (2, [], "no model"),
        (1, ["--model", "BUNDLE", "--socket", "x" * 120], "give a shorter --socket"),
        (1, ["--model", "BUNDLE", "--socket", "/nowhere/f.sock"], "no such directory"),
        (2, ["--model", "BUNDLE", "--max-sessions", "17"], "expected 1 to 16"),
        (2, ["--model", "BUNDLE", "--backend", "tape"], "expected one of: auto, uring"),
        (2, ["--model", "BUNDLE", "--threads", "many"], "--threads"),
        (2, ["--modle", "BUNDLE"], "No such option: --modle"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    bundle: Path, tmp_path: Path, code: int, args: list[str], message: str
) -> None:
    names = {"BUNDLE": str(bundle), "FILE": str(bundle / "manifest.json")}
    for mode in (["--foreground"], []):
        result = flashd(tmp_path, "start", *mode, *[names.get(arg, arg) for arg in args])
        assert result.returncode == code
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_a_start_that_fails_leaves_a_running_daemon_and_its_log_alone(bundle: Path, tmp_path: Path) -> None:
    record = json.loads(flashd(tmp_path, "start", "--model", str(bundle), "--json").stdout)
    try:
        log = Path(record["log"])
        before = log.read_bytes()
        assert b"ready" in before
        for args in (["--name", "x"], ["--threads", "1"], ["--foreground"]):
            failed = flashd(tmp_path, "start", "--model", str(bundle), *args)
            assert failed.returncode == 1
            assert "already served" in failed.stderr
        assert flashd(tmp_path, "start", "--model", "missing").returncode == 1
        other_spelling = tmp_path / "link"
        other_spelling.symlink_to(bundle)
        assert flashd(tmp_path, "start", "--model", str(other_spelling)).returncode == 0
        assert log.read_bytes() == before
    finally:
        assert flashd(tmp_path, "stop").returncode == 0
    assert log.read_bytes().endswith(b"stopped\n")


def test_of_two_starts_of_a_model_both_succeed(bundle: Path, tmp_path: Path) -> None:
    starts = [
        subprocess.Popen(
            flashd_command("start", "--model", str(bundle), "--json"),
            env=flashd_env(tmp_path),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    outputs = [start.communicate(timeout=60)[0] for start in starts]
    try:
        assert [start.returncode for start in starts] == [0] * 4
        records = [json.loads(output) for output in outputs]
        assert len({record["pid"] for record in records}) == 1
        assert sorted(record["status"] for record in records) == ["already running"] * 3 + ["ready"]
    finally:
        flashd(tmp_path, "stop")


def test_the_configuration_file_s_socket_is_everybody_s(bundle: Path, tmp_path: Path) -> None:
    directory = tmp_path / "config" / "flashd"
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(f'model = "{bundle}"\nsocket = "mine.sock"\n')
    started = flashd(tmp_path, "start", "--json")
    assert json.loads(started.stdout)["socket"] == str(directory / "mine.sock")
    asked = flashd(tmp_path, "run", "hello")
    assert "no tokenizer" in asked.stderr
    assert flashd(tmp_path, "stop").returncode == 0


def test_a_damaged_bundle_is_refused_by_name(bundle: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken)
    os.truncate(broken / "ffn.bundle", 4096)
    result = flashd(tmp_path, "start", "--model", str(broken))
    assert result.returncode == 1
    assert "ffn.bundle" in result.stderr
    assert "4096" in result.stderr


def test_listener_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    path.write_text("precious")
    with pytest.raises(SocketError, match="is no socket"):
        Listener(path, {})
    assert path.read_text() == "precious"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SocketError, match="is no socket"):
        Listener(path, {})
    path.unlink()
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(path))
        foreign.listen()
        with pytest.raises(SocketError, match="another program listens"):
            Listener(path, {})
    assert not lock_path(path).exists()
    listener = Listener(path, {"pid": 1, "model": "m", "directory": "dir"})  # the foreign one has gone: stale
    with pytest.raises(SocketError, match="pid 1, dir as m"):
        Listener(path, {})
    listener.close()
    assert not path.exists()


def test_of_many_daemons_that_start_at_once_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    won: list[Listener] = []
    lost: list[SocketError] = []
    gate = threading.Barrier(8)

    def contend() -> None:
        gate.wait()
        try:
            won.append(Listener(path, {}))
        except SocketError as exc:
            lost.append(exc)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 7
    won[0].close()


def test_an_idle_daemon_is_small_and_free_of_torch_zarr_and_gguf(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path) as daemon:
        pss_bytes = psutil.Process(daemon.process.pid).memory_full_info().pss
        assert pss_bytes < 110e6
        mapped = Path(f"/proc/{daemon.process.pid}/maps").read_text()
        for module in ("torch", "zarr", "numcodecs", "gguf", "transformers"):
            assert f"/{module}/" not in mapped


def test_the_daemon_imports_neither_torch_nor_optional_formats() -> None:
    code = (
        "import sys, flashd.cli.main, flashd.server.lifecycle;"
        "print([m for m in ('torch', 'zarr', 'gguf', 'transformers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([*flashd_command()[:2], "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
