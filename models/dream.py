"""Dream (DreamLM/Dream, arXiv 2508.15487): Qwen2.5 made bidirectional.

A masked diffusion language model: every token sees every other, without causal mask or blocks.
Dream started from an autoregressive model and kept its alignment: the hidden state of token i - 1
predicts token i, and that of the first token predicts the first token too. `Bidirectional` applies
this shift, so row i of `logits` and `logps` is about token i. Module and parameter names are the
official ones, so safetensors files need no table of names. The official code keeps the embedding of
the padding token, which also ends a text, out of training (padding_idx); here it learns. The
forward `hidden`, `grid`, `logits` and `logps` are in models/language_model.py.
"""

from dataclasses import dataclass

from models.config import DecoderKeys, Objective
from models.language_model import Bidirectional
from models.layers import MLP, Attention, Block


@dataclass(frozen=True)
class Config(DecoderKeys):
    """The keys of config.json that this architecture reads, besides those of every decoder."""

    intermediate_size: int
    mask_token_id: int
    block_length: int = 32  # of semi-autoregressive decoding; official files state none


class Dream(Bidirectional):
    """The language model. Callers use `hidden`, `logits` and `logps`."""

    shift = True
    turn_end = "<|im_end|>"  # ends an answer
    # DreamLM/Dream, src/trainer/fsdp_sft_trainer.py; there the mean is over masked tokens
    # (docs/algos/sft.md, detail 5)
    objective = Objective(has_cart=True)

    def block(self, layer):
        mlp = MLP(self.config.hidden_size, self.config.intermediate_size)
        return Block(self.config, Attention(self.config, layer, bias=True), mlp)
