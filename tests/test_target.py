import dataclasses
import pickle
from importlib import resources
from pathlib import Path

import pytest

import jax_hremat
from jax_hremat._shared.errors import UnknownTargetError
from jax_hremat._xla import calibrate
from jax_hremat._xla.rates import rates
from jax_hremat._xla.target import (
    Target,
    compiler_options,
    get_target,
    list_targets,
)

H200_TOML = (resources.files("jax_hremat") / "targets" / "h200.toml").read_text()


@pytest.mark.parametrize("name", list_targets())
def test_packaged_targets_are_whole(name: str) -> None:
    target = get_target(name)
    assert target.name == name
    assert (target.platform == "cuda") == (target.config_text is not None)
    assert {"bf16", "f32"} <= target.matrix_flops_per_s.keys()
    assert target.matrix_flops_per_s["bf16"] >= target.vector_flops_per_s
    assert target.source


@pytest.mark.parametrize("name", [name for name in list_targets() if name != "cpu"])
def test_the_config_agrees_with_the_figures(name: str) -> None:
    target = get_target(name)
    assert target.config_text is not None
    lines = (line.partition(":") for line in target.config_text.splitlines())
    config = {key.strip(): value.strip() for key, _, value in lines}
    assert int(config["memory_bandwidth"]) == pytest.approx(target.bandwidth_bytes_per_s, rel=0.01)
    assert int(config["device_memory_size"]) == pytest.approx(target.memory_bytes, rel=0.01)
    ops_per_clock = 2 * int(config["core_count"]) * int(config["fpus_per_core"])
    peak_flops_per_s = ops_per_clock * float(config["clock_rate_ghz"]) * 1e9
    assert peak_flops_per_s == pytest.approx(target.vector_flops_per_s, rel=0.05)


def test_names_ignore_case_and_targets_pass_through() -> None:
    target = get_target("H200")
    assert target is get_target(target)
    assert target == get_target("h200")
    assert hash(target) == hash(get_target("h200"))
    assert target != get_target("h100")


def test_targets_are_immutable_and_pickle() -> None:
    target = get_target("cpu")
    with pytest.raises(AttributeError):
        target.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        target.compiler_options["x"] = "y"  # pyright: ignore[reportIndexIssue]
    assert pickle.loads(pickle.dumps(target)) == target


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownTargetError, match=r"'h20'; did you mean 'h200'\? Known.*a100-80gb"):
        get_target("h20")
    with pytest.raises(UnknownTargetError, match=r"named 'xyzzy'\. Known targets are"):
        get_target("xyzzy")


def test_rates_are_peaks_times_efficiency() -> None:
    target = get_target("h200")
    sustained = rates(target)
    assert sustained.flops_per_s["bf16"] == pytest.approx(0.6 * 989.4e12)
    assert sustained.vector_flops_per_s == pytest.approx(0.6 * 66.9e12)
    assert sustained.bytes_per_s == pytest.approx(0.8 * 4.8e12)
    assert sustained.launch_s == target.launch_s


def test_compiler_options_are_a_fresh_dict() -> None:
    target = dataclasses.replace(get_target("cpu"), compiler_options={"xla_a": "1"})
    options = compiler_options(target)
    assert options == {"xla_a": "1"}
    options.clear()
    assert compiler_options(target)


def test_no_packaged_target_needs_options() -> None:
    assert all(compiler_options(name) == {} for name in list_targets())


def test_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(H200_TOML.replace('name = "h200"', 'name = "mine"'))
    for spec in (path, str(path)):
        target = get_target(spec)
        assert isinstance(target, Target)
        assert target.name == "mine"
        assert target.memory_bytes == get_target("h200").memory_bytes


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('name = "h200"', "", "'name' is missing"),
        ('name = "h200"', "name = 3", "'name' is 3, not a text"),
        ('platform = "cuda"', 'platform = "tpu"', "'platform' is 'tpu'"),
        ('platform = "cuda"', 'platform = "cpu"', "'config_text' goes with"),
        ("memory_bytes = ", "memory_byte = ", "'memory_byte' .*did you mean 'memory_bytes'"),
        ("memory_bytes = ", "memory_bytes = -", "'memory_bytes' is -.*not a positive integer"),
        ("launch_s = 2e-6", "launch_s = nan", "'launch_s' is nan, not positive"),
        ("flops_efficiency = 0.6", "flops_efficiency = 60", "'flops_efficiency' is 60"),
        ("bf16 = ", 'bf16 = "fast" #', "'matrix_flops_per_s.bf16' is 'fast'"),
        ("[compiler_options]", "[compiler_options]\nx = true", "'compiler_options.x' is True"),
        ('name = "h200"', 'name = "h200', "is not TOML"),
    ],
)
def test_a_malformed_file_is_refused_by_key(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    assert old in H200_TOML
    path = tmp_path / "mine.toml"
    path.write_text(H200_TOML.replace(old, new, 1))
    with pytest.raises(UnknownTargetError, match=complaint) as caught:
        get_target(path)
    assert "mine.toml" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownTargetError, match="cannot be read"):
        get_target(tmp_path / "absent.toml")


def test_calibrated_rates_are_plausible_and_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One short run of each, for which the clock is still fine enough.
    monkeypatch.setattr(calibrate, "_NUM_RUNS", 1)
    monkeypatch.setattr(calibrate, "_LONG_ENOUGH_S", 1e-4)
    told: list[str] = []
    target = jax_hremat.calibrate(lambda stage, done, total: told.append(stage))
    assert told[0] == "products of f32" and told[-1] == "calibrated"
    # Between a slow core and the fastest device there is.
    assert 1e8 < target.matrix_flops_per_s["f32"] < 1e17
    assert 1e8 < target.convolution_flops_per_s["bf16"] < 1e17
    assert 0 < target.launch_s < 1e-3
    assert 1e8 < target.bandwidth_bytes_per_s < 1e14
    assert 1e7 < target.vector_flops_per_s < 1e16
    assert (target.flops_efficiency, target.bandwidth_efficiency) == (1.0, 1.0)
    assert target.source.startswith("measured on")
    path = tmp_path / "mine.toml"
    target.save(path)
    assert get_target(path) == target


@pytest.mark.parametrize("name", list_targets())
def test_every_target_can_be_saved(name: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.toml"
    get_target(name).save(path)
    assert get_target(str(path)) == get_target(name)
