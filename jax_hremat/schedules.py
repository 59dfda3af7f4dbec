"""Schedules of graphs of operations, and the strategies of the literature that choose them.

    from jax_hremat.schedules import STRATEGIES, load_graph, simulate

    graph = load_graph("graph.json")
    schedule = STRATEGIES["rotor"].schedule(graph, peak_bytes=2**30)

Nothing here needs JAX: a graph is a list of operations with times and sizes.
"""

from jax_hremat._schedules.checkmate import Checkmate as Checkmate
from jax_hremat._schedules.checkmate_lp import CheckmateLP as CheckmateLP
from jax_hremat._schedules.chen import Chen as Chen
from jax_hremat._schedules.chen import ChenRecursive as ChenRecursive
from jax_hremat._schedules.graph import Forward as Forward
from jax_hremat._schedules.graph import Graph as Graph
from jax_hremat._schedules.graph import Operation as Operation
from jax_hremat._schedules.graph import training_graph as training_graph
from jax_hremat._schedules.graph_files import graph_from_json as graph_from_json
from jax_hremat._schedules.graph_files import graph_to_json as graph_to_json
from jax_hremat._schedules.graph_files import load_graph as load_graph
from jax_hremat._schedules.graph_files import save_graph as save_graph
from jax_hremat._schedules.greedy import Greedy as Greedy
from jax_hremat._schedules.grouping import ByScore as ByScore
from jax_hremat._schedules.grouping import Equally as Equally
from jax_hremat._schedules.grouping import Node as Node
from jax_hremat._schedules.grouping import Partitioner as Partitioner
from jax_hremat._schedules.grouping import Randomly as Randomly
from jax_hremat._schedules.hrockmate import HRockmate as HRockmate
from jax_hremat._schedules.keep_all import KeepAll as KeepAll
from jax_hremat._schedules.rockmate import Rockmate as Rockmate
from jax_hremat._schedules.rotor import Rotor as Rotor
from jax_hremat._schedules.schedule import Compute as Compute
from jax_hremat._schedules.schedule import Drop as Drop
from jax_hremat._schedules.schedule import Schedule as Schedule
from jax_hremat._schedules.schedule import with_drops as with_drops
from jax_hremat._schedules.schedule import without_unread as without_unread
from jax_hremat._schedules.schedule_files import load_schedule as load_schedule
from jax_hremat._schedules.schedule_files import save_schedule as save_schedule
from jax_hremat._schedules.simulate import Simulation as Simulation
from jax_hremat._schedules.simulate import simulate as simulate
from jax_hremat._schedules.simulate import without_recompute as without_recompute
from jax_hremat._schedules.strategies import STRATEGIES as STRATEGIES
from jax_hremat._schedules.strategy import Family as Family
from jax_hremat._schedules.strategy import Strategy as Strategy
from jax_hremat._schedules.tw_remat import TwRemat as TwRemat
