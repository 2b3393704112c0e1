"""The programs that judge in a box, as text: their modules one after the other, since a box has no package of ours."""

from __future__ import annotations

import functools
import re
from pathlib import Path

FUTURE = "from __future__ import annotations\n"
OWN_IMPORT = re.compile(r"^from palestra\.envs\.verifiers\.inbox_\w+ import .*$", re.MULTILINE)
MAIN = 'if __name__ == "__main__":\n    main()\n'


@functools.cache
def program(*modules: str) -> str:
    """The source of a program made of modules of this folder; only the last one's `main` is called."""
    texts = [Path(__file__).with_name(f"{module}.py").read_text() for module in modules]
    body = "\n".join(OWN_IMPORT.sub("", text).replace(FUTURE, "").replace(MAIN, "") for text in texts)
    return f"{FUTURE}{body}\nmain()\n"
