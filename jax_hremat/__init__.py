"""Automatic rematerialization for JAX and Flax under a byte budget, with a certificate."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from jax_hremat._api import apply_plan as apply_plan
from jax_hremat._api import certify as certify
from jax_hremat._api import compare as compare
from jax_hremat._api import hremat as hremat
from jax_hremat._api import pareto as pareto
from jax_hremat._api import plan_remat as plan_remat
from jax_hremat._batch import BatchSearch as BatchSearch
from jax_hremat._batch import BatchTrial as BatchTrial
from jax_hremat._batch import max_batch as max_batch
from jax_hremat._fit import FittedStep as FittedStep
from jax_hremat._fit import fit_step as fit_step
from jax_hremat._jax.cudnn import load_cudnn as load_cudnn
from jax_hremat._options.config import SearchConfig as SearchConfig
from jax_hremat._partition.cut_points import partition_by_width as partition_by_width
from jax_hremat._partition.flat import partition_flat as partition_flat
from jax_hremat._partition.repeats import partition_by_repeats as partition_by_repeats
from jax_hremat._partition.score import partition_by_score as partition_by_score
from jax_hremat._plan.certificate import Certificate as Certificate
from jax_hremat._plan.comparison import Comparison as Comparison
from jax_hremat._plan.frontier import Frontier as Frontier
from jax_hremat._plan.infeasible import InfeasibleBudgetError as InfeasibleBudgetError
from jax_hremat._plan.plan import RematPlan as RematPlan
from jax_hremat._planner.config import PlannerConfig as PlannerConfig
from jax_hremat._report.page import report as report
from jax_hremat._shared.errors import BudgetFormatError as BudgetFormatError
from jax_hremat._shared.errors import CertificationError as CertificationError
from jax_hremat._shared.errors import CompilationError as CompilationError
from jax_hremat._shared.errors import GraphFormatError as GraphFormatError
from jax_hremat._shared.errors import HRematError as HRematError
from jax_hremat._shared.errors import HRematWarning as HRematWarning
from jax_hremat._shared.errors import InvalidScheduleError as InvalidScheduleError
from jax_hremat._shared.errors import PlanFormatError as PlanFormatError
from jax_hremat._shared.errors import SolverError as SolverError
from jax_hremat._shared.errors import StalePlanError as StalePlanError
from jax_hremat._shared.errors import TargetUnavailableError as TargetUnavailableError
from jax_hremat._shared.errors import UnknownTargetError as UnknownTargetError
from jax_hremat._shared.errors import UnsupportedConfigError as UnsupportedConfigError
from jax_hremat._shared.errors import UnsupportedProgramError as UnsupportedProgramError
from jax_hremat._shared.progress import progress as progress
from jax_hremat._shared.version import __version__ as __version__
from jax_hremat._solve.backend import SolverConfig as SolverConfig
from jax_hremat._strategies.strategy import Strategy as Strategy
from jax_hremat._xla.calibrate import calibrate as calibrate
from jax_hremat._xla.target import Target as Target
from jax_hremat._xla.target import compiler_options as compiler_options
from jax_hremat._xla.target import get_target as get_target
from jax_hremat._xla.target import list_targets as list_targets

if _TYPE_CHECKING:
    from jax_hremat import linen as linen
    from jax_hremat import nnx as nnx
    from jax_hremat import schedules as schedules
    from jax_hremat import strategies as strategies

# The first two import Flax, which takes longer than the rest, and few need the others; so they wait
# until they are asked for.
_ON_USE = ("linen", "nnx", "schedules", "strategies")


def __getattr__(name: str) -> _Any:
    if name in _ON_USE:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_USE})
