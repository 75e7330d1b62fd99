"""The committed ReLU model is what its card says, and flashd runs it as transformers does."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support import REPO, serving

from flashd.tools.convert import ConvertOptions, convert

HERE = REPO / "ops" / "relu_model"
MODEL = HERE / "opt-relu-6m"
TEXTS = sorted((HERE / "held_out").glob("*.txt"))
PROMPTS = (
    "Fellow-Citizens of the Senate and House of Representatives:\n\nThe",
    "Anne had always thought",
    "Background: The islands were",
)
N_NEW = 40


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules beside the model, which import each other by their bare names."""
    monkeypatch.syspath_prepend(str(HERE))
    return {name: importlib.import_module(name) for name in ("corpus", "measure", "export")}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """The figures that export.py measured."""
    found: dict[str, Any] = json.loads((MODEL / "measured.json").read_text())
    return found


def test_weights_are_float16_and_as_many_as_the_card_says(measured: dict[str, Any]) -> None:
    data = (MODEL / "model.safetensors").read_bytes()
    assert len(data) == measured["bytes"] <= 12_000_000
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    assert {tensor["dtype"] for tensor in tensors} == {"F16"}
    parameters = sum(math.prod(tensor["shape"]) for tensor in tensors)
    assert parameters == measured["parameters"]
    assert 4_000_000 < parameters < 6_000_000
    card = (MODEL / "README.md").read_text()
    assert f"{parameters:,} parameters" in card
    assert f"({len(data) / 1e6:.2f} MB)" in card


def test_card_has_the_measured_figures(measured: dict[str, Any], scripts: dict[str, ModuleType]) -> None:
    card = (MODEL / "README.md").read_text()
    assert len(measured["domains"]) == 3
    for name, domain in measured["domains"].items():
        assert (
            f"| {name} | {domain['tokens']:,} | {domain['loss']:.3f} | {domain['bits_per_byte']:.3f} |"
            in card
        )
    for index, layer in enumerate(measured["layers"]):
        figures = " | ".join(f"{100 * value:.1f} %" for value in layer.values())
        assert f"| {index} | {figures} |" in card
    for source in scripts["corpus"].SOURCES:
        row = next(
            line for line in card.splitlines() if line.startswith(f"| {source.name} | `{source.package}`")
        )
        assert row.endswith(f"| {source.licence} |")


def test_few_neurons_fire(measured: dict[str, Any]) -> None:
    """What the model is for; the bound leaves room for a training with other luck."""
    shares = [layer["per_token"] for layer in measured["layers"]]
    assert max(shares) < 0.2
    assert np.mean(shares) < 0.13
    assert max(layer["never"] for layer in measured["layers"]) < 0.25


def test_first_window_measures_the_same_again(
    measured: dict[str, Any], scripts: dict[str, ModuleType]
) -> None:
    again = scripts["measure"].measure(MODEL, TEXTS, n_tokens=scripts["export"].CHECK_TOKENS)
    expected = measured["check"]
    for name, domain in expected["domains"].items():
        assert again["domains"][name] == pytest.approx(domain, rel=2e-3)
    for layer, before in zip(again["layers"], expected["layers"], strict=True):
        assert layer == pytest.approx(before, abs=5e-3)


def test_texts_are_small_and_apart() -> None:
    assert [path.stem for path in TEXTS] == ["novels", "reference", "speeches"]
    calibration = (HERE / "calibration.txt").read_text()
    assert len(calibration.encode()) <= 400_000
    seen = set(calibration.split("\n"))
    for path in TEXTS:
        text = path.read_text()
        assert 150_000 < len(text.encode()) <= 200_000
        # Fields like "Coastline: 0 km (landlocked)" are the same for several countries.
        assert not [line for line in text.split("\n") if len(line) > 400 and line in seen]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_flashd_writes_what_transformers_writes(tmp_path: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    convert(MODEL, tmp_path / "bundle", ConvertOptions(dtype="f32"), None)
    with serving(tmp_path / "bundle", tmp_path, "--kv-dtype", "f32") as daemon, daemon.http() as http:
        for text in PROMPTS:
            prompt = tokenizer(text, return_tensors="pt")
            whole = model.generate(
                input_ids=prompt["input_ids"],
                attention_mask=prompt["attention_mask"],
                max_new_tokens=N_NEW,
                do_sample=False,
            )[0]
            expected = whole[prompt["input_ids"].shape[1] :].tolist()
            body = {"prompt": text, "temperature": 0, "max_tokens": N_NEW, "return_tokens": True}
            answer = http.post("/v1/completions", json=body).json()
            assert answer["usage"]["prompt_tokens"] == prompt["input_ids"].shape[1]
            assert answer["choices"][0]["tokens"] == expected
