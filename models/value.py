"""A value model beside a policy: the same backbone and a head of one output for each token."""

from torch import nn

from models.checkpoint import load_weights


def load_value_model(model, device, shard, optimize, *how):
    """Weights that the policy starts from, with a value head, so that `logps` gives values.

    model: a meta_model, with adapters if the policy has some. shard(model, *how) -> the model,
    sharded, before weights are read. The head starts at 0. -> model, optimize(model, *how)
    """
    # the head of the vocabulary gets no gradient, unless it is the embedding too
    model.lm_head.requires_grad_(model.config.tie_word_embeddings and not model.lora_config)
    model.value_head = nn.Linear(model.lm_head.in_features, 1, bias=False, device="meta")
    model = load_weights(shard(model, *how), device)
    return model, optimize(model, *how)
