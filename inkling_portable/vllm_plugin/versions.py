"""Which versions of vLLM the plug-in was tried with, and what differs between them.

Of what the plug-in uses, vLLM 0.29 to 0.33 differ in this only:

- Up to 0.30 a backend's supported block sizes are asked for without an argument, from 0.31 on with the cache's spec
  (`backend.PortableBackend` takes both).
- Up to 0.32 vLLM has a processor of its own for media, which gives the levels of a sound as floats; from 0.33 on it is
  Transformers', which gives integers (`model.PortableForConditionalGeneration` takes both).

Before 0.29 caches had shapes of the backend's choosing, which this plug-in does not know. Source: the wheels of vLLM
0.26 to 0.33.
"""

from __future__ import annotations

import re

OLDEST, NEWEST = (0, 29), (0, 33)


def problem(version: str) -> str | None:
    """Why vLLM `version` is not supported, in a sentence; None where it is."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return None
    spelled = [".".join(map(str, bound)) for bound in (OLDEST, NEWEST)]
    return (
        f"vLLM {version} is outside the versions that inkling-portable works with, {spelled[0]} to {spelled[1]}: "
        f"it leaves vLLM as it is. Install one of those (pip install 'vllm>={spelled[0]},<0.{NEWEST[1] + 1}')"
    )
