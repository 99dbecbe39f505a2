"""The global batch as a user writes it: `1M` (tokens), `512 sequences`, `4,194,304`.

K, M and B count 1024, 1024^2 and 1024^3 tokens, as batch sizes are usually meant: sequences have powers of two.
"""

from __future__ import annotations

import re

from atlas.errors import SpecError

UNITS = {"": 1, "k": 2**10, "m": 2**20, "b": 2**30}
_BATCH = re.compile(r"([0-9][0-9_,]*\.?[0-9]*)\s*([kmb]?)\s*(tokens?|sequences?|seqs?)?")
EXAMPLES = "Write tokens, like 4M (4 x 2^20) or 4194304, or sequences, like 512 sequences"


def batch_sequences(text: str | int, seq_len: int, *, where: str) -> int:
    """Sequences of one iteration. SpecError with the nearest whole number where the tokens are not whole sequences."""
    found = _BATCH.fullmatch(str(text).strip().lower())
    number = float(found[1].replace(",", "").replace("_", "")) if found else 0.0
    if found is None or not 0 < number * UNITS[found[2]] < 1e15:
        raise SpecError(
            where=where, key="batch", value=text, rule="is not a number of tokens or sequences", remedy=EXAMPLES
        )
    amount = number * UNITS[found[2]]
    in_sequences = (found[3] or "").startswith("seq")
    sequences = amount if in_sequences else amount / seq_len
    if sequences != int(sequences) or sequences < 1:
        below, above = int(sequences), int(sequences) + 1
        near = [f"{n * seq_len} ({n} sequence{'s' if n > 1 else ''})" for n in (below, above) if n]
        total = "" if in_sequences or not found[2] else f"{amount:,.0f} tokens, "
        rule = (
            f"is {total}{sequences:,.2f} sequences of {seq_len:,} tokens, and a batch needs a whole number of sequences"
        )
        raise SpecError(where=where, key="batch", value=text, rule=rule, remedy=f"The nearest: {' or '.join(near)}")
    return int(sequences)
