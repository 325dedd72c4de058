"""A step that is skipped leaves weights and moments alone, but the learning rate goes on with the batches."""

import torch

from flattened import flattened

LR, DECAY = 1e-2, 0.1
FACTORS = torch.tensor([1.0, 0.5, 0.25, 0.125], dtype=torch.float64)
GOOD_STEPS = (0, 2, 3)  # the gradient of step 1 overflows


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(9, 5)


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 9, generator=generator), torch.randn(5, generator=generator)


def test_the_schedule_counts_skipped_steps(path):
    ours, theirs = net(), net()
    flat = flattened(ours, lr=LR, weight_decay=DECAY, initial_loss_scale=8.0, lr_factors=FACTORS)
    groups = [{"params": [theirs.weight], "weight_decay": DECAY}, {"params": [theirs.bias], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=LR)
    for step in range(4):
        for parameter, gradient in zip(ours.parameters(), gradients(step)):
            parameter.grad = gradient * 8.0 if step in GOOD_STEPS else gradient / 0.0
            if step > 1:
                parameter.grad = gradient * 4.0  # the scale was halved
        flat.step()
        flat.zero_grad()
        if step in GOOD_STEPS:
            for parameter, gradient in zip(theirs.parameters(), gradients(step)):
                parameter.grad = gradient.clone()
            for group in plain.param_groups:
                group["lr"] = LR * FACTORS[step].item()
            plain.step()
    assert (int(flat.step_count), int(flat.device_state.skipped)) == (3, 1)
    assert flat.loss_scale.item() == 4.0
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-5, atol=1e-6)
