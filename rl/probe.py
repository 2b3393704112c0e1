"""The rows on which engine and trainer are compared after every publish: what the policy really reads and writes."""

from __future__ import annotations

from palestra.envs.environment import Taskset
from palestra.rollout.renderer import Renderer

TASKS = 3
MAX_TOKENS = 128  # of one row


def probe_rows(renderer: Renderer, taskset: Taskset, context_tokens: int) -> list[list[int]]:
    """Opening and first scripted turn of the first training tasks, each cut to at most 128 ids."""
    tasks = taskset.split("train")
    rows = []
    for index in range(min(TASKS, len(tasks))):
        task = tasks[index]
        turns = taskset.demonstration(task, seed=index)
        ids = renderer.open(task.prompt) + (renderer.encoder.words(turns[0]) if turns else [])
        rows.append(ids[-min(MAX_TOKENS, context_tokens - 1) :])
    return rows
