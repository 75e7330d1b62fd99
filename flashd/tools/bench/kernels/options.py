"""What ``flashd bench kernels`` is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass

from flashd.config import MAX_THREADS
from flashd.errors import ConfigError

VERBS = (
    "read_all", "gemv", "gemm", "ffn_rows", "predict", "topk_union", "attention", "rmsnorm", "layernorm",
    "rope", "crc32c", "to_f32", "from_f32",
)  # fmt: skip
DTYPES = ("f32", "f16", "bf16", "u8")
MAX_ROUNDS = 1000
_TOGETHER = ("ffn_dots", "ffn_down")


@dataclass(frozen=True)
class KernelOptions:
    """What to measure.

    Attributes:
        verbs: some of ``VERBS``; None is all. ``ffn_rows`` is ``ffn_dots`` and ``ffn_down`` together.
        dtypes: some of ``DTYPES``, of the weights or of what is read; None is all.
        batches: sequences, or tokens of a prompt; None is all.
        rounds: how often; figures are medians.
        threads: of the kernels, of torch and of NumPy's BLAS, at most the usable CPUs; None leaves the
            kernels' default.
        quick: few rows, little memory and short samples: shows that everything runs, not how fast.
        torch: whether to compare with torch, where it is installed.
    """

    verbs: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    batches: tuple[int, ...] | None = None
    rounds: int = 5
    threads: int | None = None
    quick: bool = False
    torch: bool = True

    def __post_init__(self) -> None:
        for name in _TOGETHER:
            if name in (self.verbs or ()):
                raise ConfigError(f"{' and '.join(_TOGETHER)} are measured together as ffn_rows")
        for what, names, known in (("verb", self.verbs, VERBS), ("dtype", self.dtypes, DTYPES)):
            for name in names or ():
                if name not in known:
                    raise ConfigError(f"unknown {what} {name!r}; known: {', '.join(known)}")
        for batch in self.batches or ():
            if batch < 1:
                raise ConfigError(f"batch is {batch}, expected at least 1")
        if not 1 <= self.rounds <= MAX_ROUNDS:
            raise ConfigError(f"rounds is {self.rounds}, expected 1 to {MAX_ROUNDS}")
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"threads is {self.threads}, expected 1 to {MAX_THREADS}")

    def wants(self, verb: str, dtype: str, batch: int | None) -> bool:
        """Whether a case is among those asked for; one without a batch is none of a chosen batch."""
        return (
            (self.verbs is None or verb in self.verbs)
            and (self.dtypes is None or dtype in self.dtypes)
            and (self.batches is None or batch in self.batches)
        )
