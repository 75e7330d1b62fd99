from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashd.runtime.sampling import Sampler, SamplingParams


def draws(logits: np.ndarray, n: int, **params: object) -> Counter[int]:
    sampler = Sampler(SamplingParams(**params))  # type: ignore[arg-type]  # keywords come from the cases
    return Counter(sampler.next(logits) for _ in range(n))


def test_temperature_zero_is_argmax_and_ties_go_to_the_lowest_id() -> None:
    logits = np.array([0.0, 3.0, 3.0, 1.0], np.float32)
    assert draws(logits, 5, temperature=0.0) == Counter({1: 5})


def test_frequencies_follow_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    counts = draws(logits, 20000, seed=1)
    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(counts[token] / 20000 - share) < 0.015


def test_temperature_sharpens() -> None:
    logits = np.log(np.array([0.6, 0.4], np.float32))
    counts = draws(logits, 20000, seed=2, temperature=0.5)
    assert abs(counts[0] / 20000 - 0.36 / 0.52) < 0.015


@pytest.mark.parametrize("vocab", [8, 5000])
def test_top_k_and_top_p_never_leave_their_set(vocab: int) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal(vocab).astype(np.float32) * 3
    order = np.argsort(-logits, kind="stable")
    assert set(draws(logits, 500, seed=4, top_k=3)) <= set(order[:3].tolist())
    weights = np.exp(logits[order].astype(np.float64))
    size = int(np.searchsorted(np.cumsum(weights) / weights.sum(), 0.4)) + 1
    assert set(draws(logits, 500, seed=5, top_p=0.4)) <= set(order[:size].tolist())


def test_a_flat_large_vocabulary_is_sampled_whole() -> None:
    counts = draws(np.zeros(5000, np.float32), 5000, seed=6, top_p=0.99)
    assert len(counts) > 2500
    assert max(counts) > 4000


def test_same_seed_same_tokens_and_another_seed_others() -> None:
    logits = np.random.default_rng(7).standard_normal(200).astype(np.float32)

    def tokens(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed))
        return [sampler.next(logits) for _ in range(50)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    st.floats(0.01, 5),
    st.floats(0.01, 1),
    st.integers(0, 50),
)
def test_any_setting_gives_a_valid_token(
    logits: list[float], temperature: float, top_p: float, top_k: int
) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=0))
    assert 0 <= sampler.next(np.array(logits, np.float32)) < len(logits)
