"""Rules of the repository that no other tool checks. Each is shown to catch a bad sample."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

REPO = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70

# A room imports from itself and from rooms on lines above it; rooms of one line are siblings.
LINES = (
    ("errors", "types", "config", "stats"),
    ("layout",),
    ("disk", "kernels", "metrics"),
    ("memory",),
    ("store", "predictor", "models", "kv"),
    ("prefetch",),
    ("runtime",),
    ("server", "tools"),
    ("cli",),
    ("__main__",),
)
LINE_OF = {room: number for number, rooms in enumerate(LINES) for room in rooms}
# layout stands on the line of these siblings, and only disk and memory may import it there.
NO_LAYOUT = ("kernels", "metrics")
TORCH_ALLOWED = ("flashd/tools/calibrate", "flashd/tools/bench/kernels/with_torch.py")

REASON = r"\s+(#|-)\s*\w+"
DIRECTIVE = re.compile(r"#\s*(type:\s*ignore|noqa|ruff:\s*noqa|mypy:\s*ignore)")
CODES = r"(type:\s*ignore\[[\w-]+(,\s*[\w-]+)*\]|noqa:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*)"
WITH_REASON = re.compile(rf"#\s*{CODES}{REASON}")
# The one path that is the same on every machine: the runtime directory where XDG names none.
MACHINE_PATH = re.compile(r"/tmp/(?!flashd-)\w|/(home|root|Users)/\w|/" + "work/|shared/" + "DESIGN")

TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".cpp", ".hpp", ".yaml", ".yml", ".json", ".sh", ".service"}
ROOTS = ("flashd", "clients", "tests", "ops", "docs", ".ci")


def imports(tree: ast.AST, path: PurePosixPath) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.parts[: -node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def room_of(name: str) -> str | None:
    """Room of a dotted name in flashd; None if it is no room's."""
    parts = name.split(".")
    return parts[1] if parts[0] == "flashd" and len(parts) > 1 and parts[1] in (*LINE_OF, "testing") else None


def may_import(room: str, other: str) -> bool:
    if room in (other, "testing"):
        return True
    if other == "testing" or (other == "layout" and room in NO_LAYOUT):
        return False
    return LINE_OF[other] < LINE_OF[room] or LINE_OF[room] == LINE_OF[other] == 0


def import_problems(tree: ast.AST, path: PurePosixPath) -> Iterator[tuple[int, str]]:
    for line, name in imports(tree, path):
        top = name.split(".")[0]
        if path.parts[0] == "clients" and top == "flashd":
            yield line, "the client imports nothing of flashd"
        if path.parts[0] != "flashd":
            continue
        if top == "torch" and not str(path).startswith(TORCH_ALLOWED):
            yield line, "the daemon runs without torch"
        room, other = room_of(".".join(path.with_suffix("").parts)), room_of(name)
        if room and other and not may_import(room, other):
            yield line, f"{room} may not import {other}"
        if top == "flashd_client" and room != "cli":
            yield line, f"only cli uses flashd_client, not {room}"


