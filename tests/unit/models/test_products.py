"""Linear layers by oneDNN, against float64, and through a model. Any x86 processor can compute so."""

import copy

import pytest
import torch
from torch import nn

from roll.models import products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def quicker(monkeypatch):
    monkeypatch.setattr(products, "is_quicker", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 50), (3,), (1, 1), (0,), (64, 1)], ids=str)
def test_results_and_gradients_are_those_of_float64(shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(320, 400, bias=bias)
    exact = copy.deepcopy(layer).double()
    inputs = torch.randn(*shape, 320, requires_grad=True)
    twice = inputs.detach().double().requires_grad_()
    result, expected = products.linear(inputs, layer.weight, layer.bias), exact(twice)
    assert "_Linear" in type(result.grad_fn).__name__
    gradient = torch.randn(result.shape)
    result.backward(gradient)
    expected.backward(gradient.double())
    pairs = [(result, expected), (inputs.grad, twice.grad)]
    pairs += [(own.grad, other.grad) for own, other in zip(layer.parameters(), exact.parameters(), strict=True)]
    for own, other in pairs:
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5)


def test_inputs_that_do_not_lie_in_a_row():
    weight = torch.randn(400, 320)
    for inputs in (torch.randn(320, 70).t(), torch.randn(70, 4, 320)[:, -1:], torch.randn(70, 1, 1).expand(70, 3, 320)):
        expected = nn.functional.linear(inputs.double(), weight.double())
        torch.testing.assert_close(products.linear(inputs, weight).double(), expected, rtol=1e-5, atol=1e-4)


def test_a_row_does_not_depend_on_the_others():
    weight, rows = torch.randn(400, 320), torch.randn(300, 320)
    whole = products.linear(rows, weight)
    for count in (2, 16, 17, 63, 64, 100):
        assert torch.equal(products.linear(rows[:count].contiguous(), weight), whole[:count])


def test_a_frozen_weight_gets_no_gradient():
    layer = nn.Linear(320, 400).requires_grad_(False)
    inputs = torch.randn(2, 320, requires_grad=True)
    products.linear(inputs, layer.weight, layer.bias).sum().backward()
    assert inputs.grad is not None and layer.weight.grad is None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.other = nn.Linear(320, 400), nn.Linear(400, 8), nn.Bilinear(2, 3, 4)


def taken(layer: nn.Linear, inputs: torch.Tensor) -> bool:
    return "_Linear" in type(layer(inputs).grad_fn).__name__


def test_large_layers_of_a_model_take_it_and_keep_their_class():
    model = Model()
    products.speed_up(model)
    copied = copy.deepcopy(model)
    assert type(model.large) is nn.Linear and not taken(model.small, torch.ones(1, 400))
    for each in (model, copied):
        assert taken(each.large, torch.ones(1, 320))
        assert torch.allclose(each.large(torch.zeros(1, 320)), each.large.bias)
    copied.large.bias.data.zero_()
    assert not copied.large(torch.zeros(1, 320)).any() and model.large(torch.zeros(1, 320)).any()


def test_other_number_formats_and_processors_take_pytorchs_way(monkeypatch):
    layer = Model()
    products.speed_up(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert not taken(layer.large, torch.ones(1, 320)) and layer.large(torch.ones(1, 320)).dtype == torch.bfloat16
    assert taken(layer.large, torch.ones(1, 320))
    assert not taken(layer.large.double(), torch.ones(1, 320).double())
    assert not taken(layer.large.bfloat16(), torch.ones(1, 320).bfloat16())
    for module, name, value in ((torch.cuda, "is_available", True), (products, "is_quicker", False)):
        monkeypatch.setattr(module, name, lambda value=value: value)
        other = Model()
        products.speed_up(other)
        assert not taken(other.large, torch.ones(1, 320))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"avx512_f": True, "cpu_name": "AMD EPYC"}, True),
        ({"avx512_f": True, "cpu_name": "Intel Xeon 8480"}, False),
        ({"avx512_f": False, "cpu_name": "AMD EPYC"}, False),
        ({"avx512_f": True}, False),
        ({}, False),
    ],
)
def test_the_processor_decides(monkeypatch, found, expected):
    monkeypatch.undo()
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert products.is_quicker.__wrapped__() is expected
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert not products.is_quicker.__wrapped__()
