"""Automatic rematerialization for JAX and Flax under a byte budget, with a certificate."""

from jax_hremat._api import apply_plan as apply_plan
from jax_hremat._api import certify as certify
from jax_hremat._api import hremat as hremat
from jax_hremat._api import pareto as pareto
from jax_hremat._api import plan_remat as plan_remat
from jax_hremat._batch import BatchSearch as BatchSearch
from jax_hremat._batch import BatchTrial as BatchTrial
from jax_hremat._batch import max_batch as max_batch
from jax_hremat._compiler.calibrate import calibrate as calibrate
from jax_hremat._compiler.cudnn import load_cudnn as load_cudnn
from jax_hremat._compiler.target import Target as Target
from jax_hremat._compiler.target import compiler_options as compiler_options
from jax_hremat._compiler.target import get_target as get_target
from jax_hremat._compiler.target import list_targets as list_targets
from jax_hremat._fit import FittedStep as FittedStep
from jax_hremat._fit import fit_step as fit_step
from jax_hremat._modes.block_modes import SearchConfig as SearchConfig
from jax_hremat._partition.flat import partition_flat as partition_flat
from jax_hremat._partition.repeats import partition_by_repeats as partition_by_repeats
from jax_hremat._partition.score import partition_by_score as partition_by_score
from jax_hremat._partition.valleys import partition_by_width as partition_by_width
from jax_hremat._planner.bench import PlannerConfig as PlannerConfig
from jax_hremat._plans.frontier import Frontier as Frontier
from jax_hremat._plans.page import report as report
from jax_hremat._plans.plan import Certificate as Certificate
from jax_hremat._plans.plan import RematPlan as RematPlan
from jax_hremat._shared.errors import BudgetFormatError as BudgetFormatError
from jax_hremat._shared.errors import CertificationError as CertificationError
from jax_hremat._shared.errors import CompilationError as CompilationError
from jax_hremat._shared.errors import HRematError as HRematError
from jax_hremat._shared.errors import HRematWarning as HRematWarning
from jax_hremat._shared.errors import InfeasibleBudgetError as InfeasibleBudgetError
from jax_hremat._shared.errors import PlanFormatError as PlanFormatError
from jax_hremat._shared.errors import SolverError as SolverError
from jax_hremat._shared.errors import StalePlanError as StalePlanError
from jax_hremat._shared.errors import TargetUnavailableError as TargetUnavailableError
from jax_hremat._shared.errors import UnknownTargetError as UnknownTargetError
from jax_hremat._shared.errors import UnsupportedConfigError as UnsupportedConfigError
from jax_hremat._shared.errors import UnsupportedProgramError as UnsupportedProgramError
from jax_hremat._solve.backend import SolverConfig as SolverConfig

__version__ = "0.1.0.dev0"
