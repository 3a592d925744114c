"""What every recipe does in the same way around its loop: open the run folder, resume, log, save, stop.

    with session.start(…) as run:
        for step in run.steps():
            …one training step…
            run.log_step(result)
            if run.is_due(save_every_steps):
                run.save()
    return run.exit_code

The loop, and what is in it, belongs to the recipe.
"""

from optune.session.opening import start
from optune.session.running import Session
from optune.start_summary import show, summarize
from optune.time_limit import TimeLimit

__all__ = ["Session", "TimeLimit", "show", "start", "summarize"]
