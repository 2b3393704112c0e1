"""Ranks as processes: forked from one server that has imported the heavy packages, so that four cost little more than
one. Each runs the same function and leaves what it returns in a file."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from palestra.rl.ranks import Ranks

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["palestra.rl.learner", "torch.distributed.fsdp", "torch.distributed.tensor"])


def together(size: int, work: Callable[..., Any], folder: Path, *arguments: object, limit_s: float = 120) -> list[Any]:
    """What `work(ranks, *arguments)` returns on each of `size` ranks, which meet in `folder`."""
    folder.mkdir(parents=True)
    processes = [_SERVER.Process(target=_rank, args=(rank, size, work, folder, arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        told = [path.read_text() for path in sorted(folder.glob("*.error"))]
        assert [process.exitcode for process in processes] == [0] * size, "\n".join(told)
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, work: Callable[..., Any], folder: Path, arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        torch.save(work(Ranks(rank, size), *arguments), folder / f"{rank}.pt")
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    distributed.destroy_process_group()
