"""Hand-written plans as selections: layers told by the pattern of blocks."""

import pytest

from jax_hremat._cost.option import Option
from jax_hremat._cost.option_cost import OptionCost, Phase
from jax_hremat._plan.region import Region
from jax_hremat._planner.standard import grouped_selections, layer_selection
from jax_hremat._solve.chain import Chain, Selection

COST = OptionCost(1e-3, 1e-3, 10, (), (), 10, 10)
BARE = Option(Region(0, 1), COST, "plain")
KEEPING = Option(Region(0, 1, checkpointed=True, saved=((0, 0),)), COST, "names")


def chain_of(num_blocks: int, effectful: frozenset[int] = frozenset()) -> Chain:
    return Chain(
        starts=tuple(range(num_blocks)),
        options=((BARE, KEEPING),) * num_blocks,
        recompute_s=(1e-3,) * num_blocks,
        handing_on_bytes=(0,) * num_blocks,
        handing_on=(Phase(),) * num_blocks,
        last_recompute_s=((1e-3,),) * num_blocks,
        shared_bytes=(0,) * num_blocks,
        boundary_values=(),
        fixed_bytes=0,
        effectful=effectful,
    )


def layers_of(
    kinds: list[int], effectful: frozenset[int] = frozenset(), every: int = 1
) -> Selection:
    count = len(kinds)
    chain = chain_of(count, effectful)
    return layer_selection(chain, kinds, [BARE] * count, [KEEPING] * count, every)


def test_layers_of_an_encoder_and_a_decoder():
    kinds = [0, 1, 2, 3, 2, 3, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]
    layers = layers_of(kinds)
    assert layers.groups == ((2, 3), (4, 5), (6, 7), (9, 11), (12, 14))
    # Each keeps what its blocks keep under the policy, and all are run plain.
    assert layers.keeps == tuple((b, 1) for b in (*range(2, 8), *range(9, 15)))
    assert layers.options == (0,) * 16


def test_a_layer_of_one_block_is_no_group():
    layers = layers_of([0, 0, 0, 0, 1])
    assert (layers.groups, layers.options) == ((), (1, 1, 1, 1, 0))


@pytest.mark.parametrize(("every", "checkpointed"), [(2, [0, 2, 5]), (3, [0, 3, 5])])
def test_one_layer_in_a_few_of_each_stack(every: int, checkpointed: list[int]):
    layers = layers_of([0, 0, 0, 0, 2, 1, 1, 3], every=every)
    assert [b for b, option in enumerate(layers.options) if option == 1] == checkpointed


def test_every_few_blocks():
    every = [s.groups for s in grouped_selections(chain_of(5))]
    assert every == [((0, 1), (2, 3)), ((0, 2),), ((0, 3),)]


def test_the_block_at_the_loss_and_effects_are_in_no_group():
    effect = frozenset({0})
    assert layers_of([1, 2, 1, 2, 1, 2], effect).groups == ((2, 3),)
    found = list(grouped_selections(chain_of(6, effect)))
    assert all(0 not in g and 5 not in g for s in found for g in s.groups)
