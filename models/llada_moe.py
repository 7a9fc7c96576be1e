"""LLaDA-MoE (inclusionAI/LLaDA-MoE-7B-A1B-Instruct, arXiv 2509.24389): a bidirectional mixture.

A masked diffusion language model: every token sees every other, without causal mask or blocks, and
logits at position i are about token i, as in LLaDA. The layers are OLMoE's, with a norm of every
head of queries and keys: each is a mixture of experts whose softmax weights are not normalised
after the choice. Module and parameter names are the official ones, so safetensors files need no
table of names. Unlike there the embedding has no padding_idx: the padding token also ends the text,
so its row is trained.
"""

from dataclasses import dataclass

from models.config import DecoderKeys
from models.experts import SoftmaxMoE
from models.language_model import Bidirectional
from models.layers import Attention, Block
from models.llada import LLaDA


@dataclass(frozen=True)
class Config(DecoderKeys):
    """The keys of config.json that this architecture reads, besides those of every decoder."""

    expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    mask_token_id: int = 156895  # the official config.json states neither of these two
    block_length: int = 32

    fixed = DecoderKeys.fixed | {"partial_rotary_factor": 1, "qk_layernorm": True}
    fixed |= {"moe_layer_freq": 1}  # no dense layer
    needed = tuple(fixed)
    no_effect = (
        "dense_intermediate_size moe_router_score_function norm_topk_prob output_router_logits "
        "routed_scaling_factor router_aux_loss_coef router_num_group router_topk_group"
    )


class LLaDAMoE(Bidirectional):
    """The language model. Callers use `hidden`, `logits` and `logps`."""

    turn_end = "<|role_end|>"  # ends an answer
    eos_token_id = 156892  # <|endoftext|>, where no official file states it
    objective = LLaDA.objective

    def block(self, layer):
        config = self.config
        moe = SoftmaxMoE(config, config.expert_intermediate_size, is_normalized=False)
        return Block(config, Attention(config, layer, norm=True), moe)
