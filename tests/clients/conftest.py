"""A raw server on a real Unix socket for every test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.raw_server import RawServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RawServer]:
    running = RawServer(tmp_path / "d.sock")
    yield running
    running.close()
