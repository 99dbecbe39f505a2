"""How the next token is chosen from logits: OpenAI's and vLLM's sampling fields, one request at a time.

Penalties and bans first, then temperature, then top-k, top-p and min-p. Knows logits and tokens; not
text, not requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

LEAST_TEMPERATURE = 1e-4
"""Below it the most likely token is practically certain, and the division would overflow."""
BANNED = -1e9
"""Added to a logit. Finite: if all tokens are banned, the most likely one is still chosen."""
LARGEST = 1e8
"""Of a penalized logit. A tiny repetition penalty would make it infinite, and stronger than a ban."""


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 selects the most likely token; all other defaults have no effect."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: frozenset[int] | None = None
    bad: Sequence[Sequence[int]] = ()
    """Sequences of tokens that must not appear."""
    min_tokens: int = 0
    """No stop token before this many tokens."""

    def generator(self) -> torch.Generator:
        made = torch.Generator()
        made.manual_seed(torch.seed() if self.seed is None else self.seed & (2**63 - 1))
        return made

    @property
    def _is_plain(self) -> bool:
        penalized = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return not (penalized or self.bias or self.bad or self.min_tokens) and self.allowed is None


def choose(
    logits_V: Tensor,  # noqa: N803
    sampling: Sampling,
    generator: torch.Generator,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> int:
    """The token after `prompt` and `output`."""
    adjusted_V = logits_V if sampling._is_plain else _adjusted(logits_V, sampling, prompt, output)
    if sampling.temperature < LEAST_TEMPERATURE:
        return int(adjusted_V.argmax())
    likely_V = torch.softmax(adjusted_V.double() / sampling.temperature, dim=-1)
    if 0 < sampling.top_k < len(likely_V):
        least = likely_V.topk(sampling.top_k).values[-1]
        likely_V[likely_V < least] = 0.0
    if sampling.min_p > 0:
        likely_V[likely_V < sampling.min_p * likely_V.max()] = 0.0
    if sampling.top_p < 1.0:
        ordered, index = (likely_V / likely_V.sum()).sort(descending=True)
        ordered[ordered.cumsum(0) - ordered >= sampling.top_p] = 0.0
        return int(index[torch.multinomial(ordered, 1, generator=generator)])
    return int(torch.multinomial(likely_V, 1, generator=generator))


def _adjusted(logits_V: Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> Tensor:  # noqa: N803
    found_V = logits_V.double()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}))
        before = found_V[seen]
        penalty = sampling.repetition_penalty
        found_V[seen] = torch.where(before > 0, before / penalty, before * penalty).clamp(-LARGEST, LARGEST)
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(output)
        tokens, times = torch.tensor(list(counts)), torch.tensor(list(counts.values()), dtype=torch.float64)
        found_V[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token, bias in sampling.bias.items():
        found_V[token] += bias
    if sampling.allowed is not None:
        others = torch.ones(len(found_V), dtype=torch.bool)
        others[torch.tensor(sorted(sampling.allowed))] = False
        found_V[others] += 2 * BANNED  # if all allowed tokens are banned, one of them is chosen
    for token in _banned(sampling, output):
        found_V[token] += BANNED
    return found_V


def _banned(sampling: Sampling, output: Sequence[int]) -> set[int]:
    """Tokens that would complete a bad sequence, and stop tokens before `min_tokens`."""
    found = {run[-1] for run in sampling.bad if len(output) >= len(run) - 1 and _ends_with(output, run[:-1])}
    return found | (sampling.stop_tokens if len(output) < sampling.min_tokens else frozenset())


def _ends_with(output: Sequence[int], run: Sequence[int]) -> bool:
    return not run or list(output[-len(run) :]) == list(run)
