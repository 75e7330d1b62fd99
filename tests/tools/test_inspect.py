from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from flashd.cli.bundle import inspect_rows
from flashd.errors import BundleError
from flashd.testing.bundles import make_bundle, tiny_spec
from flashd.testing.predictors import make_predictors
from flashd.tools.inspect import inspect
from flashd.types import StoreKind, TokenizerSpec


@pytest.mark.parametrize("kind", ["file", "zarr"])
def test_the_arithmetic(tmp_path: Path, kind: StoreKind) -> None:
    spec = tiny_spec("llama")
    made = make_bundle(tmp_path, spec, store=kind, tokenizer=TokenizerSpec(chat_template="{{ x }}"))
    report = inspect(tmp_path)
    resident = sum(array.nbytes for array in made.resident.values())
    ffn = 3 * 80 * 512
    assert report.resident_bytes == resident
    assert (report.row_bytes, report.stride_bytes) == (3 * 32 * 2, 512)
    assert (report.layer_bytes, report.ffn_bytes) == (80 * 512, ffn)
    assert report.parameters == sum(array.size for array in made.resident.values()) + 3 * 80 * 96
    assert report.kv_bytes_per_token == 2 * 3 * 2 * 8 * 2
    assert report.kv_bytes_full_context == report.kv_bytes_per_token * 64
    assert report.ram_dense_resident_bytes == resident + ffn
    ring = 4 * 24 * 512  # four slices, a quarter of the layer each, of whole groups of 8 rows
    assert report.ram_dense_streamed_bytes == resident + ring
    assert report.ram_sparse_bytes == {
        share: resident + ring + ffn * int(share) // 100 for share in ("10", "25", "50")
    }
    assert report.total_bytes == sum(entry.size_bytes for entry in made.manifest.files)
    assert (report.calibrated, report.tokenizer, report.chat_template) == (False, False, True)
    assert report.store == kind


def test_as_json_and_as_table(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    made = make_bundle(tmp_path)
    plain = inspect(tmp_path)
    make_predictors(tmp_path, made.manifest, masked=[True, True, False])
    report = inspect(tmp_path)
    assert (report.calibrated, report.tokenizer, report.chat_template) == (True, True, False)
    predictors = (tmp_path / "predictors.safetensors").stat().st_size
    assert report.ram_sparse_bytes == {k: v + predictors for k, v in plain.ram_sparse_bytes.items()}
    assert json.loads(json.dumps(asdict(report)))["family"] == "opt"
    table = dict(inspect_rows(report))
    assert table["FFN rows"] == "120 KiB, 40 KiB a layer"
    assert table["calibrated"] == (
        "synthetic, predictor low-rank, masks in 2 of 3 layers: 50.0 % of their neurons are requested, "
        "10.0 % fire"
    )
    (tmp_path / "predictors.safetensors").write_text("damaged")
    assert inspect(tmp_path).calibrated  # headers alone are read; `flashd verify` checks all
    (tmp_path / "calibration.json").write_text("{}")
    report = inspect(tmp_path)
    assert not report.calibrated
    assert "calibrate again" in report.calibration_problem
    assert dict(inspect_rows(report))["calibrated"].startswith("unusable: ")
    assert table["source"] == "random weights"


def test_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json"):
        inspect(tmp_path)
