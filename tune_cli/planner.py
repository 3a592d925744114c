"""Rehearsals of the run that a command line asks for, and the search for settings that fit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from optune.errors import ConfigError
from tune_cli.before_start import check_settings
from tune_cli.fitting import Fit, find_fits
from tune_cli.plan_result import Result
from tune_cli.recipes import Recipe, load_recipe
from tune_cli.run import Request

if TYPE_CHECKING:
    from optune.distributed import Processes
    from optune.plan import Forecast, Setting, Task
    from optune.types import MicrobatchShape


class Planner:
    """Makes rehearsals of one request; `length` and `reads_data` say which rows are assumed."""

    def __init__(self, request: Request, *, memory: int | None, length: int | None, reads_data: bool) -> None:
        self._request, self._memory, self._length, self._reads_data = request, memory, length, reads_data
        for name in ("outline", "build", "loss_sum"):
            _function(request.recipe, name)
        self._cfg: Any = request.load()

        from optune import distributed, models

        self._source = models.resolve(self._cfg.model.path, weights=False)
        self._config = models.check(self._source, weights=False)
        self._device = _find_device(self._cfg.device)
        self._check_memory()
        check_settings(self._cfg, distributed.read_device(self._device))
        self._notes: list[str] = []
        self._processes: Processes | None = None

    def plan(self, processes: int | None) -> Result:
        """The forecast for each of `processes` (None: as many as `parallel` names), and what fits."""
        from optune import plan

        with plan.numbers_only(), self._among(processes):
            return self._plan()

    @contextmanager
    def _among(self, count: int | None) -> Iterator[None]:
        """As rank 0 of so many, on the CPU: nothing is sent, and nobody else is there."""
        from optune import distributed, optim
        from optune.distributed.pretending import pretend

        layout = asdict(self._cfg.parallel)
        shard = 1 if layout["shard"] == "auto" else int(layout["shard"])
        count = count or int(layout["replicate"] * layout["tensor"] * shard)
        if self._cfg.device != "auto":
            distributed.read_device(self._cfg.device, count)
        keep_whole = optim.why_whole(self._cfg.optimizer_step)
        others = nullcontext() if count == 1 else pretend(count)
        with others, distributed.start("cpu", **layout, keep_whole=keep_whole, computes=False) as self._processes:
            if count > 1:
                distributed.check_model(self._config, self._processes.layout)
            yield

    def _check_memory(self) -> None:
        from optune import files, plan

        overhead = plan.OVERHEAD[self._device]
        if self._memory is not None and self._memory <= overhead:
            raise ConfigError(
                f"{files.format_bytes(self._memory)} are less than what is taken before any tensor, about "
                f"{files.format_bytes(overhead)}",
                where="--memory",
                hint="give what the machine or the GPU has, such as 24GiB",
            )

    def _plan(self) -> Result:
        from optune import plan

        self._try_optimizer()
        shape, validation = self._find_shapes()
        task = self._task(self._request.recipe, self._cfg, shape, validation)
        forecast = self._forecast(task, self._cfg)
        overhead = plan.OVERHEAD[self._device]
        outlines: list[Any] = []

        def outline(layers: int) -> Any:
            outlines.append(task.outline(layers))
            return outlines[-1]

        stepping = plan.describe_stepping(replace(task, outline=outline))
        self._note(getattr(outlines[-1], "compilation", None))
        result = Result(
            self._summarize(shape, stepping), forecast, self._device, overhead, self._memory,
            [], None, None, "", self._notes,
        )  # fmt: skip
        if self._memory is None or result.is_enough(forecast):
            return result
        fits, smallest = self._search(task, forecast, self._memory - overhead, validation)
        adapters_by, adapters = self._with_adapters(shape, validation)
        return replace(result, fits=fits, smallest=smallest, adapters=adapters, adapters_by=adapters_by)

    def _try_optimizer(self) -> None:
        """As a run does before it loads anything; a device that is not here cannot be asked."""
        from optune import optim

        settings_of = getattr(sys.modules[self._request.recipe.main.__module__], "optimizer_settings", None)
        if self._device != "cpu" or settings_of is None:
            return
        assert self._processes is not None
        model = _function(self._request.recipe, "outline")(self._cfg, self._config)
        device, mesh = self._processes.parameter_device, self._processes.parameter_mesh
        optim.try_optimizer(model, **settings_of(self._cfg), device=device, mesh=mesh)

    def _search(
        self, task: Task, forecast: Forecast, limit: int, validation: MicrobatchShape | None
    ) -> tuple[list[Fit], Fit | None]:
        """The cheapest settings that fit; see `find_fits`."""
        from optune import distributed, models, plan

        cfg = self._cfg
        current = plan.Current(
            batch_size=cfg.batch_size,
            microbatches=cfg.gradient_accumulation_steps,
            length=task.shape.length,
            checkpointing=cfg.activation_checkpointing,
            step=cfg.optimizer_step,
            clips=cfg.max_grad_norm is not None,
            stash=cfg.gradient_stash,
            accumulation=cfg.accumulation,
            trains_shared_head=self._config.tie_word_embeddings and not hasattr(cfg, "lora"),
        )

        def rehearse(setting: Setting) -> Forecast | None:
            changed = _change(cfg, setting.overrides)
            try:
                check_settings(changed, distributed.read_device(self._device))
                other = self._task(self._request.recipe, changed, task.shape, validation)
                # Tokens in a step, and so what `auto` takes, are the same in all settings.
                return self._forecast(replace(other, decided=task.decided), changed)
            except ConfigError:
                return None  # it does not go with the rest of the config

        if current.clips and current.stash == "auto" and current.step != "immediate":
            # Decides now what `auto` takes: much follows from it without a rehearsal.
            within = _change(cfg, {"optimizer_step": "in_backward"})
            other = self._task(self._request.recipe, within, task.shape, validation)
            plan.decide_stash(replace(other, decided=task.decided))
        assert self._processes is not None
        width = self._config.hidden_size * models.DTYPES[cfg.model.dtype].itemsize
        inputs = self._config.num_hidden_layers * width * (task.shape.length // self._processes.layout.tensor)
        bounds = plan.Bounds(current, forecast, inputs, task.decided)
        return find_fits(plan.list_settings(self._config, current), bounds, limit, rehearse)

    def _with_adapters(self, shape: MicrobatchShape, validation: MicrobatchShape | None) -> tuple[str, Forecast | None]:
        """What the same config takes with adapters, or where it trains them already, with their base in NF4; and what
        to write for that. None where that cannot be, or is so already."""
        recipe, cfg = self._request.recipe, self._cfg
        try:
            if hasattr(cfg, "lora"):
                if cfg.lora.quantize_base is not None:
                    return "", None
                words, cfg = "lora.quantize_base=nf4", _change(cfg, {})
                cfg.lora.quantize_base = "nf4"
            else:
                words, recipe = "lora_finetune, same config", load_recipe("lora_finetune")
                cfg = replace(self._request, recipe=recipe).load()
            return words, self._forecast(self._task(recipe, cfg, shape, validation), cfg)
        except ConfigError:
            return "", None

    def _task(self, recipe: Recipe, cfg: Any, shape: MicrobatchShape, validation: MicrobatchShape | None) -> Task:
        from optune import plan

        assert self._processes is not None
        cfg = _change(cfg, {"activation_offloading": False}) if hasattr(cfg, "activation_offloading") else cfg
        rows_of = partial(replace, rows=cfg.batch_size)
        return plan.make_task(
            partial(_function(recipe, "outline"), cfg),
            partial(_function(recipe, "build"), cfg),
            _function(recipe, "loss_sum"),
            self._config,
            rows_of(shape, targets=max(1, shape.targets * cfg.batch_size // shape.rows)),
            device=self._device,
            microbatches=cfg.gradient_accumulation_steps,
            accumulation=cfg.accumulation,
            validation=None if validation is None else rows_of(validation),
            processes=self._processes,
        )

    def _forecast(self, task: Task, cfg: Any) -> Forecast:
        from optune import plan

        saves = cfg.checkpoint.save_every_steps
        is_at_end = saves is None or (cfg.max_steps is not None and saves >= cfg.max_steps)
        return plan.forecast(task, saved_on_device=self._device == "cpu" and not is_at_end)

    def _find_shapes(self) -> tuple[MicrobatchShape, MicrobatchShape | None]:
        """A microbatch of training, and one of validation."""
        from optune.types import MicrobatchShape

        cfg = self._cfg
        if self._reads_data:
            return self._read_shapes()
        length = self._length or cfg.data.max_length
        if length is None:
            raise ConfigError(
                "is null, so how long rows are is not known",
                where="data.max_length",
                hint="give --length N, or --data to prepare the rows and take the longest",
            )
        length = -(-length // cfg.data.pad_to_multiple) * cfg.data.pad_to_multiple
        shape = MicrobatchShape(cfg.batch_size, length, cfg.batch_size * length, packed=cfg.data.packing)
        return shape, None if cfg.data.validation is None else replace(shape, packed=False)

    def _read_shapes(self) -> tuple[MicrobatchShape, MicrobatchShape | None]:
        from optune import plan

        assert self._processes is not None
        make_batches = _function(self._request.recipe, "make_batches")
        _, batches, validation = make_batches(
            self._cfg, self._source, self._config, self._processes.data_size, self._processes.data_rank
        )
        if not hasattr(batches, "rows_of"):
            raise ConfigError(
                "is true: the rows are not known before the run", where="data.streaming", hint="give --length N"
            )
        training = plan.widest(batches, self._processes.data_size)
        return training, plan.widest(validation.batches, self._processes.data_size) if validation else None

    def _summarize(self, shape: MicrobatchShape, stepping: str) -> dict[str, str]:
        from optune import metrics
        from optune.types import count_parameters

        cfg = self._cfg
        model = _function(self._request.recipe, "outline")(cfg, self._config)
        count = cfg.gradient_accumulation_steps
        said = "the widest of the first epoch" if self._reads_data else "assumed"
        if not self._reads_data:
            said += (
                ": every row as long as " + ("--length" if self._length else "data.max_length") + ", all of it trained"
            )
        rows = f"{shape.rows} × {shape.length:,} tokens in a microbatch, {shape.targets:,} targets ({said})"
        assert self._processes is not None
        return {
            "model": str(cfg.model.path),
            "parameters": f"{metrics.describe_parameters(*count_parameters(model))}, in {cfg.model.dtype}",
            "processes": self._processes.describe() or "",
            "rows": rows + (f"; {count} microbatches a step" if count > 1 else ""),
            "optimizer": str(cfg.optimizer.get("_target_", "")).rpartition(".")[2],
            "step": stepping,
        }

    def _note(self, compilation: str | None) -> None:
        """What is not as the run will be, said. `compilation`: what the model says of being compiled, on a CPU."""
        cfg = self._cfg
        if cfg.compile and compilation is not None and self._device == "cpu":
            self._notes.append(f"compile: {compilation}")
        elif cfg.compile:
            self._notes.append("compile: the forecast is that of the same step uncompiled; compiled blocks keep less")
        if str(cfg.optimizer.get("_target_", "")).startswith("torchao."):
            self._notes.append("torchao: its compiled steps take memory of their own, which is not predicted")
        if cfg.activation_offloading:
            self._notes.append("activation_offloading is not predicted: this is the run without it, which takes more")
        if self._device == "cuda":
            self._notes.append(
                "a GPU's attention and allocator are not at hand here: see docs/memory.md for what is assumed of them"
            )


def _function(recipe: Recipe, name: str) -> Any:
    """A function of the recipe's file."""
    found = getattr(sys.modules[recipe.main.__module__], name, None)
    if not callable(found):
        raise ConfigError(
            f"has no function {name}, which tells `optune plan` what would be trained",
            where=recipe.reference,
            hint="`optune cat full_finetune` has one: move what your recipe builds there",
        )
    return found


def _change(cfg: Any, overrides: Mapping[str, str | int]) -> Any:
    changed = copy.deepcopy(cfg)
    for key, value in overrides.items():
        if not hasattr(changed, key):
            raise ConfigError("the recipe has no such key", where=key)
        setattr(changed, key, value)
    return changed


def _find_device(name: str) -> str:
    """`cpu` or `cuda`. What is named need not be there; `auto` is what a run would take here."""
    from optune import distributed

    kind = (distributed.find_device(name) if name == "auto" else distributed.read_device(name)).type
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"{name!r}: memory is predicted for cpu and cuda", where="device", hint="use device=cpu")
    return kind
