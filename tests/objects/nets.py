"""A network that learns in a way that can be computed by hand, for the programs of this folder.

The notebook and the ranks import this module, so that no part of it is ever sent.
"""

from __future__ import annotations

from typing import Any

import torch


def net(size: int = 2) -> torch.nn.Linear:
    """Return a linear module without a bias whose weights are zeros."""
    model = torch.nn.Linear(size, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def sgd(model: torch.nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    """Return an optimizer of the parameters of a module."""
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def loss_of(model: Any) -> torch.Tensor:
    """Return the squared distance between 10 and the module's result for ones."""
    loss: torch.Tensor = (model(torch.ones(1, 2)) - 10).pow(2).sum()
    return loss


def train(model: Any, optimizer: Any, steps: int = 5) -> float:
    """Train for some steps and return the loss: 0.605, 0.004, 0.0 for a `net` and its `sgd`."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return round(loss_of(model).item(), 3)
