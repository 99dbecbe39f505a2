"""What an iteration costs: GPU time and bytes that leave a zone, counted as Sailor's simulator counts them.

GPUs     sum over GPUs of price/hour x T          egress   activations and gradients of every replica and
microbatch, and the gradient ring (each replica sends 2 (D - 1)/D of its stage to the next, the last to the first)
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas.errors import InfeasibleError
from atlas.sailor.inputs import Inputs
from atlas.sailor.judge import PlanJudge, Verdict
from atlas.sailor.plan_file import SailorPlan


@dataclass(frozen=True)
class Money:
    """USD of one iteration."""

    gpu_usd: float
    egress_usd: float

    @property
    def total_usd(self) -> float:
        return self.gpu_usd + self.egress_usd


def money(inputs: Inputs, plan: SailorPlan, verdict: Verdict) -> Money:
    """An iteration's bill; a GPU type without a price is an error."""
    return Money(usd_per_s(inputs, plan) * verdict.iteration_s, PlanJudge(inputs, plan).egress_usd(plan.ends))


def usd_per_gpu_s(inputs: Inputs, gpu: str) -> float:
    usd = inputs.gpus[gpu].usd_per_hour
    if usd is None:
        raise InfeasibleError(
            where=str(inputs.folder / "basic_cluster_config.json"),
            key=f"{gpu}.usd_per_gpu_hour",
            rule="this GPU type has no price, and the objective needs one",
            remedy=f"Give --gpu-price {gpu}=USD_PER_HOUR, or write the key",
        )
    return usd / 3600


def usd_per_s(inputs: Inputs, plan: SailorPlan) -> float:
    return sum(count * usd_per_gpu_s(inputs, end.gpu) for end, count in plan.gpus_by_zone().items())
