"""Which barriers plans are compiled with: those that lower a peak in less time than it would take
to recompute more instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax_hremat._plan.region import Region
from jax_hremat._planner.candidate import Candidate
from jax_hremat._solve.chain import Selection
from jax_hremat._solve.regions import Barriers

# The sorts of barriers that plans are not compiled with first.
_MORE = (Barriers.PLAIN, Barriers.GRADIENTS)
# The barriers that a plan may be compiled without, those that usually take least time first.
OPTIONAL_BARRIERS = (Barriers.CHECKPOINTED, Barriers.LATE_ARGUMENTS, *_MORE)

# A peak that is higher by at most this part is as good. A plan is compiled without some of its
# barriers if its step is longer than predicted by more than this part.
NEGLIGIBLE = 0.001
# Barriers take time if the step is longer with them by more than this part; there may be several.
_TAKE_TIME = 0.0002

# The seconds by which the fastest step within a peak gets longer if options are to lower that peak:
# of the peak, and of the bytes by which it is lowered.
Price = Callable[[int, int], float]


class Pair(NamedTuple):
    """A plan compiled with some barriers and without them, the others alike."""

    with_them: Candidate
    without: Candidate

    @property
    def lower_bytes(self) -> int:
        """Bytes by which the barriers lower the peak."""
        return self.without.peak_bytes - self.with_them.peak_bytes

    @property
    def longer_s(self) -> float:
        """Seconds by which the barriers lengthen the step."""
        return self.with_them.step_s - self.without.step_s

    @property
    def take_time(self) -> bool:
        """Whether the barriers lengthen the step by more than is negligible."""
        return self.longer_s > _TAKE_TIME * self.without.step_s

    def is_telling(self, least_bytes: int) -> bool:
        """Whether the difference tells what the barriers do, if the least peak of the plan with any
        barriers is this: other barriers lower the peak by no more than these do."""
        others_bytes = self.with_them.peak_bytes - least_bytes
        return others_bytes <= max(abs(self.lower_bytes), NEGLIGIBLE * least_bytes)

    def are_worth_it(self, peak_bytes: int, price: Price) -> bool:
        """Whether the barriers lower the peak, and take no more time than options that lower such a
        peak as much."""
        if self.lower_bytes <= 0:
            return False
        return self.longer_s <= 0 or self.longer_s <= price(peak_bytes, self.lower_bytes)

    def may_be_left_out(self, peak_bytes: int, price: Price) -> bool:
        """Whether a plan with such a peak is better without the barriers. Where they neither take
        time nor raise the peak, nothing is gained by that, and they may lower the peaks of other
        plans."""
        raise_peak = -self.lower_bytes > NEGLIGIBLE * self.without.peak_bytes
        return (self.take_time or raise_peak) and not self.are_worth_it(peak_bytes, price)


def nearest_pair(
    compiled: Sequence[Candidate], like: Selection, peak_bytes: int, some: Barriers
) -> Pair | None:
    """The plan nearest to a compiled peak that was compiled with and without some barriers, among
    those that have groups, and keep values in groups, if `like` does; None if none was.

    Plans without groups tell nothing about the others: the compiler delays other parts of them. Nor
    does a plan whose peak other barriers lower by more: what these do may show only with those.
    """
    alike = [c for c in compiled if family(c.selection) == family(like)]
    pairs = [
        pair
        for plans in but_for_barriers(alike)
        for pair in _pairs(plans, some)
        if pair.is_telling(min(c.peak_bytes for c in plans))
    ]
    return min(
        pairs,
        key=lambda p: (abs(p.with_them.peak_bytes - peak_bytes), p.with_them.step_s),
        default=None,
    )


def _pairs(plans: Sequence[Candidate], some: Barriers) -> list[Pair]:
    """Those of plans that differ in barriers alone that differ in these alone."""
    by_barriers = {c.barriers: c for c in plans}
    return [
        Pair(with_them, by_barriers[barriers & ~some])
        for barriers, with_them in by_barriers.items()
        if some in barriers and barriers & ~some in by_barriers
    ]


def needed_barriers(
    compiled: Sequence[Candidate], like: Selection, peak_bytes: int, price: Price
) -> Barriers:
    """The barriers with which a plan for a compiled peak is compiled first, if they do here what
    they did in the nearest plan like it that was compiled with and without them: the usual ones
    unless they may be left out, and others that are worth it. Of the others together, if it is not
    known what one of them does alone."""
    needed = Barriers.NONE
    for some in (Barriers.CHECKPOINTED, Barriers.LATE_ARGUMENTS):
        pair = nearest_pair(compiled, like, peak_bytes, some)
        if pair is None or not pair.may_be_left_out(peak_bytes, price):
            needed |= some
    pairs = {some: nearest_pair(compiled, like, peak_bytes, some) for some in _MORE}
    if all(pair is None for pair in pairs.values()):
        together = Barriers.ALL & ~Barriers.USUAL
        pairs = {together: nearest_pair(compiled, like, peak_bytes, together)}
    for some, pair in pairs.items():
        if pair is not None and pair.are_worth_it(peak_bytes, price):
            needed |= some
    return needed


def may_do_without(pair: Pair | None, without_bytes: int, limit: int) -> bool:
    """Whether a plan may be faster without some of its barriers, and still be within a limit: by
    the time they take in the nearest plan that was compiled with and without them, if one was, and
    the compiled peak that is expected without them."""
    is_shorter = pair is None or pair.take_time
    return is_shorter and without_bytes <= limit


def but_for_barriers(compiled: Sequence[Candidate]) -> list[list[Candidate]]:
    """The plans, those together that differ in barriers alone."""
    found: dict[Region, list[Candidate]] = {}
    for candidate in compiled:
        found.setdefault(candidate.root.without_barriers(), []).append(candidate)
    return list(found.values())


def family(selection: Selection) -> tuple[bool, bool]:
    """Whether a plan has groups, and whether they keep values: what the compiler delays depends on
    that."""
    return bool(selection.groups), bool(selection.keeps)
