"""Trains the tiny model that `bubbletea serve` serves without --model, on the text that Atlas ships.

    python examples/train_tiny.py --out src/bubbletea/tiny --device cuda   100 s on an H200
    python examples/train_tiny.py --out src/bubbletea/tiny --steps 1000    about half an hour on two cores

A Llama of 0.66 million parameters that reads bytes. It knows one text of 41 KB by heart and nothing else: it answers in
English words that mean nothing. A fifth of its samples have the form of a chat. The shipped weights were trained with
the first command; their mean loss over the last 100 steps is 0.023 nats a byte.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

import atlas.runtime.data
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import build, cuts, loss_of
from atlas.runtime.models.export import hf_tensors
from atlas.runtime.models.huggingface import write_config

CONFIG = DecoderConfig(
    family="llama", num_layers=4, width=128, num_heads=4, num_kv_heads=2, head_width=32, ffn_width=256, vocabulary=256,
    max_length=8192,
)  # fmt: skip
LENGTH, BATCH, PEAK, WARM_UP = 384, 24, 3e-3, 100
CHAT = "<|user|>\n{}\n<|assistant|>\n"
TEXT = Path(atlas.runtime.data.__file__).parent / "text" / "founding.txt"


def sample(paragraphs: list[str], draw: random.Random) -> bytes:
    """Paragraphs from a random one on, the first from a random word on; some as the answer in a chat."""
    at = draw.randrange(len(paragraphs))
    words = paragraphs[at].split(" ")
    begin = " ".join(words[draw.randrange(len(words)) :])
    text = "\n\n".join([begin, *(paragraphs[(at + k) % len(paragraphs)] for k in range(1, 12))])
    if draw.random() < 0.2:
        asked = draw.choice(paragraphs).split(" ")
        text = CHAT.format(" ".join(asked[: draw.randint(1, 30)])) + text
    return text.encode()[: LENGTH + 1].ljust(LENGTH + 1, b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    paragraphs = TEXT.read_text(encoding="utf-8").strip().split("\n\n")
    draw = random.Random(0)
    decoder = build(CONFIG, cuts(CONFIG, [CONFIG.num_layers])[0], device=args.device)
    optimizer = torch.optim.AdamW(decoder.parameters(), PEAK, (0.9, 0.99), weight_decay=0.05)
    losses: list[float] = []
    for step in range(args.steps):
        share = (step + 1) / WARM_UP if step < WARM_UP else 0.5 + 0.5 * math.cos(math.pi * step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = PEAK * max(0.02, share)
        rows = [list(sample(paragraphs, draw)) for _ in range(BATCH)]
        tokens_BL = torch.tensor(rows, device=args.device)
        loss = loss_of(decoder(tokens_BL[:, :-1]), tokens_BL[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        losses = [*losses[-99:], loss.item()] if step % 10 == 0 or step >= args.steps - 100 else losses
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {losses[-1]:.3f} nats a byte", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.half() for name, tensor in hf_tensors(decoder).items()}
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    config = write_config(CONFIG, "float16")
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"mean loss of the last 100 steps: {sum(losses) / len(losses):.3f} nats a byte")


if __name__ == "__main__":
    main()
