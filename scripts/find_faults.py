"""Which faults of which HumanEval functions their hidden tests catch; prints `envs/builtin/humaneval_faults.py`.

A fault is kept when the tests fail on it within the limits: not when nothing differs, and not when it never ends.
Each is tried in a process of its own that is killed. Usage: python scripts/find_faults.py > FILE; ruff format
"""

from __future__ import annotations

import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from palestra.envs.builtin.data import data_folder, json_lines
from palestra.envs.builtin.faults import faults_of
from palestra.envs.builtin.humaneval_tests import hidden_cases, visible_examples

SECONDS, MEMORY_BYTES = 5.0, 2**30
KEPT = 4  # of one function, spread over all that it has
PASSED, FAILED = 0, 9


def outcome(source: str, entry_point: str, tests: list[str]) -> int | None:
    """PASSED, FAILED, another exit status, or None where it did not end."""
    calls = "".join(f"exec(compile({test!r}, 'test', 'exec'), {{'candidate': {entry_point}}})\n" for test in tests)
    judging = "".join(f"    {line}\n" for line in calls.splitlines())
    program = f"{source}\ntry:\n{judging}except Exception:\n    raise SystemExit({FAILED})\n"
    try:
        command = [sys.executable, "-I", "-S", "-c", program]
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, preexec_fn=_bounded, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def examined(row: dict[str, str]) -> tuple[str, list[int], list[str]]:
    """The function's id, its caught faults, and the calls of its visible examples that its own solution gets wrong."""
    id, entry_point = row["task_id"], row["entry_point"]
    good = row["prompt"] + row["canonical_solution"]
    tests = [test for _, test in hidden_cases(id, good, entry_point, row["test"])]
    if outcome(good, entry_point, tests) != PASSED:
        raise SystemExit(f"{id}: its own solution does not pass its tests")
    faults = faults_of(good, entry_point)
    # every place of the function gets its turn before the second fault of any
    order = sorted(range(len(faults)), key=lambda n: (sum(faults[m].start == faults[n].start for m in range(n)), n))
    step = max(1, len(order) // KEPT)
    order = [n for start in range(step) for n in order[start::step]]
    caught: list[int] = []
    for number in order:
        if len(caught) < KEPT and outcome(faults[number].applied(good), entry_point, tests) == FAILED:
            caught.append(number)
    shown = visible_examples(row["prompt"], entry_point)
    wrong = [
        call for call, value in shown if outcome(good, entry_point, [_example(call, value, entry_point)]) != PASSED
    ]
    return id, sorted(caught), wrong


def _example(call: str, value: str, entry_point: str) -> str:
    """An example of the docstring as a test."""
    return f"assert candidate{call.removeprefix(entry_point)} == {value}"


def main() -> None:
    """Try them all and print the module."""
    rows: list[dict[str, str]] = list(json_lines(data_folder() / "humaneval" / "HumanEval.jsonl"))  # type: ignore
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(examined, rows))
    print('"""Which faults of HumanEval functions their hidden tests catch. Made by `scripts/find_faults.py`."""\n')
    print("from __future__ import annotations\n\nfrom collections.abc import Mapping\n")
    print("FAULTS: Mapping[str, tuple[int, ...]] = {")
    for id, caught, _ in results:
        if caught:
            print(f'    "{id}": ({", ".join(map(str, caught))}{"," if len(caught) == 1 else ""}),')
    print('}\n"""Function -> places in its list of faults, see `faults_of`, in ascending order."""\n')
    print("MISPRINTED: Mapping[str, tuple[str, ...]] = {")
    for id, _, wrong in results:
        if wrong:
            print(f"    {id!r}: {tuple(wrong)!r},")
    print('}\n"""Function -> examples of its docstring, by their call, that its own solution contradicts."""')


if __name__ == "__main__":
    main()
