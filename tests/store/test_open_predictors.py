"""Opening what calibration wrote: everything that is wrong with it has a name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashd.errors import BundleError
from flashd.layout.calibration import CALIBRATION, PREDICTORS
from flashd.layout.manifest import MANIFEST
from flashd.store.open import open_manifest, open_predictors
from flashd.testing.bundles import MadeBundle, make_bundle
from flashd.testing.predictors import make_predictors
from flashd.tools.calibrate.write import write_calibration


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> MadeBundle:
    made = make_bundle(tmp_path_factory.mktemp("calibrated"))
    make_predictors(made.directory, made.manifest, masked=[False, True, True])
    return made


@pytest.fixture
def bundle(sound: MadeBundle, tmp_path: Path) -> MadeBundle:
    """A copy whose files may be replaced."""
    for path in sound.directory.iterdir():
        os.link(path, tmp_path / path.name)
    return replace(sound, directory=tmp_path)


def test_round_trip(bundle: MadeBundle) -> None:
    written = make_predictors(bundle.directory, bundle.manifest, masked=[False, True, True])
    opened = open_predictors(bundle.directory, bundle.manifest)
    assert opened is not None
    assert opened[0] == written[0]
    assert opened[1].keys() == written[1].keys()
    for name, tensor in written[1].items():
        np.testing.assert_array_equal(opened[1][name], tensor)
    assert "layers.0.predictor.w1" not in opened[1]
    assert opened[1]["layers.0.frequency"].shape == (80,)


def test_no_calibration(bundle: MadeBundle) -> None:
    (bundle.directory / CALIBRATION).unlink()
    assert open_predictors(bundle.directory, bundle.manifest) is None
    (bundle.directory / PREDICTORS).unlink()
    assert open_predictors(bundle.directory, bundle.manifest) is None


def edited(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / CALIBRATION
        content = json.loads(path.read_text())
        edit(content)
        path.unlink()
        path.write_text(json.dumps(content))

    return damage


def layer(index: int, **fields: Any) -> Callable[[Path], None]:
    return edited(lambda content: content["layers"][index].update(fields))


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        data = (directory / name).read_bytes()
        (directory / name).unlink()
        (directory / name).write_bytes(change(data))

    return damage


def with_tensor(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Tensors exchanged with all hashes right: a writer's bug."""

    def damage(directory: Path) -> None:
        manifest = open_manifest(directory)
        opened = open_predictors(directory, manifest)
        assert opened is not None
        change(opened[1])
        write_calibration(directory, manifest, *opened)

    return damage


def nan(tensors: dict[str, Any]) -> None:
    tensors["layers.1.predictor.w2"][3, 4] = np.nan


def no_share(tensors: dict[str, Any]) -> None:
    tensors["layers.0.frequency"][7] = 1.5


def folder(directory: Path) -> None:
    (directory / CALIBRATION).unlink()
    (directory / CALIBRATION).mkdir()


def link_to_nowhere(directory: Path) -> None:
    (directory / CALIBRATION).unlink()
    (directory / CALIBRATION).symlink_to("nowhere")


def pipe(directory: Path) -> None:
    (directory / CALIBRATION).unlink()
    os.mkfifo(directory / CALIBRATION)


