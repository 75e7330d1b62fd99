"""Types of the native read engines; ``native_engine.py`` documents them."""

import numpy as np
import numpy.typing as npt

from flashd.types import BoolArray, I64Array, U8Array, U32Array

class Core:
    def submit(
        self,
        file: I64Array,
        offset: I64Array,
        first: I64Array,
        length: I64Array,
        at: I64Array,
        in_place: npt.NDArray[np.bool_],
        dest: U8Array,
        prefetch: bool,
        ticket: bool,
    ) -> int: ...
    def submit_rows(
        self,
        file: int,
        offset: int,
        stride: int,
        ids: I64Array,
        rows: I64Array,
        dest: U8Array,
        limit: int,
        max_gap: int,
        max_run: int,
        prefetch: bool,
        ticket: bool,
        sums: U32Array | None = None,
        trusted: BoolArray | None = None,
        check_start: int = 0,
        check_count: int = 0,
    ) -> int: ...
    def cancel(self, batch: int) -> None: ...
    def completed(self) -> list[tuple[int, str, int, int, int, int]]: ...
    def wait(
        self, batch: int, timeout_s: float
    ) -> tuple[tuple[int, str, int, int, int, int], tuple[int, int, int, int, int]] | None: ...
    def tickets(self) -> int: ...
    def busy_ns(self) -> int: ...
    def fileno(self) -> int: ...
    def set_file(self, index: int, fd: int) -> None: ...
    def touches(self, memory: U8Array) -> bool: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...

class Uring(Core):
    def __init__(self, alignment: int, n_files: int, scratch_bytes: int, depth: int) -> None: ...
    def register_memory(self, memory: U8Array) -> int: ...
    def unregister_memory(self, memory: U8Array) -> int: ...

class Threads(Core):
    def __init__(self, alignment: int, n_files: int, scratch_bytes: int, depth: int) -> None: ...

class Fake(Core):
    def __init__(
        self,
        alignment: int,
        content: U8Array,
        scratch_bytes: int,
        depth: int,
        seed: int,
        short_share: float,
        eio_share: float,
        einval_first: int,
        latency_us: int,
        reorder: bool,
        fixed_latency_ns: int,
        bytes_per_s: float,
    ) -> None: ...
    def max_in_flight(self) -> int: ...
