"""Text in and out: a checkpoint's `tokenizer.json`, chat template, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class TextCodec:
    """The tokenizer of a checkpoint folder."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder, self._tokenizer = folder, tokenizer

    @classmethod
    def find(cls, folder: Path) -> TextCodec | None:
        """The folder's tokenizer, or None where it has no `tokenizer.json`."""
        file = Path(folder) / "tokenizer.json"
        return cls(Path(folder), Tokenizer.from_file(str(file))) if file.is_file() else None

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Render messages with the checkpoint's own chat template; `ValueError` where it has none."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        if not tokenizer.chat_template:
            raise ValueError(f"{self.folder} has no chat template; use a plain prompt")
        return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))


class Detokenizer:
    """Turns a growing list of tokens into text pieces, holding back the bytes of characters that are not complete."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._start = 0  # tokens before this one are out; the last few are decoded again for their context
        self._done = 0

    def push(self, token: int, last: bool = False) -> str:
        """Add a token and return the text that became certain."""
        self._tokens.append(token)
        before = self._codec.decode(self._tokens[self._start : self._done])
        after = self._codec.decode(self._tokens[self._start :])
        if after.endswith("\ufffd") and not last:
            return ""
        self._start, self._done = self._done, len(self._tokens)
        return after[len(before) :]

    def flush(self) -> str:
        """The text still held back, when the tokens have ended."""
        before = self._codec.decode(self._tokens[self._start : self._done])
        return self._codec.decode(self._tokens[self._start :])[len(before) :]
