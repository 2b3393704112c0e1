"""In a box for judging: puts a tree of files where its caller may write, as its caller, into a folder made for it.

Standard library alone. The job comes as JSON on the standard input, names and contents as base64 of their bytes.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any


def stage(job: dict[str, Any]) -> None:
    """Make the tree. Raises OSError; whoever called takes that for the machine's trouble: nothing else wrote there."""
    os.umask(0)
    top = os.fsencode(job["top"])
    os.makedirs(top, 0o777 if job["open"] else 0o755, exist_ok=True)
    if job["open"]:
        os.chmod(top, 0o777)
    writable = 0o222 if job["open"] else 0o200
    for name, data, executable in job["files"]:
        path = os.path.join(top, base64.b64decode(name))
        os.makedirs(os.path.dirname(path), 0o777 if job["open"] else 0o755, exist_ok=True)
        mode = 0o444 | writable | (0o111 if executable else 0)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(fd, "wb") as file:
            file.write(base64.b64decode(data))
    for name, target in job["links"]:  # last, so that no file is written through one
        path = os.path.join(top, base64.b64decode(name))
        os.makedirs(os.path.dirname(path), 0o777 if job["open"] else 0o755, exist_ok=True)
        os.symlink(base64.b64decode(target), path)


def main() -> None:
    """Do the job on the standard input."""
    stage(json.load(sys.stdin))


if __name__ == "__main__":
    main()
