"""A step of a run, taken without memory: by the run's own model, optimizer, stepper and loss.

Blocks are alike, so a deep model is not needed to know what one takes: a step of two blocks and one of three are
watched, stretch by stretch. A stretch lies between two events: a block begins, a gradient arrives, the optimizer steps.
What another block adds to each of them is the same however many there are already, so the account of any depth follows;
and so with microbatches, of which the first and the last differ.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from optune import idle_modules, train
from optune.distributed import Processes
from optune.loss import Loss
from optune.optim import filled, named_optimizer_parameters
from optune.optim.kinds import is_compiled
from optune.optim.stash import choose
from optune.plan.deciding import deciding_for_whole_model, describe_stepping
from optune.plan.remembering import Mode, storage_key
from optune.plan.tracker import Stretch, Tracker, inner_tensors
from optune.plan.without_values import answering, give_memory, make_answers
from optune.types import IGNORE, Microbatch, MicrobatchShape

SHALLOW = 2
"""Blocks that are rehearsed, and with one more; the deeper model follows from both."""
SHALLOW_DIVIDED = 6
"""The same for a model in shards, where blocks are gathered ahead of their turn."""
_MIDDLE = "middle"
BEGINNING = ("forward", "state", "first")
"""Everything that stays is there, and nothing else."""


@dataclass(frozen=True)
class Task:
    """What is rehearsed. `outline(layers)` gives a model on the meta device, `build(model, processes, fill,
    positions)` the optimizer and the stepper that train it, as recipes do. `alike`: all blocks have the same shapes.
    `validation`: the shape of its microbatches, None for none. `decided` is filled with what `gradient_stash: auto`
    takes, and may be shared by tasks with the same model, optimizer and tokens in a step."""

    outline: Callable[[int], Any]
    build: Callable[[Any, Processes, Callable[[Any], None], int], tuple[torch.optim.Optimizer, Any]]
    loss: Loss
    layers: int
    shape: MicrobatchShape
    alike: bool = True
    microbatches: int = 1
    accumulation: str = "depth_first"
    validation: MicrobatchShape | None = None
    processes: Processes = field(default_factory=lambda: Processes(torch.device("cpu")))
    round_up: Callable[[int], int] = int
    decided: list[choose.Choice] = field(default_factory=list)

    @property
    def positions_per_step(self) -> int:
        return self.microbatches * self.shape.positions * self.processes.data_size


Account = dict[tuple[Hashable, ...], Counter[str]]
"""The most of each stretch, by part; a key's first item is the moment of the step."""


def rehearse(task: Task) -> Account:
    """What is alive at the fullest point of every stretch of a step, once the optimizer has its state.

    The first item of a key is the moment: load, forward, backward, step, validation, or save for what is saved.
    """
    with torch.random.fork_rng(devices=[]), deciding_for_whole_model(task):
        # Factors of all microbatches wait together.
        is_factored = task.microbatches > 2 and "factored" in describe_stepping(task, min(task.layers, SHALLOW))
        return _rehearse_microbatches(task, is_factored=is_factored)


def _rehearse_microbatches(task: Task, *, is_factored: bool) -> Account:
    if task.accumulation == "depth_first" and not is_factored:
        # Microbatches between the first and the last find and leave what the last one finds.
        return _rehearse_depth(replace(task, microbatches=min(task.microbatches, 2)))
    if task.microbatches <= 3 or is_factored:
        return _rehearse_depth(task)
    less, more = (_rehearse_depth(replace(task, microbatches=count)) for count in (2, 3))
    return {key: _add(less[key], less[key], more[key], task.microbatches - 2) for key in less if key in more}


