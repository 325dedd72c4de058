"""How many rows of logits exist at a time, and what that saves. No torch here: the plan asks before it is imported.

A step that stores its logits holds, at the worst moment of the backward pass, for each of them: the logit itself in the
compute dtype, its log-probability, and two gradients in fp32 (of the log-probability and of the logit). That makes 14
bytes in bf16: 13.7 GiB for 8,192 tokens and 128,256 words, and HF's peak with and without Liger's loss differs by as
much. `linear_cross_entropy` has one buffer of logits, a few thousand rows at a time, and nothing else of that width.
"""

from __future__ import annotations

BUFFER_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
"""The buffer. Every further chunk reads and writes the whole gradient of the weight once more, and rounds it once more,
so it is as large as a model that trains here never misses: 4,096 rows of Llama 3's 128,256 words in bf16."""
ROWS = 128  # chunks are multiples of a matrix product's tile
COLUMNS = 16  # so are rows of the buffer, whose width is then aligned for wide loads (GPT-2 has 50,257 words)
STORED_BESIDE = 12  # bytes in fp32 for each stored logit


def padded_width(vocabulary: int) -> int:
    return -(-vocabulary // COLUMNS) * COLUMNS


def rows_at_a_time(rows: int, vocabulary: int, element_size: int, device: str) -> int:
    """Rows of one chunk: as few chunks as fit the buffer, all of about the same size."""
    budget = BUFFER_BYTES.get(device, BUFFER_BYTES["cpu"])
    most = max(1, budget // (padded_width(vocabulary) * element_size) // ROWS) * ROWS
    chunks = max(1, -(-rows // most))
    even = -(-rows // chunks)
    return max(1, min(rows, -(-even // ROWS) * ROWS))


def stored_bytes(rows: int, vocabulary: int, element_size: int) -> int:
    """Peak bytes of a loss over logits that are stored."""
    return rows * vocabulary * (element_size + STORED_BESIDE)


def saved_bytes(rows: int, vocabulary: int, element_size: int, device: str) -> int:
    """What `linear_cross_entropy` needs less."""
    buffer = rows_at_a_time(rows, vocabulary, element_size, device) * padded_width(vocabulary) * element_size
    return stored_bytes(rows, vocabulary, element_size) - buffer
