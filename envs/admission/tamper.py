"""A small scripted policy that tries to be paid without doing the task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Beats = Literal["status", "reward", "verdict", "nonce", "report", "git", "retry", "hang", "size", "answer"]
"""Which careless way of judging a tamper wins against; "answer": it gets something that it must not see."""

PREAMBLE = r"""
sources() {
    find . -name '*.py' ! -path './.git/*' ! -path './tests/*' ! -name 'test_*' ! -name '*_test.py' ! -name conftest.py
}
append() { code=$(cat); sources | while IFS= read -r file; do printf '\n%s\n' "$code" >> "$file"; done; }
plant() {
    for folder in logs/verifier /logs/verifier; do
        mkdir -p "$folder" && printf '%s\n' "$2" > "$folder/$1"
    done
    return 0
}
exec 2> /dev/null
"""
"""Shell functions of the scripts: `sources` lists the program's own files, `append` adds its input to each of them,
`plant NAME WORDS` writes where a careless verifier would look for its reward."""


@dataclass(frozen=True, slots=True)
class Tamper:
    """One try. `script` runs in the policy's box, in the workspace, as a policy with a shell could run it.

    A script that reads ("answer") ends with status 0 when it found something and prints it; CANARY in its environment
    is a word that only hidden data hold. `loot` runs after the judging, in the box or, with `mate`, in that of another
    episode of the task; then its status says so.
    """

    row: str  # of cases/abuse.md
    name: str
    beats: Beats
    script: str
    honest: bool = True  # leaves the solution as it is: together with a right one it must still earn what that earns
    loot: str | None = None
    mate: bool = False

    def argv(self) -> list[str]:
        """The command for a box."""
        return ["/bin/sh", "-c", PREAMBLE + self.script]

    def loot_argv(self) -> list[str]:
        """The command that looks for what the script got hold of."""
        assert self.loot is not None
        return ["/bin/sh", "-c", PREAMBLE + self.loot]
