"""Statistics from SciPy: `python make_stats.py OUT.json`.

t_quantiles  [degrees of freedom, 97.5 % quantile of Student's t]
mcnemar      counts of items that both, only a, only b have right; p of scipy.stats.binomtest (two-sided, 1/2) on the discordant
wilcoxon     differences d, statistic and p of scipy.stats.wilcoxon(d, zero_method="wilcox"), method "exact" where `exact`, else
             "asymptotic" with correction=True
holm         p values, and Holm's from the definition, the running maximum of (m - i) p over sorted p
tost         differences d (fewer than 8), margin, the larger p of two one-sided scipy.stats.ttest_1samp, p of the two-sided one
bca          x, the BCa interval of its mean (scipy.stats.bootstrap), ends averaged over seeds, and the spread of an end over
             seeds at 3,999 resamples
wilson       [count, n, low, high] of scipy.stats.binomtest(...).proportion_ci(method="wilson")
"""

import json
import sys

import numpy as np
from scipy import stats

N_RESAMPLES = 3999
N_SEEDS = 40


def rounded(values):
    """Short decimals that JSON keeps exactly."""
    return [float(f"{v:.5g}") for v in values]


def wilcoxon(d, exact):
    how = {"method": "exact"} if exact else {"method": "asymptotic", "correction": True}
    found = stats.wilcoxon(d, zero_method="wilcox", **how)
    return {"d": d, "statistic": float(found.statistic), "p": float(found.pvalue), "exact": exact}


def holm(p):
    order = np.argsort(p, kind="stable")
    corrected, greatest = np.zeros(len(p)), 0.0
    for rank, i in enumerate(order):
        greatest = min(1.0, max(greatest, (len(p) - rank) * p[i]))
        corrected[i] = greatest
    return {"p": p, "corrected": corrected.tolist()}


def tost(d, margin):
    above = stats.ttest_1samp(d, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(d, margin, alternative="less").pvalue
    return {"d": d, "margin": margin, "p": float(max(above, below)), "p_difference": float(stats.ttest_1samp(d, 0).pvalue)}


def bca(x):
    ends = []
    for seed in range(N_SEEDS):
        found = stats.bootstrap((x,), np.mean, n_resamples=N_RESAMPLES, method="BCa", rng=np.random.default_rng(seed))
        ends.append(found.confidence_interval)
    ends = np.array(ends)
    low, high = ends.mean(axis=0)
    return {"x": x, "low": float(low), "high": float(high), "error": float(ends.std(axis=0, ddof=1).max())}


def wilson(count, n):
    found = stats.binomtest(count, n).proportion_ci(method="wilson")
    return [count, n, float(found.low), float(found.high)]


def main(out):
    rng = np.random.default_rng(5)
    sleep = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    golden = {
        "scipy": __import__("scipy").__version__,
        "t_quantiles": [[k, float(stats.t.ppf(0.975, k))] for k in (1, 2, 3, 7, 11, 19, 39, 199, 1000)],
        "mcnemar": [
            {"both": both, "only_a": a, "only_b": b, "p": float(stats.binomtest(a, a + b, 0.5).pvalue)}
            for both, a, b in ((5, 3, 1), (300, 30, 10), (0, 0, 7), (12, 50, 50), (900, 130, 171), (3, 1, 0))
        ],
        "wilcoxon": [
            wilcoxon(rounded(rng.normal(0.3, 1, n)), exact=True) for n in (3, 5, 9, 12, 20, 35, 50)
        ] + [
            wilcoxon(rounded(rng.normal(0.2, 1, n)), exact=False) for n in (51, 120)
        ] + [
            wilcoxon(sleep, exact=False),
            wilcoxon([1.0, -1.0, 2.0, 2.0, 3.0, 0.0, 0.0, -2.0, 5.0], exact=False),
            wilcoxon([float(v) for v in np.round(rng.normal(0.1, 2, 60))], exact=False),
        ],
        "holm": [holm([0.04, 0.01, 0.03, 0.02]), holm([0.001, 0.5, 0.02, 0.02, 0.9, 0.049]), holm(rounded(rng.random(30) ** 3))],
        "tost": [
            tost([0.002, -0.001, 0.004, 0.0, 0.001], 0.01),
            tost([0.02, 0.011, 0.025, 0.018], 0.01),
            tost([-0.02, 0.03, 0.005, -0.012, 0.001, 0.018, -0.007], 0.01),
        ],
        "bca": [bca(rounded(rng.lognormal(0, 1, n))) for n in (12, 40)] + [bca(rounded(rng.normal(0, 1, 25)))],
        "wilson": [wilson(7, 10), wilson(0, 20), wilson(150, 400), wilson(399, 400)],
    }
    with open(out, "w") as file:
        json.dump(golden, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
