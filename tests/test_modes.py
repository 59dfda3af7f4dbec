"""How many modes of each kind of block are compiled."""

import pytest

from jax_hremat import SearchConfig


def total(limits: dict[int, SearchConfig]) -> int:
    return sum(x.max_runs + x.max_packings + x.max_saved_sets for x in limits.values())


def test_a_kind_with_a_fair_share_gets_all_and_one_with_less_fewer():
    config = SearchConfig(fair_share=0.1)
    limits = config.for_shares({0: 0.8, 7: 0.1, 9: 0.1 / 16, 11: 0.0})
    assert [limits[k].max_runs for k in (0, 7, 9, 11)] == [10, 10, 2, 0]
    assert limits[0] == config


@pytest.mark.parametrize("kinds", [10, 60, 200])
def test_many_kinds_share_a_limit_on_them_all(kinds: int):
    config = SearchConfig(fair_share=0.01, max_modes=120)
    limits = config.for_shares(dict.fromkeys(range(kinds), 1 / kinds))
    # Each of three numbers is rounded for each kind.
    assert total(limits) <= 120 + 1.5 * kinds
    assert total(SearchConfig(max_modes=10**6).for_shares({0: 1.0})) == 19
