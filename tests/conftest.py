"""Fixtures of the whole suite: the two kinds of model, converted once, and a daemon on the real one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests that run side by side: torch's threads would wait for CPUs in busy loops. flashd has its own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from support import SMOLLM2_GGUF, Daemon, hf_model, serving

from flashd.tools.convert import ConvertOptions, convert


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests share a process where several run them: those of a file, as they share its fixtures,
    and all that load the demo model into ``transformers``. Files with slow tests go first, so that none
    of them is left for the end."""
    group = {}
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        name = "transformers" if "hf_smollm2" in fixtures else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))
        group[item] = name
    slow = {group[item] for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: group[item] not in slow)


@pytest.fixture(autouse=True, scope="session")
def _no_curves_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """How reads are planned must not depend on what somebody measured here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo model as it is published; `make test` fetches it."""
    assert SMOLLM2_GGUF.is_file(), f"{SMOLLM2_GGUF} is missing: run the tests with `make test`"
    return SMOLLM2_GGUF


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a bundle in its default dtype, f16."""
    dest = tmp_path_factory.mktemp("smollm2") / "smollm2-135m"
    convert(smollm2_gguf, dest, ConvertOptions(), None)
    return dest


@pytest.fixture(scope="session")
def smollm2_f32(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as an f32 bundle, which holds its dequantised values exactly."""
    dest = tmp_path_factory.mktemp("smollm2-f32") / "smollm2-135m"
    convert(smollm2_gguf, dest, ConvertOptions(dtype="f32"), None)
    return dest


@pytest.fixture(scope="session")
def hf_smollm2(smollm2_gguf: Path) -> Any:
    """The demo model in ``transformers``: dequantised, float32. Loading it takes 20 s."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="session")
def hf_smollm2_tokenizer(smollm2_gguf: Path) -> Any:
    """The demo model's tokenizer as ``transformers`` reads it."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """``tiny(kind)``: a random ``transformers`` model and its f32 bundle; see support.CHECKPOINTS."""
    made: dict[str, tuple[Any, Path]] = {}
    root = tmp_path_factory.mktemp("tiny")

    def get(kind: str) -> tuple[Any, Path]:
        if kind not in made:
            model = hf_model(kind)
            model.save_pretrained(root / kind)
            convert(root / kind, root / f"{kind}-bundle", ConvertOptions(dtype="f32"), None)
            made[kind] = model, root / f"{kind}-bundle"
        return made[kind]

    return get


@pytest.fixture(scope="session")
def daemon(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that serves the demo model."""
    with serving(smollm2, tmp_path_factory.mktemp("daemon")) as running:
        yield running
