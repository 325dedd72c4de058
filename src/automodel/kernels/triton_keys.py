"""Keys of Triton's cache that do not depend on what was launched before.

The key of a kernel covers the constants that its helpers read, but Triton (3.6, 3.7) collects them before it has looked
into a helper for the first time. So a kernel has one key where an earlier one called the same helper, and another one
where it comes first; what was compiled ahead in another order is then compiled again. Here all helpers of a module are
looked into when it is imported.
"""

from __future__ import annotations

from typing import Any


def settle_keys(module: dict[str, Any]) -> None:
    """Looks into the helpers of a module (`globals()`) in the order of their definition: called ones come first."""
    for name, value in list(module.items()):
        if hasattr(value, "cache_key") and not name.endswith("_kernel"):
            _ = value.cache_key  # computed and kept by Triton; its interpreter has none
