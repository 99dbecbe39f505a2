"""Keeps the last steps of a run and writes them as a data point at its end: `atlas train --evidence DIR`.

Training never waits for it: steps are kept in memory, a few at a time.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from atlas.cost.arrange import arrange
from atlas.errors import AtlasError
from atlas.evidence.data_point import DataPoint
from atlas.evidence.write_card import RunFacts, require_new, write_data_point
from atlas.ir.program import Program
from atlas.ir.store import LAST_STEPS, joined
from atlas.ir.timeline import Timeline
from atlas.spec.job import Job


class EvidenceRecorder:
    """Call `step` with the timeline of every step, then `write`."""

    def __init__(self, folder: Path, job: Job, facts: RunFacts, *, traced: bool = False) -> None:
        """`traced`: the workers write their own traces into the folder (torch.profiler on GPUs)."""
        require_new(folder)
        self.folder, self.job, self.facts, self.traced = folder, job, facts, traced
        self._steps: deque[Timeline] = deque(maxlen=LAST_STEPS)
        self._number = -1

    def step(self, number: int, timeline: Timeline) -> None:
        if self._steps and (timeline.program is not self._steps[-1].program or number <= self._number):
            self._steps.clear()  # training went back to a checkpoint, or goes on with another plan
        self._number = number
        self._steps.append(timeline)

    def write(self) -> DataPoint:
        """Raises AtlasError where no step was done, or where the run ended under another plan than it began."""
        if not self._steps:
            raise AtlasError(f"{self.folder}: nothing to write: no step was done")
        arrangement = arrange(self.job)
        timeline = joined(list(self._steps))
        require_same(self.job, arrangement.num_pipelines, timeline.program, "the run", self.job.where)
        return write_data_point(self.folder, timeline, self.job, arrangement, self.facts, traced=self.traced)


def require_same(job: Job, num_pipelines: int, program: Program, run: object, job_file: object) -> None:
    """Raise AtlasError where a Program is not one of this job."""
    mine = (num_pipelines, job.num_stages, job.num_microbatches)
    theirs = (program.num_pipelines, program.num_stages, program.num_microbatches)
    if mine != theirs:
        names = ("pipelines", "stages", "microbatches")
        words = [f"{a} {name} instead of {b}" for name, a, b in zip(names, mine, theirs, strict=True) if a != b]
        raise AtlasError(f"{job_file} is not the job of {run}: {', '.join(words)}. Name the plan that ran")
