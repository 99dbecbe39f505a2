"""What a user can get wrong: exit code 2, one message with what, where, rule and remedy; nothing left behind."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from cli_runner import Atlas, Said

INPUTS = {"tiny.yaml", "bad.yaml", "cluster.yaml", "link", "profile.json", "run.timeline", "folder"}
OUTPUTS = ("--page", "p.html", "--save", "run.timeline", "--json")


def refused(said: Said, *wanted: str) -> None:
    assert said.code == 2, said
    assert said.out == ""
    assert "Traceback" not in said.err
    assert said.err.count("\n") == 1
    for text in wanted:
        assert text in said.err, said.err


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> object:
    """No output, whole or half, after a mistake."""
    yield
    assert not {p.name for p in tmp_path.iterdir()} - INPUTS


def changed(tmp_path: Path, old: str, new: str) -> None:
    text = (tmp_path / "tiny.yaml").read_text()
    assert old in text
    (tmp_path / "bad.yaml").write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("pp: 4", "# pp", ("bad.yaml", "pp", "missing", "Add pp:")),
        ("pp: 4", "pp: 4\nnum_microbatch: 3", ("bad.yaml:29", "num_microbatch", "unknown key", "'num_microbatches'")),
        ("pair_gbps: 5", "pair_gbps: -5", ("bad.yaml:20", "cluster.wan.pair_gbps", "-5", "greater than 0", "Change")),
        ("pp: 4", "pp: 12", ("bad.yaml:28", "pp = 12", "12 stages are more than the model's 8 layers", "at most 8")),
        ("pp: 4", "pp: 4\nmemory_gib: 1", ("bad.yaml", "memory_gib = 1", "GiB per GPU", "optimizer", "Raise pp")),
        ("pp: 4", "pp: [", ("bad.yaml", "YAML")),
        ("nodes: 4", "nodes: 1", ("bad.yaml", "pp = 4", "8 GPUs", "fewer")),
    ],
)
def test_a_job_file_with_a_mistake(atlas: Atlas, tmp_path: Path, old: str, new: str, wanted: tuple[str, ...]) -> None:
    changed(tmp_path, old, new)
    refused(atlas("simulate", "bad.yaml", *OUTPUTS), *wanted)


def test_a_datacenter_without_a_path_to_its_neighbour(atlas: Atlas, tmp_path: Path) -> None:
    north = "    - { name: north, nodes: 4, gpus_per_node: 1, gpu: A100-40 }\n  links:\n"
    changed(tmp_path, "  # without `links`", north + "    - { between: [east, west] }\n  # without `links`")
    refused(atlas("simulate", "bad.yaml", *OUTPUTS), "bad.yaml", "cluster.links", "west to north", "Add {between:")


def test_a_truncated_profile(atlas: Atlas, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text('{"entries": [{"gpu": "A100-40", "microbatch": 1, "tp": 1, "layer": {"for')
    said = atlas("simulate", "tiny.yaml", "--set", "profile=profile.json", *OUTPUTS)
    refused(said, "profile.json")


def test_a_missing_job_file(atlas: Atlas) -> None:
    refused(atlas("simulate", "nowhere.yaml", *OUTPUTS), "nowhere.yaml")


def test_an_unknown_schedule_names_the_nearest(atlas: Atlas) -> None:
    refused(atlas("simulate", "tiny.yaml", "--schedule", "zerobubble", *OUTPUTS), "zerobubble", "'zero-bubble'", "1f1b")
    refused(atlas("schedules", "--show", "gpip", "tiny.yaml"), "'gpipe'")
    refused(atlas("compare", "tiny.yaml:atlass", "tiny.yaml:1f1b"), "'atlas'")


def test_an_unknown_command_or_flag_names_the_nearest(atlas: Atlas) -> None:
    refused(atlas("simulat", "tiny.yaml"), "'simulate'")
    refused(atlas("simulate", "tiny.yaml", "--schedul", "1f1b"), "--schedule?")
    refused(atlas("simulate", "tiny.yaml", "--tcp", "three"), "three", "one", "many")
    refused(atlas("simulate", "tiny.yaml", "--iterations", "0"), "--iterations", "from 1 to")
    refused(atlas("simulate"), "JOB.yaml")


@pytest.mark.parametrize("number", ["nan", "inf", "-1", "1e400", "ten", ""])
def test_a_flag_that_is_not_a_number(atlas: Atlas, number: str) -> None:
    probe = ("wan", "probe", "--node", "a-0=127.0.0.1:9", "--node", "b-0=127.0.0.1:9")
    for words in (
        ("train", "tiny.yaml", "--emulate", "--learning-rate"),
        ("train", "tiny.yaml", "--emulate", "--clip"),
        ("train", "tiny.yaml", "--dc", "east", "--patience"),
        ("whatif", "tiny.yaml", "--wan-sigma"),
        ("wan", "emulate", "tiny.yaml", "--for"),
        ("wan", "certs", "east", "--days"),
        (*probe, "--max-mb"),
        (*probe, "--every"),
    ):
        refused(atlas(*words, number), words[-1], repr(number), "number from")


def test_a_message_names_the_flag_that_was_given(atlas: Atlas) -> None:
    refused(atlas("schedules", "--show", "gpip", "tiny.yaml"), "--show 'gpip'")
    refused(atlas("whatif", "tiny.yaml", "--sweep", "cluster.wan.latncy=1,2"), "--sweep cluster.wan.latncy=1")
    refused(atlas("wan", "emulate", "tiny.yaml", "--at", "east-0=ls"), "--at needs --grade namespace", "leave out --at")
    refused(atlas("data", "tokenize", "--end", "x", "--out", "shards"), "--end 'x'", "Leave out --end")


def test_mistakes_that_are_known_at_the_start_are_refused_before_work_begins(atlas: Atlas) -> None:
    said = atlas("train", "tiny.yaml", "--emulate", "--device", "tpu")
    refused(said, "device 'tpu': must be paced, cpu, cuda or cuda:N")
    assert "worker" not in said.err
    refused(atlas("wan", "certs", "east", "we st"), "node 'we st'", "a datacenter alone")  # without a CA: see above
    refused(atlas("wan", "certs", "east", "--out", "tiny.yaml"), "--out 'tiny.yaml'", "not a folder")
    with patch("atlas.api.make_plan", side_effect=AssertionError):
        refused(atlas("plan", "tiny.yaml", "--confidence", "0.95"), "--confidence", "`model`", "atlas wan learn")


def test_a_run_that_cannot_start_or_finish(atlas: Atlas, tmp_path: Path) -> None:
    train = ("train", "tiny.yaml", "--dc", "east", "--device", "cpu")
    refused(atlas(*train, "--listen", "192.0.2.1"), "--listen 192.0.2.1", "not an address of this host", "ip addr")
    refused(atlas(*train, "--page", "p.html"), "--page is for --emulate", "--timeline")
    refused(atlas("train", "tiny.yaml", "--emulate", "--checkpoints", "tiny.yaml/x"), "--checkpoints", "tiny.yaml")
    refused(atlas("plan", "tiny.yaml", "--pareto", "front.svg", "--out", "plan.yaml"), "--pareto", "usd_per_gpu_hour")


def test_job_files_are_not_written_for_a_plan_with_an_unknown_schedule(atlas: Atlas, tmp_path: Path) -> None:
    plan = ("plan", "tiny.yaml", "--tries", "0", "--no-break-even", "--out", "link")
    assert atlas(*plan).code == 0
    (tmp_path / "link").write_text((tmp_path / "link").read_text().replace("schedule: {name: ", "schedule: {name: x"))
    (tmp_path / "bad.yaml").write_text("steps: 2\n")
    how = ("--recipe", "bad.yaml", "--target", "slurm", "--out", "jobs", "--rendezvous", "host:7700")
    refused(atlas("launch", "link", *how), "schedule.name", "no such schedule", "Did you mean")


def test_a_wrong_set(atlas: Atlas) -> None:
    refused(atlas("simulate", "tiny.yaml", "--set", "pp", *OUTPUTS), "--set", "key=value")
    refused(atlas("simulate", "tiny.yaml", "--set", "cluster.wan.latncy_ms=3", *OUTPUTS), "latncy_ms", "'latency_ms'")
    refused(atlas("simulate", "tiny.yaml", "--set", "cluster.datacenters.nort.nodes=3", *OUTPUTS), "nort", "east")


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_computed(atlas: Atlas, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    # The job is wrong too: that the output is named shows that it was looked at first.
    refused(atlas("simulate", "no.yaml", "--page", "not/there/p.html"), "--page", "not/there", "mkdir -p")
    refused(atlas("simulate", "no.yaml", "--save", "folder"), "--save", "is a folder")
    refused(atlas("simulate", "no.yaml", "--out", "tiny.yaml/x"), "--out", "tiny.yaml")
    refused(atlas("simulate", "no.yaml", "--svg", "same", "--page", "same"), "same file")
    refused(atlas("plan", "no.yaml", "--out", "same", "--page", "same"), "--page", "same file")
    refused(atlas("whatif", "no.yaml", "--out", "same.html", "--page", "same.html"), "--page", "same file")
    refused(atlas("profile", "no.yaml", "--gpu", "x", "--out", "not/there/p.json"), "--out", "mkdir -p")
    refused(atlas("train", "tiny.yaml", "--emulate", "--timeline", "not/there/t"), "--timeline", "mkdir -p")
    refused(atlas("train", "tiny.yaml", "--emulate", "--log", "same", "--page", "same"), "same file")


def test_no_command_overwrites_its_input(atlas: Atlas, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("tiny.yaml")
    atlas("simulate", "tiny.yaml", "--schedule", "1f1b", "--save", "run.timeline")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    lines = [
        "simulate tiny.yaml --page tiny.yaml",
        "simulate tiny.yaml --svg new.svg --save ./link",
        "simulate tiny.yaml --set profile=run.timeline --trace run.timeline",
        "compare run.timeline tiny.yaml:1f1b --page tiny.yaml",
        "compare run.timeline tiny.yaml:1f1b --trace run.timeline",
        "view run.timeline --svg run.timeline",
        "plan tiny.yaml --page new.html --out tiny.yaml",
        "whatif tiny.yaml --sweep pp=2,4 --page tiny.yaml",
        "train tiny.yaml --emulate --log tiny.yaml",
        "train link --emulate --timeline tiny.yaml",
        "profile tiny.yaml --gpu A100 --device cpu --out tiny.yaml",
        "plan --from-sailor . --model x --trace x.csv --out-sailor run.timeline",
    ]
    for line in lines:
        refused(atlas(*line.split()), "is an input of this command", "overwritten", "another name")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_no_command_overwrites_a_file_that_its_job_names(atlas: Atlas, tmp_path: Path) -> None:
    document = yaml.safe_load((tmp_path / "tiny.yaml").read_text())
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(document.pop("cluster")))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**document, "cluster": "cluster.yaml"}))
    (tmp_path / "bad.yaml").write_text("base: tiny.yaml\nname: child\n")
    for taken in ("bad.yaml", "tiny.yaml", "cluster.yaml"):
        refused(atlas("simulate", "bad.yaml", "--page", taken), "--page", taken, "would be overwritten")


def test_a_file_named_after_a_schedule_does_not_overwrite_an_input(atlas: Atlas, tmp_path: Path) -> None:
    """Which names `--trace` makes of one for several timelines is known only when they are."""
    atlas("simulate", "tiny.yaml", "--schedule", "1f1b", "--save", "run.timeline")
    (tmp_path / "folder").mkdir()
    read = tmp_path / "folder" / "run-1f1b-many-0.timeline"
    read.write_bytes((tmp_path / "run.timeline").read_bytes())
    said = atlas("view", str(read), "run.timeline", "--trace", "folder/run.timeline")
    assert (said.code, read.read_bytes()) == (2, (tmp_path / "run.timeline").read_bytes())
    assert "would be overwritten" in said.err


def test_a_job_with_too_many_events(atlas: Atlas) -> None:
    said = atlas("simulate", "tiny.yaml", "--set", "num_microbatches=100000", "--iterations", "9", "--json")
    refused(said, "num_microbatches = 100000", "events", "Use fewer microbatches")


def test_files_that_are_not_timelines(atlas: Atlas, tmp_path: Path) -> None:
    refused(atlas("view", "tiny.yaml"), "tiny.yaml", "not a complete timeline file", "atlas simulate --save")
    refused(atlas("view", "gone.timeline"), "gone.timeline", "cannot be read")
    refused(atlas("view", "."), "is a folder")
    refused(atlas("compare", "tiny.yaml", "tiny.yaml"), "is a job", "tiny.yaml:atlas")
    atlas("simulate", "tiny.yaml", "--schedule", "1f1b", "--save", "run.timeline")
    whole = (tmp_path / "run.timeline").read_bytes()
    (tmp_path / "run.timeline").write_bytes(whole[: len(whole) // 2])
    refused(atlas("view", "run.timeline"), "run.timeline", "truncated")
