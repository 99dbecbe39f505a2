"""Sums of gradients over the microbatches of a step, in ascending order and in float32, whatever order a Program
computes them in: every schedule gets the same bits.

Knows slots and sums. A slot counts microbatches over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from atlas.runtime.models.linear import GradientProduct, multiply

Add = Callable[[bool], None]
"""Adds one gradient to its sum, or begins the sum with it."""


class SlotOrder:
    """Runs additions in the order of their slots; those that come early wait, with what they hold."""

    def __init__(self) -> None:
        self._early: dict[int, list[Add]] = {}
        self._complete: set[int] = set()
        self._first = self._next = 0

    @property
    def num_done(self) -> int:
        return self._next - self._first

    def begin(self, first_slot: int) -> None:
        assert not self._early, "an iteration ended with gradients missing"
        self._first, self._next = first_slot, first_slot

    def add(self, slot: int, work: Add) -> None:
        if slot == self._next:
            work(slot == self._first)
        else:
            self._early.setdefault(slot, []).append(work)

    def done(self, slot: int) -> None:
        """All of this slot's additions are made or waiting."""
        self._complete.add(slot)
        while self._next in self._complete:
            self._complete.remove(self._next)
            self._next += 1
            for work in self._early.pop(self._next, []):
                work(self._next == self._first)


class GradientSum:
    """Of one stage."""

    def __init__(self, sums: Mapping[int, Tensor], local: Callable[[Tensor, Tensor], Tensor]) -> None:
        """`sums`: by `id` of the parameter; `local`: this process's part of a gradient, given the parameter."""
        self._sums, self._local = dict(sums), local
        self._at_input, self._at_weight = SlotOrder(), SlotOrder()

    @property
    def num_added(self) -> int:
        """Microbatches that are complete in the sums."""
        return min(self._at_input.num_done, self._at_weight.num_done)

    def begin(self, first_slot: int) -> None:
        self._at_input.begin(first_slot)
        self._at_weight.begin(first_slot)

    def add_direct(self, slot: int, gradients: list[tuple[Tensor, Tensor]], products: list[GradientProduct]) -> None:
        """Gradients and products that belong to the input half; `input_done` follows."""

        def work(first: bool) -> None:
            sums = [self._sums[id(parameter)] for parameter, _ in gradients]
            parts = [self._local(gradient, parameter) for parameter, gradient in gradients]
            if sums:
                (torch._foreach_copy_ if first else torch._foreach_add_)(sums, parts)
            self._multiply(products, first)

        self._at_input.add(slot, work)

    def input_done(self, slot: int) -> None:
        self._at_input.done(slot)

    def add_products(self, slot: int, parts: Iterable[list[GradientProduct]]) -> None:
        """All products of the weight half, part by part."""
        for products in parts:
            self._at_weight.add(slot, partial(self._multiply, products))
        self._at_weight.done(slot)

    def _multiply(self, products: list[GradientProduct], first: bool) -> None:
        while products:
            product = products.pop()
            multiply(product, self._sums[id(product.weight)], first=first)

    def try_out(self, products: list[GradientProduct]) -> None:
        """Multiply in place of the sums, before the first microbatch begins them."""
        for product in products:
            multiply(product, self._sums[id(product.weight)], first=False)
        self._multiply(products, first=True)
