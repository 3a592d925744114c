"""Finetune low-rank adapters beside a model's frozen weights (LoRA).

    optune run lora_finetune --config smollm2/135m_lora

`optune cp lora_finetune .` gives you this file; change it and run your copy with `optune run ./lora_finetune.py …`.
What must not change (the step, the loss, saving, resuming) stands in the library, what you might change stands here.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from optune import checkpoint, data, distributed, lora, loss, models, optim, plan, run_folder, session, train
from optune.config import LoraSection, RunConfig, bind_targets, read_target, schedule_keywords, to_dict, to_run_yaml


@dataclass
class Config(RunConfig):
    """The keys that every recipe has, and those of the adapters."""

    lora: LoraSection = field(default_factory=LoraSection)


def make_batches(cfg: Config, source: Path, config: models.DecoderConfig, world_size: int = 1, rank: int = 0):
    """(tokenizer, batches, validation): all rows as tokens, then batches as a function of (seed, step).

    `optune data` shows what this returns. `source` is the model's folder, `config` what `models.check` read there;
    of `world_size` processes that see different rows this is number `rank`.
    """
    sources = bind_targets(to_dict(cfg, hide_secrets=False)["data"])
    tokenizer = data.load_tokenizer(source, cfg.data.chat_template, template_date=cfg.data.template_date)
    load_rows = partial(
        data.load_rows,
        tokenizer=tokenizer,
        format=sources["format"],
        max_length=cfg.data.max_length,
        truncation=cfg.data.truncation,
        train_on=cfg.data.train_on,
        parse_special=cfg.data.parse_special,
        embedding_rows=config.vocab_size,
        cache=cfg.data.cache,
    )
    pad_id = min(tokenizer.pad_id, config.vocab_size - 1)  # any id does: padding is told by its place
    batches = data.build_batches(
        load_rows(
            sources["train"],
            streaming=cfg.data.streaming,
            shuffle_window=cfg.data.shuffle_window,
        ),
        batch_size=cfg.batch_size,
        gradient_accumulation_steps=cfg.gradient_accumulation_steps,
        shuffle=cfg.data.shuffle,
        group_by_length=cfg.data.group_by_length,
        packing=cfg.data.packing,
        max_length=cfg.data.max_length,
        pad_id=pad_id,
        pad_to_multiple=cfg.data.pad_to_multiple,
        seed=cfg.seed,
        world_size=world_size,
    )
    validation = []
    if cfg.data.validation is not None:
        validation = data.build_validation_batches(
            load_rows(sources["validation"]),
            cfg.batch_size,
            pad_id=pad_id,
            world_size=world_size,
            rank=rank,
            pad_to_multiple=cfg.data.pad_to_multiple,
            trained=batches.rows,
        )
    return tokenizer, batches, validation


def outline(cfg: Config, config: models.DecoderConfig):
    """The model that is trained, as names and shapes: it has no memory yet."""
    model = models.outline(config).to(models.DTYPES[cfg.model.dtype])
    model.activation_checkpointing = cfg.activation_checkpointing
    lora.apply(model, **to_dict(cfg, hide_secrets=False)["lora"])  # wrong targets are refused here
    return model


def optimizer_settings(cfg: Config):
    """What `optim.build_optimizer` takes beside parameters."""
    factory, keywords = read_target(cfg.optimizer)
    return {
        "factory": factory,
        "settings": keywords,
        "parameter_groups": cfg.parameter_groups,
        "master_weights": cfg.model.master_weights,
        "update_rounding": cfg.model.update_rounding,
        "seed": cfg.seed,
    }


def build(cfg: Config, model, processes: distributed.Processes, fill, positions_per_step: int):
    """(optimizer, stepper): an outline is spread over the processes, gets its weights by `fill(model)`, and is trained.

    `optune plan` calls this too, with weights that have no values: so it predicts what these lines really take.
    """
    distributed.spread(model, processes)
    fill(model)
    if cfg.activation_offloading:
        model.offload_activations()
    if cfg.compile:
        model.compile_blocks()
    # An ordinary optimizer, and the stepper that decides when it steps.
    optimizer = optim.build_optimizer(model.named_parameters(), **optimizer_settings(cfg))
    stepper = optim.build_stepper(
        model,
        optimizer,
        when=cfg.optimizer_step,
        max_grad_norm=cfg.max_grad_norm,
        stash=cfg.gradient_stash,
        max_skipped_steps=cfg.max_skipped_steps,
        expected_tokens=positions_per_step,
        variant=cfg.immediate_variant,
        max_parameter_grad_norm=cfg.max_parameter_grad_norm,
        reduce=processes.reduce,
    )
    return optimizer, stepper


def loss_sum(model, hidden_BTD, microbatch):
    """What is trained: the sum over the targets of a microbatch."""
    return loss.next_token_loss(model, hidden_BTD, microbatch)


def main(cfg: Config, validate_only: bool = False) -> int:
    """Trains as `cfg` says and returns the exit code; with `validate_only`, stops before anything is written."""
    settings = to_dict(cfg, hide_secrets=False)
    keep_whole = optim.why_whole(cfg.optimizer_step)
    with distributed.start(cfg.device, **settings["parallel"], keep_whole=keep_whole) as processes:
        train.check_accumulation(cfg.accumulation, cfg.optimizer_step, cfg.gradient_accumulation_steps)
        if cfg.activation_offloading:
            models.check_offloading(processes.device, cfg.accumulation)
        time_limit = session.TimeLimit(cfg.max_time)
        loggers = [factory(**keywords) for factory, keywords in map(read_target, cfg.loggers)]
        processes.on_main(run_folder.check_output, cfg.output_dir, resume=cfg.resume)
        resume_from = processes.on_main(checkpoint.resolve, cfg.resume, cfg.output_dir)
        source = processes.in_turn(models.resolve, cfg.model.path)
        config = models.check(source)
        distributed.check_model(config, processes.layout)
        model = outline(cfg, config)
        device, mesh = processes.parameter_device, processes.parameter_mesh
        optim.try_optimizer(model, **optimizer_settings(cfg), device=device, mesh=mesh)

        tokenizer, batches, validation = make_batches(cfg, source, config, processes.data_size, processes.data_rank)
        changed_files = tokenizer.changed_files
        del tokenizer  # Rows are tokens now; a vocabulary takes memory.
        total_steps = train.count_steps(batches.steps_per_epoch, cfg.epochs, cfg.max_steps)
        schedule = optim.build_schedule(total_steps=total_steps, **schedule_keywords(cfg.schedule))

        def fill(model):  # each process reads its part
            models.fill(model, source, device=processes.parameter_device)
            train.seed_everything(cfg.seed)
            lora.start(model)
            if resume_from is not None:
                lora.load(model, resume_from)

        optimizer, stepper = build(cfg, model, processes, fill, batches.positions_per_step)
        summary = session.summarize(
            cfg.model.path, source, model, batches, total_steps, optimizer, stepper, processes.describe(), validation
        )
        if validate_only:
            session.show("valid: this is what would be trained", summary)
            return 0

        def write_adapter(tensors, folder):
            lora.save(model, folder, base=cfg.model.path, tensors=tensors, rank=processes.rank)
            if processes.is_main:
                models.copy_companions(source, folder, changed_files)

        with session.start(
            cfg.output_dir,
            processes,
            config_yaml=to_run_yaml(cfg),
            resume=cfg.resume,
            resume_from=resume_from,
            allow_change=cfg.allow_change,
            identity={"config": settings, "data": batches.fingerprint(), "model": models.fingerprint(source)},
            model=model,
            optimizer=optimizer,
            stepper=stepper,
            write_model=write_adapter,
            model_tensors=lora.state(model),
            batches=batches,
            total_steps=total_steps,
            time_limit=time_limit,
            save_every_steps=cfg.checkpoint.save_every_steps,
            keep_last=cfg.checkpoint.keep_last,
            log_every_steps=cfg.log_every_steps,
            loggers=loggers,
            summary=summary,
            predict=partial(
                plan.predict,
                outline=partial(outline, cfg),
                build=partial(build, cfg),
                loss=loss_sum,
                config=config,
                accumulation=cfg.accumulation,
                validates=bool(validation),
                processes=processes,
            ),
        ) as run:
            if validation:
                train.evaluate(model, loss_sum, validation[:1])  # a rehearsal: fail now, not in hours

            def validate():
                with run.validating():
                    rows = run.until_stopped(validation)
                    run.log_validation(train.evaluate(model, loss_sum, rows, sum_over_ranks=run.sum))

            if validation and run.owes_validation:
                validate()
            for step in run.steps():
                optim.set_learning_rate(optimizer, schedule, step)
                microbatches = batches.microbatches(step, processes.data_rank)
                result = train.train_step(
                    model, loss_sum, stepper, microbatches,
                    seed=cfg.seed, step=step, rank=processes.data_rank, sum_over_ranks=run.sum,
                    accumulation=cfg.accumulation,
                )  # fmt: skip
                run.log_step(result)
                if validation and (run.is_due(cfg.validation_every_steps) or run.is_over):
                    validate()
                if run.is_due(cfg.checkpoint.save_every_steps):
                    run.save()
        return run.exit_code
