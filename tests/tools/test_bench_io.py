from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from support import flashd_command, flashd_env

from flashd.disk.probe import open_engine
from flashd.errors import BundleError, ConfigError
from flashd.store.bundle_file import BundleFileStore
from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec
from flashd.tools.bench.fio import JOBS, Fio, FioError
from flashd.tools.bench.io import IoOptions, bench_io, check_bytes, io_options
from flashd.tools.bench.measure import (
    MeteredLoop,
    RandomReads,
    RandomRows,
    Sample,
    Stream,
    Work,
    batch_reads,
    measure,
)
from flashd.tools.bench.plot import check_plot, plot
from flashd.tools.bench.report import IoReport
from flashd.tools.bench.subjects import ENGINES, Point, open_source

ROW_KEYS = {
    "engine", "store", "pattern", "size_bytes", "depth", "gb_per_s", "fio_gb_per_s", "ratio",
    "cpu_us_per_read",
}  # fmt: skip
SHORT = {"sizes_bytes": (), "depths": (4,), "rounds": 1, "seconds": 0.02}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> MadeBundle:
    return make_bundle(tmp_path_factory.mktemp("bench") / "bundle", tiny_spec(d_ffn=400))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> MadeBundle:
    return make_bundle(tmp_path_factory.mktemp("bench") / "twin", tiny_spec(d_ffn=400), store="zarr")


def flashd(folder: Path, *args: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        flashd_command(*map(str, args)),
        env=flashd_env(folder) | {"XDG_CACHE_HOME": str(folder / "cache")} | environ,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )


def short(bundles: list[MadeBundle], fio: bool = False, **options: object) -> IoReport:
    return bench_io([made.directory for made in bundles], io_options(SHORT | options, False, fio))


def test_the_command_compares_with_fio_and_draws(bundle: MadeBundle, tmp_path: Path) -> None:
    assert shutil.which("fio"), "this test needs fio: make apt-deps"
    args = ("--quick", "--depth", "1", "--depth", "32", "--seconds", "0.05", "--plot", "figure.png", "--json")
    done = flashd(tmp_path, "bench", "io", bundle.directory, *args)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = report["rows"]
    assert all(row.keys() >= ROW_KEYS for row in rows)
    assert "buffered" in {row["engine"] for row in rows} <= set(ENGINES)
    stride = bundle.manifest.ffn.stride_bytes
    assert {
        (row["pattern"], row["size_bytes"], row["depth"]) for row in rows if row["pattern"] == "random"
    } == {
        ("random", stride, 1),
        ("random", stride, 32),
    }
    assert {row["depth"] for row in rows if row["pattern"] == "sequential"} == {16}
    assert all(row["gb_per_s"] > 0 and row["cpu_us_per_read"] > 0 and row["store"] == "file" for row in rows)
    assert report["bytes_check"]["ok"] is not False
    assert report["max_callback_cpu_ms"] == max(row["max_callback_cpu_ms"] for row in rows)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    if any(row["engine"] == "uring" for row in rows):  # else fio's io_uring doesn't work here, either
        assert report["fio"].startswith("fio-")
        for row in rows:
            # What the page cache gives is partly RAM: no ratio.
            direct = row["engine"] != "buffered"
            assert row["ratio"] == (row["gb_per_s"] / row["fio_gb_per_s"] if direct else None)
            assert row["fio_best_gb_per_s"] is None, "a quick run leaves it out"


