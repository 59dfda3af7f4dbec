"""Published methods as strategies, by name, and what a strategy of one's own is made of."""

from jax_hremat._options.block_options import BlockOptions as BlockOptions
from jax_hremat._options.config import SearchConfig as SearchConfig
from jax_hremat._plan.free_schedule import FreeSchedule as FreeSchedule
from jax_hremat._solve.backend import SolverConfig as SolverConfig
from jax_hremat._solve.chain import BoundaryValue as BoundaryValue
from jax_hremat._solve.chain import Chain as Chain
from jax_hremat._solve.chain import Selection as Selection
from jax_hremat._solve.prediction import Prediction as Prediction
from jax_hremat._solve.prediction import predict as predict
from jax_hremat._strategies.registry import STRATEGIES as STRATEGIES
from jax_hremat._strategies.segments import even_segments as even_segments
from jax_hremat._strategies.segments import weights_bytes as weights_bytes
from jax_hremat._strategies.segments import with_groups as with_groups
from jax_hremat._strategies.strategy import Choices as Choices
from jax_hremat._strategies.strategy import Curve as Curve
from jax_hremat._strategies.strategy import FreeChoices as FreeChoices
from jax_hremat._strategies.strategy import Strategy as Strategy
