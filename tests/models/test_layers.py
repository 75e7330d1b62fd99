import numpy as np
import pytest

from flashd.models.layers import Linear, Norm, _attend_many, attend


def test_linear_gives_the_same_value_for_few_and_many_tokens() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((300, 70)).astype(np.float16)
    bias = rng.standard_normal(300).astype(np.float32)
    x = rng.standard_normal((40, 70)).astype(np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64).T + bias
    linear = Linear(w, bias)
    assert np.abs(linear(x) - exact).max() < 1e-4
    assert np.abs(linear(x[:3]) - exact[:3]).max() < 1e-4


@pytest.mark.parametrize("rms", [True, False])
def test_norm_of_a_row_does_not_depend_on_its_neighbours(rms: bool) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 577)).astype(np.float32)
    norm = Norm(rng.standard_normal(577).astype(np.float32), None, 1e-5, rms)
    together = norm(x)
    for i in range(9):
        assert np.array_equal(norm(x[i : i + 1])[0], together[i])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_attention_of_many_tokens_equals_one_at_a_time(dtype: type) -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((7, 6, 16)).astype(np.float32)
    k = rng.standard_normal((2, 20, 16)).astype(dtype)
    v = rng.standard_normal((2, 20, 16)).astype(dtype)
    many = _attend_many(q, k, v, 5, 0.25)
    for t in range(7):
        one = attend(np.ascontiguousarray(q[t : t + 1]), k, v, 5 + t, 0.25)
        assert np.abs(one[0] - many[t]).max() < 1e-5