def function_problems(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if n_lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {n_lines} lines, at most {MAX_FUNCTION_LINES}"


def comment_problems(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        directive = token.type == tokenize.COMMENT and DIRECTIVE.search(token.string)
        if directive and not WITH_REASON.search(token.string):
            yield token.start[0], f"{token.string!r} names no code or gives no reason"


def problems(path: PurePosixPath, text: str) -> list[str]:
    """Everything that is wrong with one file, as ``path:line: what``."""
    found: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := MACHINE_PATH.search(line):
            found.append((number, f"{match.group()!r} is a path of one machine"))
    if path.suffix in (".py", ".cpp", ".hpp") and text.count("\n") > MAX_FILE_LINES:
        found.append((1, f"{text.count(chr(10))} lines, at most {MAX_FILE_LINES}"))
    if path.suffix == ".py":
        tree = ast.parse(text)
        found += [*import_problems(tree, path), *function_problems(tree), *comment_problems(text)]
    return [f"{path}:{line}: {what}" for line, what in sorted(found)]


def files() -> list[Path]:
    """Every text file of the repository that people write."""
    found = [path for path in REPO.iterdir() if path.is_file() and path.name != "LICENSE"]
    for root in ROOTS:
        found += [path for path in (REPO / root).rglob("*") if path.is_file()]
    named = {"Makefile", "Dockerfile", "run", ".pre-commit-config.yaml", ".gitignore"}
    return sorted(
        p for p in found if (p.suffix in TEXT_SUFFIXES or p.name in named) and "__pycache__" not in p.parts
    )


def test_repository() -> None:
    checked = files()
    assert len(checked) > 50
    found = []
    for path in checked:
        relative = PurePosixPath(path.relative_to(REPO).as_posix())
        found += problems(relative, path.read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(found)


def test_every_room_has_its_line() -> None:
    names = {
        p.stem for p in (REPO / "flashd").iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()
    }
    assert names - {"__init__"} <= {*LINE_OF, "testing"}


LONG = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
BAD = [
    ("flashd/disk/a.py", "import flashd.store.base", "disk may not import store"),
    ("flashd/store/a.py", "from flashd.models import decoder", "store may not import models"),
    ("flashd/store/a.py", "from flashd import models", "store may not import models"),
    ("flashd/store/a.py", "from ..models import decoder", "store may not import models"),
    ("flashd/disk/__init__.py", "from flashd.kernels import lane", "disk may not import kernels"),
    ("flashd/kernels/a.py", "from flashd.layout import geometry", "kernels may not import layout"),
    ("flashd/layout/a.py", "from flashd.disk import engine", "layout may not import disk"),
    ("flashd/types.py", "from flashd.layout import manifest", "types may not import layout"),
    ("flashd/server/a.py", "def f():\n    from flashd.tools import verify", "server may not import tools"),
    ("flashd/tools/a/b.py", "from flashd.server import app", "tools may not import server"),
    ("flashd/tools/a.py", "from flashd.testing import bundles", "tools may not import testing"),
    ("flashd/runtime/a.py", "from flashd.cli.main import app", "runtime may not import cli"),
    ("flashd/server/a.py", "import flashd_client", "only cli uses flashd_client"),
    ("flashd/tools/a.py", "import torch.nn as nn", "without torch"),
    ("flashd/testing/a.py", "from torch import nn", "without torch"),
    ("flashd/tools/bench/kernels/run.py", "import torch", "without torch"),
    ("clients/python/flashd_client/a.py", "from flashd import types", "nothing of flashd"),
    ("tests/a.py", "x = 1\n" * (MAX_FILE_LINES + 1), "401 lines"),
    ("flashd/kernels/native/a.cpp", "\n" * (MAX_FILE_LINES + 1), "401 lines"),
    ("tests/a.py", LONG, "f has 71 lines"),
    ("flashd/cli/a.py", LONG.replace("def", "async def"), "f has 71 lines"),
    ("tests/a.py", "import os  # noqa: F401", "gives no reason"),
    ("tests/a.py", "import os  # noqa  # all of it", "names no code"),
    ("tests/a.py", "x: int = ''  # type: ignore  # because", "names no code"),
    ("tests/a.py", "x: int = ''  # type: ignore[assignment]", "gives no reason"),
    ("tests/a.py", "x = '/tmp" + "/model'", "path of one machine"),
    ("docs/a.md", "see /home" + "/ann/models", "path of one machine"),
    ("Makefile", "MODEL = /wo" + "rk/models", "path of one machine"),
    ("README.md", "read shared" + "/DESIGN.md", "path of one machine"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "text", "expected"), BAD)
def test_bad_sample(path: str, text: str, expected: str) -> None:
    found = problems(PurePosixPath(path), text)
    assert len(found) == 1
    assert expected in found[0]


GOOD = [
    ("flashd/disk/a.py", "from flashd.layout import coalesce\nfrom flashd.disk.engine import x"),
    ("flashd/config.py", "from flashd.errors import ConfigError"),
    ("flashd/store/a.py", "from flashd.layout import manifest\nfrom flashd import __version__"),
    ("flashd/cli/a.py", "from flashd.server import app\nfrom flashd_client import Client"),
    ("flashd/testing/a.py", "from flashd.tools import verify\nfrom flashd.testing import bundles"),
    ("flashd/tools/calibrate/a.py", "import torch"),
    ("flashd/tools/bench/kernels/with_torch.py", "import torch"),
    ("tests/a.py", "import torch\nfrom flashd.testing import bundles"),
    ("tests/a.py", LONG.removesuffix("    x = 1\n")),
    ("tests/a.py", "import os  # noqa: F401, E501  # a reason\nx = y  # type: ignore[name-defined]  # one"),
    ("flashd/config.py", "path = f'/tmp/flashd-{uid}'"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_good_sample(path: str, text: str) -> None:
    assert problems(PurePosixPath(path), text) == []
