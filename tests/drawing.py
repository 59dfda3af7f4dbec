"""How many examples the property tests draw."""

from hypothesis import settings


def examples(all_of_them: int) -> int:
    """So many in the slow run, a part of them in the default one (`conftest.py`)."""
    return max(2, all_of_them * settings.default.max_examples // 100)
