"""The state of a decoder layer in vLLM's caches: keys and values, and the convolutions' last inputs.

The convolutions' inputs are a virtual sliding-window layer of one head whose window is the kernel's width: vLLM
allocates, frees, shares and moves its blocks as it does those of attention. A row of it holds the streams of K and V,
of the attention's and of the MLP's output side by side. vLLM enlarges its blocks where attention's pages are bigger, so
the block size is read from the cache that was allocated, never from the width.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group, is_v1_kv_transfer_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from inkling_portable.cache import Batch, LayerState, kind_of
from inkling_portable.config import LayerSpec
from inkling_portable.vllm_plugin.backend import ConvStateBackend, PortableBackend, PortableMetadata

logger = logging.getLogger("vllm.inkling_portable")

# Where calibration leaves the scales of a cache: beside the projection (ModelOpt), or with the layer's attention.
_SCALE = re.compile(
    r"(?:^|\.)(mtp\.)?layers\.(\d+)\.(?:transformer_block\.)?(?:self_)?attn\.(?:w[kv]_dv\.|[kv]_proj\.)?([kv])_scale$"
)


class _Layer(AttentionLayerBase):
    """What vLLM allocates a cache for, under its name."""

    def __init__(self, prefix: str, vllm_config: VllmConfig) -> None:
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"vLLM already has a layer of the name {prefix}")
        layers[prefix] = self
        self.prefix = prefix
        self.kv_cache = torch.empty(0)


class KeysAndValues(_Layer):
    """The paged keys and values of one layer."""

    def __init__(self, spec: LayerSpec, prefix: str, vllm_config: VllmConfig) -> None:
        super().__init__(prefix, vllm_config)
        self.spec = spec
        self.dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, vllm_config.model_config)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PortableBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        sizes: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": self.spec.num_kv_heads,
            "head_size": self.spec.head_dim,
            "dtype": self.dtype,
        }
        if self.spec.window is None:
            return FullAttentionSpec(**sizes)
        return SlidingWindowSpec(**sizes, sliding_window=self.spec.window)

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[P, page, Hkv, D]`: views of vLLM's `[P, Hkv, page, 2 D]` in whatever strides it allocated."""
        k, v = self.kv_cache.transpose(1, 2).split(self.spec.head_dim, -1)
        return k, v


class ConvolutionState(_Layer):
    """The last inputs of one layer's convolutions: `channels` are the widths of its three streams."""

    def __init__(
        self, channels: tuple[int, int, int], width: int, dtype: torch.dtype, prefix: str, vllm_config: VllmConfig
    ) -> None:
        super().__init__(prefix, vllm_config)
        self.channels, self.width, self.dtype = channels, width, dtype

    def get_attn_backend(self) -> type[AttentionBackend]:
        return ConvStateBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        # A power of two, so that one of the two pages is a multiple of the other and vLLM can make them equal.
        row = 1 << (sum(self.channels) - 1).bit_length()
        return SlidingWindowSpec(
            block_size=1 << (self.width - 1).bit_length(),
            num_kv_heads=1,
            head_size=row,
            head_size_v=0,
            dtype=self.dtype,
            sliding_window=self.width,
        )

    def streams(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The states `[S, R, C]` of the convolutions of K and V, of the attention's and of the MLP's output."""
        kv, attn, mlp = self.kv_cache[:, 0, :, : sum(self.channels)].split(self.channels, -1)
        return kv, attn, mlp


@contextmanager
def transferred(caches: Iterable[LayerCaches]) -> Iterator[None]:
    """Around the layers' computation, where vLLM has a connector (disaggregated prefill, a store of prefixes): wait for
    the caches that it brings, and hand over those that were written. Without one, and before caches exist, nothing.
    """
    metadata = get_forward_context().attn_metadata
    connector = get_kv_transfer_group() if has_kv_transfer_group() and is_v1_kv_transfer_group() else None
    if connector is None or not isinstance(metadata, dict) or not connector.has_connector_metadata():
        yield
        return
    layers = [layer for one in caches for layer in (one.kv, one.conv)]
    for layer in layers:
        connector.wait_for_layer_load(layer.prefix)
    yield
    for layer in layers:
        connector.save_kv_layer(layer.prefix, layer.kv_cache, metadata[layer.prefix])


@dataclass
class LayerCaches:
    """The two caches of one decoder layer, and the model's view of them."""

    spec: LayerSpec
    index: int
    kv: KeysAndValues
    conv: ConvolutionState
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def batch(self, metadata: dict[str, PortableMetadata], rows: int) -> Batch:
        """This step of `rows` rows, padding included, as the layer takes it."""
        attention, convolution, kind = metadata[self.kv.prefix], metadata[self.conv.prefix], kind_of(self.spec)
        return Batch(
            cu_seqlens=attention.cu_seqlens,
            kv_lens=attention.kv_lens,
            slots=convolution.table,
            tables={kind: attention.table},
            slot_mapping={kind: attention.slot_mapping[:rows]},
            states={self.index: LayerState(*self.kv.pages(), *self.conv.streams(), self.kv_scales)},
            max_query_len=attention.max_query_len,
            max_kv_len=attention.max_kv_len,
            decode_query_len=attention.decode_query_len,
        )

    def rehearsal(self, rows: int, dtype: torch.dtype, device: torch.device) -> Batch:
        """A step before caches exist, for vLLM to measure memory: one sequence of `rows` rows over a single page."""
        page, kind = 64, kind_of(self.spec)
        shape = (1, page, self.spec.num_kv_heads, self.spec.head_dim)
        k, v = (torch.zeros(shape, dtype=self.kv.dtype, device=device) for _ in range(2))
        kv, attn, mlp = (torch.zeros(1, page, n, dtype=dtype, device=device) for n in self.conv.channels)
        nowhere = torch.zeros(1, -(-rows // page), dtype=torch.int32, device=device)
        return Batch(
            cu_seqlens=torch.tensor([0, rows], dtype=torch.int32, device=device),
            kv_lens=torch.full((1,), rows, dtype=torch.int32, device=device),
            slots=nowhere,
            tables={kind: nowhere},
            slot_mapping={kind: torch.full((rows,), -1, dtype=torch.int64, device=device)},
            states={self.index: LayerState(k, v, kv, attn, mlp, self.kv_scales)},
            max_query_len=rows,
            max_kv_len=rows,
        )


def without_scales(
    stream: Iterable[tuple[str, torch.Tensor]], caches: Mapping[int, LayerCaches], depths_from: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """`stream` without the scales of fp8 caches, which the `caches` take that are in fp8; others have no use for them.

    The prediction depths' caches are numbered from `depths_from` on. Scales are one float each, `stored * scale` being
    the value; where there is none it is 1. ValueError, naming the tensor, for another shape or no positive number.
    """
    fp8 = [cache for cache in caches.values() if cache.kv_scales is not None]
    taken = 0
    for name, value in stream:
        found = _SCALE.search(name)
        if found is None:
            yield name, value
            continue
        index = int(found[2]) + (depths_from if found[1] else 0)
        scales = caches[index].kv_scales if index in caches else None
        if scales is None:
            continue
        if value.numel() != 1 or not 0 < float(value) < math.inf:
            raise ValueError(f"{name} is {value.tolist()}; expected one positive number for the whole layer")
        scales["kv".index(found[3])].fill_(float(value))
        taken += 1
    if fp8:
        logger.info("fp8 cache of %d layers: %d scales from the checkpoint, the others are 1", len(fp8), taken)
