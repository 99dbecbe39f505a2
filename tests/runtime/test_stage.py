"""A stage gives the same bits whatever the schedule: whole or split backwards, recomputes, any order, any cut."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atlas.errors import AtlasError
from atlas.runtime import compiling
from atlas.runtime.models.config import DecoderConfig, gpt
from atlas.runtime.models.decoder import TIED_EMBEDDING, TIED_HEAD, LayerRange, build, loss_of
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.optimizer import AdamW, clip_factor, global_norm, norms_of, squares_of
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.stage import Stage
from atlas.runtime.stage_set import add_tied

torch.set_num_threads(1)
NUM_MICROBATCHES = 3
GPT = gpt(num_layers=3, width=16, num_heads=2, vocabulary=32, max_length=8, dropout=0.2)
QWEN = DecoderConfig(
    "qwen3", num_layers=3, width=16, num_heads=4, num_kv_heads=2, head_width=8, ffn_width=24, vocabulary=32,
    max_length=8, qk_norm=True, tied=True,
)  # fmt: skip
MODELS = {"gpt with dropout": GPT, "tied qwen3": QWEN}
TRACED = "aot_eager"
"""A backend of torch's compiler that only traces."""


def microbatch(slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(slot * 10 + pipeline))
    return tokens[:, :-1], tokens[:, 1:]


def task_of(config: DecoderConfig, layers: tuple[int, ...], dtype: torch.dtype = torch.float32) -> DecoderTask:
    return DecoderTask(config, layers, 2, 8, NUM_MICROBATCHES, microbatch, dtype, seed=3)


def stages_of(task: DecoderTask, backend: str = "", *, by_layer: bool = False) -> list[Stage]:
    num_stages = len(task.layers_per_stage)
    scale = 1.0 / NUM_MICROBATCHES
    return [Stage(task, s, num_stages, 0, scale, backend=backend, by_layer=by_layer) for s in range(num_stages)]


def run(stages: list[Stage], order: str, first_slot: int = 0) -> None:
    """`F0 R0 B0 ...`: each op on all stages in turn, forwards up, backwards down."""
    gradients: dict[tuple[int, int], Tensor | None] = {}
    recomputed = {op[1:] for op in order.split() if op[0] == "R"}
    for stage in stages:
        stage.gradients.begin(first_slot)
    for op in order.split():
        kind, slot = op[0], first_slot + int(op[1:])
        if kind == "F":
            x = None
            for stage in stages:
                x = stage.forward(slot, x, keep=op[1:] not in recomputed)
            continue
        for s in range(len(stages) - 1, -1, -1):
            if kind == "R":
                stages[s].recompute(slot)
            elif kind == "W":
                stages[s].backward_weight(slot)
            else:
                half = stages[s].backward if kind == "B" else stages[s].backward_input
                gradients[s, slot] = half(slot, gradients.get((s + 1, slot)))


def gradients_of(stages: list[Stage]) -> dict[str, Tensor]:
    """By name, the tied ends joined."""
    found = {}
    for stage in stages:
        for name, parameter in stage.named_parameters.items():
            parameter.grad = stage.flat.gradient_of[name].clone()
            found[name] = parameter
    if stages[0].module.config.tied:
        add_tied(found)
    return {name: parameter.grad for name, parameter in found.items() if parameter.grad is not None}


def alone(config: DecoderConfig) -> dict[str, Tensor]:
    """Plain torch: one module, autograd's own sums."""
    task = task_of(config, (config.num_layers,))
    model = build(config, LayerRange.whole(config), seed=3)
    for slot in range(NUM_MICROBATCHES):
        tokens, targets = microbatch(slot, 0)
        loss = loss_of(model(tokens, task.draw(slot, 0)), targets) / NUM_MICROBATCHES
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if config.tied:
        gradients[TIED_EMBEDDING] = gradients[TIED_HEAD] = gradients[TIED_EMBEDDING] + gradients[TIED_HEAD]
    return gradients


ORDERS = {
    "gpipe": "F0 F1 F2 B0 B1 B2",
    "one by one": "F0 B0 F1 B1 F2 B2",
    "backwards": "F2 F1 F0 B2 B1 B0",
    "recompute": "F0 F1 F2 R0 B0 R1 B1 R2 B2",
    "split": "F0 I0 F1 I1 F2 I2 W2 W1 W0",
    "split, recompute, out of order": "F0 F1 F2 R2 I2 R0 I0 W0 B1 W2",
}


