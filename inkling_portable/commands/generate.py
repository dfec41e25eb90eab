"""`inkling generate`: complete prompts with a checkpoint, or with the small model that comes with the package."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from inkling_portable.checkpoint import Checkpoint
    from inkling_portable.llm import LLM
    from inkling_portable.request import RequestOutput
    from inkling_portable.sampling import SamplingParams


def generate(
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder or hub id; the default is the built-in small model.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Text to complete; repeatable.")] = None,
    prompt_token_ids: Annotated[
        list[str] | None,
        typer.Option(metavar="IDS", help="The same as token ids, 5,17,…: needs no tokenizer; repeatable."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take each text as a user's message, in the model's chat template.")
    ] = False,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Image for every --prompt; repeatable.")
    ] = None,
    audio: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Sound for every --prompt; repeatable.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it is generated.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a prompt, one a line, and nothing else.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens to generate for a prompt.")] = 64,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the likeliest token every time.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="Sample among the K likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(metavar="P", help="Sample among those that make up mass P.")] = 1.0,
    seed: Annotated[int | None, typer.Option(metavar="S", help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; repeatable.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, metavar="K", help="Log-probabilities of each token and the K likeliest.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="D", help="Of activations: auto (bfloat16), bfloat16, float32.")] = (
        "auto"
    ),
    moe_format: Annotated[
        str | None,
        typer.Option(metavar="F", help="Hold the routed experts in bf16, nvfp4 or mxfp4, whatever the checkpoint has."),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="D", help="cpu, auto (what this machine has), interpret, or as in `explain`.")
    ] = "cpu",
    chunk: Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens in one step: a prompt's pieces.")] = 512,
    speculative: Annotated[
        int, typer.Option(min=0, metavar="N", help="Draft N tokens ahead with the model's own prediction layers.")
    ] = 0,
) -> int:
    """Complete prompts, all in one batch: first the texts, then the token ids.

    Prompts and completions go to stdout, timings to stderr. The exit code is 1 where a request failed on the way.
    """
    if device == "interpret":
        # Triton reads this when a kernel's module is imported, which no module up to here has been.
        os.environ["TRITON_INTERPRET"] = "1"
    from inkling_portable.checkpoint import Checkpoint
    from inkling_portable.llm import LLM, default_model
    from inkling_portable.sampling import SamplingParams

    if stream and json:
        raise ValueError("--stream and --json exclude each other; give one of them")
    texts, ids, media = prompt or [], [_token_ids(each) for each in prompt_token_ids or []], _media(image, audio)
    _check_arguments(texts, ids, chat=chat, media=media)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        logprobs=logprobs,
    )
    if model is None:
        typer.echo(
            "inkling: no --model, so the small built-in one answers: it completes Python code, and no more", err=True
        )
    with Checkpoint.open(default_model() if model is None else model) as checkpoint:
        prompts = _prompts(checkpoint, texts, ids, chat=chat, media=media)
        _check_drafts(checkpoint, speculative)
        for note in checkpoint.notes:
            typer.echo(f"inkling: {note}", err=True)
    llm = LLM(
        model,
        dtype=dtype,
        moe_format=moe_format,
        device=device,
        max_num_batched_tokens=chunk,
        num_speculative_tokens=speculative,
        progress=sys.stderr.isatty(),
    )
    if llm.conversion is not None:
        typer.echo(f"inkling: {llm.conversion}", err=True)
    failed = 0
    if stream:
        outputs: Iterable[RequestOutput] = _stream(llm, prompts, params, chat=chat)
    else:
        # One prompt alone, and not in a list, fails by an exception where it cannot be served.
        outputs = llm.generate(prompts[0] if len(prompts) == 1 else prompts, params)
    for output in outputs:
        result = output.outputs[0]
        if json:
            typer.echo(json_module.dumps(_record(output, llm)))
        elif not stream:
            _say_prompt(output, llm, chat=chat)
            _say(f"{_completion(output, llm)}\n")
        if result.finish_reason == "error":
            failed += 1
            # A request that was refused has no tokens; its sentence does not say which one it is.
            name = "" if output.prompt_token_ids else f"request {output.request_id}: "
            typer.echo(f"inkling: {name}{result.error}", err=True)
        if not json and result.token_ids:
            if result.logprobs is not None:
                _print_logprobs(output, llm)
            typer.echo(_summary(output, len(prompts)), err=True)
    return 1 if failed else 0


# Arguments and what the checkpoint says about them, all before a weight is loaded.


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise ValueError(
            f"--prompt-token-ids is {text!r}; expected numbers separated by commas, such as 5,17"
        ) from None


def _media(image: Sequence[Path] | None, audio: Sequence[Path] | None) -> dict[str, list[str]]:
    given = {"image": image or (), "audio": audio or ()}
    return {kind: [str(file) for file in files] for kind, files in given.items() if files}


def _check_arguments(
    texts: Sequence[str], ids: Sequence[Sequence[int]], *, chat: bool, media: Mapping[str, Sequence[str]]
) -> None:
    if not texts and not ids:
        raise ValueError("there is nothing to complete; give --prompt TEXT or --prompt-token-ids IDS")
    for text in texts:
        if not text:
            raise ValueError("--prompt is empty; give at least one character")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"--prompt is {text!r}, which is not valid UTF-8") from None
    if not all(ids):
        raise ValueError("--prompt-token-ids is empty; give at least one token id")
    if ids and (chat or media):
        option = "--chat" if chat else f"--{next(iter(media))}"
        raise ValueError(f"{option} goes with --prompt; token ids are taken as they are")
    for kind, files in media.items():
        for file in files:
            if not Path(file).is_file():
                raise ValueError(f"--{kind} is {file}, which is no file")


def _prompts(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    ids: Sequence[list[int]],
    *,
    chat: bool,
    media: Mapping[str, list[str]],
) -> list[dict[str, Any]]:
    """What `LLM` takes, checked as far as the configuration and the tokenizer tell."""
    from inkling_portable.prompts import PromptReader
    from inkling_portable.text import TextCodec

    config, towers = checkpoint.config, {"image": "vision", "audio": "audio"}
    for kind in media:
        if getattr(config, towers[kind]) is None:
            raise ValueError(f"--{kind}: {checkpoint.path} has no {towers[kind]} tower; use a model that has one")
    for each in ids:
        for token in each:
            if not 0 <= token < config.unpadded_vocab_size:
                last = config.unpadded_vocab_size - 1
                raise ValueError(f"--prompt-token-ids: {token} is out of range; the vocabulary is 0..{last}")
    codec = TextCodec.find(checkpoint.path) if texts else None
    if texts and codec is None:
        raise ValueError(f"{checkpoint.path} has no tokenizer.json; give --prompt-token-ids instead of --prompt")
    prompts: list[dict[str, Any]] = []
    for text in texts:
        one: dict[str, Any] = {"prompt": text}
        if chat and codec is not None:
            parts = [{"type": kind} for kind, files in media.items() for _ in files]
            content = [*parts, {"type": "text", "text": text}] if parts else text
            one["prompt_token_ids"] = codec.chat([{"role": "user", "content": content}])
        if media:
            one["multi_modal_data"] = dict(media)
        prompts.append(one)
    if media:
        # All prompts get the same media: read with the first one, they are known to be sound.
        PromptReader(checkpoint.path, config, codec).read(prompts[0])
    return prompts + [{"prompt_token_ids": each} for each in ids]


def _check_drafts(checkpoint: Checkpoint, drafts: int) -> None:
    depths = checkpoint.config.mtp.num_layers if checkpoint.config.mtp and checkpoint.has_mtp else 0
    if drafts > depths:
        raise ValueError(
            f"--speculative is {drafts}, but {checkpoint.path} has {depths} multi-token-prediction depths; "
            f"expected at most {depths}"
        )


# What is printed.


def _stream(
    llm: LLM, prompts: Sequence[Mapping[str, Any]], params: SamplingParams, *, chat: bool
) -> Iterator[RequestOutput]:
    """Print each request's text as it comes, one request after another, and yield each when it has ended.

    While one is printed the others' text is kept: pieces of several in turn would be no text. The end of an unfinished
    text is held back too, where it may turn out to be the beginning of a stop text.
    """
    held = max((len(text) - 1 for text in params.stop), default=0)
    seen: dict[int, RequestOutput] = {}
    current, printed = 0, -1
    for output, _ in llm.stream(prompts[0] if len(prompts) == 1 else prompts, params):
        seen[output.request_id] = output
        while current in seen:
            ended = seen[current].outputs[0].finish_reason is not None
            text = _completion(seen[current], llm)
            if printed < 0:
                _say_prompt(seen[current], llm, chat=chat)
                printed = 0
            upto = len(text) if ended else max(printed, len(text) - held)
            _say(text[printed:upto])
            printed = upto
            if not ended:
                break
            _say("\n")
            yield seen[current]
            current, printed = current + 1, -1


def _say_prompt(output: RequestOutput, llm: LLM, *, chat: bool) -> None:
    """The prompt, which its completion follows: on a new line where it is a reply."""
    if output.request_id:
        _say("\n")
    _say(_prompt_text(output, llm), dim=True)
    if chat:
        _say("\n")


def _say(text: str, dim: bool = False) -> None:
    """Write text to stdout at once, with a mark for what the terminal's encoding does not have."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    typer.secho(text.encode(encoding, "replace").decode(encoding), nl=False, dim=dim or None)
    sys.stdout.flush()


