import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hremat._emit.checkpoint import checkpoint as checkpoint_apart
from jax_hremat._jax.trace_context import in_settings_of_this_thread
from jax_hremat._shared.errors import CompilationError, TargetUnavailableError, UnknownTargetError
from jax_hremat._xla import compile as compiling
from jax_hremat._xla.compile import (
    Compiled,
    MemoryStats,
    compile_flat,
    compiler_versions,
    memory_stats,
    never_run,
    with_quick_code,
)
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.hlo.roofline import estimate_step
from jax_hremat._xla.rates import rates
from jax_hremat._xla.target import Target, get_target, list_targets

# Without a GPU the CUDA plugin starts only if none is asked for; with one, this keeps
# autotuning, and so the device, out of what is compared.
jax.config.update("jax_platforms", "cpu")

Shape = jax.ShapeDtypeStruct
CPU = get_target("cpu")
GPU_NAMES = [name for name in list_targets() if name != "cpu"]


@pytest.fixture(params=["cpu", "h200"])
def target(request: pytest.FixtureRequest) -> Target:
    return CPU if request.param == "cpu" else request.getfixturevalue("h200")


def block(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w_in) @ w_out


def mlp_loss(x: jax.Array, *weights: jax.Array, checkpoint: bool = False) -> jax.Array:
    layer = checkpoint_apart(block, prevent_cse=True) if checkpoint else block
    for w_in, w_out in zip(weights[::2], weights[1::2], strict=True):
        x = layer(x, w_in, w_out)
    return (x.astype(jnp.float32) ** 2).sum()


def mlp(rows: int, layers: int, checkpoint: bool = False) -> tuple[Callable[..., object], list]:
    loss = partial(mlp_loss, checkpoint=checkpoint)
    weights = [Shape((128, 512), jnp.bfloat16), Shape((512, 128), jnp.bfloat16)] * layers
    fun = jax.grad(loss, argnums=tuple(range(1, 2 * layers + 1)))
    return fun, [Shape((rows, 128), jnp.bfloat16), *weights]


def test_memory_counts_each_byte_once(target: Target) -> None:
    vector = Shape((1024,), jnp.float32)
    plain = compile_flat(jnp.add, [vector, vector], target)
    assert plain.memory == MemoryStats(8192, 4096, 0, 0, 0)
    assert plain.memory.peak_bytes == 12288
    donated = compile_flat(jnp.add, [vector, vector], target, donate_argnums=0)
    assert donated.memory.alias_bytes == 4096
    assert donated.memory.peak_bytes == 8192


CAPTURED = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


def captures(x: jax.Array) -> jax.Array:
    return x @ CAPTURED


def captures_in_a_loop(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, _: (jnp.sin(h @ CAPTURED), None), x, None, length=5)[0]


def captures_in_a_branch(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, captures, jnp.sin, x)


def captures_and_sorts(x: jax.Array) -> jax.Array:
    return jax.lax.sort((captures(x) + x[0, 0], x), num_keys=2)[1]


@pytest.mark.parametrize(
    "fun", [captures, captures_in_a_loop, captures_in_a_branch, captures_and_sorts]
)
@pytest.mark.parametrize("derived", [lambda f: f, lambda f: jax.grad(lambda x: f(x).sum())])
def test_captured_arrays_are_counted(fun: Any, derived: Any) -> None:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    compiled = jax.jit(derived(fun)).lower(x).compile()
    # XLA's own figure of the peak leaves temporaries out on the CPU, and counts constants.
    assert memory_stats(compiled).fixed_bytes == compiled.memory_analysis().peak_memory_in_bytes
    gpu = compile_flat(derived(fun), [x], get_target("h200"))
    assert gpu.memory.constant_bytes >= CAPTURED.nbytes


def test_what_is_compiled_can_be_inspected(target: Target) -> None:
    compiled = compile_flat(*mlp(64, 1), target)
    assert "ENTRY" in compiled.hlo_text
    assert compiled.hlo_text is compiled.hlo_text


