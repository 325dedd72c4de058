"""What TRL's SFTTrainer writes beside the loss: entropy, token accuracy, tokens so far, and the loss of a router.

    entropy               mean over the micro-batches since the last line of the mean entropy of their learned tokens
    mean_token_accuracy   mean over the same micro-batches of the share of learned tokens with the highest logit
    num_tokens            tokens that were trained on since the trainer was made, prompts included
    aux_loss              mean loss of the router, before its coefficient, where there is one

The engine's steps and evaluations count while they make the loss (`kernels/token_scores.py`). In Trainer's own steps
`counted` does, from the drop-in model's loss or from logits that are there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from automodel.kernels.token_scores import TokenScores, sums_of_logits

MODES = ("train", "eval")


class LineMetrics:
    """What is counted for the next log line, apart for training and evaluation."""

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        device = accelerator.device
        self.scores = {mode: TokenScores(device) for mode in MODES}
        self.balances: dict[str, list[Tensor]] = {mode: [] for mode in MODES}
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        """On this rank."""
        if accelerator.num_processes > 1:
            for scores in self.scores.values():
                scores.of_all_ranks = lambda sums: accelerator.reduce(sums, "sum")

    def count_logits(self, mode: str, outputs: Any, labels_BS: Tensor) -> None:
        """Adds one micro-batch of a forward that made its logits. Virtual tokens of prompt learning stand in front."""
        logits_BSV = outputs["logits"] if isinstance(outputs, dict) else outputs[1]
        shifted_BSV = logits_BSV[:, -labels_BS.shape[1] :][:, :-1]
        with torch.no_grad():
            sums = sums_of_logits(shifted_BSV.flatten(0, 1), labels_BS[:, 1:].flatten().to(logits_BSV.device))
        self.scores[mode].add_sums(sums)

    def count_tokens(self, inputs: dict[str, Any]) -> None:
        """Adds the tokens of a micro-batch as its collator made it."""
        mask = inputs.get("attention_mask")
        self.tokens += mask.sum() if mask is not None else inputs["input_ids"].numel()

    def take(self, mode: str) -> dict[str, float]:
        """The values of a line, and nothing where no micro-batch came since the last one."""
        found = self.scores[mode].take()
        if found is None:
            return {}
        tokens = self.accelerator.reduce(self.tokens, "sum") if self.accelerator.num_processes > 1 else self.tokens
        values = {"entropy": found[0], "mean_token_accuracy": found[1], "num_tokens": float(tokens)}
        if self.balances[mode]:
            balance = torch.stack([b.float() for b in self.balances[mode]]).mean()
            if self.accelerator.num_processes > 1:
                balance = self.accelerator.reduce(balance, "mean")
            values["aux_loss"] = float(balance)
            self.balances[mode].clear()
        return values

    def forget(self, mode: str) -> None:
        """Drops what was counted and written nowhere."""
        self.scores[mode].take()
        self.balances[mode].clear()
