"""Recipes: every key is documented and checked, flags replace keys, and launchers with other recipes are refused."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
from sections import sections

from atlas.cli import command_parser, main
from atlas.commands.train import recipe_of
from atlas.errors import SpecError
from atlas.launch.prepared_job import difference, digest_of, prepare_job
from atlas.launch.train_options import TrainOptions, optimizer_settings, recipe_options
from atlas.spec import load_job
from atlas.spec.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
TINY = ROOT / "examples" / "tiny.yaml"


def written(folder: Path, text: str) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return file


def options_of(recipe: Recipe) -> TrainOptions:
    return TrainOptions("1f1b", **recipe_options(recipe, model="job"))


@pytest.mark.parametrize("kind", sections(Recipe), ids=lambda kind: kind.__name__)
def test_every_key_has_a_docstring_and_is_on_the_page(kind: type) -> None:
    source = "".join(inspect.getsource(base) for base in kind.__mro__ if base.__module__ == kind.__module__)
    for name in kind.model_fields:
        assert re.search(rf'\n    {name}: [^\n]*\n    """', source), f"{kind.__name__}.{name}"
        assert re.search(rf"\b{name}\b", PAGE), f"{kind.__name__}.{name}"


def test_the_example_is_a_recipe_and_its_paths_are_relative_to_it() -> None:
    recipe = load_recipe(ROOT / "examples" / "recipe.yaml")
    assert recipe.checkpoints.folder == str(ROOT / "examples" / "saved")
    assert (recipe.model, recipe.data.shards) == ("job", "shipped")


def test_the_learning_rate_warms_up_and_decays_to_the_last_step(tmp_path: Path) -> None:
    file = written(tmp_path, "steps: 104\nlearning_rate: {peak: 2.0, warmup: 4, decay: cosine, final: 0.5}\n")
    rate = optimizer_settings(options_of(load_recipe(file))).learning_rate
    assert [rate.at(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert rate.at(54) == pytest.approx(1.25)
    assert rate.at(104) == pytest.approx(0.5)


def test_a_flag_replaces_the_recipes_key(tmp_path: Path) -> None:
    file = written(tmp_path, "steps: 9\nlearning_rate: {peak: 2.0, warmup: 4}\nseed: 5\n")
    recipe = load_recipe(file, {"steps": 7, "learning_rate.peak": 1.0, "seed": None})
    assert (recipe.steps, recipe.learning_rate.peak, recipe.learning_rate.warmup, recipe.seed) == (7, 1.0, 4, 5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("setps: 3\n", "recipe.yaml:1: setps: unknown key. Did you mean 'steps'?"),
        ("learning_rate:\n  warm_up: 3\n", "recipe.yaml:2: learning_rate.warm_up: unknown key. Did you mean 'warmup'?"),
        ("optimizer: {name: lion}\n", "optimizer.name = 'lion'"),
        ("optimizer: adamw\n", "optimizer = 'adamw': must be a mapping of keys"),
        ("steps: 5\nlearning_rate: {warmup: 5, decay: linear}\n", "a linear decay begins after the warm-up"),
        ("learning_rate: {peak: 1, decay: cosine, final: 2}\n", "must not exceed learning_rate.peak (1)"),
        ("learning_rate: {final: 0.1}\n", "only has an effect with a decay"),
        ("steps: 0\n", "steps = 0"),
        ("clip: .nan\n", "clip = nan"),
        ("- steps\n", "a recipe is a mapping of keys"),
        ("", "this is empty"),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_line_and_the_remedy(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(says)):
        load_recipe(written(tmp_path, text))


def test_a_flag_that_breaks_a_rule_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape("command line: learning_rate.warmup = 9")):
        load_recipe(written(tmp_path, "steps: 5\nlearning_rate: {decay: linear}\n"), {"learning_rate.warmup": 9})


def test_launchers_with_other_recipes_are_refused_with_the_key(tmp_path: Path) -> None:
    job = load_job(TINY)
    ours = replace(options_of(load_recipe(None, {"steps": 9, "clip": 1.0})), stated=None)
    same = digest_of(job, replace(ours, checkpoints=tmp_path, patience_s=5.0))
    assert difference(same, digest_of(job, ours)) is None
    other = digest_of(job, options_of(load_recipe(None, {"steps": 9, "clip": 2.0})))
    assert "clip is 2.0 there and 1.0 at the rendezvous" in str(difference(other, digest_of(job, ours)))
    partly = options_of(load_recipe(None, {"checkpoints.folder": "x", "data.shards": "y", "clip": 1.0}))
    assert partly.stated == {"checkpoints.folder", "data.shards", "clip"}
    assert difference(digest_of(job, partly), digest_of(job, ours)) is None


def test_a_recipe_trains_as_the_same_flags_do(tmp_path: Path) -> None:
    text = "steps: 3\nseed: 2\nlearning_rate: {peak: 0.2, warmup: 2, decay: linear}\n"
    flags = ["--steps=3", "--seed=2", "--learning-rate=0.2", "--warmup=2", "--decay=linear"]
    found = []
    for way in (["--recipe", str(written(tmp_path, text))], flags):
        options = options_of(recipe_of(command_parser("train")[0].parse_args([str(TINY), *way])))
        found.append(prepare_job(load_job(TINY), replace(options, model="")).training)
    assert found[0] == found[1]
    assert (found[0].model.seed, found[0].data.seed) == (2, 2)
    assert [found[0].optimizer.learning_rate.at(step) for step in range(3)] == [0.1, 0.2, 0.2]


def test_a_recipe_with_an_unknown_key_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(TINY), "--emulate", "--recipe", str(written(tmp_path, "learning: 1\n"))]) == 2
    assert "Did you mean 'learning_rate'?" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3:/bucket/run"])
def test_another_url_than_s3_is_refused_and_no_folder_is_made_of_it(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    in_file = written(tmp_path, f"checkpoints: {{folder: '{url}'}}")
    for flags in (["--recipe", str(in_file)], ["--checkpoints", url]):
        assert main(["train", str(TINY), "--emulate", *flags]) == 2
        assert "the only object store is s3://BUCKET/PREFIX" in " ".join(capsys.readouterr().err.split())
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]


def test_an_object_store_is_not_relative_to_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, "checkpoints: {folder: 's3://bucket/run'}"))
    assert recipe.checkpoints.folder == "s3://bucket/run"