def test_a_recompute_is_merged_on_no_target(h200: Target) -> None:
    def dots(checkpoint: bool, target: Target) -> int:
        text = compile_flat(*mlp(256, 2, checkpoint), target).hlo_text
        return sum(
            " dot(" in line or "__cublas$" in line or "gemm_fusion" in line
            for line in text.splitlines()
            if " = " in line
        )

    for target in (CPU, h200):
        assert dots(True, target) > dots(False, target)


def test_typed_keys_go_in_and_out(target: Target) -> None:
    def fun(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.random.split(key), x * jax.random.bernoulli(key, 0.5, x.shape)

    avals = [jax.eval_shape(lambda: jax.random.key(0)), Shape((256,), jnp.float32)]
    memory = compile_flat(fun, avals, target).memory
    assert memory.argument_bytes == 8 + 1024


def test_odd_signatures(target: Target) -> None:
    nothing = compile_flat(lambda: jnp.zeros(256), [], target)
    assert nothing.memory.output_bytes == 1024
    unused = compile_flat(lambda x, y: x * 2, [Shape((256,), jnp.float32)] * 2, target)
    assert unused.memory.argument_bytes == 1024
    weak = compile_flat(lambda x: x * jnp.ones(4, jnp.bfloat16), [jax.typeof(1.0)], target)
    assert weak.memory.output_bytes == 8


def test_it_compiles_while_another_function_is_traced(target: Target) -> None:
    seen: list[Compiled] = []

    def outer(x: jax.Array) -> jax.Array:
        seen.append(compile_flat(lambda a: (a @ a).sum(), [jax.typeof(x)], target))
        return x * 2

    jax.grad(lambda x: jax.jit(outer)(x).sum())(jnp.ones((64, 64)))
    assert seen[0].memory.argument_bytes == 64 * 64 * 4


TOO_LARGE = """
import os, jax, jax.numpy as jnp
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.target import get_target

def loss(x, w):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return x.sum()

shapes = [jax.ShapeDtypeStruct((rows, 4096), "bfloat16") for rows in (20_000_000, 4096)]
before = dict(os.environ)
compile_flat(jax.grad(loss, 1), shapes, get_target("h200"))
assert dict(os.environ) == before
"""


@pytest.mark.parametrize("level", [None, pytest.param("0", marks=pytest.mark.slow)])
def test_a_trial_larger_than_the_device_gives_no_warning(h200: Target, level: str | None) -> None:
    del h200  # For its skip.
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    if level is not None:
        environment["TF_CPP_MIN_LOG_LEVEL"] = level
    done = subprocess.run(
        [sys.executable, "-c", TOO_LARGE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # Who asks for XLA's warnings gets them.
    assert ("Can't reduce memory use" in done.stderr) is (level is not None)


@pytest.mark.parametrize("name", GPU_NAMES)
def test_every_gpu_target_compiles(name: str, h200: Target) -> None:
    del h200  # For its skip.
    compiled = compile_flat(*mlp(64, 1), get_target(name))
    assert compiled.memory.argument_bytes == 2 * (64 * 128 + 128 * 512 + 512 * 128)
    assert compiled.memory.temp_bytes > 0


def test_the_same_program_takes_the_same_memory(target: Target) -> None:
    # Fresh function objects, so that JAX's own cache does not answer.
    first, second = (compile_flat(*mlp(96, 2), target) for _ in range(2))
    assert first.memory == second.memory
    assert first.hlo_text == second.hlo_text


@pytest.mark.parametrize("checkpoint", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_program_that_is_never_run_takes_the_same_memory(
    target: Target, checkpoint: bool, tmp_path: Path
) -> None:
    # The last finds the kernels of the one before it.
    with_kernels = never_run(target, str(tmp_path))
    targets = (target, never_run(target), with_kernels, with_kernels)
    run, *others = (compile_flat(*mlp(96, 2, checkpoint), t) for t in targets)
    for looked_at in others:
        assert run.memory == looked_at.memory
        assert run.hlo_text == looked_at.hlo_text
    assert any(tmp_path.iterdir()) == (target.platform == "cuda")


def test_a_block_compiled_quickly_costs_nearly_the_same() -> None:
    targets = never_run(CPU), with_quick_code(CPU, "")
    exact, quick = (compile_flat(*mlp(96, 2, True), target) for target in targets)
    assert quick.memory.temp_bytes == pytest.approx(exact.memory.temp_bytes, rel=0.01)
    times_s = [estimate_step(parse_hlo(c.hlo_text), rates(CPU)).time_s for c in (exact, quick)]
    assert times_s[1] == pytest.approx(times_s[0], rel=0.02)


def test_two_threads_give_what_one_gives(target: Target) -> None:
    rows = [32 * i for i in range(1, 5)]
    one = [compile_flat(*mlp(n, 1), target).memory for n in rows]
    with ThreadPoolExecutor(2) as pool:
        two = list(pool.map(lambda n: compile_flat(*mlp(n, 1), target).memory, rows))
    assert one == two


def test_a_config_xla_cannot_read_is_named(h200: Target) -> None:
    broken = dataclasses.replace(h200, name="broken", config_text="gpu_device_info {")
    with pytest.raises(UnknownTargetError, match="config_text"):
        compile_flat(jnp.tanh, [Shape((4,), jnp.float32)], broken)


@pytest.mark.parametrize(
    ("installed", "advice"),
    [({}, r"jax_hremat\[gpu-aot\]"), ({"jax-cuda12-plugin": "0"}, "JAX_PLATFORMS=cpu")],
)
def test_a_plugin_that_is_not_there_or_not_started(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], advice: str
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(compiling.topologies, "get_topology_desc", absent)
    monkeypatch.setattr(compiling, "compiler_versions", lambda: installed)
    target = dataclasses.replace(get_target("h200"), config_text="never compiled")
    with pytest.raises(TargetUnavailableError, match=advice):
        compile_flat(jnp.tanh, [Shape((4,), jnp.float32)], target)


def test_a_missing_toolkit_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def unassembled(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: No PTX compilation provider is available.")

    cpu = jax.local_devices(backend="cpu")[0]
    monkeypatch.setattr(compiling, "_device", lambda *_: cpu)
    monkeypatch.setattr(jax.stages.Lowered, "compile", unassembled)
    with pytest.raises(TargetUnavailableError, match=r"ptxas.*jax_hremat\[gpu-aot\]"):
        compile_flat(partial(jnp.add, 1.0), [Shape((4,), jnp.float32)], get_target("h200"))


def test_what_xla_cannot_compile_is_said_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def beyond_xla(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: no tile sizes satisfy %dot.34\nand more")

    monkeypatch.setattr(jax.stages.Lowered, "compile", beyond_xla)
    message = r"for target 'cpu'.*fault is XLA's.*XLA said: INTERNAL: no tile sizes.*%dot.34$"
    with pytest.raises(CompilationError, match=message):
        compile_flat(partial(jnp.add, 2.0), [Shape((4,), jnp.float32)], get_target("cpu"))


def test_versions_name_what_compiles() -> None:
    versions = compiler_versions()
    assert versions["jax"] == jax.__version__
    assert {"python", "jaxlib"} <= versions.keys()


def test_another_thread_takes_all_settings_along() -> None:
    def settings() -> list[object]:
        names = "enable_x64 default_matmul_precision numpy_dtype_promotion default_prng_impl"
        return [getattr(jax.config, f"jax_{name}") for name in names.split()]

    with (
        ThreadPoolExecutor(1) as pool,
        jax.enable_x64(True),
        jax.default_matmul_precision("float32"),
        jax.numpy_dtype_promotion("strict"),
        jax.default_prng_impl("rbg"),
    ):
        assert pool.submit(settings).result() != settings()
        assert pool.submit(in_settings_of_this_thread(settings)).result() == settings()


def test_one_device_s_program_is_lowered_as_jit_lowers_it() -> None:
    # A typed key, for which JAX adds an operation unless a sharding is given.
    def step(key: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(jax.random.normal(key, w.shape) @ w), key

    args = (jax.random.key(0), jnp.ones((8, 8)))
    compiled = compile_flat(step, args, get_target("cpu"))
    options = dict(get_target("cpu").compiler_options)
    own = jax.jit(step, compiler_options=options).lower(*args).compile().as_text()
    entries = [parse_hlo(text).entry for text in (compiled.hlo_text, own)]
    names = [[(i.name, i.opcode) for i in entry.instructions] for entry in entries]
    assert names[0] == names[1]
