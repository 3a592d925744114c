"""torch's agent for the workers of one machine, which waits for nobody that is dead."""

from __future__ import annotations

import signal
from typing import Any

from optune.errors import TrainingError
from tune_cli.overseer import GRACE_S, LAST_S, Overseer

EXIT_BARRIER_S = 60.0
"""How long a machine whose workers are done waits for the others to be done too."""


class SilentError(TrainingError):
    """A machine does not answer."""


def make_agent(overseer: Overseer, signals: list[str]) -> type[Any]:
    """torch's agent for the workers of one machine, under `overseer`."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    base: Any = LocalElasticAgent  # its decorators hide what its methods take

    class Agent(base):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            self._exit_barrier_timeout = EXIT_BARRIER_S
            overseer.prepare(_count_restarts(worker_group))
            pids = super()._start_workers(worker_group)
            overseer.watch(worker_group, self._pcontext, signals)
            return pids

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            overseer.let_leave()
            if overseer.silence:
                overseer.end_all()
                result = RunResult(state=WorkerState.FAILED)
            else:
                result = super()._monitor_workers(worker_group)
            if result.state == WorkerState.FAILED:
                found = overseer.conclude()
                if not found.may_restart:
                    self._remaining_restarts = 0
                if self._remaining_restarts:
                    overseer.keep_words()
                    overseer.tell(found, prefix="warning")
                    overseer.forgive()
                elif overseer.silence:
                    raise SilentError(overseer.silence)
            return result

        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            # Workers that are well are stopped when a machine joins: they save first.
            if not overseer.look()[1]:
                overseer.stop_all(min(LAST_S, self._shutdown_timeout))
            overseer.end_all()
            overseer.stop_pulse()
            super()._shutdown(signal.SIGHUP, int(GRACE_S))

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            if overseer.stop is not None:
                overseer.stop_all(timeout)
            overseer.end_all()
            overseer.stop_pulse()
            super()._shutdown(signal.SIGHUP, int(GRACE_S))

    return Agent


def _count_restarts(group: Any) -> int:
    """How often the workers were started before. torch's own count leaves out starts after a machine has joined, and is
    0 on a machine that joins late."""
    if group.group_rank != 0:
        return int(group.store.get("optune/restarts"))
    run_id = group.spec.rdzv_handler.get_run_id()
    count = group.store.underlying_store.add(f"optune/starts/{run_id}", 1) - 1
    group.store.set("optune/restarts", str(count))
    return count
