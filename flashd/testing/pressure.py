"""A daemon in a small memory cgroup with a neighbour that takes memory and gives it back, again and again.

``python -m flashd.testing.pressure BUNDLE`` needs a machine on which memory cgroups can be made. The
group's limit is a share of the bundle's size; somebody reads files in it all the time, so that its page cache
is full. The neighbour's memory grows at a given rate up to a share of the limit, stays for a while, and goes.
Clients ask for one answer after the other. Afterwards the same questions are asked of a daemon that has all
the machine's memory, and every token must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from flashd.tools.bench.token.limit import join_group, memory_group

_SAMPLE_S = 0.05
_MB = 1 << 20


@dataclass(frozen=True)
class Options:
    """What to do.

    Attributes:
        bundle: its directory.
        share: the group's limit, of the bundle's size.
        ramp_mb_per_s: how fast the neighbour takes memory.
        top_share: how much it takes, of the limit.
        hold_s, rest_s: how long it keeps that, and how long it then has nothing.
        seconds: in all.
        clients: that ask at the same time.
        max_tokens: of an answer at most.
        memory: the daemon's setting.
    """

    bundle: Path
    share: float = 0.8
    ramp_mb_per_s: float = 50.0
    top_share: float = 0.15
    hold_s: float = 5.0
    rest_s: float = 5.0
    seconds: float = 180.0
    clients: int = 4
    max_tokens: int = 256
    memory: str = "auto"


@dataclass
class Report:
    """What happened. ``asdict`` makes JSON of it.

    Attributes:
        limit_bytes: of the group.
        answers: that came whole.
        different: of these, those whose tokens are others than without pressure.
        errors: what clients were told.
        tokens: generated under pressure.
        oom_kills: by the kernel, in the group.
        k: window in steps, once a second.
        k_changes: as the daemon counts them.
        footprint_peak_bytes: the daemon's own memory, 20 times a second.
        lowest_available_bytes: as the daemon saw it.
        ended: exit status of the daemon after SIGTERM.
    """

    limit_bytes: int
    answers: int = 0
    different: int = 0
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    oom_kills: int = 0
    k: list[int] = field(default_factory=list)
    k_changes: int = 0
    footprint_peak_bytes: int = 0
    lowest_available_bytes: int = 1 << 62
    ended: int | None = None

    @property
    def survived(self) -> bool:
        """Nobody was killed, refused, or told something else."""
        return not (self.errors or self.different or self.oom_kills or self.ended) and self.answers > 0


def run(options: Options) -> Report:
    """Do it.

    Raises:
        RuntimeError: no cgroup can be made, or the daemon does not start.
    """
    size = sum(path.stat().st_size for path in options.bundle.iterdir() if path.is_file())
    report = Report(int(options.share * size))
    with ExitStack() as stack:
        group, why = stack.enter_context(memory_group(report.limit_bytes))
        if group is None:
            raise RuntimeError(f"no memory cgroup can be made here: {why}")
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashd-pressure-")))
        questions: dict[tuple[int, int], tuple[dict[str, Any], list[int]]] = {}
        with daemon(options.bundle, scratch, options.memory, group) as (process, socket):
            _under_pressure(options, report, group, process.pid, socket, questions)
        report.ended = process.returncode
        _leave(group)
        # Beside the group: all the machine's memory.
        again = stack.enter_context(daemon(options.bundle, scratch, "auto", None))
        client = stack.enter_context(_client(again[1]))
        for body, tokens in questions.values():
            report.different += _answer(client, body) != tokens
    return report


@contextmanager
def daemon(
    bundle: Path, scratch: Path, memory: str, group: Path | None
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A daemon that serves, in a cgroup or not; ended by SIGTERM.

    Raises:
        RuntimeError: it does not start; says what it said.
    """
    socket, log = scratch / "s", scratch / "log"
    command = [sys.executable, "-m", "flashd", "start", "--foreground", "--model", str(bundle)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--socket", str(socket), "--memory", memory],
            stdout=subprocess.PIPE,
            stderr=output,
            env={**_plain_environment(), "XDG_RUNTIME_DIR": str(scratch)},
            preexec_fn=None if group is None else lambda: join_group(group),
        )
    assert process.stdout is not None
    try:
        if not process.stdout.readline():  # it says that it is ready, or ends
            raise RuntimeError(f"the daemon does not start: {log.read_text()}")
        yield process, socket
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def _plain_environment() -> dict[str, str]:
    """Without anybody's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FLASHD_")}


def _client(socket: Path) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(socket))
    return httpx.Client(transport=transport, base_url="http://flashd", timeout=600)


def _answer(client: httpx.Client, body: dict[str, Any]) -> list[int]:
    response = client.post("/v1/completions", json=body)
    if response.status_code != 200:
        raise RuntimeError(f"{response.status_code}: {response.text}")
    tokens: list[int] = response.json()["choices"][0]["tokens"]
    return tokens


def _under_pressure(
    options: Options,
    report: Report,
    group: Path,
    pid: int,
    socket: Path,
    questions: dict[tuple[int, int], tuple[dict[str, Any], list[int]]],
) -> None:
    until_s = time.monotonic() + options.seconds
    stop = threading.Event()
    others = [
        threading.Thread(target=_ask, args=(options, report, socket, number, until_s, questions))
        for number in range(options.clients)
    ]
    watching = threading.Thread(target=_watch, args=(report, pid, stop))
    neighbour = _spawn(group, _NEIGHBOUR, options, report.limit_bytes)
    reader = _spawn(group, _READER, options, report.limit_bytes)
    for thread in (*others, watching):
        thread.start()
    with _client(socket) as client:
        while any(thread.is_alive() for thread in others):
            _sample(report, client)
            time.sleep(1.0)  # samples are of every second
        _sample(report, client)
    stop.set()
    watching.join()
    for process in (neighbour, reader):
        process.kill()
        process.wait()
    report.oom_kills = _oom_kills(group)


def _ask(
    options: Options,
    report: Report,
    socket: Path,
    number: int,
    until_s: float,
    questions: dict[tuple[int, int], tuple[dict[str, Any], list[int]]],
) -> None:
    """One client; every other question is answered by sampling, with a seed."""
    chance, count = random.Random(number), 0
    with _client(socket) as client:
        while time.monotonic() < until_s:
            body = {
                "prompt": [chance.randrange(4, 400) for _ in range(chance.randrange(2, 60))],
                "max_tokens": chance.randrange(options.max_tokens // 4, options.max_tokens + 1),
                "temperature": count % 2,
                "seed": count,
                "ignore_eos": True,
                "return_tokens": True,
            }
            try:
                tokens = _answer(client, body)
            except (RuntimeError, httpx.HTTPError) as exc:
                report.errors.append(str(exc) or type(exc).__name__)
                time.sleep(0.5)  # a client that was refused comes back, but not at once
                continue
            questions[number, count] = body, tokens
            report.answers += 1
            report.tokens += len(tokens)
            count += 1


def _watch(report: Report, pid: int, stop: threading.Event) -> None:
    while not stop.wait(_SAMPLE_S):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        sizes = [int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
        report.footprint_peak_bytes = max(report.footprint_peak_bytes, sum(sizes))


def _sample(report: Report, client: httpx.Client) -> None:
    try:
        families = text_string_to_metric_families(client.get("/metrics").text)
    except httpx.HTTPError:
        return
    values = {sample.name: sample.value for family in families for sample in family.samples}
    report.k.append(int(values["flashd_window_steps"]))
    report.k_changes = int(values["flashd_window_changes_total"])
    available = int(values["flashd_memory_available_bytes"])
    report.lowest_available_bytes = min(report.lowest_available_bytes, available)


_NEIGHBOUR = """
import sys, time
rate, top, hold, rest = map(float, sys.argv[1:5])
while True:
    held, began = [], time.monotonic()
    while len(held) << 20 < top:
        held.append(b"x" * (1 << 20))
        time.sleep(max(0.0, began + (len(held) << 20) / rate - time.monotonic()))
    time.sleep(hold)
    held.clear()
    time.sleep(rest)
