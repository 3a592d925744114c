"""What the immediate mode cannot see or do is refused with the reason, and no weight has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optune.errors import ConfigError, OptuneError, TrainingError
from tests.optim.immediate_nets import ROWS, Net, make_stepper


@contextmanager
def refused(model: nn.Module, error: type[OptuneError], *words: str) -> Iterator[None]:
    """The body raises `error` with `words` in its text and a way out in its hint, and leaves all weights alone."""
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(error) as caught:
        yield
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert caught.value.hint
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} has changed"
    assert all(parameter.grad is None for parameter in model.parameters())


class Foreign(torch.autograd.Function):
    """A product that torch functions cannot see into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


def through_foreign(model: Net, x: Tensor) -> Tensor:
    return Foreign.apply(x, model.middle.weight)  # type: ignore[no-any-return]


def through_foreign_transposed(model: Net, x: Tensor) -> Tensor:
    return Foreign.apply(x, model.middle.weight.t())  # type: ignore[no-any-return]


def through_reentrant_checkpoint(model: Net, x: Tensor) -> Tensor:
    return checkpoint(model.middle, x, use_reentrant=True)  # type: ignore[no-any-return]


def through_data(model: Net, x: Tensor) -> Tensor:
    return F.linear(x, model.middle.weight.data)


def through_write_to_data(model: Net, x: Tensor) -> Tensor:
    model.middle.weight.data = torch.ones(4, 4)
    return model.middle(x)


def through_hook(model: Net, x: Tensor) -> Tensor:
    model.middle.weight.register_hook(lambda grad: grad * 0)
    return model.middle(x)


def through_hook_on_transposed(model: Net, x: Tensor) -> Tensor:
    weight = model.middle.weight.t()
    weight.register_hook(lambda grad: grad * 0)
    return x @ weight


