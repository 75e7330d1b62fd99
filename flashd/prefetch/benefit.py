"""Whether reading ahead pays: measured, per layer and for the whole step. Pure, but for the clock.

Speculative work must not hurt. Two measures decide, when prefetch is ``auto``:

- per layer, the share of prefetched rows that were used: a layer that guesses badly is left out;
- for the step, blocks of steps with and without prefetch in turn, compared by their medians. What wins is
  kept until the next trial, which also gives layers that were left out another chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

# A layer whose guesses are used less often than this is left out.
MIN_PRECISION = 0.3
# Rows that must have been guessed before a layer is judged.
MIN_EVIDENCE_ROWS = 48
_DECAY = 0.95
# Steps with the same setting in a row, and how many such blocks of each setting make a trial.
BLOCK_STEPS = 4
TRIAL_BLOCKS = 4
# Steps before the first trial, when the window is cold, and between two of them.
WARM_UP_STEPS = 16
HOLD_STEPS = 480
# The other setting must be better by this much to win.
HYSTERESIS = 0.02

_TRIAL_STEPS = 2 * BLOCK_STEPS * TRIAL_BLOCKS


class PrefetchBenefit:
    """Decides which layers are prefetched.

    Args:
        mode: ``on``, ``off`` or ``auto``.
        layers: layers that can be guessed.
        n_layers: of the model.

    Attributes:
        active: whether this step reads ahead.
        preferred: what the last trial has shown to be better.
    """

    def __init__(self, mode: str, layers: Sequence[int], n_layers: int) -> None:
        self._auto = mode == "auto"
        self.preferred = mode != "off" and bool(layers)
        self.active = self.preferred
        self._can = [layer in layers for layer in range(n_layers)]
        self._left_out = [False] * n_layers
        self._guessed = [0.0] * n_layers
        self._used = [0.0] * n_layers
        self._tokens = 0
        self._step = -WARM_UP_STEPS
        self._times: dict[bool, list[int]] = {True: [], False: []}

    def wants(self, layer: int) -> bool:
        """Whether to read ahead for this layer now."""
        return self.active and self._can[layer] and not self._left_out[layer]

    @property
    def layers(self) -> int:
        """How many layers are prefetched when prefetch is on."""
        return sum(can and not out for can, out in zip(self._can, self._left_out, strict=True))

    def precision(self, layer: int) -> float:
        """Share of the rows guessed for a layer that were used, lately; 1 where nothing is known."""
        return self._used[layer] / self._guessed[layer] if self._guessed[layer] else 1.0

    def observe(self, layer: int, guessed: int, used: int) -> None:
        """Rows that were read ahead for a layer in this step, and rows used that a guess had brought."""
        if not self._auto or not guessed:
            return
        self._guessed[layer] = self._guessed[layer] * _DECAY + guessed
        self._used[layer] = self._used[layer] * _DECAY + used
        if self._guessed[layer] >= MIN_EVIDENCE_ROWS:
            self._left_out[layer] = self.precision(layer) < MIN_PRECISION

    def step_done(self, took_ns: int, tokens: int) -> None:
        """A step of so many sequences took so long; decides about the next one."""
        if not self._auto or not any(self._can):
            return
        in_trial = 0 <= self._step < _TRIAL_STEPS
        if in_trial and tokens != self._tokens:  # not comparable: begin again
            self._step = 0
            self._times = {True: [], False: []}
        elif in_trial:
            self._times[self.active].append(took_ns)
        self._tokens = tokens
        self._step += 1
        if self._step == 0:
            self._restart()
        elif self._step == _TRIAL_STEPS:
            self._decide()
        elif self._step == _TRIAL_STEPS + HOLD_STEPS:
            self._step = 0
            self._restart()
        in_trial = 0 <= self._step < _TRIAL_STEPS
        self.active = self._step // BLOCK_STEPS % 2 == 0 if in_trial else self.preferred

    def _restart(self) -> None:
        self._times = {True: [], False: []}
        n_layers = len(self._can)
        self._left_out, self._guessed, self._used = [False] * n_layers, [0.0] * n_layers, [0.0] * n_layers

    def _decide(self) -> None:
        current, other = self._times[self.preferred], self._times[not self.preferred]
        if current and other and median(other) < median(current) * (1 - HYSTERESIS):
            self.preferred = not self.preferred
