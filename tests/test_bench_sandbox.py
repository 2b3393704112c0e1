"""The bench measures what it says, on a small scale."""

from __future__ import annotations

import asyncio

import pytest

from palestra.rl.bench_sandbox import measure
from sandbox_support import require_image
from tests_support import require

KEYS = {
    "exec_ms_p50",
    "reset_ms_p50",
    "episode_ms_p50",
    "plain_exec_ms_p50",
    "plain_episode_ms_p50",
    "speedup",
    "parallel",
    "leaked",
}


@pytest.mark.docker
def test_the_bench_has_its_figures_and_both_ways_are_measured() -> None:
    require_image()
    figures = asyncio.run(measure(print, parallel=(1, 4), seconds=0.5, rounds=8, plain_episodes=2))
    assert set(figures) >= KEYS
    assert figures["backend"] == "docker"
    assert figures["leaked"] == 0
    assert 0 < figures["exec_ms_p50"] < figures["episode_ms_p50"] < figures["plain_episode_ms_p50"]
    assert figures["exec_ms_p50"] < figures["plain_exec_ms_p50"]
    assert figures["speedup"] == pytest.approx(figures["plain_episode_ms_p50"] / figures["episode_ms_p50"], rel=0.01)
    assert [row["boxes"] for row in figures["parallel"]] == [1, 4]
    assert all(row[key] > 0 for row in figures["parallel"] for key in ("exec_per_s", "episode_per_s"))


def test_without_an_engine_namespaces_are_measured_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    require("bwrap")
    monkeypatch.setenv("PALESTRA_DOCKER_SOCKET", "/nonexistent.sock")
    said: list[str] = []
    figures = asyncio.run(measure(said.append, parallel=(2,), seconds=0.2, rounds=4))
    assert (figures["backend"], figures["speedup"], figures["leaked"]) == ("namespace", None, 0)
    assert figures["exec_ms_p50"] > 0
    assert any("no Docker engine answers at /nonexistent.sock" in line for line in said)
