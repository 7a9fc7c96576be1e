"""Values of a frozen reference on draws that are known before training, kept in a file so that no step computes them again."""

import hashlib
import json
import os
import secrets
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor


class ReferenceCache:
    """One-draw values of the sequences of steps 0, 1, ...: in memory, and in one safetensors file for later runs.

        cache = ReferenceCache(path, model_facts(model) | {"device": "cpu"})
        for step in range(len(cache), steps):
            cache.append(values, digests)       # of this rank's sequences, [B, n] and [B]; ranks in order, equally many each
        cache.save()
        values = cache.values(step, first, digests)

    facts: what the values depend on besides ids and masks; a file with others is refused. digests: row_digests of what a
    value is of; at another digest nothing is returned. All ranks construct it and call alike; rank 0 writes.
    """

    def __init__(self, path, facts):
        self.path, self.facts, self.steps = (
            Path(path),
            {name: str(value) for name, value in facts.items()},
            [],
        )
        if self.path.is_dir():
            raise SystemExit(f"--ref-cache {path} is a folder; name a file in it")
        if self.path.exists():
            try:
                with safe_open(self.path, "pt") as file:
                    found = json.loads((file.metadata() or {}).get("facts", "{}"))
                    tensors = [file.get_tensor(name) for name in ("values", "digests")]
            except (SafetensorError, OSError, ValueError) as error:
                raise SystemExit(
                    f"--ref-cache {path} is no file of reference values, or a truncated one: {error}"
                ) from error
            differ = [
                f"{name} {found.get(name)} there, {value} here"
                for name, value in self.facts.items()
                if found.get(name) != value
            ]
            if differ:
                raise SystemExit(
                    f"--ref-cache {path} is stale: {'; '.join(differ)}; name another file or remove it"
                )
            self.steps = list(zip(*tensors, strict=True))
        if dist.is_initialized():
            dist.barrier()  # nobody writes before all have read

    def __len__(self):
        return len(self.steps)

    def append(self, values, digests):
        """values [B, n] fp32, digests [B] int64 of this rank, of the next step."""
        self.steps.append((gathered(values).cpu(), gathered(digests).cpu()))

    def values(self, step, first, digests):
        """Values [B, n] of the B sequences from number `first` of the step, on the device of digests. SystemExit if they are of
        other ids or masks."""
        values, known = (tensor[first : first + len(digests)] for tensor in self.steps[step])
        if not torch.equal(known, digests.cpu()):
            raise SystemExit(
                f"--ref-cache {self.path} is stale: step {step + 1} has other data or masks; remove the file"
            )
        return values.to(digests.device)

    def save(self):
        """Write the file, under another name until it is whole. SystemExit on every rank where rank 0 cannot."""
        problem = [None]
        if not dist.is_initialized() or dist.get_rank() == 0:
            temporary = self.path.with_name(
                f".{self.path.name}.{secrets.token_hex(4)}.tmp"
            )  # runs may share the file
            tensors = dict(
                zip(
                    ("values", "digests"),
                    map(torch.stack, zip(*self.steps, strict=True)),
                    strict=True,
                )
            )
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                save_file(tensors, temporary, {"facts": json.dumps(self.facts)})
                os.replace(temporary, self.path)
            except (SafetensorError, OSError) as error:
                problem = [f"--ref-cache {self.path} cannot be written: {error}"]
            finally:
                if temporary.exists():
                    temporary.unlink()
        if dist.is_initialized():
            dist.broadcast_object_list(problem, src=0)
        if problem[0]:
            raise SystemExit(problem[0])


def gathered(tensor):
    """Rows of all ranks, in the order of ranks."""
    if not dist.is_initialized():
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def row_digests(valid_mask, *tensors):
    """64 bits of a row's valid positions, whatever its pads. valid_mask [B, T], tensors [B, ..., T] -> [B] int64"""
    rows, widths = [], valid_mask.sum(1).tolist()
    tensors = [tensor.cpu() for tensor in tensors]
    for i, width in enumerate(widths):
        parts = [tensor[i, ..., :width].contiguous().numpy().tobytes() for tensor in tensors]
        rows.append(
            int.from_bytes(
                hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little", signed=True
            )
        )
    return torch.tensor(rows, device=valid_mask.device)


def model_facts(model):
    """Hashes of what a model's values depend on: its weights, and what its class reads of config.json. Collective."""
    config = hashlib.blake2b(repr(model.config).encode(), digest_size=8).hexdigest()
    return {"config": config, "weights": weights_checksum(model)}


def weights_checksum(model):
    """63 bits of all weights but adapters, equal for every sharding, and for an fp32 copy of bf16 weights. Collective."""
    total, alone = (
        torch.zeros((), dtype=torch.int64),
        not dist.is_initialized() or dist.get_rank() == 0,
    )
    weights = [*model.named_parameters(), *model.named_buffers()]
    for number, value in enumerate(value for name, value in weights if "lora_" not in name):
        if not alone and not isinstance(value, DTensor):  # whole on every rank
            continue
        local = value.to_local() if isinstance(value, DTensor) else value
        # sums of bit patterns do not depend on who holds which rows; a place in the sum for every tensor
        total += (2 * number + 1) * local.detach().float().view(torch.int32).sum(
            dtype=torch.int64
        ).cpu()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() % 2**63
