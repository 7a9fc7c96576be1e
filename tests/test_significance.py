"""p values against closed forms."""

import pandas as pd
from pytest import approx

from bench.significance import RUN, differences, holm, rank_correlation


def test_holm_and_methods_that_change_places():
    assert [*holm(pd.Series([0.01, 0.04, 0.005]))] == [0.015, 0.02, 0.04]
    # in all orders; within the kinds, of which the second pair has only the first
    x = pd.DataFrame([[1, 1], [2, 2], [3, None], [4, None]])
    for kinds, orders in ("aaaa", 4), ("aabc", 2):
        assert rank_correlation(x, x**3, [*kinds]) == approx((1, 1 / orders), abs=0.02)


def test_errors_over_problems_and_starts():
    runs = pd.MultiIndex.from_product([["a", "start"], ["x", "y"], [1]], names=RUN)
    found, free = differences(pd.DataFrame([[0, 2], [2, 4], [0, 0], [0, 0]], runs))
    # variance of two problems, 1; of two starts, 1/2
    assert (*found.loc["a", "start"], free) == approx((200, 100 * 1.5**0.5, 1))
