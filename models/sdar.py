"""SDAR (JetAstra/SDAR, arXiv 2510.06303): a Qwen3 decoder with block-causal attention.

A block diffusion language model: a token sees every token of its own block of `block_length`
positions and of the blocks before it. The grid of blocks starts at position 0 of the prompt. Logits
at position i are about token i: there is no shift. Module and parameter names are the official
ones, so safetensors files need no table of names. The forward `hidden`, `grid`, `logits` and
`logps` are in models/language_model.py.
"""

from dataclasses import dataclass

from models.config import DecoderKeys, Objective
from models.experts import SoftmaxMoE
from models.language_model import BlockCausal
from models.layers import MLP, Attention, Block


@dataclass(frozen=True)
class Config(DecoderKeys):
    """The keys of config.json that this architecture reads, besides those of every decoder."""

    intermediate_size: int
    head_dim: int  # not hidden_size / heads: SDAR-4B has 32 heads of 128 at width 2560
    mask_token_id: int
    block_size: int
    tie_word_embeddings: bool = False
    num_experts: int = 0  # 0: dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    round_first = False  # as in the fused kernel of the official code
    no_effect = (
        "debug ep_size fuse_cross_entropy micro_forward output_router_logits "
        "router_aux_loss_coef skip_checkpoint"
    )

    @classmethod
    def from_dict(cls, raw):
        is_mixture = raw["model_type"] == "sdar_moe"
        return super(Config, MixtureConfig if is_mixture else cls).from_dict(raw)


@dataclass(frozen=True)
class MixtureConfig(Config):
    mask_token_id: int = 151669  # the official code's defaults for what config.json leaves out
    block_size: int = 4

    fixed = Config.fixed | {"norm_topk_prob": True, "decoder_sparse_step": 1}
    needed = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


class SDAR(BlockCausal):
    """The language model. Callers use `hidden`, `logits` and `logps`."""

    turn_end = "<|im_end|>"  # ends an answer
    objective = Objective(t_min=0, weight="1/n")  # SDAR, training/

    def block(self, layer):
        config = self.config
        if config.num_experts:
            mlp = SoftmaxMoE(config, config.moe_intermediate_size)
        else:
            mlp = MLP(config.hidden_size, config.intermediate_size)
        return Block(config, Attention(config, layer, norm=True), mlp)
