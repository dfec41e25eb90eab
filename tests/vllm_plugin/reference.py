"""Transformers' own Inkling, in float32, as the oracle of what vLLM generates with this package's model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

# Towers of checkpoints that have none: the defaults of the configuration are of terabytes.
TOWERS = {"vision_config": {"patch_size": 40, "num_hidden_layers": 2}, "audio_config": {"mel_vocab_size": 16}}


class Reference:
    """The text model of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        text = transformers.InklingConfig.from_pretrained(folder).text_config.to_dict()
        # Transformers 5.19, which older versions of vLLM bring, reads one of these widths for both.
        raw = json.loads((folder / "config.json").read_text())["text_config"]
        text |= {"intermediate_size": raw["dense_intermediate_size"], "moe_intermediate_size": raw["intermediate_size"]}
        config = transformers.InklingConfig(text_config=text, **TOWERS)
        whole, report = transformers.InklingForConditionalGeneration.from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True
        )
        assert all("_tower." in name for name in report["missing_keys"])
        assert not report["unexpected_keys"] | report["mismatched_keys"]
        # The text model by itself: that of Transformers 5.17, within the other, has its embedding normed twice.
        self.model = transformers.InklingForCausalLM(config.text_config).eval()
        self.model.model, self.model.lm_head = whole.model.language_model.eval(), whole.lm_head
        self.vocabulary: int = config.text_config.unpadded_vocab_size

    @torch.inference_mode()
    def scores(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities `[len(tokens) - 1, vocabulary]` of what follows each token but the last."""
        logits: torch.Tensor = self.model(input_ids=torch.tensor([tokens])).logits
        return logits[0, :-1, : self.vocabulary].log_softmax(-1)

    def passed_over(self, prompt: list[int], found: list[int]) -> list[float]:
        """For each token of `found`, how much likelier the likeliest is: 0 where it is greedy decoding's."""
        scores = self.scores([*prompt, *found])[len(prompt) - 1 :]
        chosen = scores.gather(1, torch.tensor(found)[:, None])[:, 0]
        apart: list[float] = (scores.amax(1) - chosen).tolist()
        return apart
