"""Programs drawn at random: a handful in the default suite, thousands in the slow run."""

from __future__ import annotations

import pytest

from differential.random_programs import check_random


def test_a_few_drawn_programs_under_drawn_regions() -> None:
    tally = check_random(count=5, planned_every=0)
    assert tally.programs >= 5 and tally.plans >= 10


@pytest.mark.slow
def test_thousands_of_drawn_programs(capsys: pytest.CaptureFixture[str]) -> None:
    tally = check_random(count=2000, seed=1)
    with capsys.disabled():
        print(f"\n{tally}, nothing found")
    assert tally.programs >= 2000 and tally.plans > 4000
