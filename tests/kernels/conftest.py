"""Every verb is tested as the NumPy twin and as native code on every SIMD level of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from flashd import kernels
from flashd.kernels import twin

LEVELS = kernels.available_simd() if kernels.NATIVE else ()


@pytest.fixture(scope="module", params=["twin", *LEVELS])
def verbs(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A module with the verbs, set to one level."""
    if request.param == "twin":
        yield twin
        return
    before, threads = kernels.simd_level(), kernels.threads()
    kernels.set_simd(request.param)
    yield kernels
    kernels.set_simd(before)
    kernels.set_threads(threads)
