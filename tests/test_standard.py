"""Hand-written plans as selections: layers told by the pattern of blocks."""

from jax_hremat._cost.mode_cost import ModeCost
from jax_hremat._modes.option import Option
from jax_hremat._planner.standard import grouped_selections
from jax_hremat._program.region import Region
from jax_hremat._schedule.chain import Chain


def chain_of(num_blocks: int, pinned: frozenset[int] = frozenset()) -> Chain:
    cost = ModeCost(1e-3, 1e-3, 10, (), (), 10, 10)
    return Chain(
        starts=tuple(range(num_blocks)),
        options=((Option(Region(0, 1), cost, "bare"),),) * num_blocks,
        recompute_s=(1e-3,) * num_blocks,
        last_recompute_s=((1e-3,),) * num_blocks,
        shared_bytes=(0,) * num_blocks,
        crossings=(),
        fixed_bytes=0,
        pinned=pinned,
    )


def test_layers_of_an_encoder_and_a_decoder():
    kinds = [0, 1, 2, 3, 2, 3, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]
    layers = next(grouped_selections(chain_of(16), kinds))
    assert layers.groups == ((2, 3), (4, 5), (6, 7), (9, 11), (12, 14))


def test_a_layer_of_one_block_is_no_group():
    every = [s.groups for s in grouped_selections(chain_of(5), [0, 0, 0, 0, 1])]
    assert every == [((0, 1), (2, 3)), ((0, 2),), ((0, 3),)]


def test_the_block_at_the_loss_and_effects_are_in_no_group():
    kinds = [1, 2, 1, 2, 1, 2]
    found = list(grouped_selections(chain_of(6, frozenset({0})), kinds))
    assert found[0].groups == ((2, 3),)
    assert all(0 not in g and 5 not in g for s in found for g in s.groups)
