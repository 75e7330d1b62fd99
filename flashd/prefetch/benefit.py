"""Whether reading ahead pays: measured, per layer and for the whole step. Pure, but for the clock.

Speculative work must not hurt. Two measures decide, when prefetch is ``auto``:

- per layer, the share of prefetched rows that were used: a layer that guesses badly is left out;
- for the step, trials: blocks of steps with and without prefetch as neighbours, in pairs of both orders, so
  that neither a drift nor one disturbance decides. The other setting wins when the median of the pairs'
  ratios and most pairs say so. What a trial has changed is tried again soon, what it has confirmed later;
  each trial also gives layers that were left out another chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

# A layer whose guesses are used less often than this is left out.
MIN_PRECISION = 0.3
# Rows that must have been guessed before a layer is judged.
MIN_EVIDENCE_ROWS = 48
_DECAY = 0.95
# Steps with the same setting in a row, and how many pairs of such blocks make a trial.
BLOCK_STEPS = 4
TRIAL_PAIRS = 4
# Steps before the first trial, when the window is cold.
WARM_UP_STEPS = 16
# Steps between two trials: after a change, and at most, each trial that confirms doubling them.
FIRST_HOLD_STEPS = 60
MAX_HOLD_STEPS = 480
# The other setting must be better by this much to win, and in all pairs but this many.
HYSTERESIS = 0.02
MAX_DISSENT = 1

TRIAL_STEPS = 2 * BLOCK_STEPS * TRIAL_PAIRS


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
        self._hold_steps = FIRST_HOLD_STEPS
        self._times: list[int] = []  # of the trial's steps so far

    def wants(self, layer: int) -> bool:
        """Whether to read ahead for this layer now."""
        return self.active and self._can[layer] and not self._left_out[layer]

    def cannot(self, layer: int) -> None:
        """Nothing guesses this layer: it is never asked about again."""
        self._can[layer] = False

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
        if 0 <= self._step < TRIAL_STEPS:
            if self._times and tokens != self._tokens:  # not comparable: begin again
                self._step, self._times = 0, []
            self._times.append(took_ns)
        self._tokens = tokens
        self._step += 1
        if self._step == TRIAL_STEPS:
            self._decide()
        if self._step in (0, TRIAL_STEPS + self._hold_steps):
            self._restart()
        in_trial = 0 <= self._step < TRIAL_STEPS
        self.active = _on_in_trial(self._step) if in_trial else self.preferred

    def _restart(self) -> None:
        self._step, self._times = 0, []
        n_layers = len(self._can)
        self._left_out, self._guessed, self._used = [False] * n_layers, [0.0] * n_layers, [0.0] * n_layers

    def _decide(self) -> None:
        blocks = [
            (_on_in_trial(start), median(self._times[start : start + BLOCK_STEPS]))
            for start in range(0, TRIAL_STEPS, BLOCK_STEPS)
        ]
        pairs = [dict(blocks[i : i + 2]) for i in range(0, len(blocks), 2)]
        # Of the other setting's time to the preferred one's.
        ratios = [pair[not self.preferred] / max(1, pair[self.preferred]) for pair in pairs]
        dissent = sum(ratio >= 1 for ratio in ratios)
        if median(ratios) < 1 - HYSTERESIS and dissent <= MAX_DISSENT:
            self.preferred = not self.preferred
            self._hold_steps = FIRST_HOLD_STEPS
        else:
            self._hold_steps = min(2 * self._hold_steps, MAX_HOLD_STEPS)


def _on_in_trial(step: int) -> bool:
    """Whether a trial's step reads ahead: on, off, off, on, on, off, ... block by block."""
    return (step // BLOCK_STEPS + 1) // 2 % 2 == 0
