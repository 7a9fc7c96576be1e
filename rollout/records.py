"""What a rollout of a bidirectional model keeps beside its step map, for methods that need more: Trace.records."""

import torch
import torch.nn.functional as F


class Events:
    """Every change of a token."""

    def __init__(self):
        self.events, self.logps = [], []

    def add(self, sample_index, step, start, changed, block, logps):
        """changed [R, n] bool: which tokens of the block at column `start` step number `step` has changed, to block, logps."""
        r, j = changed.nonzero(as_tuple=True)
        self.events.append(
            torch.stack([sample_index[r], torch.full_like(r, step), start + j, block[r, j]], 1)
        )
        self.logps.append(logps[r, j])

    def result(self):
        return {"events": torch.cat(self.events), "logps": torch.cat(self.logps)}


class States:
    """What every forward saw and predicted: 9 bytes a token of a canvas and step, N x K x L of them."""

    def __init__(self, N, K, L, pad_token_id, device):
        self.masked = torch.zeros(N, K, L, dtype=torch.bool, device=device)
        self.predictions = torch.full((N, K, L), pad_token_id, dtype=torch.int32, device=device)
        self.confidences = torch.zeros(N, K, L, dtype=torch.float32, device=device)

    def add(self, row, step, start, seen, masked, predictions, logps):
        """row [R]: which rows; seen [R, L]: their canvases at step number `step`; masked, predictions, logps [R, L - start]:
        from column `start`, the block's and those behind it. Where no token of a row is masked, nothing was asked."""
        masked, logps = F.pad(masked, (start, 0), value=False), F.pad(logps, (start, 0))
        asked = masked.any(1)
        row, masked = row[asked], masked[asked]
        predictions = torch.cat([seen[:, :start], predictions], 1)[asked]
        self.masked[row, step] = masked
        self.predictions[row, step] = torch.where(masked, predictions, seen[asked]).int()
        self.confidences[row, step] = torch.where(masked, logps[asked].exp(), 0.0).float()

    def result(self):
        return {
            "masked": self.masked,
            "predictions": self.predictions,
            "confidences": self.confidences,
        }
