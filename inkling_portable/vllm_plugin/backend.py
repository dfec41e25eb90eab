"""The attention backend CUSTOM and that of the convolution state, with their metadata: where a step's rows belong.

Honoured of `CommonAttentionMetadata`: counts are padded when a graph is replayed (rows behind `query_start_loc[-1]`
and requests of no rows are padding, which the kernels pass over), slots of -1 are not written, lengths stay on the
device, and what the CPU says of them is taken for the upper bounds that it is. A graph is captured for the longest
sequences that it may replay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImplBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from inkling_kernels.rel_attention_plan import MAX_QUERY_LEN

#: Tokens that a page may have for the attention kernels. vLLM splits larger blocks into pages of these sizes.
PAGE_SIZES = (16, 32, 64, 128, 256)


@dataclass
class PortableMetadata(AttentionMetadata):
    """One step of the layers that share a block table: `cu_seqlens` `[B+1]`, `kv_lens` `[B]` and `table` `[B, N]`
    int32, `slot_mapping` `[T]` int64."""

    cu_seqlens: torch.Tensor
    kv_lens: torch.Tensor
    table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_kv_len: int
    decode_query_len: int | None


class PortableMetadataBuilder(AttentionMetadataBuilder[PortableMetadata]):
    """Passes vLLM's persistent buffers on: a captured graph finds the next step's values at the same addresses."""

    # Launches follow the shapes of a batch and never its lengths, so a decode batch of any lengths replays one graph.
    # Where row counts differ, the number of sequences varies at one number of rows, and shapes with it.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        speculative = vllm_config.speculative_config
        few = 1 + (speculative.num_speculative_tokens if speculative else 0)
        self.decode_query_len = few if few <= MAX_QUERY_LEN else None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PortableMetadata:
        common, requests = common_attn_metadata, common_attn_metadata.num_reqs
        return PortableMetadata(
            cu_seqlens=common.query_start_loc[: requests + 1],
            kv_lens=common.seq_lens[:requests],
            table=common.block_table_tensor[:requests],
            slot_mapping=common.slot_mapping,
            max_query_len=int(common.max_query_len),
            max_kv_len=int(common.max_seq_len),
            decode_query_len=self.decode_query_len,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PortableMetadata:
        captured = self.build(0, common_attn_metadata)
        return replace(captured, max_kv_len=self.vllm_config.model_config.max_model_len)


class PortableBackend(AttentionBackend):
    """Relative attention over paged keys and values, by the kernels that the dispatch table chooses."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float32", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        raise NotImplementedError(
            "the attention backend CUSTOM of inkling-portable serves Inkling's layers alone, which call its kernels "
            "themselves: for another model leave --attention-backend out"
        )

    @staticmethod
    def get_builder_cls() -> type[PortableMetadataBuilder]:
        return PortableMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return list(PAGE_SIZES)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class ConvStateBackend(PortableBackend):
    """The convolutions' last inputs, kept by vLLM as those of a sliding-window layer of any block size."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]
