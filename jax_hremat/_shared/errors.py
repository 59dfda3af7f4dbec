"""The exceptions that the library raises on purpose, most with an example, all with a fix.

`InfeasibleBudgetError`, which holds a plan, is in `_plan/infeasible.py`.
"""

from __future__ import annotations


class HRematError(Exception):
    """Base of the library's own exceptions.

    Other invalid arguments raise `ValueError` or `TypeError`. Catch it to handle refusals of the
    library without catching errors of your own code::

        try:
            step = jax_hremat.hremat(loss_fn, budget="10GiB")(params, batch)
        except jax_hremat.HRematError as error:
            report(error)
    """


class HRematWarning(UserWarning):
    """A plan is valid, but not for the device it is used on or was asked for.

    It is lowered for another platform than its certificate's, or its budget is more than the
    memory of the device. Each text is shown once, under the default filters of `warnings`.

    Example: a plan made for an H200, run on the CPU::

        plan = jax_hremat.plan_remat(loss_fn, budget="70GiB", target="h200")(params, batch)
        jax.jit(jax.grad(jax_hremat.apply_plan(loss_fn, plan)))(params, batch)

    Fix: make a plan, or a certificate, for the device in use::

        plan = jax_hremat.certify(loss_fn, plan, budget="8GiB", target="cpu")(params, batch)
    """


class BudgetFormatError(HRematError, ValueError):
    """A budget is not in a form that the library reads.

    Failing examples (a unit without its B, a float above 1, zero)::

        jax_hremat.hremat(loss_fn, budget="70G")
        jax_hremat.hremat(loss_fn, budget=2.0)
        jax_hremat.hremat(loss_fn, budget=0)

    Fix: give an integer number of bytes, a string with a unit, or a float in (0, 1], a fraction of
    the step's peak without rematerialization::

        jax_hremat.hremat(loss_fn, budget="70GiB")
        jax_hremat.hremat(loss_fn, budget=0.9)
    """


class UnknownTargetError(HRematError, ValueError):
    """A target's name is not known, or a target file cannot be read as one.

    Failing example::

        jax_hremat.get_target("h20")

    Fix: give a name from ``jax_hremat.list_targets()``, or the path of your own TOML file with the
    same keys as the packaged ones::

        jax_hremat.get_target("h200")
        jax_hremat.get_target("targets/my_gpu.toml")
    """


class TargetUnavailableError(HRematError, RuntimeError):
    """The compiler for the target is not installed, or does not accept the target.

    Compiling for a GPU needs JAX's CUDA plugin and two files of the CUDA toolkit, the assembler
    ptxas and the device library libdevice; the rest of the toolkit is not used.

    Failing example, on a machine where one of them is missing::

        jax_hremat.hremat(loss_fn, budget="70GiB", target="h200")(params, batch)

    Fix: install them; no GPU and no driver is needed::

        pip install "jax_hremat[gpu-aot]"

    a function that calls cuDNN, for example its fused attention, also needs that library::

        pip install "jax_hremat[gpu-aot-cudnn]"

    and, on a machine without a GPU, tell JAX before its first use, or the plugin fails to start::

        jax.config.update("jax_platforms", "cpu")
    """


class StalePlanError(HRematError, ValueError):
    """A plan was made for another program than the one it is applied to.

    Failing example: the plan was made before a layer was added to ``loss_fn``::

        jax_hremat.apply_plan(loss_fn, plan)(params, batch)

    Fix: make the plan again for the program as it is now; the message names the first
    difference::

        plan = jax_hremat.plan_remat(loss_fn, budget="70GiB")(params, batch)
    """


class PlanFormatError(HRematError, ValueError):
    """A text is not a plan, or is a plan in a format that this version does not read.

    Failing example::

        jax_hremat.RematPlan.load("params.json")

    Fix: read a file that ``RematPlan.save`` wrote, with a library version of the same plan format;
    otherwise make the plan again::

        plan = jax_hremat.RematPlan.load("plan.json")
    """


