"""What Inkling makes of images and audio: the hMLP vision tower and the dMel audio embedding.

Vision, for patches `x` `[n, T, P, P, C]` (T frames of P x P pixels):

    x = gelu(rms(fold(x) @ linear_i^T; norm_i))     for every stage i but the last
    x = rms(fold(x) @ linear_last^T; final_norm)    [n, 1, 1, 1, H] -> [n, H]: one token a patch

`fold` gathers t x s x s neighbouring positions into channels; the stages are `vision_scales`. Audio, for levels
`[n, B]` of B mel bins with V levels each:

    y = rms(sum_b encoder[b * V + level_b]; final_norm)      [n, H]: one token a frame

Sums and norms are float32 and rounded to the weights' dtype once; GELU is the exact one. Sources: Transformers
`modeling_inkling.py` (InklingVisionModel, InklingAudioModel), vLLM 0.33 `models/inkling/common/towers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from .config import AudioConfig, InklingConfig, VisionConfig
from .media import Media, MediaSpan
from .ops import Ops
from .tensor_table import vision_scales

# Rows that go through a tower at a time. Intermediate tensors hold this many, so that memory beyond the result does not
# grow with the input. A frame's intermediates are nine times its bf16 result, hence at most a sixteenth of a sound.
PATCHES_AT_ONCE = 256
FRAMES_AT_ONCE = 128
FRAMES_SHARE = 16


def fold(x: torch.Tensor, frames: int, side: int) -> torch.Tensor:
    """`[n, T, H, W, C]` -> `[n, T/frames, H/side, W/side, frames*side*side*C]`, channels ordered frame, row, column."""
    n, t, h, w, c = x.shape
    x = x.reshape(n, t // frames, frames, h // side, side, w // side, side, c)
    return x.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(n, t // frames, h // side, w // side, frames * side * side * c)


class Scale(nn.Module):
    """The weight of an RMS norm, under the name that checkpoints give it."""

    def __init__(self, channels: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, dtype=dtype, device=device))


class VisionTower(nn.Module):
    """hMLP: patches to one embedding each. Parameters are `layers.{linear_i,norm_i}.weight`, `final_norm.weight`."""

    def __init__(
        self, vision: VisionConfig, hidden: int, ops: Ops, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.vision, self.hidden, self.ops = vision, hidden, ops
        self.folds: list[tuple[int, int]] = []
        self.layers = nn.ModuleDict()
        for i, (start, end) in enumerate(pairwise(vision_scales(vision))):
            frames, side = end[0] // start[0], end[1] // start[1]
            self.folds.append((frames, side))
            last = i == vision.n_layers - 1
            inputs, outs = start[2] * frames * side * side, hidden if last else end[2]
            self.layers[f"linear_{i}"] = torch.nn.utils.skip_init(
                nn.Linear, inputs, outs, bias=False, dtype=dtype, device=device
            )
            if not last:
                self.layers[f"norm_{i}"] = Scale(outs, dtype, device)
        self.final_norm = Scale(hidden, dtype, device)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """`patches` `[n, frames, side, side, channels]` of any float dtype on any device -> `[n, H]`.

        Raises ValueError where the shape is not that of the configured patches.
        """
        v = self.vision
        expected = (v.temporal_patch_size, v.patch_size, v.patch_size, v.num_channels)
        if patches.ndim != 5 or tuple(patches.shape[1:]) != expected:
            raise ValueError(
                f"patches have shape {tuple(patches.shape)}; expected (n, {', '.join(map(str, expected))})"
            )
        weight = self.final_norm.weight
        out = torch.empty(patches.shape[0], self.hidden, dtype=weight.dtype, device=weight.device)
        for rows in range(0, patches.shape[0], PATCHES_AT_ONCE):
            part = patches[rows : rows + PATCHES_AT_ONCE].to(weight.device, weight.dtype)
            out[rows : rows + PATCHES_AT_ONCE] = self._stages(part).view(-1, self.hidden)
        return out

    def _stages(self, x: torch.Tensor) -> torch.Tensor:
        eps = self.vision.rms_norm_eps
        for i, (frames, side) in enumerate(self.folds):
            x = self.layers[f"linear_{i}"](fold(x, frames, side))
            if f"norm_{i}" in self.layers:
                x = F.gelu(self.ops.rms_norm(x, self.layers[f"norm_{i}"].weight, eps))
        return self.ops.rms_norm(x, self.final_norm.weight, eps)


class AudioTower(nn.Module):
    """dMel embedding: frames of levels to one embedding each. Parameters `encoder.weight`, `final_norm.weight`.

    The rows of a frame's bins are summed as they are looked up: the `[n, B, H]` tensor of all of them, 80 times the
    result, never exists.
    """

    offsets: torch.Tensor

    def __init__(
        self, audio: AudioConfig, hidden: int, ops: Ops, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.audio, self.hidden, self.ops = audio, hidden, ops
        rows = audio.n_mel_bins * audio.mel_vocab_size
        self.encoder = torch.nn.utils.skip_init(nn.Embedding, rows, hidden, dtype=dtype, device=device)
        self.final_norm = Scale(hidden, dtype, device)
        offsets = torch.arange(audio.n_mel_bins, device=device) * audio.mel_vocab_size
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        """`levels` `[n, bins]` of any integer dtype on any device -> `[n, H]`.

        Raises ValueError where the shape is wrong or a level lies outside 0..mel_vocab_size-1.
        """
        bins, size = self.audio.n_mel_bins, self.audio.mel_vocab_size
        if levels.ndim != 2 or levels.shape[1] != bins or levels.is_floating_point():
            raise ValueError(f"levels are {tuple(levels.shape)} {levels.dtype}; expected (n, {bins}) integers")
        if levels.numel() and not 0 <= int(levels.min()) <= int(levels.max()) < size:
            raise ValueError(
                f"levels lie in {int(levels.min())}..{int(levels.max())}; expected 0..{size - 1} (mel_vocab_size)"
            )
        weight = self.encoder.weight
        out = torch.empty(levels.shape[0], self.hidden, dtype=weight.dtype, device=weight.device)
        step = max(1, min(FRAMES_AT_ONCE, levels.shape[0] // FRAMES_SHARE))
        for at in range(0, levels.shape[0], step):
            rows = levels[at : at + step].to(weight.device, torch.int64) + self.offsets
            summed = F.embedding_bag(rows, weight, mode="sum")
            out[at : at + step] = self.ops.rms_norm(summed, self.final_norm.weight, self.audio.rms_norm_eps)
        return out


class Towers(nn.Module):
    """The towers that a model has; `visual` or `audio` is None where it has none."""

    def __init__(
        self, config: InklingConfig, ops: Ops, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.visual = VisionTower(config.vision, hidden, ops, dtype=dtype, device=device) if config.vision else None
        self.audio = AudioTower(config.audio, hidden, ops, dtype=dtype, device=device) if config.audio else None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy checkpoint tensors (`visual.layers.linear_0.weight`, `audio.encoder.weight`, ...) into the towers.

        The checkpoint has been inspected before, so an unknown name or another shape is a defect: KeyError, ValueError.
        """
        parameters: Mapping[str, torch.Tensor] = dict(self.named_parameters())
        with torch.no_grad():
            for name, value in tensors:
                target = parameters[name]
                if target.shape != value.shape:
                    raise ValueError(f"{name}: shape {tuple(value.shape)}, expected {tuple(target.shape)}")
                target.copy_(value)

    def forward(self, media: Media) -> torch.Tensor:
        """Embeddings `[media.tokens, H]`; ValueError where the model lacks the tower."""
        tower = self.visual if media.kind == "image" else self.audio
        if tower is None:
            raise ValueError(f"{media.name} cannot be used: this model has no tower for {media.kind} inputs")
        rows: torch.Tensor = tower(media.rows)
        return rows


def embed_media(
    embedded: torch.Tensor, first: int, spans: Sequence[MediaSpan], features: Sequence[torch.Tensor]
) -> None:
    """Put the towers' rows over the placeholders' rows of `embedded`, in place.

    `embedded` `[T, H]` are the normed embeddings (after `embed_norm`) of the prompt's positions `first` to
    `first + T - 1`; `features[i]` `[spans[i].media.tokens, H]` is what the tower made of `spans[i]`. A span may lie
    in this stretch wholly, in part (a prompt prefilled in chunks) or not at all. Rows are copied as they are: they have
    been through the tower's own `final_norm` and take no other.
    """
    end = first + embedded.shape[0]
    for span, rows in zip(spans, features, strict=True):
        low, high = max(span.start, first), min(span.stop, end)
        if low < high:
            embedded[low - first : high - first] = rows[low - span.start : high - span.start]
