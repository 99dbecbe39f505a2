"""What an iteration costs: GPU time and bytes that leave a zone, counted as Sailor's simulator counts them.

GPUs     sum over GPUs of price/hour x T          egress   activations and gradients of every replica and
microbatch, and the gradient ring (each replica sends 2 (D - 1)/D of its stage to the next, the last to the first)
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas.errors import InfeasibleError
from atlas.sailor.inputs import Inputs
from atlas.sailor.judge import FLOAT_BYTES, Verdict, activation_bytes
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
    return Money(usd_per_s(inputs, plan) * verdict.iteration_s, egress_usd(inputs, plan, verdict.num_microbatches))


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
    return sum(count * usd_per_gpu_s(inputs, end.gpu) for end, count in plan.gpus_by_end().items())


def egress_usd(inputs: Inputs, plan: SailorPlan, num_microbatches: int) -> float:
    """Price of every byte that leaves its zone in one iteration."""
    price = inputs.egress.usd_per_byte
    total = 0.0
    for i, (layers, stage) in enumerate(zip(plan.layers, plan.replicas, strict=True)):
        if i + 1 < plan.num_stages:
            sent = activation_bytes(inputs, layers[-1], plan.mbs) * num_microbatches
            for a, b in zip(stage, plan.replicas[i + 1], strict=True):
                total += sent * (price(a.zone, b.zone) + price(b.zone, a.zone))
        stage_bytes = sum(inputs.sizes[1].params[layer] for layer in layers) * FLOAT_BYTES
        num = len(stage)
        ring = sum(price(stage[j].zone, stage[(j + 1) % num].zone) for j in range(num))
        total += ring * stage_bytes * 2 * (num - 1) / num
    return total
