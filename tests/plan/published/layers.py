"""Random MoE parts and backward passes."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from penstock.cost import AlphaBeta
from penstock.plan.published import Backward, GapLayer, Linear, Made, MoEPart


def random_linear(rng: random.Random) -> Linear:
    """Log-uniform over two decades."""
    return Linear(alpha_s=10 ** rng.uniform(-3, -1), linear_s=10 ** rng.uniform(-2, 0))


def random_part(rng: random.Random, *, alike: bool = False) -> MoEPart:
    """alike: AG and RS take equally long."""
    ag = random_linear(rng)
    rs = ag if alike else random_linear(rng)
    return MoEPart(a2a=random_linear(rng), ag=ag, rs=rs, experts=random_linear(rng))


def random_reduce_s(rng: random.Random) -> float:
    """Nothing in every fourth case."""
    return 0.0 if rng.random() < 0.25 else 10 ** rng.uniform(-2, 0.5)


seconds = st.floats(0, 1)
linears = st.builds(Linear, alpha_s=st.floats(0, 0.1), linear_s=seconds)
parts = st.builds(MoEPart, a2a=linears, ag=linears, rs=linears, experts=linears)


@st.composite
def backwards(draw: st.DrawFn) -> Backward:
    """Up to six layers, some of them dense; sizes of whole elements, some of them none."""
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=6).filter(any))
    sizes = [4 * draw(st.integers(0, 5000)) for _ in kinds]
    moe = [layer for layer, is_moe in enumerate(kinds) if is_moe][::-1]

    def made(first: int, last: int) -> tuple[Made, ...]:
        layers = range(first, last, -1)
        return tuple(Made(layer=layer, size_bytes=sizes[layer]) for layer in layers if sizes[layer])

    return Backward(
        num_layers=len(kinds),
        gaps=tuple(
            GapLayer(layer=layer, part=draw(parts), dense_s=draw(seconds), made=made(layer, end))
            for layer, end in zip(moe, [*moe[1:], -1], strict=True)
        ),
        all_reduce=AlphaBeta(alpha_s=draw(st.floats(0, 0.05)), beta_s_per_byte=draw(st.floats(1e-6, 1e-3))),
        above=made(len(kinds) - 1, moe[0]),
        degrees=(1, 2, 3, 4),
    )
