"""Whether something creeps: the slope of a series after its first half, and how sure it is.

Theil (1950) and Sen (1968): the median of the slopes of all pairs, which up to 29 % of outliers do not move; Sen's
confidence interval is of the same slopes, by the variance of Kendall's tau.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_SURE = 1.96  # standard deviations: 95 % of the time the slope is within


@dataclass(frozen=True)
class Slope:
    """Per hour: the likeliest, and the ends of its interval of 95 %."""

    median: float
    low: float
    high: float


def slope(hours: Sequence[float], values: Sequence[float]) -> Slope:
    """Of a series of at least four values, without those that are missing (NaN)."""
    x, y = np.asarray(hours, float), np.asarray(values, float)
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    count = len(x)
    if count < 4:
        raise ValueError(f"a slope takes at least 4 values, there are {count}")
    one, other = np.triu_indices(count, 1)
    slopes = np.sort((y[other] - y[one]) / (x[other] - x[one]))
    equal = np.unique(y, return_counts=True)[1]
    variance = (count * (count - 1) * (2 * count + 5) - (equal * (equal - 1) * (2 * equal + 5)).sum()) / 18
    reach = _SURE * np.sqrt(max(variance, 0.0))
    low, high = round(float(len(slopes) - reach) / 2) - 1, round(float(len(slopes) + reach) / 2)
    ends = np.clip([low, high], 0, len(slopes) - 1)
    return Slope(float(np.median(slopes)), float(slopes[ends[0]]), float(slopes[ends[1]]))


def settled(hours: Sequence[float], values: Sequence[float]) -> Slope:
    """Of the second half: before that caches fill and allocators find their size."""
    half = len(hours) // 2
    return slope(hours[half:], values[half:])


def creeping(
    hours: Sequence[float], series: Mapping[str, Sequence[float]], limits: Mapping[str, float]
) -> dict[str, Slope]:
    """The series that surely grow faster than their limits per hour."""
    found = {name: settled(hours, values) for name, values in series.items()}
    return {name: line for name, line in found.items() if line.low > limits[name]}
