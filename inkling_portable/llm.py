"""The Python API: a checkpoint with its tokenizer, ready to generate.

    from inkling_portable import LLM, SamplingParams

    llm = LLM("path/to/checkpoint")
    for request in llm.generate(["def main(", "import "], SamplingParams(max_tokens=32, temperature=0)):
        print(request.outputs[0].text)

Names and meanings follow vLLM's, so a script moves to it by changing an import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from inkling_kernels.target import usable_target
from inkling_portable.cache import FULL, SLIDING, kind_of
from inkling_portable.checkpoint import Checkpoint
from inkling_portable.config import InklingConfig
from inkling_portable.conversion import Conversion
from inkling_portable.engine import Engine
from inkling_portable.facts import Facts
from inkling_portable.model import Inkling
from inkling_portable.mtp import MultiTokenPrediction
from inkling_portable.ops import Ops
from inkling_portable.prompts import Prompt, PromptReader
from inkling_portable.request import RequestOutput
from inkling_portable.sampling import SamplingParams
from inkling_portable.text import TextCodec
from inkling_portable.towers import Towers
from inkling_portable.weights import load_tensors


def pages_for(
    config: InklingConfig, max_num_seqs: int, max_model_len: int, chunk: int, page: int, drafts: int
) -> dict[str, int]:
    """Pages of each kind for `max_num_seqs` full-length sequences, and as many sliding ones again for kept prefixes."""
    full = -(-(max_model_len + drafts) // page)
    live = -(-(config.sliding_window_size + chunk + 2 * drafts) // page) + 1
    return {FULL: full * max_num_seqs, SLIDING: min(full, 2 * live) * max_num_seqs}


def page_bytes(config: InklingConfig, page: int, itemsize: int, mtp_layers: int) -> dict[str, int]:
    """Bytes that one page of each kind takes over all layers of the kind."""
    specs = [config.layer(i) for i in range(config.num_hidden_layers)] + [
        config.mtp_layer(d) for d in range(mtp_layers)
    ]
    total = {FULL: 0, SLIDING: 0}
    for spec in specs:
        total[kind_of(spec)] += 2 * spec.kv_size * page * itemsize
    return total


class LLM:
    """A model with its tokenizer, ready to generate; arguments are named after vLLM's.

    `model` is a checkpoint folder or hub id; without one the small trained model that comes with the package is used.
    `dtype` 'auto' is bfloat16, the dtype of the released checkpoints. `moe_format` (bf16, nvfp4 or mxfp4) is the format
    in which the routed experts are held, the checkpoint's where it is None; `conversion` then says what error that
    added. The caches hold `max_num_seqs` sequences of
    `max_model_len` tokens within `kv_cache_memory_bytes`; a context that does not fit is an error that says what
    does. `batch_invariant` makes the logits of a request the same to the last bit whatever else is running: all
    products in fixed tiles and splits, prompts and generated tokens in steps of their own. It needs the kernels, so a
    GPU or the interpreter, and costs time.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        moe_format: str | None = None,
        device: str = "cpu",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        block_size: int = 64,
        kv_cache_memory_bytes: int = 4 << 30,
        enable_prefix_caching: bool = True,
        num_speculative_tokens: int = 0,
        batch_invariant: bool = False,
        progress: bool = False,
    ) -> None:
        checkpoint = Checkpoint.open(model if model is not None else default_model())
        config = self.config = checkpoint.config
        depths = config.mtp.num_layers if config.mtp and checkpoint.has_mtp else 0
        if not 0 <= num_speculative_tokens <= depths:
            raise ValueError(
                f"num_speculative_tokens is {num_speculative_tokens}; expected 0 to {depths}, as many as the model has "
                "multi-token-prediction depths"
            )
        for name, value, least, most in (
            ("block_size", block_size, 1, None),
            ("max_num_seqs", max_num_seqs, 1, None),
            ("max_num_batched_tokens", max_num_batched_tokens, 1, None),
            ("max_model_len", max_model_len, 2, config.max_position_embeddings),
        ):
            if value is not None and (value < least or (most is not None and value > most)):
                raise ValueError(
                    f"{name} is {value}; expected at least {least}" + (f", at most {most}" if most else "")
                )
        target = usable_target(device)
        torch_dtype = torch.bfloat16 if dtype == "auto" else _dtype(dtype)
        self.conversion = Conversion.of(checkpoint, moe_format)
        packed = set(checkpoint.formats.values()) - {"bf16"}
        held = self.conversion.target if self.conversion else packed.pop() if packed else "bf16"
        if batch_invariant and target.vendor == "cpu":
            raise ValueError(
                "batch_invariant is True and device is cpu, whose libraries choose the order of a sum by the batch; "
                "take a GPU, or device 'interpret'"
            )
        facts = facts_of(config, held, torch_dtype, block_size)
        self.ops = Ops.bind(target, replace(facts, batch_invariant=batch_invariant))
        place = target.device_type
        per_page = page_bytes(config, block_size, torch_dtype.itemsize, num_speculative_tokens)
        longest = _longest_context(config, per_page, kv_cache_memory_bytes, max_num_batched_tokens, block_size)
        if max_model_len is None:
            max_model_len = min(config.max_position_embeddings, longest)
        if max_model_len > longest:
            raise ValueError(
                f"a context of {max_model_len} tokens does not fit {kv_cache_memory_bytes / 2**30:.2f} GiB of cache; "
                f"{longest} do: lower max_model_len or raise kv_cache_memory_bytes"
            )
        if target.is_gpu:
            # It reads this module's sizes of caches.
            from inkling_portable.plan import Wish, require

            wish = Wish(
                format=held,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                drafts=num_speculative_tokens,
                kv_itemsize=torch_dtype.itemsize,
                chunk=max_num_batched_tokens,
            )
            require(config, wish, torch.cuda.mem_get_info()[0], kv_cache_memory_bytes)
        self.model = Inkling(config, self.ops, dtype=torch_dtype, device=place)
        self.mtp = None
        if num_speculative_tokens:
            self.mtp = MultiTokenPrediction(config, self.ops, num_speculative_tokens, dtype=torch_dtype, device=place)
        self.towers = Towers(config, self.ops, dtype=torch_dtype, device=place)
        self._load(checkpoint, torch_dtype, place, progress)
        self.codec = TextCodec.find(checkpoint.path)
        self._reader = PromptReader(checkpoint.path, config, self.codec)
        pages = pages_for(
            config, max_num_seqs, max_model_len, max_num_batched_tokens, block_size, num_speculative_tokens
        )
        share = min(1.0, kv_cache_memory_bytes / max(1, sum(pages[kind] * per_page[kind] for kind in pages)))
        one = pages_for(config, 1, max_model_len, max_num_batched_tokens, block_size, num_speculative_tokens)
        self.engine = Engine(
            self.model,
            self.mtp,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_pages={kind: max(one[kind], int(count * share)) for kind, count in pages.items()},
            enable_prefix_caching=enable_prefix_caching,
            device=place,
            codec=self.codec,
        )

    def _load(self, checkpoint: Checkpoint, dtype: torch.dtype, device: str, progress: bool) -> None:
        tensors = load_tensors(checkpoint, dtype, device, conversion=self.conversion, progress=progress)
        for room, group in groupby(tensors, key=lambda item: item[0].partition(".")[0]):
            if room == "llm":
                self.model.load(group)
            elif room == "mtp" and self.mtp is not None:
                self.mtp.load(group)
            elif room in ("visual", "audio"):
                self.towers.load((name, value) for name, value in group if isinstance(value, torch.Tensor))
        for module in (self.model, self.mtp, self.towers):
            if module is not None:
                module.requires_grad_(False)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts in one batch; results in their order. `inkling_portable.prompts` says what a prompt may be.

        A prompt of a list that cannot be served ends with `finish_reason` 'error', and `error` names the file or field
        at fault; the others go on. A single prompt that cannot be served is a `ValueError`.
        """
        results: dict[int, RequestOutput] = {}
        for output, _ in self.stream(prompts, sampling_params):
            results[output.request_id] = output
        return [results[key] for key in sorted(results)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[RequestOutput, str]]:
        """Like `generate`, yielding each request's output so far with its newest text as steps end."""
        single = isinstance(prompts, (str, Mapping))
        listed: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item, assignment]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(listed)
        if len(sampling_params) != len(listed):
            raise ValueError(f"{len(listed)} prompts came with {len(sampling_params)} sampling parameters")
        refused, accepted = [], []
        try:
            for prompt, params in zip(listed, sampling_params, strict=True):
                try:
                    accepted.append(self._submit(prompt, params))
                except ValueError as error:
                    if single:
                        raise
                    text = prompt if isinstance(prompt, str) else prompt.get("prompt")
                    refused.append(self.engine.refuse(text, str(error)))
            yield from ((output, "") for output in refused)
            while self.engine.unfinished():
                yield from self.engine.step()
        finally:
            # Whoever stops listening, by choice or by an error, leaves no request behind for the next caller.
            self.engine.abort(accepted)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Reply to a conversation, or to each of a list of conversations, in the checkpoint's own chat template.

        A message has a `role` and a `content`, a text or a list of parts (see `inkling_portable.prompts`). As in
        `generate`, conversations of a list fail one by one, and a single one by a `ValueError`.
        """
        if not messages or isinstance(messages[0], Mapping):
            return self.generate({"messages": messages}, sampling_params)
        return self.generate([{"messages": each} for each in messages], sampling_params)

    @torch.inference_mode()
    def _submit(self, prompt: Prompt, params: SamplingParams) -> int:
        request = self._reader.read(prompt)
        self.engine.check(request.tokens, params)
        media = [(span.start, self.towers(span.media)) for span in request.spans]
        return self.engine.submit(request.tokens, params, request.text, media, request.keys)


def facts_of(config: InklingConfig, format: str, dtype: torch.dtype, page_size: int) -> Facts:
    """The static facts by which the dispatch table chooses, of a model on one device."""
    name = str(dtype).removeprefix("torch.")
    return Facts(
        format=format,
        dtype=name,
        kv_dtype=name,
        hidden_size=config.hidden_size,
        head_dim=config.head_dim,
        d_rel=config.d_rel,
        page_size=page_size,
        num_experts=config.n_routed_experts or 1,
        expert_width=config.moe_intermediate_size or 1,
        top_k=config.num_experts_per_tok or 1,
        conv_width=config.conv_kernel_size,
    )


def default_model() -> Path:
    """The folder of the small trained model that comes with the package."""
    return Path(__file__).parent / "assets" / "tiny"


def _dtype(name: str | torch.dtype) -> torch.dtype:
    known = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32}
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if name not in known:
        raise ValueError(f"dtype is {name}; expected auto, bfloat16 or float32 (float16 overflows in this model)")
    return known[name]


def _longest_context(config: InklingConfig, per_page: Mapping[str, int], budget: int, chunk: int, page: int) -> int:
    """The longest sequence whose pages fit `budget` bytes."""
    live = 2 * (-(-(config.sliding_window_size + chunk + 16) // page) + 1)
    full = max((budget - live * per_page[SLIDING]) // max(per_page[FULL], 1), budget // max(sum(per_page.values()), 1))
    return max(int(full) * page - 8, 1) if per_page[FULL] else config.max_position_embeddings
