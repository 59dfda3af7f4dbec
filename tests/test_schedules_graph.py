"""Graphs of operations: what is refused, how a training step is built, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.random_graphs import KINDS, random_graph
from jax_hremat._schedules.graph import Forward, Graph, Operation, training_graph
from jax_hremat._schedules.graph_files import (
    graph_from_json,
    graph_to_json,
    load_graph,
    save_graph,
)
from jax_hremat._schedules.schedule import Compute, Drop, Schedule
from jax_hremat._schedules.schedule_files import load_schedule, save_schedule
from jax_hremat._shared.errors import GraphFormatError


def operation(name: str, *reads: int, **fields: Any) -> Operation:
    return Operation(**{"name": name, "time_s": 1.0, "output_bytes": 1, "reads": reads} | fields)


def test_what_no_operation_reads_is_a_result() -> None:
    graph = Graph((operation("a"), operation("b", 0), operation("c", 0)))
    assert graph.results == (1, 2)
    assert graph.readers == ((1, 2), (), ())
    assert len(graph) == 3 and graph.time_s == 3.0


@pytest.mark.parametrize(
    ("operations", "fields", "message"),
    [
        ([], {}, "at least one operation"),
        ([operation("a"), operation("a")], {}, "no other has"),
        ([operation("")], {}, "not empty"),
        ([operation("a", 0)], {}, "topological order"),
        ([operation("a"), operation("b", 0, 0)], {}, "one of them twice"),
        ([operation("a", time_s=-1.0)], {}, "time_s=-1.0; it must be finite"),
        ([operation("a", time_s=float("nan"))], {}, "must be finite"),
        ([operation("a", output_bytes=-1)], {}, "output_bytes=-1; it must be a whole number"),
        ([operation("a", output_bytes=1.5)], {}, "output_bytes=1.5"),
        ([operation("a", workspace_bytes=True)], {}, "workspace_bytes=True"),
        ([operation("a", backward_of=0)], {}, "backward_of=0, which is no forward"),
        ([operation("a")], {"constant_bytes": -1}, "constant_bytes=-1"),
        ([operation("a")], {"results": (1,)}, "result 1 is no operation: there are 1"),
        ([operation("a"), operation("b")], {"results": (0,)}, "'b' contributes to no result"),
    ],
)
def test_what_is_no_graph_is_refused(
    operations: list[Operation], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(GraphFormatError, match=message):
        Graph(tuple(operations), **fields)


def test_a_training_step() -> None:
    graph = training_graph(
        [
            Forward(name="table", time_s=1, output_bytes=5, backward_time_s=None),
            Forward(
                name="f", time_s=2, output_bytes=7, backward_time_s=3, backward_reads_output=True
            ),
            Forward(
                name="g",
                time_s=4,
                output_bytes=9,
                backward_time_s=5,
                reads=("f", "table"),
                backward_reads_inputs=False,
                workspace_bytes=2,
                backward_workspace_bytes=3,
            ),
            Forward(name="loss", time_s=6, output_bytes=1, backward_time_s=7, reads=("f", "g")),
        ],
        constant_bytes=100,
    )
    names = [o.name for o in graph.operations]
    assert names == ["table", "f", "g", "loss", "loss.backward", "g.backward", "f.backward"]
    by_name = dict(zip(names, graph.operations, strict=True))
    reads = {o.name: [names[j] for j in o.reads] for o in graph.operations}
    assert reads["loss.backward"] == ["f", "g"]
    assert reads["g.backward"] == ["loss.backward"]
    assert reads["f.backward"] == ["f", "loss.backward", "g.backward"]
    # The gradients of what is read, of those that have a backward; and of the data, none.
    assert by_name["loss.backward"].output_bytes == 7 + 9
    assert by_name["g.backward"].output_bytes == 7
    assert by_name["f.backward"].output_bytes == 0
    assert by_name["g.backward"].workspace_bytes == 3
    assert [names[i] for i in graph.results] == ["loss", "f.backward"]
    assert graph.constant_bytes == 100


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (("a", ("b",), 1), "'a' reads 'b', which is no operation before it"),
        (("first", (), 1), "two operations have the name 'first'"),
        (("a", ("first",), None), "no gradient reaches it"),
    ],
)
def test_what_is_no_forward_is_refused(forward: Any, message: str) -> None:
    name, reads, backward_time_s = forward
    first = Forward(name="first", time_s=1, output_bytes=1, backward_time_s=1)
    second = replace(first, name=name, reads=reads, backward_time_s=backward_time_s)
    with pytest.raises(GraphFormatError, match=message):
        training_graph([first, second])
    with pytest.raises(GraphFormatError, match="result 'z' is no operation"):
        training_graph([first], results=("z",))


GRAPHS = st.builds(
    random_graph, st.sampled_from(sorted(KINDS)), st.integers(2, 12), st.integers(0, 1000)
)


@given(GRAPHS)
def test_files_round_trip(graph: Graph) -> None:
    text = graph_to_json(graph)
    assert graph_from_json(text) == graph
    assert graph_to_json(graph_from_json(text)) == text


def test_a_file(tmp_path: Path) -> None:
    graph = Graph((operation("α"), operation("b", 0, backward_of=0)), (0, 1), 3)
    save_graph(graph, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == graph
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphFormatError, match="bytes.json: it is no text"):
        load_graph(tmp_path / "bytes.json")
    with pytest.raises(OSError):
        load_graph(tmp_path / "none.json")


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_that_is_too_large_is_refused(digits: int) -> None:
    head = '{"format": "jax_hremat.graph", "format_version": 1, "operations": '
    text = head + '[{"name": "a", "output_bytes": 1, "time_s": ' + digits * "1" + "}]}"
    with pytest.raises(GraphFormatError, match="^the text"):
        graph_from_json(text)


def test_a_schedule_s_file(tmp_path: Path) -> None:
    graph = Graph((operation("α"), operation("b", 0)))
    path = tmp_path / "schedule.json"
    for schedule in (Schedule(()), Schedule((Compute(0), Compute(1), Drop(0)), 1.5)):
        save_schedule(graph, schedule, path)
        assert load_schedule(graph, path) == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "jax_hremat.graph"}, "its \"format\" is 'jax_hremat.graph', not"),
        ({"bound_s": "1"}, "bound_s: it is '1', not a number of seconds"),
        ({"steps": None}, "steps: it is null, not a list"),
        ({"steps": [{"keep": "a"}]}, r"steps\[0\]: unknown key 'keep'"),
        ({"steps": [{"drop": "a", "compute": "a"}]}, r"steps\[0\]: it has both"),
        ({"steps": [{}]}, r"steps\[0\]: it has both of \"compute\" and \"drop\", or neither"),
        ({"steps": [{"compute": "z"}]}, r"steps\[0\]: 'z' is no operation of the graph"),
    ],
)
def test_what_is_no_schedule_s_file(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = {"format": "jax_hremat.schedule", "format_version": 1, "steps": []} | change
    (tmp_path / "s.json").write_text(json.dumps(data))
    with pytest.raises(GraphFormatError, match=message):
        load_schedule(Graph((operation("a"),)), tmp_path / "s.json")


def test_what_may_be_left_out_of_a_file() -> None:
    operations = [{"name": "a", "time_s": 1, "output_bytes": 2}]
    text = json.dumps({"format": "jax_hremat.graph", "format_version": 1, "operations": operations})
    assert graph_from_json(text) == Graph((operation("a", output_bytes=2),))


A = {"name": "a", "time_s": 1.0, "output_bytes": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "its \"format\" is 'other', not"),
        ({"format_version": 2}, "format version 2; this version of jax_hremat reads version 1"),
        ({"budget": 3}, "unknown key 'budget'"),
        ({"operations": {}}, "operations: it is a dict, not a list"),
        ({"operations": [3]}, r"operations\[0\]: it is a int, not an object"),
        ({"operations": [{"name": "a"}]}, r"operations\[0\]: the key 'time_s' is missing"),
        ({"operations": [A | {"name": 3}]}, r"operations\[0\].name: it is 3, not a text"),
        ({"operations": [A | {"time_s": "1"}]}, r"operations\[0\].time_s: it is '1'"),
        ({"operations": [A | {"output_bytes": 1.5}]}, r"operations\[0\].output_bytes: it is 1.5"),
        ({"operations": [A | {"size": 1}]}, r"operations\[0\]: unknown key 'size'"),
        ({"operations": [A | {"reads": ["b"]}]}, r"operations\[0\].reads\[0\]: 'b' is not"),
        ({"operations": [A | {"backward_of": "b"}]}, r"operations\[0\].backward_of: 'b' is not"),
        ({"operations": [A, A]}, "file: operation 1 has the name 'a'"),
        ({"operations": [A | {"time_s": -1}]}, "file: operation 'a' has time_s=-1.0"),
        ({"results": ["z"]}, r"results\[0\]: 'z' is not"),
        ({"constant_bytes": "1"}, "constant_bytes: it is '1', not a whole number of bytes"),
    ],
)
def test_errors_name_the_place_in_the_file(change: dict[str, Any], message: str) -> None:
    data = {"format": "jax_hremat.graph", "format_version": 1, "operations": [A]} | change
    with pytest.raises(GraphFormatError, match=message):
        graph_from_json(json.dumps(data), where="file")


def test_what_is_no_json() -> None:
    with pytest.raises(GraphFormatError, match="file: it is no JSON"):
        graph_from_json("{", where="file")
    with pytest.raises(GraphFormatError, match="file: it is null, not an object"):
        graph_from_json("null", where="file")
