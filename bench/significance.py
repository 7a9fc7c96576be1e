"""Errors and p values of comparisons whose runs share problems, seeds or methods."""

import numpy as np


def clustered_error(scores):
    """-> standard error of the mean over other problems and seeds (Cameron, Gelbach and Miller,
    2011), at least that of either alone; one seed knows no spread between seeds.

    scores: frame [problem, seed]; rows with one label are one problem. For two methods: their
    difference, problem by problem and seed by seed.
    """
    rest = (scores - scores.mean(axis=None)).groupby(level=0).sum()
    parts = rest.T.sum(), rest.sum(), rest.stack()
    problems, seeds, both = (part.var() * len(part) for part in parts)
    return np.nanmax([problems + seeds - both, problems, seeds]) ** 0.5 / scores.size


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
