"""The lower convex hull of points in the plane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def above_lower_hull(points: Sequence[tuple[float, float]]) -> list[float]:
    """Of each point, how far above the lower convex hull of all of them it lies, by its second
    coordinate; no less than 0. (Monotone chain, Andrew 1979.)"""
    xs, ys = zip(*lower_hull(points), strict=True)
    return [max(y - float(np.interp(x, xs, ys)), 0.0) for x, y in points]


def lower_hull(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the lower convex hull of points, by ascending first coordinate."""
    hull: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if hull and hull[-1][0] == point[0]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
