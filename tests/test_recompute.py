"""A pass that is run again in the backward pass: gradients, draws, mode, parameters and precision are those of a plain pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtem.recompute import RandomState, recomputed, recomputed_layer
from tests.memory import Peak

CPU = torch.device("cpu")


@pytest.fixture
def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Dropout(0.5), nn.Linear(40, 3))


def values(seed=2, rows=5):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain(network, given):
    return network(given)


def again(network, given):
    return recomputed(network, lambda tensor: (network(tensor),), [given], CPU)[0]


def gradients(network, forward, given, parameters=None):
    """The gradients of one number in the input and the parameters, and what is drawn after it."""
    torch.manual_seed(3)
    loss = forward(network, given).square().sum()
    found = torch.autograd.grad(loss, [given, *(parameters or network.parameters())])
    return [loss.detach(), *found, torch.rand(2)]


@pytest.mark.parametrize("training", [True, False])
def test_gradients_and_later_draws_are_those_of_a_plain_pass(network, training):
    network.train(training)
    for found, wanted in zip(*(gradients(network, forward, values()) for forward in (again, plain)), strict=True):
        assert torch.equal(found, wanted)


def test_fewer_activations_are_alive(network):
    given, peaks = values(rows=1000), []
    for forward in (plain, again):
        with Peak() as peak:
            outputs = [forward(network, given) for _ in range(8)]
        peaks.append(peak.bytes)
        del outputs
    assert peaks[1] < peaks[0] / 3


def test_swapped_parameters_are_those_of_the_first_run(network):
    """The backward pass runs when the swap is over."""
    others = {name: (2 * value.detach()).requires_grad_() for name, value in network.named_parameters()}

    def swapped(forward):
        def call(network, given):
            wrapper = Wrapper(network, forward)
            return torch.func.functional_call(wrapper, {f"network.{name}": value for name, value in others.items()}, (given,))

        return gradients(network.eval(), call, values(), list(others.values()))

    found, wanted = swapped(again), swapped(plain)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert any(one.abs().sum() > 0 for one in found[2:-1])
    assert all(parameter.grad is None for parameter in network.parameters())


class Wrapper(nn.Module):
    def __init__(self, network, forward):
        super().__init__()
        self.network, self.call = network, forward

    def forward(self, given):
        return self.call(self.network, given)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_may_change_before_the_backward_pass(network, training):
    def changing(forward):
        def call(network, given):
            network.train(training)
            output = forward(network, given)
            network.train(not training)
            return output

        return gradients(network, call, values())

    assert all(torch.equal(one, other) for one, other in zip(changing(again), changing(plain), strict=True))
    assert network.training is not training and network[2].training is not training


def test_the_precision_is_that_of_the_first_run(network):
    def rounded(forward):
        def call(network, given):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return forward(network, given).float()

        return gradients(network, call, values())

    found, exact = rounded(again), gradients(network, plain, values())
    assert all(torch.equal(one, other) for one, other in zip(found, rounded(plain), strict=True))
    assert not torch.equal(found[0], exact[0])


def test_parameters_that_change_before_the_backward_pass_are_refused(network):
    loss = again(network, values()).sum()
    with torch.no_grad():
        network[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_derivatives_are_refused(network):
    given = values()
    gradient = torch.autograd.grad(again(network, given).square().sum(), given, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_nothing_is_repeated_without_gradients(network):
    network.eval().requires_grad_(False)
    calls = []

    def counted(tensor):
        calls.append(torch.is_grad_enabled())
        return (network(tensor),)

    assert not recomputed(network, counted, [values().detach()], CPU)[0].requires_grad
    with torch.no_grad():
        recomputed(network.requires_grad_(), counted, [values()], CPU)
    assert calls == [True, False]


def test_frozen_and_unused_parameters_have_no_gradient(network):
    network[0].weight.requires_grad_(False)
    recomputed(network, lambda tensor: (network[:3](tensor),), [values()], CPU)[0].sum().backward()
    assert network[0].weight.grad is None and network[0].bias.grad is not None and network[3].weight.grad is None


class Tied(nn.Module):
    """Two layers of one weight, tensors in nested arguments, and an output with more than a tensor in it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, hidden, positions, *, scale=None, name="x"):
        return self.second(self.first(hidden) * positions[0]) + scale, None, {"name": name, "first": hidden * 2}


def test_a_layer_may_take_and_return_anything():
    torch.manual_seed(0)
    layer, hidden, tables, scale = Tied(), values(), (values(3), values(4)), values(5)
    inputs = [hidden, tables[0], scale, layer.first.weight, layer.second.bias]

    def found(output):
        assert output[1] is None and output[2]["name"] == "y"
        return torch.autograd.grad((output[0].square() + output[2]["first"].square()).sum(), inputs)

    wanted = found(layer(hidden, tables, scale=scale, name="y"))
    for one, other in zip(found(recomputed_layer(layer, CPU, hidden, tables, scale=scale, name="y")), wanted, strict=True):
        assert torch.equal(one, other)


def test_a_random_state_can_be_drawn_from_again():
    state = RandomState(CPU)
    first, second = torch.rand(3), torch.rand(3)
    with state.again():
        assert torch.equal(torch.rand(3), first)
    torch.manual_seed(0)
    after = torch.rand(2)
    torch.manual_seed(0)
    with state.again():
        assert torch.equal(torch.cat([torch.rand(3), torch.rand(3)]), torch.cat([first, second]))
    assert torch.equal(torch.rand(2), after)
