"""Schedules: the fastest within a peak, and that of the least peak, from the root program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jax_hremat._solve.backend import SolverConfig, undecided
from jax_hremat._solve.chain import Chain
from jax_hremat._solve.output_reuse import NO_REUSE, Result, ReusedBytes, ReusedParts
from jax_hremat._solve.root_program import ZERO_MS, Answer, RootProgram, Schedule, selection_of

# The highest reduced cost, as a part of the step's time, in the first integer program with groups.
_FIRST_WORTH = 0.005
# No integer program has more groups than these: beyond them, the solver's first node takes minutes.
_MAX_GROUPS = 4000
# The gap, as a part of the step's time, allowed to a first schedule that needs groups to fit.
_ROUGH = 0.03


def fastest_within(
    chain: Chain,
    peak_bytes: int,
    config: SolverConfig,
    *,
    groups: bool = True,
    reused: ReusedBytes = NO_REUSE,
) -> Schedule:
    """The fastest schedule whose predicted peak is at most `peak_bytes`.

    Args:
        chain: Blocks and their options.
        peak_bytes: Bound on the predicted peak.
        config: The solver's limits.
        groups: Whether consecutive blocks may be checkpointed together.
        reused: Bytes saved by output-buffer reuse.

    Returns:
        The schedule. Its selection is None with `Status.INFEASIBLE`, or with `Status.UNDECIDED` if
        the solver's limit was reached first.
    """
    program = RootProgram(chain, config, reused)
    limit = peak_bytes - chain.fixed_bytes
    best = program.fastest(program.singles, limit)
    if groups and limit > 0:
        best = _with_groups(program, limit, best)
    return replace(
        program.schedule(best, program.base_ms), bound_s=1e-3 * (program.base_ms + best.lower)
    )


def fastest_of_blocks(
    chain: Chain,
    peak_bytes: int,
    config: SolverConfig,
    results: Sequence[Result],
    parts: ReusedParts,
) -> Schedule:
    """The fastest schedule without groups whose peak is at most `peak_bytes`, if parts of what
    `reuse_rows` allows are reused.

    Args:
        chain: Blocks and their options.
        peak_bytes: Bound on the peak.
        config: The solver's limits.
        results: The results that are reused.
        parts: For the forward and backward of each block, the part of the bytes that the rows allow
            which is reused.
    """
    program = RootProgram(chain, config)
    limit = peak_bytes - chain.fixed_bytes
    answer = program.fastest(program.singles, limit, reuse=(results, parts))
    return program.schedule(answer, program.base_ms)


def least_possible_s(
    chain: Chain, peak_bytes: int, config: SolverConfig, reused: ReusedBytes = NO_REUSE
) -> float:
    """A time in seconds that no schedule with a predicted peak of at most `peak_bytes` undercuts,
    from the relaxation of the program alone. The arguments are those of `fastest_within`."""
    program = RootProgram(chain, config, reused)
    priced = program.price(max(peak_bytes - chain.fixed_bytes, 1))
    added_ms = 0.0 if priced is None else max(priced[0], 0.0)
    return 1e-3 * (program.base_ms + added_ms)


def least_peak(chain: Chain, config: SolverConfig, *, groups: bool = True) -> Schedule:
    """The least predicted peak; of the schedules with that peak and the same groups, the fastest.

    Raises:
        SolverError: The solver's limit was reached without a schedule.
    """
    program = RootProgram(chain, config)
    best = program.lowest(program.singles, math.inf)
    if best.columns is None:
        raise undecided(config)
    if groups:
        limit = program.peak_bytes(best.columns)
        inside = program.groups.columns(limit, by_time=False)
        if inside:
            answer = program.lowest([*program.singles, *inside], limit)
            best = best.improved(answer).bounded(answer.lower)
    assert best.columns is not None
    schedule = program.schedule(best)
    limit = program.peak_bytes(best.columns)
    same = frozenset((p.first, p.last) for p in best.columns if p.last > p.first)
    inside = program.groups.columns(limit, only=same)
    faster = program.fastest([*program.singles, *inside], limit)
    if faster.columns is None or program.peak_bytes(faster.columns) > limit:
        return schedule
    return replace(schedule, selection=selection_of(faster.columns))


def _with_groups(program: RootProgram, limit: int, best: Answer) -> Answer:
    """The best schedule with groups, given the best schedule without."""
    reused_bytes = program.most_reused_bytes
    if best.columns is None:
        # If any schedule fits, one made of the groups with Pareto-optimal peaks does.
        inside = program.groups.columns(limit + reused_bytes, by_time=False)
        rough_ms = _ROUGH * program.base_ms
        best = program.fastest([*program.singles, *inside], limit, gap_ms=rough_ms)
        if best.columns is None:
            return best
    priced = program.price(limit)
    if priced is None:
        return best.bounded(0.0)
    bound_ms, prices, columns = priced
    # The columns of the relaxation usually contain a good schedule. Once it is known, few other
    # columns are worth considering.
    best = best.improved(program.fastest(columns, limit, best.objective - program.gap_ms))
    worth_ms, proven_ms = _FIRST_WORTH * program.base_ms, bound_ms
    while bound_ms <= (wanted_ms := best.objective - program.gap_ms):
        worth_ms = min(worth_ms, wanted_ms - bound_ms)
        columns = [p for p in program.singles if prices.reduced_ms(p) <= worth_ms + ZERO_MS]
        inside = program.groups.columns(
            limit + reused_bytes, prices=prices, worth_ms=worth_ms + ZERO_MS
        )
        if len(inside) > _MAX_GROUPS:
            break
        columns += inside
        answer = program.fastest(columns, limit, wanted_ms)
        best = best.improved(answer)
        if answer.undecided:
            break
        # No schedule below `wanted_ms` contains a column whose reduced cost is higher than
        # `wanted_ms` less the bound. If all other columns were in the program, its proof holds for
        # all schedules.
        wanted_ms = best.objective - program.gap_ms
        if worth_ms >= wanted_ms - bound_ms:
            return best.bounded(min(answer.lower, wanted_ms))
        # A better schedule of other columns contains one whose reduced cost is above `worth_ms`.
        proven_ms = min(answer.lower, bound_ms + worth_ms)
        worth_ms *= 4
    return best.bounded(proven_ms)
