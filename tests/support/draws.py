"""How many examples a property is tried on: in proportion to what `make quick`, `test` or `soak` ask for."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100
LEAST = 2


def draws(examples: int) -> settings:
    """Settings for a property whose examples cost more than most: `examples` where others have USUAL."""
    wanted = settings.default.max_examples if settings.default is not None else USUAL
    return settings(max_examples=max(LEAST, examples * wanted // USUAL))