class GraphFormatError(HRematError, ValueError):
    """A graph of operations, or a file with one, does not say what schedules are made from.

    Failing example: an operation reads one that comes after it::

        from jax_hremat.schedules import Graph, Operation

        a = Operation(name="a", time_s=1.0, output_bytes=8, reads=(1,))
        b = Operation(name="b", time_s=1.0, output_bytes=8)
        Graph((a, b))

    Fix: what the message says; here, operations in a topological order::

        Graph((b, replace(a, reads=(0,))))
    """


class InvalidScheduleError(HRematError, ValueError):
    """A schedule cannot be carried out: a step needs a value that is not there, or a result is
    missing at the end.

    Failing example: the second operation reads the first::

        simulate(graph, Schedule((Compute(1),)))

    Fix: compute what is read before it, and drop it after it is read; or give only the order of
    the computations, and let the library drop each value as early as possible::

        simulate(graph, with_drops(graph, [0, 1]))
    """


class UnsupportedProgramError(HRematError, TypeError):
    """The program cannot be split into regions and differentiated as it stands.

    Reasons are an ordered effect (its order would change under recompute), a loss that is not
    a scalar, parameters that hold only integers, a mutable array made outside the function, a
    symbolic shape, and the like; the message names the one found.

    Failing example::

        @jax_hremat.hremat(budget="70GiB")
        def loss_fn(params, batch):
            jax.debug.print("{}", batch.sum(), ordered=True)
            return ((params["w"] * batch) ** 2)  # an array, not a scalar

    Fix: drop ``ordered=True``, and reduce the loss::

        @jax_hremat.hremat(budget="70GiB")
        def loss_fn(params, batch):
            jax.debug.print("{}", batch.sum())
            return ((params["w"] * batch) ** 2).mean()
    """


class SolverError(HRematError, RuntimeError):
    """The solver stopped without a plan: it failed, and did not prove that no plan fits.

    Failing example: limits too small to find any solution::

        config = PlannerConfig(solver=SolverConfig(max_nodes=0, max_labels=1))
        jax_hremat.plan_remat(loss_fn, budget="70GiB", config=config)(params, batch)

    Fix: allow more. Reaching a limit *with* a solution is no error: the gap is reported::

        config = PlannerConfig(solver=SolverConfig(max_nodes=10_000, max_labels=100_000))
    """


class UnsupportedConfigError(HRematError, RuntimeError):
    """A setting rules this out: one of JAX's that changes what ``jax.checkpoint`` means, or one of
    how the plan is made; the message names it.

    Failing example: with ``jax_remat3`` nested checkpoints mean something else, and plans would
    not hold::

        jax.config.update("jax_remat3", True)
        jax_hremat.hremat(loss_fn, budget="70GiB")(params, batch)

    Fix: turn the setting off before the step is traced::

        jax.config.update("jax_remat3", False)
    """


class CompilationError(HRematError, RuntimeError):
    """XLA could not compile the step, or a part of it without rematerialization, for the target.

    Some versions of XLA cannot compile some operations at some shapes; the step without a plan then
    fails to compile as well. If a part fails only with something rematerialized, that option is
    left out, with a warning.

    Fix: compile the step without a plan first (``jax.jit(step).lower(*args).compile()``). If that
    fails, change the shapes that the message names, or the version of jax. If it succeeds, plan
    with ``PlannerConfig(cost="analytic")``, which compiles no parts, and please report the error.
    """


class CertificationError(HRematError, RuntimeError):
    """A plan about to be returned does not hold.

    Its compiled peak is above the budget: plans that exceed the budget are discarded earlier, and
    a budget that no plan meets gives an `InfeasibleBudgetError`, so this is a fault of the library.
    Or, of a plan that is certified again, the compiled step may read what it has overwritten: a
    fault of XLA before JAX 0.12, of which new plans are kept free.

    Fix: in the first case none; please report it, with the program. In the second, make a plan for
    the program, or use JAX 0.12.
    """