"""
_READER = """
import sys, time
while True:
    with open(sys.argv[5], "rb") as file:
        while file.read(1 << 20):
            time.sleep(0.001)
    time.sleep(0.2)
"""


def _spawn(group: Path, code: str, options: Options, limit_bytes: int) -> subprocess.Popen[bytes]:
    rows = options.bundle / "ffn.bundle"
    arguments = (
        options.ramp_mb_per_s * _MB,
        options.top_share * limit_bytes,
        options.hold_s,
        options.rest_s,
        rows if rows.exists() else options.bundle / "resident.safetensors",
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], preexec_fn=lambda: join_group(group)
    )


def _oom_kills(group: Path) -> int:
    for name in ("memory.oom_control", "memory.events"):
        path = group / name
        if path.exists():
            words = dict(line.split() for line in path.read_text().splitlines() if len(line.split()) == 2)
            return int(words.get("oom_kill", 0))
    return 0


def _leave(group: Path) -> None:
    """Wait until the last process has left."""
    for _ in range(100):
        if not (group / "cgroup.procs").read_text():
            return
        time.sleep(0.05)


_HELP = {
    "share": "the group's limit, of the bundle's size",
    "ramp_mb_per_s": "how fast the neighbour takes memory, MiB/s",
    "top_share": "how much it takes, of the limit",
    "hold_s": "seconds that it keeps that",
    "rest_s": "seconds that it then has nothing",
    "seconds": "in all",
    "clients": "that ask at the same time",
    "max_tokens": "of an answer",
    "memory": "the daemon's --memory",
}


def main() -> None:
    """Print a report, ``--json`` as JSON; exit code 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m flashd.testing.pressure", description=__doc__)
    parser.add_argument("bundle", type=Path)
    for item in fields(Options)[1:]:
        flag = f"--{item.name.replace('_', '-')}"
        parser.add_argument(
            flag, type=type(item.default), default=item.default, help=f"{_HELP[item.name]} [%(default)s]"
        )
    parser.add_argument("--json", action="store_true")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    if not (given["bundle"] / "manifest.json").is_file():
        parser.error(f"{given['bundle']}: no bundle; make one with flashd synth --like opt-1.3b DIR")
    report = run(Options(**given))
    if as_json:
        print(json.dumps({**asdict(report), "survived": report.survived}, indent=1))
    else:
        print(
            f"{report.answers} answers, {report.tokens} tokens, {report.different} different from those "
            f"without pressure, {len(report.errors)} errors, {report.oom_kills} killed; k "
            f"{min(report.k, default=0)} to {max(report.k, default=0)} in {report.k_changes} changes; "
            f"least available {report.lowest_available_bytes / 1e6:.0f} of {report.limit_bytes / 1e6:.0f} MB"
        )
    sys.exit(0 if report.survived else 1)


if __name__ == "__main__":
    main()
