"""The memory rule against what the runtime's autograd keeps on one rank of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from shipped_jobs import EXAMPLES
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from atlas.cost.arrange import arrange
from atlas.cost.memory import worker_memory
from atlas.runtime.flat import local_part
from atlas.runtime.models.config import gpt
from atlas.runtime.models.decoder import Decoder, LayerRange, build
from atlas.runtime.models.parallel import parallelize
from atlas.runtime.stage_parts import LayerRunner, LossHead, PassContext
from atlas.spec import Job, load_job

LENGTH, WIDTH, HEADS, VOCABULARY = 32, 64, 8, 4096
SHAPE = (f"seq_len={LENGTH}", f"hidden={WIDTH}", f"heads={HEADS}", f"vocab={VOCABULARY}", "layers=4")


def job_of(tp: int) -> Job:
    """One layer on each of four workers, in float32."""
    nodes = [f"cluster.datacenters.{dc}.gpus_per_node=4" for dc in ("east", "west")]
    return load_job(EXAMPLES / "tiny.yaml", [*nodes, *(f"model.{key}" for key in SHAPE), "precision=fp32", f"tp={tp}"])


@pytest.fixture(params=[1, 2, 4])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Of a group whose other ranks are not there: collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    try:
        yield init_device_mesh("cpu", (request.param,))
    finally:
        dist.destroy_process_group()


def test_a_rank_keeps_of_a_layer_and_of_the_loss_what_is_counted(mesh: DeviceMesh) -> None:
    config = gpt(num_layers=1, width=WIDTH, num_heads=HEADS, vocabulary=VOCABULARY, max_length=LENGTH)
    decoder = build(config, LayerRange(range(1), False, True), shard=partial(parallelize, mesh=mesh))
    assert decoder.head is not None
    layers, head = LayerRunner(list(decoder.layers.values()), None), LossHead(decoder.head, None)  # type: ignore[arg-type]
    around, targets = PassContext(torch.arange(LENGTH), None, None), torch.zeros(1, LENGTH, dtype=torch.int64)
    x = torch.zeros(1, LENGTH, WIDTH, requires_grad=True)
    worker = worker_memory(job_of(mesh.size()), arrange(job_of(mesh.size())))[3]
    of_layer = kept_bytes(decoder, lambda: layers.forward(layers.layers[0], around, x))
    of_loss = kept_bytes(decoder, lambda: head.forward(targets, 1.0, x))
    assert of_layer == pytest.approx(worker.kept, rel=0.02), "statistics of norms and attention are not counted"
    assert of_loss == pytest.approx(worker.logits / 2, rel=0.05), "without the gradient of the logits"


def kept_bytes(decoder: Decoder, run: Callable[[], object]) -> int:
    """What autograd keeps of a forward; parameters are left out."""
    parameters = {local_part(p).untyped_storage().data_ptr() for p in decoder.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        part = local_part(tensor)
        found[part.untyped_storage().data_ptr()] = part.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()  # until here all that is kept has an address of its own
    assert kept is not None
    return sum(size for address, size in found.items() if address not in parameters)
