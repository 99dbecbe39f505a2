"""The small parts of the service, each alone: text, stop strings, keys, prefixes, folders of models."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prefill_samples import LLAMA, Collector, greedy_after, greedy_alone, make_stages, offer_everywhere, run_all, whole
from serving import TINY

from atlas.errors import AtlasError, SpecError
from atlas.runtime.models.export import export_stage, finish_export
from bubbletea.admit.aims import LATEST_NS, Aims
from bubbletea.admit.records import AdmissionRefusal, Placement, PrefillRequest
from bubbletea.costs import LayerTime
from bubbletea.handoff import decode
from bubbletea.handoff.sampling import Sampling, choose
from bubbletea.prefill.messages import WorkerOrder
from bubbletea.prefill.shard import Served
from bubbletea.serve.assemble import assemble
from bubbletea.serve.auth import EVERYBODY, ApiKeys
from bubbletea.serve.errors import ApiError
from bubbletea.serve.prefix_store import HitTimes, PrefixStore
from bubbletea.serve.service import StopStrings, TextRequest
from bubbletea.serve.tokens import ServedTokenizer, TextStream
from bubbletea.serve.worker_windows import alone


# ---- the decoder ----------------------------------------------------------------------------------------------------
def test_without_a_decoder_only_hand_offs_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(served: object) -> None:
        raise AssertionError("the whole model is loaded for a decoder that nobody asked for")

    monkeypatch.setattr(decode, "load_whole", loaded)
    parts = assemble(replace(TINY, decodes=False), alone(2, TINY.arena_bytes), ApiKeys.open_to_all())

    async def ask() -> str:
        with pytest.raises(ApiError) as refused:
            await anext(parts.service.answer(TextRequest("", "hello", Sampling(max_tokens=4))))
        return str(refused.value)

    said = asyncio.run(ask())
    assert "router with vLLM behind it" in said
    assert parts.dispatcher.prefixes.budget_bytes == 0


# ---- the prefix cache ------------------------------------------------------------------------------------------------
def test_a_cached_prefix_is_used_only_if_moving_it_is_faster_than_computing_it() -> None:
    times = HitTimes()
    assert times.pays(512, 1_000_000), "not measured yet"
    for _ in range(40):
        times.loaded(512, 512_000)
    assert times.pays(512, 513_000)
    assert not times.pays(512, 511_000)
    for _ in range(40):
        times.loaded(512, 5_120_000)
    used = sum(times.pays(512, 1_000_000) for _ in range(64))
    assert used == 2, "now and then, to measure again"
    for _ in range(40):
        times.loaded(512, 1000)
    assert times.pays(512, 1_000_000)


# ---- text --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("said", ["plain", "naïve café", "日本語 🎉 ok", ""])
def test_a_stream_returns_whole_characters_only(said: str) -> None:
    text = ServedTokenizer.of_bytes()
    stream = TextStream(text)
    pieces = [stream.push(token) for token in said.encode()]
    assert "".join(pieces) + stream.flush() == said
    assert all("\ufffd" not in piece for piece in pieces)


def test_invalid_utf8_is_returned_with_replacement_characters() -> None:
    text, rng = ServedTokenizer.of_bytes(), random.Random(1)
    for _ in range(50):
        tokens = [rng.randrange(256) for _ in range(30)]
        stream = TextStream(text)
        assert "".join(map(stream.push, tokens)) + stream.flush()


def tokenizer_folder(folder: Path, **config: object) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    hf = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    hf.add_special_tokens(["<s>", "</s>"])
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    hf.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, **config}))
    return folder


def test_a_models_tokenizer_and_template_are_used(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    text = ServedTokenizer.of_folder(tokenizer_folder(tmp_path, chat_template=template, bos_token="<s>"))
    assert text.ends == {257}
    assert text.encode("ab")[0] == 256
    assert 256 not in text.encode("ab", special=False)
    assert text.decode(text.encode("héllo")) == "héllo"
    prompt = text.chat([{"role": "user", "content": "hi"}])
    assert prompt == "<s>[user]hi"
    assert text.encode(prompt, special=False).count(256) == 1
    assert text.at_least("x" * 1000) <= len(text.encode("x" * 1000))


def test_a_chat_that_its_template_refuses_is_an_error_of_the_request(tmp_path: Path) -> None:
    refusing = "{{ raise_exception('roles must alternate') }}"
    text = ServedTokenizer.of_folder(tokenizer_folder(tmp_path, chat_template=refusing))
    with pytest.raises(AtlasError, match="roles must alternate"):
        text.chat([{"role": "user", "content": "hi"}])
    prying = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    text = ServedTokenizer.of_folder(tokenizer_folder(tmp_path, chat_template=prying))
    with pytest.raises(AtlasError, match="chat template"):
        text.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 100])
def test_stop_strings_are_found_wherever_the_pieces_end(cut: int) -> None:
    said = "one two <end> three"
    stops, shown, stopped = StopStrings(["<end>", "never"]), "", False
    pieces = [said[i : i + cut] for i in range(0, len(said), cut)]
    for number, piece in enumerate(pieces):
        text, stopped = stops.push(piece, last=number == len(pieces) - 1)
        shown += text
        if stopped:
            break
    assert (shown, stopped) == ("one two ", True)


def test_the_start_of_a_stop_string_is_shown_if_it_does_not_complete() -> None:
    stops = StopStrings(["<end>"])
    assert stops.push("a <en", last=False) == ("a ", False)
    assert stops.push("d", last=True) == ("<end", False)


# ---- keys --------------------------------------------------------------------------------------------------------
def test_keys_are_read_from_their_digests(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"tenants:\n  a: {{sha256: {hashlib.sha256(b'k').hexdigest()}, weight: 2}}\n")
    keys = ApiKeys.read(path)
    assert (keys.tenant("Bearer k"), keys.tenant("Bearer x"), keys.tenant(None)) == ("a", None, None)
    assert keys.weights == {"a": 2.0}
    assert ApiKeys.open_to_all().tenant(None) == EVERYBODY


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be a mapping of keys"),
        ("tenants: {}", "docs/bubbletea-serve.md"),
        ("tenants: {a: {sha256: abc}}", "tenants.a.sha256 = 'abc'"),
        ("other: 1", "Known: tenants"),
        ("{", "not valid YAML"),
    ],
)
def test_an_invalid_keys_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=said):
        ApiKeys.read(path)


# ---- prefixes ----------------------------------------------------------------------------------------------------
def test_prefixes_are_kept_by_tenant_and_dropped_from_their_ends() -> None:
    prefixes = PrefixStore(3 * 2 * 2 * 2 * 4 * 8 * 4, block=4)
    slabs = [torch.randn(2, 2, 16, 8) for _ in range(2)]
    tokens = list(range(12))
    mine, others = prefixes.hashes(tokens, "a"), prefixes.hashes(tokens, "b")
    prefixes.add(mine, slabs)
    assert prefixes.longest(mine, 100) == 12
    assert prefixes.longest(mine, 11) == 8
    assert prefixes.longest(others, 100) == 0
    assert all(torch.equal(kv, slab[:, :, :8]) for kv, slab in zip(prefixes.take(mine, 8), slabs, strict=True))
    prefixes.add(prefixes.hashes([99] * 4, "a"), slabs)
    assert prefixes.longest(mine, 100) == 8
    assert prefixes.used_bytes <= prefixes.budget_bytes


def test_a_tenant_cannot_push_out_the_reserved_part_of_another() -> None:
    slabs = [torch.zeros(2, 1, 4, 8)]
    prefixes = PrefixStore(8 * 2 * 4 * 8 * 4, {"a": 1.0, "b": 1.0}, block=4)
    for number in range(20):
        prefixes.add(prefixes.hashes([number] * 4, "a"), slabs, "a")
    assert len(prefixes) == 8, "one tenant alone may use all of it"
    quiet = [prefixes.hashes([number] * 4, "b") for number in range(2)]
    for one in quiet:
        prefixes.add(one, slabs, "b")
    for number in range(20, 60):
        prefixes.add(prefixes.hashes([number] * 4, "a"), slabs, "a")
    assert [prefixes.longest(one, 4) for one in quiet] == [0, 4], "an eighth of the budget is reserved for each"
    assert len(prefixes) == 8


# ---- models ------------------------------------------------------------------------------------------------------
def test_a_folder_of_weights_is_served_as_it_is(tmp_path: Path) -> None:
    source = Served(LLAMA, seed=5)
    export_stage(tmp_path, whole(source), 0, 1)
    finish_export(tmp_path, LLAMA, 1)
    served = Served.of_folder(tmp_path)
    tokens = list(range(80))
    collector = Collector(served, 80)
    stages = make_stages(served, (1, 3), collector)
    offer_everywhere(stages, tokens, 32)
    run_all(stages)
    assert greedy_after(collector, whole(source), 8) == greedy_alone(whole(source), tokens, 8)


def test_an_order_survives_json(tmp_path: Path) -> None:
    order = WorkerOrder(Served(LLAMA, seed=3), (1, 3), 1, 1 << 20, 1 << 20, 64, waits_ns={4: 5})
    assert WorkerOrder.from_json(json.loads(json.dumps(order.to_json()))) == order


def test_sampling_stays_within_the_nucleus() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([3.0, 2.0, 1.0, -5.0])
    assert choose(logits, Sampling(1, temperature=0.0), generator) == 0
    narrow = {choose(logits, Sampling(1, 1.0, 0.5), generator) for _ in range(50)}
    wide = {choose(logits, Sampling(1, 2.0), generator) for _ in range(200)}
    assert narrow == {0}
    assert choose(logits, Sampling(1, temperature=5e-324, top_p=5e-324), generator) == 0
    assert choose(logits, Sampling(1, temperature=1e-4, top_p=1e-9), generator) == 0
    assert {0, 1, 2} <= wide


def test_costs_that_admit_nothing_are_halved_until_they_do() -> None:
    """As after a calibration on a busy host: nothing that is refused could ever correct them."""
    planner = assemble(TINY, alone(2, TINY.arena_bytes), ApiKeys.open_to_all()).dispatcher.planner
    planner.costs = replace(planner.costs, layer=LayerTime(1e12, 0.0, 0.0, 0.0))
    planner.set_alive((0, 1), 0)
    assert isinstance(planner.admit(PrefillRequest("first", "", 10, 0, None), 0), Placement)
    planner.costs, planner.learns_costs = replace(planner.costs, layer=LayerTime(1e12, 0.0, 0.0, 0.0)), False
    planner._costs_moved = True
    assert isinstance(planner.admit(PrefillRequest("exact costs", "", 10, 0, None), 0), AdmissionRefusal)


def test_postponed_requests_survive_the_loss_of_a_worker() -> None:
    settings = replace(TINY, aims=Aims(late=0.9, late_tokens=2000))
    planner = assemble(settings, alone(2, TINY.arena_bytes), ApiKeys.open_to_all()).dispatcher.planner
    planner.set_alive((0, 1), 0)
    long = PrefillRequest("long", "", 4000, 0, 1)
    assert planner.quote(long, 0) is None
    assert planner.admit(long, 0) is None
    assert isinstance(planner.admit(PrefillRequest("short", "", 1000, 0, 1), 0), AdmissionRefusal)
    for alive in ((0,), (0, 1)):
        planner.set_alive(alive, 0)
        assert "long" in planner.postponed
    (found,) = planner.advance(LATEST_NS)
    assert (found.request.id, found.request.kind, found.ends[-1]) == ("long", "offline", 4000)
    assert "long" not in planner.postponed
    assert planner.admit(PrefillRequest("next", "", 4000, 0, 1), LATEST_NS) is None
    planner.cancel("next", LATEST_NS)
    assert "next" not in planner.postponed
