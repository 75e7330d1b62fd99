"""What the daemon is built with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashd import kernels
from flashd.config import DaemonConfig
from flashd.runtime.build import build
from flashd.testing.bundles import make_bundle, tiny_spec


@pytest.fixture(autouse=True)
def thread_count() -> Iterator[None]:
    before = kernels.threads()
    yield
    kernels.set_threads(before)


@pytest.mark.skipif(not kernels.NATIVE, reason="the twins have one thread")
@pytest.mark.parametrize("wanted", [0, 1, 1000])
async def test_no_more_threads_than_can_run(
    wanted: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_bundle(tmp_path / "bundle", tiny_spec("opt"))
    with caplog.at_level(logging.WARNING):
        runtime = await build(DaemonConfig(model=str(tmp_path / "bundle"), threads=wanted))
    await runtime.close()
    usable = kernels.default_threads()
    assert kernels.threads() == min(wanted or usable, usable)
    assert ("1000 kernel threads are too many" in caplog.text) == (wanted == 1000)