@pytest.mark.parametrize("name", MODELS)
def test_every_schedule_and_every_cut_gives_the_same_bits(name: str) -> None:
    config, reference = MODELS[name], None
    for layers, order in itertools.product([(3,), (1, 2), (0, 2, 1), (1, 1, 1, 0)], ORDERS.values()):
        stages = stages_of(task_of(config, layers), by_layer=layers == (0, 2, 1))
        run(stages, order)
        gradients = gradients_of(stages)
        if reference is None:
            reference = gradients
            for key, expected in alone(config).items():
                assert torch.allclose(gradients[key], expected, rtol=1e-4, atol=1e-7), key
        assert gradients.keys() == reference.keys()
        for key in reference:
            assert torch.equal(gradients[key], reference[key]), (layers, order, key)
            assert gradients[key].abs().sum() > 0 or "k.bias" in key, key


def test_compiled_layers_give_the_same_bits_in_every_schedule_and_cut_and_agree_with_eager_ones() -> None:
    config = replace(QWEN, dropout=0.1, qkv_bias=True)
    eager = stages_of(task_of(config, (3,)))
    run(eager, ORDERS["gpipe"])
    expected, reference = gradients_of(eager), None
    for layers, order in (((3,), "gpipe"), ((1, 2), "split"), ((0, 2, 1), "recompute")):
        stages = stages_of(task_of(config, layers), TRACED, by_layer=order == "recompute")
        run(stages, ORDERS[order])
        gradients = gradients_of(stages)
        reference = reference or gradients
        for key in expected:
            assert torch.equal(gradients[key], reference[key]), (layers, order, key)
            assert torch.allclose(gradients[key], expected[key], rtol=1e-4, atol=1e-7), key


def test_a_recompute_gives_the_activations_of_the_forward() -> None:
    stages = stages_of(task_of(GPT, (2, 1)))
    before = {}
    for slot in (0, 1):
        before[slot] = stages[0].forward(slot, None, keep=False)
        stages[1].forward(slot, before[slot].clone(), keep=False)
    for slot in (1, 0):  # in another order
        stages[0].recompute(slot)
        assert torch.equal(stages[0]._passes[slot][-1].output, before[slot])
        loss = stages[1].losses[slot]
        stages[1].recompute(slot)
        assert stages[1].losses[slot] == loss


def test_dropout_differs_by_step_microbatch_pipeline_and_layer_and_is_off_without_a_draw() -> None:
    task = task_of(GPT, (3,))
    model = task.build_stage(0, 1)
    tokens = microbatch(0, 0)[0]
    outputs = [model(tokens, task.draw(slot, pipeline)) for slot, pipeline in ((0, 0), (1, 0), (3, 0), (0, 1))]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations([*outputs, model(tokens)], 2))
    assert torch.equal(outputs[0], model(tokens, task.draw(0, 0)))
    draw = task.draw(0, 0)
    assert draw is not None
    ones = torch.ones(64, 64)
    masks = [draw.dropout(ones, 0.25, layer, site) for layer in (0, 1) for site in ("attention", "mlp")]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(masks, 2))
    assert abs(masks[0].mean().item() - 1.0) < 0.05


def test_a_split_backward_frees_the_graph_and_leaves_the_products_for_later() -> None:
    stage = stages_of(task_of(replace(GPT, dropout=0.0), (3,)))[0]
    run([stage], "F0 I0")
    assert not stage._passes
    assert not stage._inputs
    assert sum(map(len, stage._products[0])) == 3 * 6  # q, k, v, o, up, down of every layer; never the head
    stage.backward_weight(0)
    assert not stage._products


# ---- tied ends -------------------------------------------------------------------------------------------------------
def squares(stage: Stage) -> list[float]:
    gradients = [stage.named_parameters[name].grad for name in stage.counted]
    return squares_of(norms_of([gradient for gradient in gradients if gradient is not None]))


