"""The laws of every strategy; a strategy of your own is tested by calling `check_laws`."""

from __future__ import annotations

from collections.abc import Sequence

from jax_hremat.strategies import Chain, Selection, SolverConfig, Strategy, predict

EXACT = SolverConfig(relative_gap=0.0)
# The solver counts in MiB and meets a row within about one byte; a schedule adds up a few.
ROUNDING_BYTES = 64


def check_laws(strategy: Strategy, chain: Chain) -> None:
    """Check what must hold of the choices of a strategy on any chain: they are valid, within the
    limit, monotone in it, and the same each time.

    Args:
        strategy: The strategy.
        chain: Blocks, each with its plain option first and its checkpointed one last.
    """
    choices = strategy.choices(chain, EXACT)
    again = strategy.choices(chain, EXACT)
    lowest = choices.lowest()
    assert lowest == again.lowest()
    check_selection(chain, lowest)
    least_bytes = predict(chain, lowest).peak_bytes
    plain_bytes = predict(chain, Selection((0,) * len(chain))).peak_bytes
    high_bytes = max(plain_bytes, least_bytes)
    before_s = float("inf")
    for i in range(6):
        limit = least_bytes + (high_bytes - least_bytes) * i // 5
        selection = choices.fastest(limit)
        assert selection == again.fastest(limit)
        assert selection is not None, "the selection of least peak fits"
        check_selection(chain, selection)
        found = predict(chain, selection)
        assert found.peak_bytes <= limit + ROUNDING_BYTES
        assert found.time_s <= before_s + 1e-9, "more memory never gives a slower selection"
        before_s = found.time_s
    assert choices.fastest(least_bytes - ROUNDING_BYTES) is None, "nothing is below the least peak"


def check_selection(chain: Chain, selection: Selection) -> None:
    """Check that a selection can be emitted."""
    assert len(selection.options) == len(chain)
    for block, option in enumerate(selection.options):
        assert 0 <= option < len(chain.options[block])
    groups: Sequence[tuple[int, int]] = selection.groups
    assert list(groups) == sorted(set(groups), key=lambda g: (g[0], -g[1])), "outer groups first"
    for i, (a, z) in enumerate(groups):
        assert 0 <= a < z < len(chain), "a group has two blocks or more"
        assert chain.effectful.isdisjoint(range(a, z + 1)), "effects are not repeated"
        for b, y in groups[i + 1 :]:
            assert b > z or (a <= b and y <= z), "groups are disjoint or nested"
