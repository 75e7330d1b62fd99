from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from flashd.errors import BundleError
from flashd.layout.calibration import PREDICTORS
from flashd.layout.manifest import BUNDLE, MANIFEST, RESIDENT, SUMS
from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec
from flashd.testing.predictors import make_predictors
from flashd.tools.verify import verify
from flashd.types import StoreKind

SPEC = tiny_spec("llama", d_ffn=83)
ROWS = SPEC.n_layers * SPEC.d_ffn


@pytest.fixture
def bundle(tmp_path: Path) -> MadeBundle:
    return make_bundle(tmp_path / "bundle", SPEC)


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("kind", ["file", "zarr"])
def test_a_sound_bundle(tmp_path: Path, kind: StoreKind) -> None:
    made = make_bundle(tmp_path / "bundle", SPEC, store=kind)
    calls: list[tuple[str, int, int]] = []
    report = verify(made.directory, lambda *call: calls.append(call))
    assert report.ok
    assert (report.problems, report.unlisted, report.bad_rows) == ([], [], 0)
    assert report.checked_rows == ROWS
    assert report.checked_bytes == sum(entry.size_bytes for entry in made.manifest.files)
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert {call[2] for call in calls} == {done[-1]}
    assert json.loads(json.dumps(asdict(report)))["checked_rows"] == ROWS


@pytest.mark.parametrize(("layer", "neuron", "byte"), [(0, 0, 0), (1, 82, 5), (2, 40, 511)])
def test_the_first_bad_row_is_named(bundle: MadeBundle, layer: int, neuron: int, byte: int) -> None:
    path, stride = bundle.directory / BUNDLE, bundle.manifest.ffn.stride_bytes
    offset = bundle.manifest.layer_offset_bytes[layer] + neuron * stride
    flip(path, offset + byte)
    flip(path, bundle.manifest.layer_offset_bytes[2] + 82 * stride + 7)
    report = verify(bundle.directory)
    assert not report.ok
    assert report.bad_rows == 2
    row = report.first_bad_row
    assert row is not None
    assert (row.file, row.layer, row.neuron, row.offset_bytes) == (BUNDLE, layer, neuron, offset)
    sha, rows = report.problems
    assert f"{path}: SHA-256 is" in sha
    assert f"2 of {ROWS} neuron rows" in rows
    assert f"layer {layer}, neuron {neuron}, at offset {offset}" in rows


def test_damage_between_the_rows(bundle: MadeBundle) -> None:
    """Padding behind a layer belongs to no row, but to the file's hash."""
    flip(bundle.directory / BUNDLE, bundle.manifest.layer_offset_bytes[1] - 1)
    report = verify(bundle.directory)
    assert report.bad_rows == 0
    assert [problem.count("SHA-256") for problem in report.problems] == [1]


@pytest.mark.parametrize("name", [RESIDENT, SUMS])
def test_damage_elsewhere(bundle: MadeBundle, name: str) -> None:
    flip(bundle.directory / name, 40)
    report = verify(bundle.directory)
    assert f"{bundle.directory / name}: SHA-256 is" in report.problems[0]
    assert report.bad_rows == (1 if name == SUMS else 0)


@pytest.mark.parametrize("name", [RESIDENT, SUMS, BUNDLE])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 1000)])
def test_missing_and_truncated_files_do_not_stop_the_rest(
    bundle: MadeBundle, name: str, damage: Callable[[Path], None]
) -> None:
    damage(bundle.directory / name)
    report = verify(bundle.directory)
    assert len(report.problems) == 1
    assert str(bundle.directory / name) in report.problems[0]
    assert report.checked_rows == (ROWS if name == RESIDENT else 0)


def test_damaged_zarr_chunks(tmp_path: Path) -> None:
    made = make_bundle(tmp_path / "bundle", SPEC, store="zarr")
    shard = made.directory / "ffn.zarr/layers/1/c/1/0"
    flip(shard, 3)  # content of the shard's first inner chunk
    report = verify(made.directory)
    assert f"{shard}: SHA-256 is" in report.problems[0]
    row = report.first_bad_row
    assert row is not None
    assert (row.file, row.layer, row.neuron) == ("ffn.zarr/layers/1", 1, 40)
    flip(shard, shard.stat().st_size - 3)  # the shard's index
    report = verify(made.directory)
    assert any("ffn.zarr/layers/1" in problem and "layer 1" in problem for problem in report.problems)
    assert report.checked_rows == ROWS - SPEC.d_ffn


def test_unlisted_files_are_reported_and_no_damage(bundle: MadeBundle) -> None:
    (bundle.directory / "notes").mkdir()
    (bundle.directory / "notes" / "a.txt").write_text("x")
    report = verify(bundle.directory)
    assert report.ok
    assert report.unlisted == ["notes/a.txt"]


def test_predictors_are_checked(bundle: MadeBundle) -> None:
    make_predictors(bundle.directory, bundle.manifest)
    before = verify(bundle.directory)
    assert (before.problems, before.unlisted) == ([], [])
    flip(bundle.directory / PREDICTORS, 5000)
    report = verify(bundle.directory)
    assert len(report.problems) == 1
    assert f"{PREDICTORS}: its SHA-256" in report.problems[0]


def test_no_bundle(bundle: MadeBundle) -> None:
    (bundle.directory / MANIFEST).unlink()
    with pytest.raises(BundleError, match=r"manifest\.json"):
        verify(bundle.directory)


@pytest.mark.slow
def test_large_bundle_in_bounded_memory(tmp_path: Path) -> None:
    """Two hundred megabytes are checked within tens."""
    spec = tiny_spec("llama", d_model=1024, d_ffn=4096, n_layers=8)
    made = make_bundle(tmp_path / "bundle", spec)
    size = made.rows.nbytes
    del made
    peak = _peak_growth_bytes(lambda: verify(tmp_path / "bundle"))
    assert size == 192 << 20
    assert peak < 48 << 20


def _peak_growth_bytes(call: Callable[[], object]) -> int:
    """How much RssAnon grew during a call, sampled while it runs."""
    import threading

    done = threading.Event()
    samples = [_rss_anon_bytes()]

    def sample() -> None:
        while not done.is_set():
            samples.append(_rss_anon_bytes())
            time.sleep(0.005)

    sampler = threading.Thread(target=sample)
    sampler.start()
    call()
    done.set()
    sampler.join()
    return max(samples) - samples[0]


def _rss_anon_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