def _prompt_text(output: RequestOutput, llm: LLM) -> str:
    if output.prompt is not None:
        return output.prompt
    if llm.codec is not None:
        return llm.codec.decode(output.prompt_token_ids)
    return ",".join(map(str, output.prompt_token_ids)) + ","


def _completion(output: RequestOutput, llm: LLM) -> str:
    """The text generated so far; without a tokenizer, its ids."""
    result = output.outputs[0]
    return result.text if llm.codec is not None else ",".join(map(str, result.token_ids))


def _record(output: RequestOutput, llm: LLM) -> dict[str, Any]:
    result = output.outputs[0]
    record = {
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": result.token_ids,
        "text": result.text if llm.codec is not None else None,
        "logprobs": result.logprobs,
        "finish_reason": result.finish_reason,
        "timings": output.timings,
    }
    if llm.conversion is not None:
        record["moe_conversion"] = llm.conversion.to_dict()
    return record | ({"error": result.error} if result.error else {})


def _print_logprobs(output: RequestOutput, llm: LLM) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def shown(token: int) -> str:
        return f"{token} {llm.codec.decode([token])!r}" if llm.codec is not None else str(token)

    table = Table("token", "logprob", "likeliest")
    result = output.outputs[0]
    for token, found in zip(result.token_ids, result.logprobs or (), strict=True):
        best = sorted(found.items(), key=lambda item: -item[1])
        likeliest = "  ".join(f"{shown(other)} {value:.3f}" for other, value in best)
        table.add_row(Text(shown(token)), f"{found[token]:.3f}", Text(likeliest))
    Console().print(table)


