"""FP8 under an adapter, tried on the run's own data before it is used.

A frozen weight is rounded once for the whole run. Whether a model stands that shows in its loss: the first batch is
scored with products in FP8 and in bf16. Where they differ by more than `ALLOWED`, the run goes on in bf16 and says so;
else the plan says how near they were, and the bf16 weights are let go.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from automodel.data.batch import Batch
from automodel.engine.prepare import Prepared
from automodel.models.fp8 import bf16_again, let_go_of_bf16, without_fp8
from automodel.plan.plan import Decision

ALLOWED = 0.02
"""Of the loss. Rounding to three bits of mantissa moves the loss of a language model by a few thousandths."""


@torch.no_grad()
def _loss(step: Any, batch: Batch) -> float:
    return float(step.loss.scores(step.forward(batch), batch).loss) / max(1, step.loss.count(batch))


def guarded(prepared: Prepared, model: Any, step: Any, batch: Batch) -> Prepared:
    """The same run, with FP8 or, if its first batch says so, without; before anything was recorded."""
    plan = prepared.plan
    if not plan.fp8 or prepared.adapter is None:
        return prepared
    batch, was_training = batch.to(plan.device), model.training
    model.eval()
    rounded = _loss(step, batch)
    with without_fp8(model):
        exact = _loss(step, batch)
    model.train(was_training)
    found = f"the first batch has loss {rounded:.4f} in FP8, {exact:.4f} in bf16"
    stands = abs(rounded - exact) <= ALLOWED * abs(exact)  # not a number does not
    if stands:
        let_go_of_bf16(model)
    else:
        bf16_again(model)
    before = next(d for d in plan.decisions if d.name == "fp8")
    asked = before.reason.partition("; the first batch has loss")[0]  # a batch that did not fit is asked again
    reason = f"{asked}; {found}" if stands else f"{found}: more than {ALLOWED:.0%} apart"
    line = Decision("fp8", before.value if stands else "off", reason)
    decisions = tuple(line if d is before else d for d in plan.decisions)
    return dataclasses.replace(prepared, plan=dataclasses.replace(plan, fp8=stands, decisions=decisions))
