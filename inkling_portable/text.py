"""Text in and out: a checkpoint's `tokenizer.json`, chat template, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class TextCodec:
    """The tokenizer of a checkpoint folder."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder, self._tokenizer = folder, tokenizer

    @classmethod
    def find(cls, folder: Path) -> TextCodec | None:
        """The folder's tokenizer, or None where it has no `tokenizer.json`; `ValueError` where that cannot be used."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            return cls(Path(folder), Tokenizer.from_file(str(file)))
        except Exception as error:
            # The library raises this very class for whatever a file can have wrong; a subclass is something else.
            if type(error) is not Exception:
                raise
            raise ValueError(f"{file} is no tokenizer that can be used: {error}") from error

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled `text`, if there is one."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation, rendered by the checkpoint's own chat template, up to where the reply begins.

        A message's `content` is a text or a list of parts. Parts reach a template that goes through them as they are;
        for one that takes texts only, text parts are joined by line breaks. `ValueError` where there is no template
        that works, or it takes texts only and is given media.
        """
        plain = [{**message, "content": self._content(message.get("content"))} for message in messages]
        return list(self._render(plain, tokenize=True))

    def _content(self, content: object) -> object:
        if isinstance(content, str) or not isinstance(content, Sequence) or self._takes_parts:
            return content
        media = [part["type"] for part in content if part["type"] != "text"]
        if media:
            raise ValueError(f"{self.folder}: the chat template has no place for {media[0]} parts; send text only")
        return "\n".join(part["text"] for part in content)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template goes through a list of parts. One that does not prints the list, or fails."""
        try:
            probe = self._render([{"role": "user", "content": [{"type": "text", "text": "probe"}]}], tokenize=False)
        except ValueError:
            return False
        return "'type'" not in str(probe)

    def _render(self, messages: list[dict[str, Any]], tokenize: bool) -> Any:
        from jinja2 import TemplateError

        if not self._chat_tokenizer.chat_template:
            raise ValueError(f"{self.folder} has no chat template; use a plain prompt")
        try:
            return self._chat_tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=tokenize, return_dict=False
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"{self.folder}: the chat template fails: {error}") from error

    @cached_property
    def _chat_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.folder}: Transformers cannot load the tokenizer: {error}") from error


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
