"""``flashd synth``: a bundle of a real model's shape with made-up weights, for measuring speed.

::

    position embedding: [ code c(p), a slow walk on a sphere | 1 | noise ]     reserved | the rest
    up row of neuron n: [ u_n, a random direction            | -t_n | noise ]
    fires where u_n . c(p) > t_n

Attention and down projections write nothing into the reserved dimensions, and norms keep directions, so
every layer sees the same code: how fast it walks and how the thresholds ``t_n`` are spread set how many
neurons are used over k tokens, and a predictor of low rank that reads the code is exact.
"""

from flashd.tools.synth.report import CurveRow, SynthReport
from flashd.tools.synth.run import SynthOptions, synth

__all__ = ["CurveRow", "SynthOptions", "SynthReport", "synth"]