def acceptance(timings: Sequence[Mapping[str, Any]]) -> tuple[list[float], float]:
    """How drafts fared over some requests: the part accepted at each draft position, and tokens a verifying step.

    A step yields the drafts accepted and one token more, so without any accepted it is 1. Steps that verify no draft
    are not counted; where there is no other, the result is `([], 1.0)`.
    """
    drafted = [each for each in timings if each.get("steps")]
    steps = sum(each["steps"] for each in drafted)
    accepted = [sum(counts) for counts in zip(*(each["accepted"] for each in drafted), strict=True)]
    return [count / steps for count in accepted], 1 + sum(accepted) / steps if steps else 1.0


def _summary(output: RequestOutput, of: int) -> str:
    """One line about a request that ended."""
    result, timings = output.outputs[0], output.timings
    name = f"request {output.request_id}: " if of > 1 else ""
    prompt = f"{len(output.prompt_token_ids)} prompt tokens ({timings.get('reused_tokens', 0)} reused)"
    rate = f" at {timings['tokens_per_second']:.1f} tokens/s" if "tokens_per_second" in timings else ""
    line = (
        f"{name}{prompt}, first token after {timings['first_token']:.2f} s; "
        f"{len(result.token_ids)} tokens{rate}; ended by {result.finish_reason}"
    )
    rates, length = acceptance([timings])
    if rates:
        line += f"; drafts accepted {', '.join(f'{rate:.0%}' for rate in rates)}, {length:.2f} tokens a step"
    return line
