"""Gradients come from the thread that asks for them."""

from __future__ import annotations

import threading

import pytest
import torch

from slideformer.engine.backward import gradients


class _Watched(torch.autograd.Function):
    seen: list[tuple[int, bool]] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _Watched.seen.append((threading.get_ident(), torch._C._is_multithreading_enabled()))
        return grad


def test_backward_runs_in_the_thread_that_asks_for_it():
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    _Watched.seen.clear()
    found = gradients(_Watched.apply(x * y) * 2, (x, y), torch.full((3,), 5.0))
    assert [g.tolist() for g in found] == [[10.0] * 3] * 2
    assert _Watched.seen == [(threading.get_ident(), False)]  # a device's backward would else be another's
    assert torch._C._is_multithreading_enabled()


def test_a_leaf_that_is_not_used_is_an_error():
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="not have been used"):
        gradients(x * 2, [x, y], torch.ones(3))