def test_without_fio_the_command_still_measures(bundle: MadeBundle, tmp_path: Path) -> None:
    args = ("--quick", "--depth", "2", "--seconds", "0.02", "--engine", "buffered")
    done = flashd(tmp_path, "bench", "io", bundle.directory, *args, PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "fio is not installed" in done.stderr
    lines = done.stdout.splitlines()
    shown = dict(zip(lines[0].split("\t"), lines[1].split("\t"), strict=True))
    assert (shown["ENGINE"], shown["DEPTH"], shown["FIO"], shown["RATIO"]) == ("buffered", "2", "-", "-")
    (footnote,) = (line for line in lines if line.startswith(f"{shown['NOTE']}: "))
    assert "page cache" in footnote


def test_rounds_bundles_and_sizes(bundle: MadeBundle, twin: MadeBundle) -> None:
    report = short([bundle, twin], rounds=3, sizes_bytes=(2048,), engines=("uring", "threads", "buffered"))
    stride = bundle.manifest.ffn.stride_bytes
    for store, sizes in (("file", {stride, 2048}), ("zarr", {stride})):
        random = [row for row in report.rows if (row.store, row.pattern) == (store, "random")]
        assert {row.size_bytes for row in random} == sizes
        assert any(row.pattern == "sequential" and row.store == store for row in report.rows)
    for row in report.rows:
        assert len(row.rounds_gb_per_s) == 3
        assert row.gb_per_s == sorted(row.rounds_gb_per_s)[1]
        assert (row.fio_gb_per_s, row.ratio, row.fio_rounds_gb_per_s) == (None, None, [])
    assert report.bytes_check.ok is not False


def test_what_does_not_fit_or_work_is_named(bundle: MadeBundle) -> None:
    report = short([bundle], sizes_bytes=(1 << 20,), engines=("buffered",))
    assert any("no reads of 1048576 bytes" in text for text in report.notes)
    with pytest.raises(ConfigError, match="nothing to measure"):
        short([bundle], engines=())


def test_no_bundle_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    done = flashd(tmp_path, "bench", "io", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "flashd convert" in done.stderr


def test_wrong_arguments_name_the_remedy(bundle: MadeBundle, tmp_path: Path) -> None:
    good = str(bundle.directory)
    wrong = [
        ((f"{good}/nowhere",), BundleError, "no such directory"),
        ((f"{good}/ffn.bundle",), BundleError, "not a bundle directory"),
        ((good, "--also", str(tmp_path)), BundleError, "flashd convert"),
        ((good, "--engine", "tape"), ConfigError, "known: uring"),
        ((good, "--depth", "0"), ConfigError, "expected 1 to"),
        ((good, "--size", "big"), ConfigError, "16K"),
        (
            (good, "--depth", "4096", "--size", "16M"),
            ConfigError,
            "128.0 GiB of memory, expected at most 1 GiB",
        ),
        ((good, "--depth", "8,deep"), ConfigError, "'deep'"),
        ((good, "--size", "1"), ConfigError, "expected 512 up to 16 MiB"),
        ((good, "--also", f"{good}/."), ConfigError, "named twice"),
        ((good, "--plot", "figure.svg"), ConfigError, "*.png"),
        ((good, "--plot", "nowhere/figure.png"), ConfigError, "no such directory"),
    ]
    for args, kind, remedy in wrong:
        with pytest.raises(kind) as caught:
            in_process("bench", "io", *args)
        assert remedy in str(caught.value)


def in_process(*args: str) -> None:
    """The command's own exception: starting an interpreter for each of them takes a second."""
    from flashd.cli.main import app

    app(list(args), standalone_mode=False)


def test_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"flashd\[plot\]"):
        check_plot(tmp_path / "figure.png")


def test_plot_of_many_rows(bundle: MadeBundle, tmp_path: Path) -> None:
    report = short([bundle], depths=(1, 4), sizes_bytes=(2048,), engines=("buffered",))
    plot(report.rows, "a machine", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    with pytest.raises(FileNotFoundError):
        plot(report.rows, "a machine", tmp_path / "gone" / "figure.png")


# --- fio


def test_fio_reads_several_files_under_awkward_names(tmp_path: Path) -> None:
    fio = Fio.find()
    assert fio is not None, "this test needs fio: make apt-deps"
    folder = tmp_path / "a b:c;d#e$(f)"
    folder.mkdir()
    for name in ("x", "y"):
        (folder / name).write_bytes(os.urandom(1 << 20))
    for job in JOBS:
        try:
            result = fio.run(job, folder, ("x", "y"), 4096, 4, 0.05)
        except FioError as exc:
            pytest.skip(f"fio cannot use io_uring and O_DIRECT here: {exc}")
        assert result.gb_per_s > 0
        assert result.cpu_us_per_read >= 0


def test_fio_failing_is_told_and_leaves_no_ratio(
    bundle: MadeBundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = Fio.find()
    assert installed is not None, "this test needs fio: make apt-deps"
    with pytest.raises(FioError, match="size"):  # fio's way to say that a file is missing
        installed.run("randread", tmp_path, ("nowhere",), 4096, 1, 0.05)
    program = tmp_path / "fio"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo fio-9 && exit\necho "no luck today" >&2; exit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    report = short([bundle], fio=True, engines=("buffered",), rounds=2)
    assert report.fio == "fio-9"
    assert {row.ratio for row in report.rows} == {None}
    assert any("no luck today" in text for text in report.notes)


def test_a_broken_fio_is_no_fio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fio").write_text("#!/nowhere/sh\n")
    (tmp_path / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Fio.find() is None


# --- measuring


@asynccontextmanager
async def opened(made: MadeBundle) -> AsyncIterator[BundleFileStore]:
    engine = await open_engine(made.directory / "ffn.bundle", depth=8)
    try:
        yield BundleFileStore(engine, made.manifest.ffn, made.manifest.layer_offset_bytes)
    finally:
        await engine.close()


def run_on_metered_loop(coroutine: Callable[[], object]) -> object:
    with asyncio.Runner(loop_factory=MeteredLoop) as runner:
        return runner.run(coroutine())  # type: ignore[arg-type]  # a coroutine function


def test_every_row_is_a_read_of_its_own(bundle: MadeBundle) -> None:
    async def check() -> None:
        async with opened(bundle) as store:
            work = RandomRows(store, 8)
            for _ in range(20):
                ids = work.neurons()
                assert ids[0] >= 0
                assert ids[-1] < store.geometry.n_neurons
                assert (np.diff(ids) > 1).all()
            before = store.engine.stats.reads
            sample = await measure(work, store.engine, 0.02)
            reads = store.engine.stats.reads - before
            assert reads * store.geometry.stride_bytes == sample.engine_bytes
            assert reads % work.batch_reads == 0
            if store.engine.direct and sample.kernel_bytes:
                assert sample.kernel_bytes >= sample.engine_bytes

    run_on_metered_loop(check)


def test_rows_land_where_the_store_puts_them(bundle: MadeBundle) -> None:
    """The benchmark reads what the model would: the right bytes of the right neurons."""

    async def check() -> None:
        async with opened(bundle) as store:
            stream = Stream(store, 4 * 100 * store.geometry.stride_bytes, 4, 4096)
            for _ in range(2):  # once around all layers, and again
                for layer in range(store.geometry.n_layers):
                    for piece in range(4):
                        await stream.batch(piece)
                        expected = bundle.rows[layer, 100 * piece : 100 * piece + 100]
                        assert np.array_equal(stream.part(piece).reshape(100, -1), expected)
            reads = RandomReads(store.engine, bundle.rows.nbytes, 2048, 8)
            await reads.batch(1)
            content = (bundle.directory / "ffn.bundle").read_bytes()
            for got in reads.part(1).reshape(-1, 2048):
                assert content.find(got.tobytes()) % 2048 == 0

    run_on_metered_loop(check)


@pytest.mark.parametrize("depth", [1, 8, 64, 256])
@pytest.mark.parametrize("n_neurons", [1, 2, 5, 80, 400])
def test_the_queue_can_be_full_however_small_a_layer_is(tmp_path: Path, n_neurons: int, depth: int) -> None:
    made = make_bundle(tmp_path / "bundle", tiny_spec(d_ffn=n_neurons, n_layers=1))

    async def check() -> None:
        async with opened(made) as store:
            work = RandomRows(store, depth)
            assert work.lanes >= 2
            assert (work.lanes - 1) * work.batch_reads >= min(depth, depth * n_neurons)
            assert work.neurons().max() < n_neurons

    run_on_metered_loop(check)
    assert batch_reads(32 << 10, depth) >= depth


def test_an_error_while_measuring_comes_out(bundle: MadeBundle) -> None:
    class Broken(Work):
        async def batch(self, lane: int) -> None:
            await asyncio.sleep(0)
            raise OSError("broken")

    async def check() -> Sample:
        return await measure(Broken(2, 1, 512), None, 0.01)

    with pytest.raises(OSError, match="broken"):
        run_on_metered_loop(check)


def test_the_loop_sees_a_callback_that_computes() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeteredLoop)
        reader, writer = os.pipe()
        seen = asyncio.Event()

        def compute() -> None:
            end_ns = time.thread_time_ns() + 6_000_000
            while time.thread_time_ns() < end_ns:
                pass

        def readable() -> None:
            os.read(reader, 1)
            compute()
            seen.set()

        with loop.measuring():
            await asyncio.sleep(0)
        assert loop.max_cpu_ns < 6_000_000
        loop.call_soon(compute)
        await asyncio.sleep(0)
        assert loop.max_cpu_ns < 6_000_000, "counted though nobody measures"
        loop.add_reader(reader, readable)
        with loop.measuring():
            os.write(writer, b"x")
            await seen.wait()
        assert loop.max_cpu_ns >= 6_000_000
        assert loop.max_wall_ns >= 6_000_000
        loop.remove_reader(reader)
        os.close(reader)
        os.close(writer)

    run_on_metered_loop(check)


@pytest.mark.parametrize(
    ("direct", "kernel_mib", "expected"),
    [(True, 1000, True), (True, 1010, True), (True, 990, True), (True, 988, False), (True, 1012, False),
     (True, 0, None), (True, None, None), (False, 1, None)],
)  # fmt: skip
def test_bytes_are_checked_to_one_percent(
    bundle: MadeBundle, direct: bool, kernel_mib: int | None, expected: bool | None
) -> None:
    source = open_source(bundle.directory)
    kernel_bytes = None if kernel_mib is None else kernel_mib << 20
    sample = Sample(1.0, 1.0, 0.1, 0.1, 1000 << 20, direct, kernel_bytes)
    check = check_bytes({(source, Point("random", 512, 1), "uring"): [sample, sample]})
    assert check.ok is expected
    assert (check.worst_percent is None) == (expected is None)


def test_options_are_checked() -> None:
    assert io_options({}, False, True) == IoOptions()
    quick = io_options({"depths": (7,)}, True, False)
    assert (quick.rounds, quick.sizes_bytes, quick.depths, quick.fio) == (1, (), (7,), False)
    for wrong in (
        {"rounds": 0},
        {"seconds": 0.0},
        {"depths": ()},
        {"depths": (5000,)},
        {"sizes_bytes": (7,)},
    ):
        with pytest.raises(ConfigError):
            io_options(wrong, False, True)


def test_only_row_files_of_a_zarr_bundle_are_read(twin: MadeBundle) -> None:
    source = open_source(twin.directory)
    assert source.store == "zarr"
    assert not [name for name in source.files if name.endswith(".json")]
    assert all(path.is_file() for path in source.paths)
    with pytest.raises(BundleError):
        open_source(twin.directory / "ffn.zarr")
