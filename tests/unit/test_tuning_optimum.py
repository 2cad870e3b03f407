"""Young, Daly and the exact optimum: printed digits, limits, and that it is the optimum."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from pccheck import tuning
from pccheck.errors import OptionError
from pccheck.tuning.optimum import exponential_excess

VECTORS = [  # c, M: exact, Daly, Young
    (0.1, 519, 10.121671179, 10.121670893, 10.188228502),
    (0.5, 2700, 51.628726851, 51.628725477, 51.961524227),
    (5, 2700, 161.000476623, 161.000338935, 164.316767252),
    (60, 3600, 617.890625009, 617.875649626, 657.267069006),
    (300, 960, 573.561077267, 572.122795358, 758.946638440),
    (600, 700, 568.047656102, 560.158717038, 916.515138991),
]


@pytest.mark.parametrize(("c", "m", "exact", "daly", "young"), VECTORS)
def test_vectors(c, m, exact, daly, young):
    found = [f"{f(c, m):.9f}" for f in (tuning.optimum, tuning.daly, tuning.young)]
    assert found == [f"{value:.9f}" for value in (exact, daly, young)]


@pytest.mark.parametrize(("c", "m", "lost"), [(0.5, 2700, 4e-7), (5, 2700, 1e-5), (60, 3600, 3e-4), (300, 960, 2.5e-2)])
def test_what_young_loses(c, m, lost):
    def useful(work):
        return tuning.useful_fraction(work, stall_s=c, durable_s=c, mtbf_s=m)

    assert 1 - useful(tuning.young(c, m)) / useful(tuning.optimum(c, m)) == pytest.approx(lost, rel=0.3)


@pytest.mark.parametrize("ratio", [1e-12, 1e-6, 1e-3, 0.02, 0.3, 1.0, 5.0, 50.0])
def test_the_optimum_satisfies_its_equation(ratio):
    """d ln U / d tau = 0: exp(-(tau + c) / M) = 1 - tau / M, in whichever form does not cancel."""
    share = tuning.optimum(ratio * 1000, 1000) / 1000
    if share < 0.5:
        assert exponential_excess(math.log1p(-share)) == pytest.approx(ratio, rel=1e-12, abs=0)
    else:
        assert 1 - share == pytest.approx(math.exp(-share - ratio), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("c", [1e-300, 1e-30, 1e-9])
def test_tiny_stalls_lose_no_digits(c):
    """sqrt(2 c M) - 2/3 c: the next term is of the order of c^1.5."""
    assert tuning.optimum(c, 1000) == pytest.approx(math.sqrt(2 * c * 1000) - 2 * c / 3, rel=1e-11, abs=0)


def test_the_optimum_moves_with_stall_and_failures():
    stalls = np.geomspace(1e-6, 1e6, 200)
    over_stalls = [tuning.optimum(c, 1000) for c in stalls]
    assert all(a < b or b == 1000 for a, b in itertools.pairwise(over_stalls))
    assert over_stalls[-1] <= 1000
    assert tuning.optimum(10, 1e3) < tuning.optimum(10, 1e4) < tuning.optimum(10, 1e300)


def test_limits():
    for f in (tuning.young, tuning.daly, tuning.daly_first_order, tuning.optimum):
        assert f(0, 1000) == 0
        assert f(0, math.inf) == 0
        assert f(1, math.inf) == math.inf
    for c in (2000, 2001, 1e9):
        assert tuning.daly(c, 1000) == 1000  # as Daly says, from c = 2 M on
        assert tuning.daly_first_order(c, 1000) == 1000
    assert tuning.daly(1999.999, 1000) < 1000
    assert tuning.optimum(1e9, 1000) == 1000
    assert math.isfinite(tuning.young(1e200, 1e200))


def test_daly_first_order():
    assert tuning.daly_first_order(5, 2700) == pytest.approx(math.sqrt(2 * 5 * 2700) - 5, rel=1e-14)
    assert tuning.daly_first_order(5, 2700, 300) == pytest.approx(math.sqrt(2 * 5 * 3000) - 5, rel=1e-14)
    assert tuning.daly_first_order(5, 2700) == pytest.approx(tuning.optimum(5, 2700), rel=0.02)


def test_no_lag_and_no_restart_moves_the_optimum():
    """The maximum over a fine grid is at `optimum`, for checkpoints that become durable at once and late."""
    for c, m in [(0.5, 2700), (60, 3600), (300, 960)]:
        best = tuning.optimum(c, m)
        works = best * np.linspace(0.5, 1.5, 4001)
        for lag, restart in [(c, 0), (c + 0.1 * m, 50), (c + m, 900)]:
            useful = [tuning.useful_fraction(w, stall_s=c, durable_s=lag, mtbf_s=m, restart_s=restart) for w in works]
            assert works[int(np.argmax(useful))] == pytest.approx(best, rel=5e-4)


@pytest.mark.parametrize("z", [-1e-300, -1e-9, -0.05, -0.2, -0.3, -0.36, -0.3678])
def test_lambert_w0(z):
    w = tuning.lambert_w0(z)
    assert -1 <= w < 0
    assert w * math.exp(w) == pytest.approx(z, rel=1e-12, abs=0)


def test_lambert_w0_at_its_ends():
    assert tuning.lambert_w0(-1 / math.e) == pytest.approx(-1, abs=1e-7)
    assert tuning.lambert_w0(0) == 0
    for z in (-0.4, 0.1, math.nan, True):
        with pytest.raises(OptionError):
            tuning.lambert_w0(z)


@pytest.mark.parametrize(("c", "m"), [(60, 3600), (300, 960), (600, 700), (5000, 700)])
def test_the_optimum_is_what_lambert_says(c, m):
    assert tuning.optimum(c, m) == pytest.approx(m * (1 + tuning.lambert_w0(-math.exp(-1 - c / m))), rel=1e-12)


@pytest.mark.parametrize(
    "x", [-5.0, -0.5001, -0.4999, -1e-3, -1.1e-6, 0.0, 1e-200, 1e-12, 1.1e-6, 1e-3, 0.4999, 0.5001, 3.0]
)
def test_the_excess_of_the_exponential_has_all_digits(x):
    exact, term, rest = Fraction(0), Fraction(1), Fraction(x)
    for k in range(1, 80):
        term = term * rest / k
        exact += term if k > 1 else 0
    assert exponential_excess(x) == pytest.approx(float(exact), rel=1e-14, abs=0)
