"""``bench io`` interrupted, beside fio at its best, and with several bundles."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support import flashd_command, flashd_env, lines_on_a_terminal

from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec
from flashd.tools.bench.io import bench_io, io_options
from flashd.tools.bench.measure import MeteredLoop, measure
from flashd.tools.bench.subjects import ENGINES, Point, Unavailable, open_source, prepared


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> MadeBundle:
    return make_bundle(tmp_path_factory.mktemp("bench") / "bundle", tiny_spec(d_ffn=400))


@pytest.mark.parametrize("pattern", ["random", "sequential"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_measurement_is_cancelled_at_any_moment(bundle: MadeBundle, name: str, pattern: str) -> None:
    """As Ctrl-C does: what comes out is the cancellation, whatever is still with the kernel."""
    source = open_source(bundle.directory)
    point = Point(pattern, bundle.manifest.ffn.stride_bytes, 64)

    async def run(started: asyncio.Event) -> None:
        async with prepared(source, point, name) as subject:
            started.set()
            await measure(subject.work, subject.engine, 60.0)

    async def check() -> None:
        for turn in range(40):
            started = asyncio.Event()
            task = asyncio.create_task(run(started))
            task.add_done_callback(lambda _, started=started: started.set())
            await started.wait()
            await asyncio.sleep(turn * 0.0002)
            task.cancel()
            with pytest.raises((asyncio.CancelledError, Unavailable)) as caught:
                await task
            if caught.type is Unavailable:
                pytest.skip(f"{name} does not work here: {caught.value}")

    with asyncio.Runner(loop_factory=MeteredLoop) as runner:
        runner.run(check())


def test_ctrl_c_ends_with_130(bundle: MadeBundle, tmp_path: Path) -> None:
    args = ("--no-fio", "--depth", "64", "--seconds", "30", "--engine", "buffered")
    command = flashd_command("bench", "io", str(bundle.directory), *args)
    with subprocess.Popen(
        command, env=flashd_env(tmp_path), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "warming" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert "error" not in rest


def test_fio_at_its_best(bundle: MadeBundle) -> None:
    assert shutil.which("fio"), "this test needs fio: make apt-deps"
    short = {
        "sizes_bytes": (),
        "depths": (4,),
        "rounds": 1,
        "seconds": 0.02,
        "engines": ("uring+registered",),
    }
    report = bench_io([bundle.directory], io_options(short, False, True))
    if not any(row.fio_best_gb_per_s for row in report.rows):
        pytest.skip(f"fio cannot register buffers here: {report.notes}")
    for row in report.rows:
        assert row.fio_best_gb_per_s
        assert row.fio_gb_per_s
        assert row.ratio == row.gb_per_s / row.fio_gb_per_s


def test_lists_with_commas_and_several_bundles(bundle: MadeBundle, tmp_path: Path) -> None:
    twin = make_bundle(tmp_path / "twin", tiny_spec(d_ffn=400), store="zarr")
    args = ("--quick", "--seconds", "0.02", "--no-fio", "--engine", "threads,buffered", "--depth", "1,2")
    done = subprocess.run(
        flashd_command(
            "bench", "io", str(bundle.directory), "--also", str(twin.directory), "--size", "2K", *args
        ),
        env=flashd_env(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "a zarr store is read in rows" in done.stderr
    header, *rows = (line.split("\t") for line in done.stdout.splitlines() if "\t" in line)
    shown = [dict(zip(header, row, strict=True)) for row in rows]
    assert {(row["BUNDLE"], row["STORE"]) for row in shown} == {("bundle", "file"), ("twin", "zarr")}
    assert {row["DEPTH"] for row in shown if row["PATTERN"] == "random"} == {"1", "2"}
    assert {row["ENGINE"] for row in shown} <= {"threads", "buffered"}


def test_a_terminal_of_80_columns_is_enough(bundle: MadeBundle, tmp_path: Path) -> None:
    args = ("--quick", "--seconds", "0.02", "--no-fio", "--depth", "128")
    lines = lines_on_a_terminal(80, tmp_path, "bench", "io", str(bundle.directory), *args)
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("buffered  ") for line in lines)
    # An engine that works has a row under its whole name.
    assert {line.split()[0] for line in lines if " random " in line} <= set(ENGINES)
