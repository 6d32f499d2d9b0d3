"""Which worker of pytest-xdist runs which file. Tests of processes wait half of the time: unit tests fill it.

The last of three workers runs unit tests alone, and only while the others leave a processor idle, so that it delays no
draft. A third one like the others does: what is tested of drafts then comes too late.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

_FILLING = "gw2"


def give_way(worker: str) -> None:
    """Called by each worker, first of all: whether it computes only when nobody else does."""
    if worker == _FILLING:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class FillingScheduling(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """File after file; one worker takes unit tests and ends with them, the others take them last."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node.gateway.id == _FILLING and (own := _unit_tests(self.workqueue)):
            self.workqueue.move_to_end(own[0], last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node.gateway.id == _FILLING and not _unit_tests(self.workqueue):
            if not node.shutting_down:
                node.shutdown()
        else:
            super()._reschedule(node)


def _unit_tests(files: Iterable[str]) -> list[str]:
    return [file for file in files if file.startswith("tests/unit/")]
