"""Whether a series creeps: the slope of its second half, and its confidence interval.

Theil (1950) and Sen (1968): the median of the slopes of all pairs, which is robust to 29 % of outliers; Sen's
confidence interval is taken from the same slopes, by the variance of Kendall's tau.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_SURE = 1.96  # standard deviations of a 95 % interval


@dataclass(frozen=True)
class Slope:
    """A slope per hour: the median, and the ends of its 95 % confidence interval."""

    median: float
    low: float
    high: float


def slope(hours: Sequence[float], values: Sequence[float]) -> Slope:
    """The slope of a series; missing values are NaN. Raises ValueError if fewer than four values are left."""
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
    """The slope of the second half: in the first, caches fill and allocators reach their size."""
    half = len(hours) // 2
    return slope(hours[half:], values[half:])


def creeping(
    hours: Sequence[float], series: Mapping[str, Sequence[float]], limits: Mapping[str, float]
) -> dict[str, Slope]:
    """The slopes of the series whose intervals lie above their limits per hour, by name."""
    found = {name: settled(hours, values) for name, values in series.items()}
    return {name: line for name, line in found.items() if line.low > limits[name]}