def test_tied_ends_on_two_stages_stay_one_matrix_and_equal_one_stage() -> None:
    whole, split = stages_of(task_of(QWEN, (3,))), stages_of(task_of(QWEN, (1, 2)))
    settings = OptimizerSettings(LearningRate(1e-2))
    together = AdamW(whole[0].named_parameters, settings)
    apart = [AdamW(stage.named_parameters, settings) for stage in split]
    for step in range(3):
        for stages in (whole, split):
            run(stages, ORDERS["gpipe"], step * NUM_MICROBATCHES)
            for stage in stages:
                stage.adopt()
        add_tied(whole[0].named_parameters)
        first, last = (stage.named_parameters for stage in split)
        gradients = first[TIED_EMBEDDING].grad, last[TIED_HEAD].grad  # each end receives the other's
        assert gradients[0] is not None
        assert gradients[1] is not None
        first[TIED_EMBEDDING].grad, last[TIED_HEAD].grad = (gradients[0] + gradients[1] for _ in range(2))
        norms = [global_norm(map(squares, stages)) for stages in (whole, split)]
        assert norms[0] == norms[1] > 0.1
        once = [p.grad.flatten() for n, p in whole[0].named_parameters.items() if n != TIED_HEAD and p.grad is not None]
        assert abs(norms[0] - torch.cat(once).norm().item()) <= 1e-6 * norms[0]
        for optimizer in (together, *apart):
            optimizer.factor = clip_factor(norms[0], 0.1)
            assert optimizer.factor < 1.0
            optimizer.step()
            optimizer.zero_grad()
        mine = {**first, **last}
        assert torch.equal(mine[TIED_EMBEDDING], mine[TIED_HEAD])
        for name, parameter in whole[0].named_parameters.items():
            assert torch.equal(parameter, mine[name]), name


# ---- bf16 ------------------------------------------------------------------------------------------------------------
def test_bf16_stages_sum_in_float32_and_step_by_master_weights() -> None:
    stages = stages_of(task_of(replace(QWEN, tied=False), (1, 2), torch.bfloat16))
    stages[0].warm_up()
    stages[1].warm_up()
    run(stages, ORDERS["split"])
    exact = alone(replace(QWEN, tied=False))
    for stage in stages:
        for name, parameter in stage.named_parameters.items():
            total = stage.flat.gradient_of[name]
            assert parameter.dtype == torch.bfloat16
            assert total.dtype == torch.float32
            assert (total - exact[name]).norm() <= 0.1 * exact[name].norm(), name
            parameter.grad = total
        optimizer = AdamW(stage.named_parameters, OptimizerSettings(LearningRate(1e-6)))
        before = [p.detach().clone() for p in stage.named_parameters.values()]
        for _ in range(4):
            optimizer.step()
        # Each step is far below bf16's resolution; the masters hold on to it.
        masters = [optimizer.state[p]["master"] for p in stage.named_parameters.values()]
        assert all(bool((m != b.float()).any()) for m, b in zip(masters, before, strict=True))


def test_the_compiler_is_imported_while_a_stage_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(compiling.CACHE, str(tmp_path))
    monkeypatch.setattr(compiling, "MODULES", ("no_such_module", "colorsys"))
    monkeypatch.setattr(compiling, "_loading", [])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    compiling.load_ahead(TRACED)
    assert not compiling._loading, "only for kernels"
    compiling.load_ahead(compiling.INDUCTOR)
    compiling.compiler(compiling.INDUCTOR)
    assert "colorsys" in sys.modules, "it waits until all are imported, and some may be missing"


# ---- a compiler that is missing, kernels of another torch ------------------------------------------------------------
def test_without_a_compiler_layers_run_eagerly_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiling.available(compiling.INDUCTOR, "cpu", 1) == compiling.EAGER
    assert [record.getMessage() for record in caplog.records] == [
        "compile: this host has no C++ compiler (no-such-compiler); layers run eagerly, which is slower"
    ]


def test_kernels_of_another_torch_are_not_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(compiling.CACHE, "")
    monkeypatch.delenv(compiling.CACHE)
    (tmp_path / "atlas" / "compiled" / "torch-1.0").mkdir(parents=True)
    for _ in range(2):
        compiling.compiler(compiling.INDUCTOR)
    assert os.environ[compiling.CACHE] == str(tmp_path / "atlas" / "compiled" / f"torch-{torch.__version__}")
    assert len(caplog.records) == 1
    assert "kernels compiled with torch-1.0" in caplog.text


def test_kernels_chosen_by_timing_are_refused_where_bits_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling.require_fixed_kernels(compiling.INDUCTOR, "ordered")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    with pytest.raises(AtlasError, match=r"TORCHINDUCTOR_MAX_AUTOTUNE=1 .* Unset it, or train with sums: fast"):
        compiling.require_fixed_kernels(compiling.INDUCTOR, "ordered")
    compiling.require_fixed_kernels(compiling.INDUCTOR, "fast")
    compiling.require_fixed_kernels(compiling.EAGER, "ordered")
