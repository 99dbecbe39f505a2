"""AdamW against torch's, learning rates by value, clipping against torch's."""

from __future__ import annotations

import math

import pytest
import torch

from atlas.errors import SpecError
from atlas.runtime.flat import FlatParameters
from atlas.runtime.flat_layout import ALIGNMENT
from atlas.runtime.optimizer import AdamW, FlatSlice, clip_factor, global_norm, make_optimizer, norms_of, squares_of
from atlas.runtime.recipe import LearningRate, OptimizerSettings

SHAPES = {"matrix": (5, 7), "bias": (7,), "other": (3, 3)}


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}


def set_gradients(of: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in of.values():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_adamw_is_torchs_to_the_bit() -> None:
    rate = LearningRate(1e-2, "cosine", 3, 10)
    ours, theirs = parameters(), parameters()
    mine = AdamW(ours, OptimizerSettings(rate, beta1=0.8, beta2=0.97, weight_decay=0.3))
    groups = [
        {"params": [theirs["matrix"], theirs["other"]], "weight_decay": 0.3},
        {"params": [theirs["bias"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.8, 0.97), foreach=False)
    for step in range(12):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for group in reference.param_groups:
            group["lr"] = rate.at(step)
        mine.step()
        reference.step()
        for name in SHAPES:
            assert torch.equal(ours[name], theirs[name]), (step, name)
    assert mine.num_steps == 12


def test_a_resumed_optimizer_is_equal_to_the_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        straight, broken = parameters(dtype=dtype), parameters(dtype=dtype)
        settings = OptimizerSettings(LearningRate(1e-2, "linear", 1, 9))
        first, second = AdamW(straight, settings), AdamW(broken, settings)
        for step in range(6):
            if step == 3:
                saved = {n: {k: v.clone() for k, v in second.state[p].items()} for n, p in broken.items()}
                broken = {n: torch.nn.Parameter(p.detach().clone()) for n, p in broken.items()}
                second = AdamW(broken, settings)
                second.num_steps = 3
                for name, parameter in broken.items():
                    for slot, kept in second.state[parameter].items():
                        kept.copy_(saved[name][slot])
            set_gradients(straight, step)
            set_gradients(broken, step)
            first.step()
            second.step()
        assert all(torch.equal(straight[n], broken[n]) for n in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_flat_memory_take_the_steps_of_single_parameters(dtype: torch.dtype) -> None:
    single, module = parameters(dtype=dtype), torch.nn.ParameterDict(parameters(dtype=dtype))
    flat = FlatParameters(module)
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        assert torch.equal(parameter, single[name])
        parameter.grad_dtype = torch.float32
        parameter.grad = flat.gradient_of[name]
    settings = OptimizerSettings(LearningRate(1e-2))
    cut = ALIGNMENT  # in the middle: two owners
    owners = [AdamW(named, settings, [FlatSlice(flat, a, b)]) for a, b in ((0, cut), (cut, flat.num_values))]
    alone = AdamW(single, settings)
    for step in range(3):
        set_gradients(single, step)
        for name in SHAPES:
            named[name].grad.copy_(single[name].grad)  # type: ignore[union-attr, arg-type]
        for optimizer in (alone, *owners):
            optimizer.factor = 0.5
            optimizer.step()
    assert all(torch.equal(named[name], single[name]) for name in SHAPES)
    kept = {id(p): state for owner in owners for p, state in owner.state.items()}
    for name in SHAPES:
        for slot, tensor in alone.state[single[name]].items():
            assert torch.equal(kept[id(named[name])][slot], tensor), (name, slot)


def test_two_names_of_one_memory_step_once_and_share_their_state() -> None:
    once, twice = parameters(), parameters()
    twice["again"] = torch.nn.Parameter(twice["matrix"].detach())
    settings = OptimizerSettings(LearningRate(1e-2))
    first, second = AdamW(once, settings), AdamW(twice, settings)
    for step in range(3):
        for named in (once, twice):
            set_gradients({n: named[n] for n in SHAPES}, step)
        twice["again"].grad = twice["matrix"].grad
        first.step()
        second.step()
    assert torch.equal(once["matrix"], twice["matrix"])
    assert second.state[twice["again"]] is second.state[twice["matrix"]]
    second.zero_grad()
    assert twice["again"].grad is None


def test_learning_rates() -> None:
    assert [LearningRate(2.0).at(k) for k in (0, 100)] == [2.0, 2.0]
    warm = LearningRate(2.0, "linear", num_warmup_steps=4, num_steps=8, floor=0.4)
    assert [round(warm.at(k), 6) for k in range(10)] == [0.5, 1.0, 1.5, 2.0, 2.0, 1.6, 1.2, 0.8, 0.4, 0.4]
    cosine = LearningRate(1.0, "cosine", num_warmup_steps=2, num_steps=10)
    assert cosine.at(2) == 1.0
    assert math.isclose(cosine.at(6), 0.5)
    assert math.isclose(cosine.at(10), 0.0, abs_tol=1e-12)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LearningRate(1.0, "cosine", 10, 10), "num_steps = 10: a cosine decay must end after the warm-up"),
        (lambda: LearningRate(1.0, "steps"), "decay = 'steps': must be constant, linear or cosine"),
        (lambda: make_optimizer(OptimizerSettings(LearningRate(1.0), "lion"), {}), "must be one of sgd, adamw"),
    ],
)
def test_mistakes_name_their_key(make: object, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        make()  # type: ignore[operator]


def test_clipping_over_workers_is_torchs_and_exact_in_any_grouping() -> None:
    ours, theirs = parameters(), parameters()
    set_gradients(ours, 9)
    set_gradients(theirs, 9)
    gradients = [p.grad for p in ours.values() if p.grad is not None]
    whole = global_norm([squares_of(norms_of(gradients))])
    assert whole == global_norm([squares_of(norms_of([gradient])) for gradient in reversed(gradients)])
    expected = torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.5, foreach=False)
    assert math.isclose(whole, expected.item(), rel_tol=1e-6)
    optimizer = make_optimizer(OptimizerSettings(LearningRate(0.1), "sgd"), ours)
    optimizer.factor = clip_factor(whole, 0.5)
    assert optimizer.factor == 0.5 / (whole + 1e-6)
    optimizer.step()
    torch.optim.SGD(list(theirs.values()), lr=0.1).step()
    for name in SHAPES:
        assert torch.allclose(ours[name].grad, theirs[name].grad, rtol=1e-6)  # type: ignore[arg-type]
        assert torch.allclose(ours[name], theirs[name], rtol=1e-6)
    assert optimizer.factor == clip_factor(0.1, 0.5) == 1.0
