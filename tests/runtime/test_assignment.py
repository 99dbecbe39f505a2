"""What a worker is told survives the journey as JSON, and costs its sender no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from atlas.runtime.assignment import Assignment, FillerChoice, ModelChoice, SaveChoice, read, stand_in
from atlas.runtime.models.config import DecoderConfig, RopeScaling


def test_an_assignment_travels_as_json() -> None:
    training = stand_in()
    config = DecoderConfig("llama", 2, 8, 2, 1, 4, 16, 32, 64, rope_scaling=RopeScaling("linear", 2.0))
    model = ModelChoice(config, "bf16", 7, "/weights", (1, 1))
    full = Assignment(
        worker=3,
        program="text",
        training=type(training)(model, training.data, training.optimizer, 1.0),
        num_steps=5,
        compute_ns=((1, 2), (3, 4)),
        trusted_networks=("10.0.0.0/8",),
        save=SaveChoice("/here", every=2, sources=("/here", "/there"), resume=4),
        filler=FillerChoice("prefill", {"port": 1, "names": ["a"]}),
    )
    assert read(Assignment, json.loads(json.dumps(asdict(full)))) == full
    bare = Assignment(0, "text", training, 1)
    assert read(Assignment, json.loads(json.dumps(asdict(bare)))) == bare


def test_an_assignment_loads_without_torch() -> None:
    script = "import sys, atlas.runtime.assignment, atlas.runtime.topology; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
