"""Groups in groups: what they are predicted to take, and how the solver comes to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integer_program import fastest_of_columns

import jax_hremat
from jax_hremat._cost.option import Option
from jax_hremat._cost.option_cost import OptionCost, Phase
from jax_hremat._partition.tree import MAX_CHILDREN, Node, block_tree
from jax_hremat._plan.region import Region
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.chain import BoundaryValue, Chain, Group, Selection
from jax_hremat._solve.groups import single_columns
from jax_hremat._solve.nests import nest_columns
from jax_hremat._solve.prediction import predict, recompute_s
from jax_hremat._solve.schedule import Schedules
from jax_hremat._trace.graph import Graph

MIB = 2**20
EXACT = SolverConfig(relative_gap=0.0)
# The solver counts in MiB and meets a row within 1e-6 of them.
ROUNDING_BYTES = 64
QUICK = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def option(forward_s: float, backward_s: float, *sizes_mib: int) -> Option:
    kept, forward_peak, backward_peak, *ending_peak = (s * MIB for s in sizes_mib)
    cost = OptionCost(forward_s, backward_s, kept, (), (), forward_peak, backward_peak)
    at_end = replace(cost, backward_peak_bytes=ending_peak[0]) if ending_peak else None
    return Option(Region(0, 4), cost, "plain", at_end=at_end)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Chain, list[int]]:
    """Equal layers of one or two blocks, others around them, a stream, and values that every
    layer reads or that skip."""
    size, time_s = st.integers(0, 12), st.integers(0, 9)
    period = draw(st.integers(1, 2))
    kinds = [9, *list(range(period)) * draw(st.integers(4, 7)), 7, 8]
    layer = {
        kind: [
            option(*(draw(time_s) for _ in range(2)), *(draw(size) for _ in range(4)))
            for _ in range(draw(st.integers(1, 2)))
        ]
        for kind in sorted(set(kinds))
    }
    recompute_s_of = {kind: draw(st.integers(0, 3)) for kind in layer}
    handing_on_of = {kind: draw(size) for kind in layer}
    shared = {kind: draw(st.sampled_from([0, 0, 3])) for kind in layer}
    last = len(kinds) - 1
    ends = [(k, (k + 1,)) for k in range(last)] + [(0, tuple(range(1, last)))]
    for _ in range(draw(st.integers(0, 3))):
        producer = draw(st.integers(0, last - 1))
        later = st.integers(producer + 1, last)
        ends.append((producer, tuple(sorted(draw(st.sets(later, min_size=1, max_size=3))))))
    boundary_values = []
    for producer, readers in ends:
        pairs = [(k, o) for k in (producer, *readers) for o in range(len(layer[kinds[k]]))]
        needed = frozenset(draw(st.sets(st.sampled_from(pairs))))
        boundary_values.append(
            BoundaryValue(draw(size) * MIB, producer, readers, draw(st.booleans()), needed)
        )
    chain = Chain(
        starts=tuple(range(0, 4 * len(kinds), 4)),
        options=tuple(tuple(layer[k]) for k in kinds),
        recompute_s=tuple(float(recompute_s_of[k]) for k in kinds),
        handing_on_bytes=tuple(handing_on_of[k] * MIB for k in kinds),
        handing_on=(Phase(),) * len(kinds),
        last_recompute_s=tuple(tuple(recompute_s_of[k] / 2 for _ in layer[k]) for k in kinds),
        shared_bytes=tuple(shared[k] * MIB for k in kinds),
        boundary_values=tuple(boundary_values),
        fixed_bytes=draw(size) * MIB,
    )
    return chain, kinds


def equal_layers(count: int) -> Chain:
    """Layers, plain or checkpointed, of which the stream takes more than their insides."""
    layers = [(option(2, 3, 9, 4, 10), option(2, 5, 0, 4, 10)) for _ in range(count)]
    stream = [
        BoundaryValue(8 * MIB, k, (k + 1,), True, frozenset({(k + 1, 0), (k + 1, 1)}))
        for k in range(count - 1)
    ]
    return Chain(
        starts=tuple(range(0, 4 * count, 4)),
        options=tuple(layers),
        recompute_s=(2.0,) * count,
        handing_on_bytes=(4 * MIB,) * count,
        handing_on=(Phase(),) * count,
        last_recompute_s=((2.0, 0.0),) * count,
        shared_bytes=(0,) * count,
        boundary_values=tuple(stream),
        fixed_bytes=0,
    )


def random_selection(data: st.DataObject, chain: Chain) -> Selection:
    """Options and disjoint groups, some of them in larger ones."""
    options = tuple(data.draw(st.integers(0, len(o) - 1)) for o in chain.options)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(chain) - 2), min_size=2)))
    groups = {(a, b - 1) for a, b in itertools.pairwise(cuts) if b - a > 1}
    groups = {g for g in groups if data.draw(st.booleans())}
    return Selection(options, tuple(sorted(groups)))


def tree_of(groups: Sequence[Group], first: int, last: int) -> Iterator[int | tuple[Group, list]]:
    """Blocks, and groups with what is in them."""
    block = first
    while block <= last:
        own = [g for g in groups if g[0] == block and g[1] <= last]
        if not own:
            yield block
            block += 1
            continue
        outer = max(own, key=lambda g: g[1])
        rest = [g for g in groups if g != outer]
        yield outer, list(tree_of(rest, *outer))
        block = outer[1] + 1


def replayed(chain: Chain, selection: Selection) -> tuple[int, float]:
    """Peak and time, by walking the tree of groups as the emitted step does."""
    peak, recomputed_s = 0, 0.0
    value_bytes = [c.size_bytes for c in chain.boundary_values]

    def cost(block: int) -> OptionCost:
        return chain.options[block][selection.options[block]].cost

    def reads(first: int, last: int) -> set[int]:
        return {
            v
            for v, c in enumerate(chain.boundary_values)
            if c.producer < first and any(first <= r <= last for r in c.readers)
        }

    def forward_bytes(block: int) -> int:
        """The peak of the first forward, which hands on only where a group is around the block."""
        if any(first <= block <= last for first, last in selection.groups):
            return chain.handing_on_bytes[block]
        return cost(block).forward_peak_bytes

    def forward(item: int | tuple[Group, list]) -> tuple[int, set[int]]:
        """What it keeps for its backward."""
        if not isinstance(item, int):
            first, last = item[0]
            return sum(chain.shared_bytes[first : last + 1]), reads(first, last)
        pair = (item, selection.options[item])
        return cost(item).kept_bytes, {
            v for v, c in enumerate(chain.boundary_values) if pair in c.needed
        }

    def backward_bytes(block: int, ends_a_group: bool) -> int:
        option = chain.options[block][selection.options[block]]
        return (option.ending if ends_a_group else option.cost).backward_peak_bytes

    def rerun_s(item: int | tuple[Group, list], is_last: bool) -> float:
        if isinstance(item, int):
            last_s = chain.last_recompute_s[item][selection.options[item]]
            return last_s if is_last else chain.recompute_s[item]
        return 0.0 if is_last else sum(rerun_s(i, False) for i in item[1])

    def walk(items: list, kept_bytes: int, held: set[int], *, first_forward: bool) -> None:
        nonlocal peak, recomputed_s
        stack = []
        for item in items:
            stack.append((item, kept_bytes, held))
            if first_forward:
                first, last = (item, item) if isinstance(item, int) else item[0]
                for block in range(first, last + 1):
                    # A group takes hold of what it reads when it begins.
                    before = held | reads(first, last) if block > first else held
                    live = {
                        v
                        for v, c in enumerate(chain.boundary_values)
                        if c.producer < block <= c.readers[-1]
                    }
                    waiting = sum(value_bytes[v] for v in live | before)
                    waiting += sum(chain.shared_bytes[first:block])
                    peak = max(peak, kept_bytes + waiting + forward_bytes(block))
            more, values = forward(item)
            kept_bytes, held = kept_bytes + more, held | values
        for item, kept_before, held_before in reversed(stack):
            _, values = forward(item)
            if isinstance(item, int):
                passed = sum(value_bytes[v] for v in held_before | values)
                ends_a_group = not first_forward and item is items[-1]
                own = backward_bytes(item, ends_a_group) + chain.pending_cotangent_bytes(item)
                peak = max(peak, kept_before + passed + own)
            else:
                inner = item[1]
                recomputed_s += sum(rerun_s(i, i is inner[-1]) for i in inner)
                walk(inner, kept_before, held_before | values, first_forward=False)

    walk(list(tree_of(selection.groups, 0, len(chain) - 1)), 0, set(), first_forward=True)
    time_s = sum(cost(b).time_s for b in range(len(chain))) + recomputed_s
    return chain.fixed_bytes + peak, time_s


@given(stacks(), st.data())
@QUICK
def test_predict_is_what_a_walk_of_the_tree_finds(
    stack: tuple[Chain, list[int]], data: st.DataObject
) -> None:
    chain, _ = stack
    selection = random_selection(data, chain)
    groups = set(selection.groups)
    for a, b in selection.groups:
        if b - a > 2 and data.draw(st.booleans()):
            groups.add((a, b - 1) if data.draw(st.booleans()) else (a + 1, b))
    nested = replace(selection, groups=tuple(sorted(groups, key=lambda g: (g[0], -g[1]))))
    prediction = predict(chain, nested)
    peak_bytes, time_s = replayed(chain, nested)
    assert prediction.peak_bytes == peak_bytes
    assert prediction.time_s == pytest.approx(time_s)


@given(stacks(), st.data())
@QUICK
def test_what_a_nest_takes_is_what_is_predicted(
    stack: tuple[Chain, list[int]], data: st.DataObject
) -> None:
    chain, kinds = stack
    columns = nest_columns(chain, block_tree(kinds))
    column = data.draw(st.sampled_from(columns))
    inside = range(column.first, column.last + 1)
    plain = tuple(column.options[b - column.first] if b in inside else 0 for b in range(len(chain)))
    nest = Selection(plain, ((column.first, column.last), *column.inner))
    found, without = predict(chain, nest), predict(chain, Selection(plain))
    fastest_s = sum(min(o.cost.time_s for o in chain.options[b]) for b in inside)
    own_s = sum(chain.options[b][nest.options[b]].cost.time_s for b in inside)
    assert found.time_s - without.time_s == pytest.approx(
        column.added_ms / 1e3 - (own_s - fastest_s), abs=1e-9
    )
    singles = {(p.first, p.options): p for p in single_columns(chain)}
    others = [singles[b, (0,)] for b in range(len(chain)) if b not in inside]
    for less_bytes, fits in ((0, True), (ROUNDING_BYTES, False)):
        peak_bytes = found.peak_bytes - less_bytes
        selection = fastest_of_columns(chain, [column, *others], peak_bytes, EXACT)
        assert (selection is not None) == fits


def test_what_a_group_ends_with_is_not_run_again_for_it() -> None:
    chain = equal_layers(6)
    selection = Selection((1,) * 6, ((0, 4), (1, 2), (3, 4)))
    # Blocks 1 and 2 run in both recomputes, 2 not in its own, where its backward does it; 3 and 4
    # not in the outer one, for nothing reads what they make.
    assert recompute_s(chain, selection) == [2.0, 4.0, 2.0, 2.0, 0.0, 0.0]
    assert predict(chain, selection).time_s == 6 * 7 + 10


@pytest.mark.parametrize("groups", [((0, 4), (1, 2)), ((0, 2), (1, 2)), ((1, 2),)])
def test_the_last_block_of_a_group_takes_what_it_takes_there(groups: tuple[Group, ...]) -> None:
    chain = equal_layers(6)
    costly = option(2, 3, 9, 4, 10, 99)
    options = [*chain.options]
    options[2] = (costly, *options[2][1:])
    chain = replace(chain, options=tuple(options))
    prediction = predict(chain, Selection((0,) * 6, groups))
    assert (prediction.peak.block, prediction.peak.in_backward) == (2, True)
    assert prediction.peak.working_bytes == 99 * MIB
    # In the middle of a group it takes no more than elsewhere.
    assert predict(chain, Selection((0,) * 6, ((1, 3),))).peak.working_bytes == 10 * MIB


def depth(groups: Sequence[Group]) -> int:
    return max(sum(a <= g[0] and g[1] <= b for a, b in groups) for g in groups)


def nested(count: int) -> Chain:
    chain = equal_layers(count)
    return replace(chain, listed=nest_columns(chain, block_tree(["layer"] * count)))


@pytest.mark.slow
def test_many_layers_hold_few_boundaries() -> None:
    """r levels of groups over n layers hold r n^(1/r) boundaries; the growth is what is shown."""
    peaks = {}
    for count in (25, 65, 217):
        chain = nested(count)
        selection = Schedules(chain).least_peak(EXACT).selection
        found = predict(chain, selection)
        peaks[count] = found.peak_bytes / (8 * MIB)
        flat = equal_layers(count)
        assert (
            found.peak_bytes < predict(flat, Schedules(flat).least_peak(EXACT).selection).peak_bytes
        )
    # Nine times the layers for less than twice the boundaries, where √n would be three times.
    assert peaks[217] < 2 * peaks[25]
    assert depth(selection.groups) >= 3


def test_no_nest_has_an_effect_or_the_block_at_the_loss_inside() -> None:
    chain = equal_layers(20)
    tree = block_tree(["layer"] * 20)
    assert max(p.last for p in nest_columns(chain, tree)) == 18
    effectful = replace(chain, effectful=frozenset({3}))
    assert all(not p.first <= 3 <= p.last for p in nest_columns(effectful, tree))
    assert not nest_columns(replace(chain, effectful=frozenset(range(20))), tree)


def test_a_budget_that_only_nests_meet() -> None:
    flat, chain, config = equal_layers(33), nested(33), SolverConfig()
    floor = predict(flat, Schedules(flat).least_peak(config).selection).peak_bytes
    limit = floor - 8 * MIB
    assert Schedules(flat).fastest_within(limit, config).selection is None
    found = Schedules(chain).fastest_within(limit, config).selection
    assert predict(chain, found).peak_bytes <= limit


def leaves(node: Node) -> list[int]:
    return [b for c in node.children for b in leaves(c)] if node.children else [node.first]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=120))
@QUICK
def test_a_tree_has_every_block_but_the_last_once(kinds: list[int]) -> None:
    tree = block_tree(kinds)
    assert leaves(tree) == list(range(max(len(kinds) - 1, 1)))
    for node in tree.inner_first():
        assert 2 <= len(node.children) <= MAX_CHILDREN
        assert (node.first, node.last) == (node.children[0].first, node.children[-1].last)


def test_nodes_of_a_stack_are_made_of_whole_layers() -> None:
    kinds = ["first", *["attention", "mlp"] * 12, "norm", "loss"]
    tree = block_tree(kinds)
    spans = [(node.first, node.last) for node in tree.children]
    assert spans == [(0, 0), (1, 8), (9, 16), (17, 24), (25, 25)]


@pytest.mark.slow
def test_a_deep_model_is_planned_in_groups_of_groups_and_computes_the_same() -> None:
    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for i in range(layers):
            x = x + jnp.tanh(x @ params[f"w{i}"])
        return (x**2).mean()

    layers, width, batch = 12, 8, 512
    shapes = {f"w{i}": jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(layers)}
    args = (shapes, jax.ShapeDtypeStruct((batch, width), jnp.float32))

    def at_products(graph: Graph) -> list[int]:
        return [op.id for op in graph.operations if op.primitive == "dot_general"]

    config = jax_hremat.PlannerConfig(cost="analytic", max_rounds=0, partitioner=at_products)
    with pytest.raises(jax_hremat.InfeasibleBudgetError) as refusal:
        jax_hremat.plan_remat(loss, budget="1KiB", target="cpu", config=config)(*args)
    plan = jax_hremat.plan_remat(
        loss, budget=refusal.value.min_budget_bytes, target="cpu", config=config
    )(*args)
    assert plan.root.depth >= 2
    rng = np.random.default_rng(0)
    real = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 3, s.dtype), args)
    planned = jax_hremat.apply_plan(loss, plan)
    expected = jax.jit(jax.value_and_grad(loss))(*real)
    actual = jax.jit(
        jax.value_and_grad(planned), compiler_options=jax_hremat.compiler_options("cpu")
    )(*real)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
