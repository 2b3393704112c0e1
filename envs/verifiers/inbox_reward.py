"""In a box for judging: reads the files that a test script may have left, following no link and waiting for nobody.

Standard library alone. The job on the standard input names a folder, files and a size; the answer is one line of JSON.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import sys


def look(folder: int, name: str, max_bytes: int) -> dict[str, str] | None:
    """The file as base64, or why it cannot be taken for one; None where nothing has that name."""
    try:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(facts.st_mode):
        return {"bad": f"it is no regular file (mode {facts.st_mode:o})"}
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        return {"bad": f"it is longer than {max_bytes} bytes"}
    return {"data": base64.b64encode(data).decode("ascii")}


def main() -> None:
    """Answer the job on the standard input."""
    job = json.load(sys.stdin)
    found = {}
    try:
        folder = os.open(job["folder"], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        for name in job["names"]:
            found[name] = look(folder, name, job["max_bytes"])
    except OSError as error:
        found = {name: {"bad": f"the folder cannot be read: {error.strerror}"} for name in job["names"]}
    sys.stdout.write(json.dumps({"nonce": job["nonce"], "found": found}) + "\n")


if __name__ == "__main__":
    main()
