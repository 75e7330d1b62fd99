"""How much memory a daemon takes without a model, found out in a process that imports and opens what it does.

``python -m flashd.cli.base_process SETTINGS``: settings as JSON; prints ``{"base_bytes": ...}`` or an error.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys

from flashd.config import DaemonConfig
from flashd.errors import FlashdError

_LIMIT_S = 60.0
# What a server that runs adds to one that was only made: 4 to 7 MB, of which no two have the same. What is
# advised by a plan must be enough for `flashd start`.
_RUNNING_BYTES = 8 << 20


def base_bytes(config: DaemonConfig) -> int:
    """Footprint of a daemon that has not loaded its model: RssAnon + RssShmem, in bytes.

    Raises:
        FlashdError: the process failed; says what it said.
    """
    command = [sys.executable, "-m", "flashd.cli.base_process", json.dumps(config.settings())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        result = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as exc:
        raise FlashdError(
            f"a process like the daemon gave no figure ({exc!r}); start it by hand to see why: "
            f"{' '.join(command[:3])}"
        ) from exc
    if "error" in result:
        raise FlashdError(result["error"])
    return int(result["base_bytes"]) + _RUNNING_BYTES


def main() -> None:
    """Import, open, and say what that took."""
    logging.disable(logging.WARNING)
    try:
        print(json.dumps({"base_bytes": asyncio.run(_taken(DaemonConfig(**json.loads(sys.argv[1]))))}))
    except (FlashdError, OSError) as exc:
        print(json.dumps({"error": str(exc) or type(exc).__name__}))
        sys.exit(1)


async def _taken(config: DaemonConfig) -> int:
    from flashd.layout.manifest import TOKENIZER
    from flashd.memory.system import footprint_bytes
    from flashd.runtime.tokenizer import Tokenizer
    from flashd.server import lifecycle
    from flashd.server.app import AppState, create_app
    from flashd.store.open import open_manifest, open_store

    directory = config.model_dir
    manifest = open_manifest(directory)
    tokenizer = None
    if manifest.tokenizer is not None and any(entry.name == TOKENIZER for entry in manifest.files):
        tokenizer = Tokenizer(directory / TOKENIZER, manifest.tokenizer)
    backend = "auto" if config.backend == "memory" else config.backend
    store = await open_store(directory, manifest, backend, verify=config.verify)
    app = create_app(AppState(config.served_name))
    gc.collect()
    taken = footprint_bytes()
    await store.close()
    del tokenizer, app, lifecycle
    return taken


if __name__ == "__main__":
    main()