def through_in_place_method(model: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.middle.weight.clamp_(-1, 1)
    return model.middle(x)


def through_in_place_on_transposed(model: Net, x: Tensor) -> Tensor:
    return x @ model.middle.weight.clone().mul_(2)


def through_item_assignment(model: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.middle.weight[0] = 1.0
    return model.middle(x)


def through_own_generator(model: Net, x: Tensor) -> Tensor:
    keep = torch.bernoulli(torch.sigmoid(model.middle.weight), generator=torch.Generator())
    return F.linear(x, model.middle.weight * keep)


@pytest.mark.parametrize("variant", ["local", "exact"])
@pytest.mark.parametrize(
    ("between", "words"),
    [
        (through_foreign, ("middle.weight", "foreign")),
        (through_foreign_transposed, ("middle.weight", "foreign")),
        (through_reentrant_checkpoint, ("reentrant",)),
        (through_data, ("middle.weight", "reading .data")),
        (through_write_to_data, ("middle.weight", "writing .data")),
        (through_hook, ("middle.weight", "register_hook")),
        (through_hook_on_transposed, ("middle.weight", "register_hook")),
        (through_in_place_method, ("middle.weight", "clamp_")),
        (through_in_place_on_transposed, ("middle.weight", "mul_")),
        (through_item_assignment, ("middle.weight", "__setitem__")),
        (through_own_generator, ("bernoulli", "generator")),
    ],
)
def test_parameters_reached_behind_the_modes_back_are_refused(
    variant: str, between: Any, words: tuple[str, ...]
) -> None:
    model = Net(between)
    stepper = make_stepper(model, variant)
    if variant == "exact" and "foreign" in words:
        words = ("Foreign", "foreign")
    with refused(model, TrainingError, *words), stepper.microbatch(True):
        model(ROWS).sum().backward()


def test_a_parameter_changed_by_a_function_whose_name_does_not_say_so_is_refused() -> None:
    def between(model: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.add(model.middle.weight, 1, out=model.middle.weight)
        return model.middle(x)

    model = Net(between)
    stepper = make_stepper(model)
    with pytest.raises(TrainingError, match=r"add changes middle\.weight in place"), stepper.microbatch(True):
        model(ROWS)


def test_views_of_parameters_held_as_attributes_are_refused() -> None:
    model = Net(lambda m, x: F.linear(x, m.view))
    for view in (model.middle.weight.view(4, 4), model.middle.weight.detach(), [model.middle.weight[:2]]):
        model.view = view
        stepper = make_stepper(model)
        with refused(model, ConfigError, "view", "middle.weight"), stepper.microbatch(True):
            pass
    model.view = None
    weight = model.middle.weight.view(4, 4)  # held by nobody whom the mode could ask
    model.between = lambda m, x: F.linear(x, weight)
    stepper = make_stepper(model)
    with refused(model, TrainingError, "middle.weight", "view"), stepper.microbatch(True):
        model(ROWS).sum().backward()


def test_an_embedding_that_renormalizes_its_weight_is_refused() -> None:
    model = nn.Embedding(5, 3, max_norm=1.0)
    stepper = make_stepper(model)
    with refused(model, TrainingError, "max_norm"), stepper.microbatch(True):
        model(torch.tensor([1, 2])).sum().backward()


def test_buffers_changed_after_they_were_combined_with_a_parameter_are_refused() -> None:
    def between(model: Net, x: Tensor) -> Tensor:
        masked = model.middle.weight * model.mask
        model.mask.mul_(2)
        return F.linear(x, masked)

    model = Net(between)
    model.register_buffer("mask", torch.ones(4, 4), persistent=False)
    stepper = make_stepper(model)
    with pytest.raises(TrainingError, match="a buffer that mul combined with middle"), stepper.microbatch(True):
        model(ROWS).sum().backward()


def test_a_function_that_writes_into_another_tensor_is_refused() -> None:
    def between(model: Net, x: Tensor) -> Tensor:
        out = torch.empty(3, 4)
        with torch.enable_grad():
            return _into(x, model.middle.weight, out)

    model = Net(between)
    stepper = make_stepper(model)
    with refused(model, TrainingError, "changes another tensor"), stepper.microbatch(True):
        model(ROWS).sum().backward()


def _into(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """A function of ours that takes part in torch's protocol and writes into its last argument."""
    if torch.overrides.has_torch_function((x, weight, out)):
        return torch.overrides.handle_torch_function(_into, (x, weight, out), x, weight, out)
    out.zero_()
    return x @ weight + out


class Smuggler(torch.autograd.Function):
    """Gives a parameter a gradient that no graph knows of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, give: Callable[[], None]) -> Tensor:
        ctx.give = give
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.give()
        return grads[0], None


def test_a_gradient_that_comes_from_nowhere_is_found_after_the_step() -> None:
    def give() -> None:
        with torch._C.DisableTorchFunction():
            model.middle.weight.grad = torch.ones(4, 4)

    model = Net(lambda m, x: Smuggler.apply(x, give))  # type: ignore[return-value]
    stepper = make_stepper(model)
    with pytest.raises(TrainingError, match="a gradient that the mode did not see"), stepper.microbatch(True):
        model(ROWS).sum().backward()
    assert model.middle.weight.grad is None


@pytest.mark.parametrize("variant", ["local", "exact"])
def test_backward_that_cannot_mean_what_it_says_is_refused(variant: str) -> None:
    model = Net(lambda m, x: m.middle(x))

    def attempt(body: Callable[[Tensor], Any], *words: str) -> None:
        stepper = make_stepper(model, variant)
        with refused(model, TrainingError, *words), stepper.microbatch(True):
            body(model(ROWS).sum())

    attempt(lambda loss: loss.backward(create_graph=True), "create_graph")
    attempt(lambda loss: loss.backward(inputs=list(model.parameters())), "create_graph")
    attempt(lambda loss: torch.autograd.backward([loss, loss * 2]), "2 losses")
    stepper = make_stepper(model, variant)
    with pytest.raises(TrainingError, match="a second backward"), stepper.microbatch(True):
        loss = model(ROWS).sum()
        loss.backward(retain_graph=True)
        loss.backward()


def test_gradients_taken_outside_of_the_microbatch_are_refused() -> None:
    model = Net(lambda m, x: m.middle(x))
    stepper = make_stepper(model)
    with stepper.microbatch(True):
        loss = model(ROWS).sum()
    with refused(model, TrainingError, "outside of the microbatch"):
        loss.backward()
    with refused(model, TrainingError, "no backward ran"):
        stepper.finish()
    stepper = make_stepper(model)
    rows = ROWS.clone().requires_grad_()
    with refused(model, TrainingError, "outside of the microbatch"), stepper.microbatch(True):
        torch.autograd.grad(model(rows).sum(), rows)


def test_an_activation_carried_over_from_an_earlier_microbatch_is_refused_unless_detached() -> None:
    carried: list[Tensor] = []

    def between(model: Net, x: Tensor) -> Tensor:
        x = model.middle(x) + (carried[-1] if carried else 0)
        carried.append(x)
        return x

    model = Net(between)
    stepper = make_stepper(model)
    with stepper.microbatch(True):
        model(ROWS).sum().backward()
    stepper.finish()
    with refused(model, TrainingError, "earlier microbatch"), stepper.microbatch(True):
        model(ROWS).sum().backward()
    carried[:] = [carried[0].detach()]
    with stepper.microbatch(True):
        model(ROWS).sum().backward()
    stepper.finish()
