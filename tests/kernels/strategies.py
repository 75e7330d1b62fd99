"""What the property tests draw: sizes around the vector widths 4, 8 and 16, batches, seeds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

DTYPES = st.sampled_from(["f32", "f16", "bf16"])
SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.integers(0, 70) | st.sampled_from([127, 128, 129, 255, 576, 1000])
SIZES = WIDTHS.filter(bool)
COUNTS = st.integers(0, 20) | st.sampled_from([64, 301])  # and beyond one chunk
BATCHES = st.integers(1, 16)
PROMPTS = st.integers(17, 70)
THREADS = (1, 2, 3, 7)
EXAMPLES = settings(max_examples=40, deadline=None)
FEW = settings(max_examples=12, deadline=None)