DAMAGE: list[tuple[str, Callable[[Path], None]]] = [
    (rf"{PREDICTORS}: missing.*calibrate again", lambda d: (d / PREDICTORS).unlink()),
    (rf"{PREDICTORS}: \d+ bytes, expected \d+.*calibrate again", rewritten(PREDICTORS, lambda b: b[:-1])),
    (rf"{PREDICTORS}: its SHA-256.*calibrate again", rewritten(PREDICTORS, lambda b: b[:-1] + b"\x7f")),
    (rf"{PREDICTORS}: .*", rewritten(PREDICTORS, lambda b: b"\xff" * len(b))),
    (rf"{PREDICTORS}: .*", rewritten(PREDICTORS, lambda b: b.replace(b'"F16"', b'"F64"'))),
    (rf"{PREDICTORS}: tensor 'layers.1.predictor.w2' holds values that are no numbers", with_tensor(nan)),
    (rf"{PREDICTORS}: tensor 'layers.0.frequency' holds shares that are not", with_tensor(no_share)),
    (rf"{PREDICTORS}: no tensor 'layers.0.predictor.w1'", layer(0, masked=True, rank=8)),
    (rf"{PREDICTORS}: tensor .* is float16 \[8, 32\], expected f16 \[9, 32\]", layer(1, rank=9)),
    (rf"{CALIBRATION}: no file, or a link to nowhere; calibrate again", link_to_nowhere),
    (rf"{CALIBRATION}: no file, or a link to nowhere; calibrate again", pipe),
    (rf"{CALIBRATION}: no file, or a link to nowhere; calibrate again", folder),
    (rf"{CALIBRATION}: .*calibrate again", rewritten(CALIBRATION, lambda b: b[:-20])),
    (rf"{CALIBRATION}: .*", rewritten(CALIBRATION, lambda b: b"[" * 100_000)),
    (rf"{CALIBRATION}: .*", rewritten(CALIBRATION, lambda b: b"\xff\xfe")),
    (rf"{CALIBRATION}: format_version: .*", edited(lambda c: c.update(format_version=2))),
    (rf"{CALIBRATION}: made for other weights", edited(lambda c: c.update(bundle_sha256="0" * 64))),
    (rf"{CALIBRATION}: made for other thresholds", edited(lambda c: c.update(thresholds=[0.5] * 3))),
    (rf"{CALIBRATION}: 2 layers, the bundle has 3", edited(lambda c: c["layers"].pop())),
    (rf"{CALIBRATION}: layer 1: a threshold is no finite number", layer(1, threshold=float("nan"))),
    (rf"{CALIBRATION}: layer 1: a share is not between 0 and 1", layer(1, false_negative=1.5)),
    (rf"{CALIBRATION}: layer 1: capacity_rows are not", layer(1, capacity_rows=[81] * 64)),
    (rf"{CALIBRATION}: layer 1: 3 capacity_rows, expected 64", layer(1, capacity_rows=[8] * 3)),
    (rf"{CALIBRATION}: layer 1: a usage curve", layer(1, s_agg_fired=[0.1])),
    (rf"{CALIBRATION}: layer 1: rank is 0", layer(1, rank=0)),
    (rf"{CALIBRATION}: layer 1: lookahead_rank is 8", layer(1, lookahead_threshold=None)),
    (rf"{CALIBRATION}: the last layer looks ahead", layer(2, lookahead_threshold=0.0, lookahead_rank=8)),
    (rf"{CALIBRATION}: layer 1: rank is 1180591620717411303424", layer(1, rank=1 << 70)),
    (rf"{CALIBRATION}: layers.1.threshold: ", layer(1, threshold="0")),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(DAMAGE)))
def test_damage_is_named(bundle: MadeBundle, case: int) -> None:
    expected, damage = DAMAGE[case]
    damage(bundle.directory)
    with pytest.raises(BundleError, match=expected):
        open_predictors(bundle.directory, bundle.manifest)


def test_another_bundle(bundle: MadeBundle, tmp_path: Path) -> None:
    """Converted again, or thresholds changed: the calibration is of something else."""
    other = make_bundle(tmp_path / "other", seed=1)
    for name in (CALIBRATION, PREDICTORS):
        (bundle.directory / name).rename(other.directory / name)
    with pytest.raises(BundleError, match="made for other weights than this bundle's; calibrate again"):
        open_predictors(other.directory, other.manifest)


def test_thresholds_are_written_with_it(bundle: MadeBundle) -> None:
    (bundle.directory / MANIFEST).unlink()
    (bundle.directory / MANIFEST).write_text("{}")
    cut = replace(bundle.manifest, thresholds=(0.0, 0.25, 0.5))
    calibration, _ = make_predictors(bundle.directory, cut)
    assert open_manifest(bundle.directory) == cut
    assert calibration.thresholds == cut.thresholds
    assert open_predictors(bundle.directory, cut) is not None
    with pytest.raises(BundleError, match="made for other thresholds"):
        open_predictors(bundle.directory, bundle.manifest)
