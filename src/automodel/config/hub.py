"""Whether the Hugging Face hub can be reached: asked once in a process.

The libraries ask a hub that does not answer again and again, 24 to 40 seconds for each file, with a raw line for each
time. So it is looked for once, for models and data alike. Where it is not there, what is in the caches loads at once,
and for everything else an error says what was tried.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, build_opener

PROBE_S = 4.0
NO_WAY = (407, 502, 503, 504)  # what a proxy says that does not reach the hub


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def turned_off_by() -> str:
    """The variable that keeps the libraries from the hub, as `HF_HUB_OFFLINE=1`; empty where none does."""
    from huggingface_hub import constants

    given = ((name, os.environ.get(name, "")) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    name, value = next(((name, value) for name, value in given if value), ("", ""))
    return f"{name}={value}" if value.upper() in constants.ENV_VARS_TRUE_VALUES else ""


def why_no_hub() -> str:
    """Why the hub is out of reach, as a sentence without its end."""
    variable = turned_off_by()
    return f"{variable} is set" if variable else f"{endpoint()} does not answer"


@lru_cache(maxsize=1)
def hub_answers() -> bool:
    """Whether the hub answers a request within `PROBE_S` seconds, through the proxy where one is set."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answers = []
    # A thread, because looking up a name has no timeout of its own.
    probe = Thread(target=lambda: answers.append(_asked()), daemon=True)
    probe.start()
    probe.join(PROBE_S)
    return any(answers)


def _asked() -> bool:
    try:
        with build_opener().open(Request(endpoint(), method="HEAD"), timeout=PROBE_S):
            return True
    except HTTPError as error:  # the hub itself says no to this request, but it is there
        return error.code not in NO_WAY
    except OSError as error:
        # Python's own certificates may be others than those that the libraries use; something has answered.
        return "CERTIFICATE_VERIFY_FAILED" in str(error)
    except ValueError:  # not an address; the libraries say so
        return True


@contextmanager
def hub_left_alone() -> Generator[None]:
    """A block in which `huggingface_hub` and `datasets` look into their caches alone where the hub does not answer."""
    if hub_answers():
        yield
        return
    from huggingface_hub import constants

    modules = [module for module in (constants, sys.modules.get("datasets.config")) if module is not None]
    before = [getattr(module, "HF_HUB_OFFLINE", False) for module in modules]
    try:
        for module in modules:
            setattr(module, "HF_HUB_OFFLINE", True)  # noqa: B010
        yield
    finally:
        for module, value in zip(modules, before):
            setattr(module, "HF_HUB_OFFLINE", value)  # noqa: B010
