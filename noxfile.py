"""What is checked, and how: `nox -s <session>`; what follows `--` goes to the session's command."""

import shutil
from pathlib import Path

import nox

OLDEST_PYTHON, NEWEST_PYTHON = "3.11", "3.12"
OLDEST_JAX = ("jax==0.10.2", "jaxlib==0.10.2")
# Two files of tests at a time; in one file, tests share what is dear to make.
PYTEST = ("python", "-m", "pytest", "-n", "2", "--dist", "loadfile")
# What a wheel could lack: the target files and the marker of a typed package.
USE_WHEEL = """
import importlib.resources, jax_hremat
assert (importlib.resources.files(jax_hremat) / "py.typed").is_file()
for name in jax_hremat.list_targets():
    print(name, jax_hremat.compiler_options(name))
assert "h200" in jax_hremat.list_targets()
"""

nox.options.sessions = ["lint", "typecheck", "tests"]


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting (ruff)."""
    session.install("ruff>=0.15")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session(python=OLDEST_PYTHON)
def typecheck(session: nox.Session) -> None:
    """Types of the package and of the benchmarks (pyright)."""
    session.install(".[examples,plot]", "pyright[nodejs]>=1.1.400")
    session.run("pyright", *session.posargs)


@nox.session(python=OLDEST_PYTHON)
def tests(session: nox.Session) -> None:
    """The test suite on the oldest supported JAX."""
    session.install(".[test,gpu-aot]", *OLDEST_JAX)
    session.run(*PYTEST, *session.posargs)


@nox.session(python=NEWEST_PYTHON)
def tests_newest(session: nox.Session) -> None:
    """The test suite on the newest JAX, with the newest of everything else."""
    session.install("--upgrade", "--upgrade-strategy", "eager", ".[test,gpu-aot]")
    session.run(*PYTEST, *session.posargs)


@nox.session(python=OLDEST_PYTHON)
def slow(session: nox.Session) -> None:
    """The tests that the default run leaves out, and all examples of the property tests."""
    session.install(".[test,gpu-aot]")
    session.run(*PYTEST, "-m", "slow", *session.posargs, env={"JAX_HREMAT_TEST_OPTIMISED": "1"})


@nox.session(python=NEWEST_PYTHON)
def gpu(session: nox.Session) -> None:
    """The tests that need an attached GPU."""
    session.install(".[test,gpu-aot]", "jax[cuda12]")
    session.run(
        "python", "-m", "pytest", "-m", "gpu", *session.posargs, env={"JAX_HREMAT_TEST_GPU": "1"}
    )


@nox.session(python=OLDEST_PYTHON)
def browser(session: nox.Session) -> None:
    """The tests that look at the report in Chromium, which must be installed, with its driver."""
    session.install(".[test]", "selenium>=4.30")
    session.run("python", "-m", "pytest", "-m", "browser", *session.posargs)


@nox.session(python=OLDEST_PYTHON)
def examples(session: nox.Session) -> None:
    """The examples as the README runs them, at a size that takes a minute."""
    session.install(".[examples]")
    arguments = session.posargs or ["--size", "tiny", "--steps", "50", "--budget", "0.7"]
    session.run("python", "examples/train_gpt.py", *arguments)
    for name in ("fit_llama", "nnx_vit", "unet_diffusion", "encoder_decoder", "too_small"):
        session.run("python", f"examples/{name}.py")
    session.run("python", "examples/train_yaml.py", "examples/mixer.yaml")
    session.install(".[gpu-aot-cudnn]")
    session.run("python", "examples/fused_attention.py")


@nox.session(python=OLDEST_PYTHON)
def docs(session: nox.Session) -> None:
    """The documentation site, warnings and broken links within it being errors."""
    session.install(".[docs]")
    session.run("sphinx-build", "-EW", "--keep-going", "-b", "html", "docs", "site")


@nox.session(python=OLDEST_PYTHON)
def build(session: nox.Session) -> None:
    """Builds the source archive and from it the wheel, then uses the wheel outside the tree."""
    dist = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(dist))
    (wheel,) = dist.glob("*.whl")
    session.install(str(wheel))
    session.chdir(dist)
    session.run("python", "-c", USE_WHEEL)


@nox.session(python=OLDEST_PYTHON)
@nox.parametrize(
    "of",
    "table scale planning recurrence frontier optimum partitioners equality times training "
    "batches mesh attention fused compared strategies attached".split(),
)
def benchmarks(session: nox.Session, of: str) -> None:
    """One of the benchmarks (many minutes): `nox -s "benchmarks(of='scale')" -- --models lstm`."""
    session.install(".[examples,gpu-aot-cudnn,plot]")
    session.run("python", "-m", f"benchmarks.{of}", *session.posargs)
