"""p values of comparisons whose runs share methods."""

import numpy as np


def holm(p):
    """p: Series of a table's p values -> corrected for their number, the lowest first"""
    p = p.sort_values()
    return (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1)


def rank_correlation(x, y, kinds):
    """-> mean rank correlation over the pairs; share of the orders that reach it, if methods change
    places, in all pairs alike, with those of their kind that have values in the same pairs

    x, y: frames [method, pair], NaN where there is no value; kinds: a label for each method
    """
    x, y = x + 0 * y, y + 0 * x
    a, b = (np.nan_to_num(rank - rank.mean()) for rank in (x.rank(), y.rank()))
    a /= ((a**2).sum(0) * (b**2).sum(0)) ** 0.5 * len(x.T)
    random, missing = np.random.default_rng(0).random, x.isna().T.to_numpy()
    order = lambda: np.lexsort([random(len(x)), kinds, *missing])
    found = (a * b).sum()
    drawn = [(a[order()] * b[order()]).sum() for _ in range(9_999)]
    return found, np.greater([found, *drawn], found - 1e-9).mean()
