"""Text to tokens and back for the service: the tokenizer and the chat template of a model's folder, or plain bytes.

`TextStream` turns tokens into text one by one and holds back an incomplete character. `at_least` gives the least number
of tokens that a text can have, from its size alone. Knows no requests. Templates run in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from atlas.errors import AtlasError
from atlas.runtime.data.tokenizers import ByteTokenizer, FileTokenizer

PLAIN_CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""For models without a template."""
INCOMPLETE = "\ufffd"
MAX_HELD = 8
"""Most tokens that are held back for an incomplete character."""


class ServedTokenizer:
    """Converts text to tokens, tokens to text, and a chat to a prompt."""

    def __init__(
        self,
        encode: Callable[[str, bool], list[int]],
        decode: Callable[[Sequence[int]], str],
        ends: frozenset[int],
        longest_token_bytes: int,
        template: str = PLAIN_CHAT,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """`encode` takes the text and whether to add special tokens (usually a begin token)."""
        self._encode, self.decode, self.ends = encode, decode, ends
        self._longest, self._extra = longest_token_bytes, dict(extra or {})
        self._template = _compiled(template)

    @classmethod
    def of_folder(cls, folder: Path) -> ServedTokenizer:
        """From its `tokenizer.json` and the configs of tokenizer and generation; bytes if there is none."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            return cls.of_bytes()
        config, generation = _json(folder / "tokenizer_config.json"), _json(folder / "generation_config.json")
        end = FileTokenizer(path, _content(config.get("eos_token"))).end  # also validates the file
        from tokenizers import Tokenizer  # in the extra `hf`; FileTokenizer has checked for it

        hf = Tokenizer.from_file(str(path))
        more = generation.get("eos_token_id", [])
        template = config.get("chat_template") or _text(folder / "chat_template.jinja")
        return cls(
            lambda text, special: list(hf.encode(text, add_special_tokens=special).ids),
            lambda tokens: str(hf.decode(list(tokens), skip_special_tokens=True)),
            frozenset([end, *(more if isinstance(more, list) else [more])]),
            max(len(word.encode()) for word in hf.get_vocab(with_added_tokens=True)),
            template if isinstance(template, str) and template else PLAIN_CHAT,
            {name: _content(config.get(name)) or "" for name in ("bos_token", "eos_token")},
        )

    @classmethod
    def of_bytes(cls) -> ServedTokenizer:
        plain = ByteTokenizer()
        return cls(
            lambda text, _: list(text.encode()),
            lambda tokens: plain.decode(np.asarray(tokens)),
            frozenset([plain.end]),
            1,
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: add special tokens; a chat template has added them already."""
        return self._encode(text, special)

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of each word, at the start of a text and after a space."""
        found = (self.encode(before + word, special=False) for word in words for before in ("", " "))
        return [tokens for tokens in found if tokens]

    def at_least(self, text: str) -> int:
        """The least number of tokens: none has more bytes than the longest of the vocabulary."""
        return -(-len(text.encode()) // self._longest)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation: bool = True) -> str:
        """The prompt of a conversation; raises AtlasError with the template's message if it refuses."""
        try:
            given = {"messages": list(messages), "add_generation_prompt": add_generation, **self._extra}
            found: str = self._template.render(**given)
        except (TemplateError, TypeError, ValueError) as error:
            raise AtlasError(f"messages: the model's chat template refuses them ({error})") from None
        return found


class TextStream:
    """Turns tokens into text as soon as characters are complete."""

    def __init__(self, text: ServedTokenizer) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._shown = 0
        """Characters of the held tokens that were returned."""

    def push(self, token: int) -> str:
        self._tokens.append(token)
        whole = self._text.decode(self._tokens)
        if whole.endswith(INCOMPLETE) and len(self._tokens) < MAX_HELD + 1:
            return ""
        fresh = whole[self._shown :]
        self._tokens, self._shown = self._tokens[-1:], len(self._text.decode(self._tokens[-1:]))
        return fresh

    def flush(self) -> str:
        fresh = self._text.decode(self._tokens)[self._shown :] if self._tokens else ""
        self._tokens, self._shown = [], 0
        return fresh


def _compiled(template: str) -> Any:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise AtlasError(f"chat_template: {error}. Correct the model's tokenizer_config.json") from None


def _json(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise AtlasError(f"{path}: not JSON ({error}). Fetch the file again") from None
    return found if isinstance(found, dict) else {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _content(token: object) -> str | None:
    """Special tokens are written as text, or as an object with their text inside."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