def _rehearse_depth(task: Task) -> Account:
    shallow = SHALLOW if task.processes.world_size == 1 else SHALLOW_DIVIDED
    if task.layers <= shallow + 1 or not task.alike:
        return _watch(task, task.layers)
    # A validation keeps nothing of a block for the next one: all that a deeper model adds is there at its beginning.
    less, more = _watch(task, shallow), _watch(replace(task, validation=None), shallow + 1)
    added = task.layers - shallow
    account = {key: _add(less[key], less[key], more[key], added) for key in less if key in more}
    begun = (less[BEGINNING], more[BEGINNING])
    account |= {key: _add(less[key], *begun, added) for key in less if key[0] == "validation"}
    for key in more.keys() - less.keys():
        # The block in the middle stands for the one below the top and for the one above the bottom: what is added lies
        # below the former and above the latter.
        for place in ("top", "bottom"):
            like = tuple(place if item == _MIDDLE else item for item in key)
            if like in account:
                account[(*key, place)] = _add(more[key], less[like], more[like], added - 1)
    return account


def _add(start: Counter[str], less: Counter[str], more: Counter[str], times: int) -> Counter[str]:
    """`start` and, so many times, what `more` has beyond `less`."""
    parts = start.keys() | less.keys() | more.keys()
    return Counter({part: start[part] + times * (more[part] - less[part]) for part in parts})


def _watch(task: Task, layers: int) -> Account:
    mode = Mode()
    model = task.outline(layers)
    give_memory(model, mode)
    tracker = Tracker(make_answers(task.shape.positions, task.shape.targets), task.round_up)
    with ExitStack() as stack:
        stack.enter_context(answering())

        def fill(model: Any) -> None:
            # Between spreading, which replaces parameters, and the stepper, whose hooks free gradients.
            stack.enter_context(_marking(model, tracker, task.accumulation))

        optimizer, stepper = task.build(model, task.processes, fill, task.positions_per_step)
        if any(map(is_compiled, model.modules())):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            stack.enter_context(idle_modules.tried(optimizer))
        stack.enter_context(mode)
        with Tracker(tracker.answer), filled(model.named_parameters(), optimizer):
            _make_state(optimizer)
        _adopt_what_stays(tracker, model, optimizer)
        batch = [_make_microbatch(task.shape) for _ in range(task.microbatches)]
        for microbatch in batch:
            for tensor in vars(microbatch).values():
                if isinstance(tensor, torch.Tensor):
                    tracker.adopt(tensor, "batch")
        stack.enter_context(tracker.watching_resizes())
        stack.enter_context(_marking_updates(model, optimizer, tracker))
        stack.enter_context(tracker)
        _take_step(task, model, stepper, batch, tracker)
        if task.validation is not None:
            _validate(task, model, tracker)
    return _account(tracker.stretches)


