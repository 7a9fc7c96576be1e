"""A value model beside a policy: the same backbone and a head of one output for each token."""

from torch import nn

from models.checkpoint import load_weights, meta_model
from models.lora import add_lora


def load_value_model(name_or_dir, policy, optimizer, shard, *how):
    """The weights that the policy started from, with a value head, so that `logps` gives values.

    name_or_dir: as the policy was loaded. Dtype, device and adapters (shape, seed) are as in the
    policy; its optimizer has the settings of `optimizer`. shard(model, *how) -> the model,
    sharded, before weights are read. The head starts at 0. -> model, its own optimizer
    """
    weight, config = policy.lm_head.weight, policy.lora_config
    model = meta_model(name_or_dir, weight.dtype)
    if config:
        add_lora(model, config.r, config.lora_alpha, config.target_modules, policy.lora_seed)
    # the head of the vocabulary gets no gradient, unless it is the embedding too
    is_tied = model.lm_head.weight is model.get_submodule(model.embedding).weight
    model.lm_head.requires_grad_(is_tied and not config)
    model.value_head = nn.Linear(model.lm_head.in_features, 1, bias=False, device="meta")
    model = load_weights(shard(model, *how), weight.device)
    (settings,) = optimizer.param_groups
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, type(optimizer)([settings | {"params": trained}])
