"""A candidate: one complete choice of parallelism and placement, without figures.

Pipelines are alike inside a group: the same datacenters in the same order. A candidate with several groups has data
parallelism over regions: the groups sum their gradients over the WAN. Knows shapes and counts, no times and no prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from atlas.cost.arrange import Arrangement
from atlas.cost.price import Tcp
from atlas.spec import Job, Place
from atlas.spec.plan import PlanGroup


@dataclass(frozen=True)
class Group:
    """Cells that share one placement."""

    places: tuple[tuple[str, int], ...]
    """(datacenter, stages) along the pipeline, first stage first."""
    layers_per_stage: tuple[int, ...]
    cells: int
    pipelines_per_cell: int
    num_microbatches: int
    """Per pipeline: the most any of them has."""

    @classmethod
    def placed(cls, one: Job | PlanGroup) -> Group:
        """Of a job or a group of a plan, both placed and split."""
        assert one.placement is not None, "a plan has one"
        assert one.layers_per_stage is not None, "a plan has them"
        places = tuple((place.dc, place.stages) for place in one.placement)
        return cls(places, one.layers_per_stage, one.cells, one.pipelines_per_cell or 1, one.num_microbatches)

    @classmethod
    def arranged(cls, job: Job, found: Arrangement) -> Group:
        """Of a job whose open choices were made by the cost model."""
        places = tuple((name, len(list(run))) for name, run in groupby(found.rank_dc))
        return cls(places, found.layers_per_stage, job.cells, found.num_pipelines, job.num_microbatches)

    @property
    def pp(self) -> int:
        return len(self.layers_per_stage)

    @property
    def replicas(self) -> int:
        return self.cells * self.pipelines_per_cell

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each piece of the model: embedding, layers, LM head."""
        return stage_of_pieces(self.layers_per_stage)

    @property
    def stage_dc(self) -> tuple[str, ...]:
        return tuple(name for name, stages in self.places for _ in range(stages))

    @property
    def num_hops(self) -> int:
        """Boundaries that cross the WAN."""
        return len(self.places) - 1


def stage_of_pieces(layers_per_stage: tuple[int, ...]) -> tuple[int, ...]:
    """By piece of the model: embedding, layers, LM head."""
    layers = [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
    return (0, *layers, len(layers_per_stage) - 1)


@dataclass(frozen=True)
class Candidate:
    """Parallelism and placement. Groups may cut the model at different layers: gradients are summed layer by layer."""

    tp: int
    microbatch: int
    groups: tuple[Group, ...]
    sharing: bool = False
    """Whether the pipelines of a cell take turns on the WAN."""
    tcp: Tcp = "many"

    @property
    def replicas(self) -> int:
        return sum(group.replicas for group in self.groups)

    @property
    def slots(self) -> int:
        """Microbatches that one iteration has room for; those beyond the global batch stay empty."""
        return sum(group.replicas * group.num_microbatches for group in self.groups)

    @cached_property
    def gpus(self) -> Mapping[str, int]:
        """GPUs in use by datacenter."""
        used: dict[str, int] = {}
        for group in self.groups:
            for name, stages in group.places:
                used[name] = used.get(name, 0) + stages * group.replicas * self.tp
        return used

    @property
    def num_gpus(self) -> int:
        return sum(self.gpus.values())

    @property
    def num_datacenters(self) -> int:
        return len(self.gpus)

    @cached_property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        if self.num_datacenters == 1:
            return "one"
        return "pipeline" if len(self.groups) == 1 else "data"

    def job(self, job: Job, index: int = 0) -> Job:
        """The job that one group is: what `cost`, `sim` and `schedules` take."""
        group = self.groups[index]
        return job.alone(
            tp=self.tp,
            pp=group.pp,
            interleave=1,
            microbatch=self.microbatch,
            num_microbatches=group.num_microbatches,
            cells=group.cells,
            pipelines_per_cell=group.pipelines_per_cell,
            placement=tuple(Place(dc=name, stages=stages) for name, stages in group.places),
            layers_per_stage=group.layers_per_stage,
        )

    def where(self) -> str:
        """`west 4 + east 8`, groups apart: `west 4 | east 4`."""
        return " | ".join(" + ".join(f"{name} {stages}" for name, stages in group.places) for group in self.groups)

    def how(self) -> str:
        """`tp 8 x pp 12 x dp 4, b 2`, with cells where they take turns."""
        cells = "+".join(f"{g.cells}x{g.pipelines_per_cell}" for g in self.groups) if self.sharing else ""
        depths = "/".join(str(pp) for pp in dict.fromkeys(group.pp for group in self.groups))
        return f"tp {self.tp} x pp {depths} x dp {self.replicas}{f' ({cells})' if cells else ''}, b {self.microbatch}"


KINDS = {
    "one": "one region alone",
    "pipeline": "pipelines across regions",
    "data": "data parallelism across regions",
}