def _adopt_what_stays(tracker: Tracker, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights = [*model.parameters(), *model.buffers()]
    for tensor in weights:
        tracker.adopt(tensor, "weights")
    own = set(map(id, weights))
    for parameter in _held(optimizer):
        if id(parameter) not in own:
            tracker.adopt(parameter, "masters")
    tracker.moment = "forward"
    tracker.begin("state")
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                tracker.adopt(value, "optimizer")
    # What a checkpoint holds: what is trained, its masters, and the optimizer's state.
    trained = {storage_key(each): each.nbytes for p in weights if p.requires_grad for each in inner_tensors(p)}
    tracker.add("save", copies=sum(trained.values()) + tracker.size_of("masters") + tracker.size_of("optimizer"))


def _take_step(task: Task, model: Any, stepper: Any, batch: Sequence[Microbatch], tracker: Tracker) -> None:
    def loss(model: Any, hidden_BTD: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
        tracker.begin("loss")
        with tracker.naming("loss"):
            total = task.loss(model, hidden_BTD, microbatch)
        tracker.moment = "backward"
        tracker.begin("differentiating")
        return total

    finish = stepper.finish

    def finish_watched() -> Any:
        # What is left of forward and backward, and is no gradient, waits for the norm.
        tracker.relabel(tracker.rest_of("activations", "loss"), "stash")
        tracker.moment = "step"
        tracker.begin("finish")
        with tracker.naming("update"):
            return finish()

    stepper.finish = finish_watched
    tracker.moment = "forward"
    tracker.begin("start")
    train.train_step(model, loss, stepper, batch, seed=0, step=0, accumulation=task.accumulation)


def _validate(task: Task, model: Any, tracker: Tracker) -> None:
    assert task.validation is not None
    tracker.moment = "validation"
    tracker.begin("start")
    train.evaluate(model, task.loss, [_make_microbatch(task.validation)])


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """The state that the optimizer has from the first step on."""
    held = _held(optimizer)
    for parameter in held:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    for parameter in held:
        parameter.grad = None


def _held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _make_microbatch(shape: MicrobatchShape) -> Microbatch:
    tokens_BT = torch.zeros(shape.rows, shape.length, dtype=torch.int64)
    return Microbatch(
        tokens_BT=tokens_BT,
        labels_BT=torch.full_like(tokens_BT, IGNORE),
        positions_BT=torch.zeros_like(tokens_BT),
        documents_BT=torch.zeros_like(tokens_BT) if shape.packed else None,
        weights_BT=torch.ones(shape.rows, shape.length) if shape.weighted else None,
        num_tokens=shape.positions,
        rows=("",) * shape.rows,
    )


@contextmanager
def _marking(model: Any, tracker: Tracker, accumulation: str) -> Iterator[None]:
    """Begins a stretch where a block begins and where a gradient arrives, and says which storages are gradients."""
    handles: list[Any] = []

    def arrived(key: tuple[Hashable, ...], parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            tracker.adopt(parameter.grad, "gradients")
        tracker.begin("gradient", *key)

    def entered(place: str, *_: Any) -> None:
        is_backward = torch._C._current_graph_task_id() != -1  # a checkpointed block runs again
        if tracker.moment == "backward" and accumulation == "depth_first" and not is_backward:
            tracker.moment = "forward"
        tracker.begin("block", place)

    for parameter, key in _places(model).items():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(partial(arrived, key)))
    for index, block in enumerate(model.blocks):
        handles.append(block.register_forward_pre_hook(partial(entered, _place(index, len(model.blocks)))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _marking_updates(model: Any, optimizer: torch.optim.Optimizer, tracker: Tracker) -> Iterator[None]:
    """Begins a stretch where the optimizer steps, and names what it makes."""
    own = dict(model.named_parameters())
    places = _places(model)
    keys = {id(held): places[own[name]] for name, held in named_optimizer_parameters(optimizer).items()}

    def stepping(*_: Any) -> None:
        stepped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        tracker.begin("update", *keys[stepped[0]])
        tracker.part = "update"

    def stepped(*_: Any) -> None:
        tracker.part = "update" if tracker.moment == "step" else "activations"

    handles = [optimizer.register_step_pre_hook(stepping), optimizer.register_step_post_hook(stepped)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _places(model: Any) -> dict[nn.Parameter, tuple[str, str]]:
    """Where each parameter stands, and its name there."""
    places = {
        parameter: (_place(index, len(model.blocks)), name)
        for index, block in enumerate(model.blocks)
        for name, parameter in block.named_parameters()
    }
    return {parameter: ("root", name) for name, parameter in model.named_parameters()} | places


def _place(index: int, layers: int) -> str:
    if index == 0:
        return "bottom"
    return "top" if index == layers - 1 else _MIDDLE


def _account(stretches: Sequence[Stretch]) -> Account:
    """Stretches by their keys; of those that come several times the first, and the fullest of the others."""
    account: Account = {}
    for stretch in stretches:
        key = stretch.key
        if (*key, "first") not in account:
            account[(*key, "first")] = stretch.parts
        elif stretch.parts.total() > account.get((*key, "last"), Counter()).total():
            account[(*key, "last")] = stretch.parts
    return account
