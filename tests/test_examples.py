"""The examples, as a reader runs them, at a size that takes seconds."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

import encoder_decoder
import fit_llama
import fused_attention
import jax_hremat
import nnx_vit
import too_small
import train_gpt
import train_yaml
import unet_diffusion

# Few candidates, so that planning takes seconds.
QUICK = jax_hremat.PlannerConfig(
    search=jax_hremat.SearchConfig(max_packings=1, max_saved_sets=0, max_segments=1, max_workers=2),
    max_rounds=1,
)

# No block is compiled, only whole steps.
BY_SHAPES = dataclasses.replace(QUICK, max_rounds=0, cost="analytic")


@pytest.mark.slow
def test_train_gpt_learns_within_its_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    result = train_gpt.main(size="tiny", steps=30, budget=0.7, config=QUICK, report=page)
    assert result is not None
    assert result.loss_after < result.loss_before - 0.5
    certificate = result.plan.certificate
    assert certificate.peak_bytes <= certificate.budget_bytes < result.plan.baseline_peak_bytes

    # What is certified is the step that ran.
    assert result.peak_bytes == certificate.peak_bytes
    printed = capsys.readouterr().out
    shown = {
        row: float(amount) for row, amount in re.findall(r"│ ([a-z ]+?) +│ ([\d.]+) MiB", printed)
    }
    assert shown["compiled memory"] <= shown["budget"]
    assert shown["compiled memory"] == pytest.approx(certificate.peak_bytes / 2**20, abs=0.1)
    assert result.plan.memory_chart() in printed
    assert page.stat().st_size > 0 and page.name in printed.splitlines()[-1]


@pytest.mark.slow
def test_train_gpt_only_plans_for_a_named_target(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        result = train_gpt.main(
            size="tiny", budget=1.0, target="h200", config=BY_SHAPES, report=None
        )
    except jax_hremat.TargetUnavailableError as error:
        pytest.skip(f"nothing compiles for a GPU here: {error}")
    assert result is None
    assert "h200" in capsys.readouterr().out


@pytest.mark.slow
def test_fused_attention_is_planned_without_a_gpu(
    h200: jax_hremat.Target, capsys: pytest.CaptureFixture[str]
) -> None:
    if not jax_hremat.load_cudnn():
        pytest.skip("cuDNN is not installed")
    small = dict(layers=2, width=128, batch=1, context=64)
    plan = fused_attention.main(**small, budget=1.0, config=BY_SHAPES)
    assert plan.certificate.holds and plan.certificate.target == "h200"
    assert not plan.unpriced
    assert "certified peak" in capsys.readouterr().out


@pytest.mark.slow
def test_fit_llama_learns_within_its_budget() -> None:
    plan, losses = fit_llama.main(budget=0.8, steps=10, config=BY_SHAPES)
    assert losses[-1] < losses[0] - 0.3
    certificate = plan.certificate
    assert certificate.peak_bytes <= certificate.budget_bytes < plan.baseline_peak_bytes


@pytest.mark.slow
def test_nnx_vit_learns_within_its_budget() -> None:
    plan, losses = nnx_vit.main(steps=12, batch=32, config=QUICK)
    assert losses[-1] < losses[0] - 0.3
    certificate = plan.certificate
    assert certificate.peak_bytes <= certificate.budget_bytes < plan.baseline_peak_bytes


@pytest.mark.slow
def test_unet_diffusion_learns_within_its_budget() -> None:
    plan, losses = unet_diffusion.main(steps=8, batch=8, budget=0.9, config=BY_SHAPES)
    assert losses[-1] < 0.7 * losses[0]
    certificate = plan.certificate
    assert certificate.peak_bytes <= certificate.budget_bytes < plan.baseline_peak_bytes


@pytest.mark.slow
def test_encoder_decoder_learns_with_planned_layers() -> None:
    plans, losses = encoder_decoder.main(steps=40, budget=0.9, config=BY_SHAPES)
    assert losses[-1] < losses[0] - 0.2
    # Two layers of either kind, planned once each.
    assert len(plans) == 2
    assert all(plan.certificate.holds for plan in plans)


@pytest.mark.slow
def test_a_trainer_that_a_yaml_file_drives(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "examples" / "mixer.yaml"
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    given["model"]["layers"] = 2
    given["training"]["steps"] = 12
    given["remat"]["config"] = dict(
        max_rounds=0, cost="analytic", search=dict(max_packings=1), cache_dir=str(tmp_path)
    )
    plan, losses = train_yaml.main(given)
    assert plan is not None
    assert plan.certificate.peak_bytes <= plan.certificate.budget_bytes < plan.baseline_peak_bytes
    assert losses[-1] < losses[0] - 0.3
    assert list(tmp_path.iterdir())
    del given["remat"]
    nothing, plain = train_yaml.main(given)
    assert nothing is None
    np.testing.assert_allclose(losses, plain, rtol=1e-2)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "examples" / "frontier.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    scope: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            # Kept without results, so that a diff shows what was written.
            assert cell["outputs"] == []
            code = "".join(cell["source"])
            exec(compile(code, f"frontier.ipynb, cell {number}", "exec"), scope)
    assert len(scope["frontier"]) >= 2
    assert scope["plan"].certificate.holds
    assert "loss " in capsys.readouterr().out


@pytest.mark.slow
def test_too_small_says_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    plan = too_small.main(config=BY_SHAPES)
    printed = capsys.readouterr().out
    assert "no plan fits the budget of 1.00 MiB" in printed
    assert f"at {plan.certificate.peak_bytes} bytes there is one" in printed


def test_readme_example_runs() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    first_block = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert first_block is not None
    scope: dict[str, Any] = {}
    exec(compile(first_block[1], "README.md", "exec"), scope)
    expected = jax.value_and_grad(scope["loss_fn"])(scope["params"], scope["x"])
    same = partial(np.testing.assert_allclose, rtol=1e-4)
    jax.tree.map(same, (scope["loss"], scope["grads"]), expected)


@pytest.mark.slow
def test_guide_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (Path(__file__).parents[1] / "docs" / "how-to" / "guide.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) >= 9
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"guide.md, block {number}", "exec"), scope)
    assert {path.name for path in tmp_path.iterdir()} == {
        "frontier.csv",
        "frontier.png",
        "plan.json",
        "report.html",
    }
    assert scope["search"].best.fitted is not None
    assert scope["plan"].certificate.holds
    assert "time per GiB" in capsys.readouterr().out
