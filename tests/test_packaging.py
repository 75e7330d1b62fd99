"""Building flashd where something is missing: no compiler, no native code wanted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs, so that the checkout's own build folder stays as it is."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("flashd", "clients"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def no_compiler(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose PATH has the build tools and no compiler."""
    tools = tmp_path_factory.mktemp("tools")
    for name in ("cmake", "ninja"):
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    environment = {key: value for key, value in os.environ.items() if key not in ("CXX", "CC")}
    return {**environment, "PATH": str(tools)}


def pip(*arguments: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)


def build(sources: Path, wheels: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # What is in the wheel does not depend on the optimiser, which takes most of the time.
    options = ("--no-build-isolation", "--no-deps", "--config-settings", "cmake.build-type=Debug")
    return pip("wheel", *options, "-w", wheels, sources, env=env)


def test_a_pure_wheel_works_without_a_compiler(
    sources: Path, no_compiler: dict[str, str], tmp_path: Path
) -> None:
    built = build(sources, tmp_path, {**no_compiler, "FLASHD_NO_NATIVE": "1"})
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "flashd/kernels/twin/__init__.py" in names
    assert {f"flashd/tools/bench/{job}.fio" for job in ("randread", "sequential")} <= set(names)
    assert "flashd_client/__init__.py" in names
    assert not [name for name in names if name.endswith((".so", ".cpp", ".hpp"))]

    target = tmp_path / "site"
    installed = pip("install", "--no-deps", "--target", target, wheel, env=no_compiler)
    assert installed.returncode == 0, installed.stderr
    # -S keeps out an editable install of this checkout, whose import hook would win.
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import numpy as np, flashd\nfrom flashd import kernels\n"
        "assert flashd.__file__.startswith(sys.argv[1]) and not kernels.NATIVE, flashd.__file__\n"
        "out = np.zeros((1, 2), np.float32)\n"
        "kernels.gemv(np.full((2, 3), 2, np.float16), np.ones((1, 3), np.float32), out)\n"
        "print(kernels.simd_level(), out.tolist())\n"
    )
    command = [sys.executable, "-S", "-c", code, str(target), sysconfig.get_path("purelib")]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.stderr) == ("numpy [[6.0, 6.0]]\n", "")


def test_a_missing_compiler_is_named(sources: Path, no_compiler: dict[str, str], tmp_path: Path) -> None:
    built = build(sources, tmp_path, no_compiler)
    assert built.returncode != 0
    said = built.stdout + built.stderr
    assert "flashd needs a C++17 compiler" in said
    assert "apt install g++" in said
    assert "FLASHD_NO_NATIVE=1" in said
    assert not list(tmp_path.glob("*.whl"))


def test_missing_python_headers_are_named(sources: Path, tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    assert cmake, "tests need cmake: pip install cmake"
    empty = tmp_path / "include"
    empty.mkdir()
    configured = subprocess.run(
        [cmake, "-S", sources, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={sys.executable}",
         f"-DPython_INCLUDE_DIR={empty}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert configured.returncode != 0
    assert "flashd needs the C headers of Python 3." in configured.stderr
    assert "apt install python3-dev" in configured.stderr


def test_the_native_wheel_has_the_module_and_no_sources(sources: Path, tmp_path: Path) -> None:
    built = build(sources, tmp_path, dict(os.environ) | {"FLASHD_NO_NATIVE": ""})
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for room in ("kernels", "disk"):
        assert f"flashd/{room}/_native{suffix}" in names
        assert f"flashd/{room}/_native.pyi" in names
    assert {f"flashd/tools/bench/{job}.fio" for job in ("randread", "sequential")} <= set(names)
    assert not [name for name in names if name.endswith((".cpp", ".hpp", "CMakeLists.txt"))]
    assert len(names) == len(set(names))
