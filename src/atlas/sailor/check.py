"""Whether a plan could run at all: GPUs of each zone, node borders, memory, layers, replicas. The first thing wrong
is an InfeasibleError that says what was given, the rule and the remedy. Knows no times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from atlas.errors import InfeasibleError
from atlas.sailor.inputs import GIB, Inputs
from atlas.sailor.judge import stage_memory_bytes
from atlas.sailor.links import ZoneGpu
from atlas.sailor.plan_file import SailorPlan


def check(inputs: Inputs, plan: SailorPlan, where: str = "plan") -> None:
    """Raise for the first rule that the plan breaks."""
    _check_layers(inputs, plan, where)
    _check_replicas(inputs, plan, where)
    _check_gpus(inputs, plan, where)
    _check_memory(inputs, plan, where)


def fits_nodes(num_gpus: int, gpus_per_node: int, groups: Mapping[int, int]) -> bool:
    """Whether groups {tp: how many} fit GPUs in nodes, of which the last may not be full; no group leaves its node.

    Where each tp divides the next, as powers of two do, it is enough that those of a tp and all larger ones find room.
    """
    nodes, rest = divmod(num_gpus, gpus_per_node)
    used, larger = 0, gpus_per_node
    for tp in sorted(groups, reverse=True):
        if larger % tp:
            return _packs(num_gpus, gpus_per_node, groups)
        used, larger = used + tp * groups[tp], tp
        if used > nodes * gpus_per_node + rest // tp * tp:
            return False
    return True


def _packs(num_gpus: int, gpus_per_node: int, groups: Mapping[int, int]) -> bool:
    """Largest first into the fullest node that has room."""
    nodes, rest = divmod(num_gpus, gpus_per_node)
    free = [rest] + [gpus_per_node] * nodes
    for tp in sorted(groups, reverse=True):
        left = groups[tp]
        for node in sorted(range(len(free)), key=lambda n: free[n]):
            placed = min(left, free[node] // tp)
            free[node] -= placed * tp
            left -= placed
        if left:
            return False
    return True


def _check_layers(inputs: Inputs, plan: SailorPlan, where: str) -> None:
    flat = [layer for stage in plan.layers for layer in stage]
    if flat != list(range(inputs.num_layers)) or not all(plan.layers):
        raise InfeasibleError(
            where=where,
            key="layers_per_stage",
            rule=f"every layer 0..{inputs.num_layers - 1} must occur once, in order, and no stage may be empty",
            remedy="Fix the split",
        )


def _check_replicas(inputs: Inputs, plan: SailorPlan, where: str) -> None:
    counts = {len(stage) for stage in plan.replicas}
    if len(counts) != 1 or 0 in counts or len(plan.replicas) != plan.num_stages:
        raise InfeasibleError(
            where=where,
            key="dp",
            value=[len(stage) for stage in plan.replicas],
            rule="replica j of a stage sends to replica j of the next: every stage needs the same number of them",
            remedy="Give each stage D replicas",
        )
    pools = {pool.zone_gpu for pool in inputs.pools}
    for replica in {replica for stage in plan.replicas for replica in stage}:
        if replica.zone_gpu not in pools:
            rule, remedy = "the trace has no such GPUs", f"Use {', '.join(f'{e.gpu} in {e.zone}' for e in pools)}"
        elif replica.tp > min(replica.gpus_in_vm, inputs.gpus[replica.gpu].gpus_per_node):
            rule, remedy = "a tensor-parallel group must fit in one VM and in one node", "Lower tp"
        elif (replica.gpu, plan.mbs, replica.tp) not in inputs.times or replica.tp not in inputs.sizes:
            rule = f"{replica.gpu} was not profiled at microbatch {plan.mbs}, tp {replica.tp}"
            remedy = "Use a microbatch and a tp that were profiled"
        else:
            continue
        raise InfeasibleError(where=where, key="tmp_per_stage", value=tuple(replica), rule=rule, remedy=remedy)


def _check_gpus(inputs: Inputs, plan: SailorPlan, where: str) -> None:
    groups: dict[ZoneGpu, Counter[int]] = {}
    for stage in plan.replicas:
        for replica in stage:
            groups.setdefault(replica.zone_gpu, Counter())[replica.tp] += 1
    for pool in inputs.pools:
        used = groups.get(pool.zone_gpu, Counter())
        per_node = inputs.gpus[pool.gpu].gpus_per_node
        if not fits_nodes(pool.num_gpus, per_node, used):
            raise InfeasibleError(
                where=where,
                key=f"tmp_per_stage: {pool.gpu} in {pool.zone}",
                value=sum(tp * n for tp, n in used.items()),
                rule=f"{pool.zone} has {pool.num_gpus} {pool.gpu} in nodes of {per_node}",
                remedy="Use fewer replicas, stages or tp there",
            )


def _check_memory(inputs: Inputs, plan: SailorPlan, where: str) -> None:
    for i, (layers, stage) in enumerate(zip(plan.layers, plan.replicas, strict=True)):
        for gpu, tp in {(replica.gpu, replica.tp) for replica in stage}:
            need = stage_memory_bytes(inputs, layers, tp, plan.mbs, plan.num_stages - i)
            have = inputs.gpus[gpu].memory_bytes
            if need > have:
                raise InfeasibleError(
                    where=where,
                    key=f"layers_per_stage.{i}",
                    value=list(layers),
                    rule=f"needs {need / GIB:.1f} GiB a GPU at microbatch {plan.mbs}, tp {tp}; {gpu} has {have // GIB}",
                    remedy="Use fewer layers there, a smaller microbatch, more tp or more stages",
                )
