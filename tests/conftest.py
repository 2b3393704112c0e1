"""What holds for every test: nothing asks a hub, reports home or writes outside its own folder."""

from __future__ import annotations

import os

import hypothesis
import pytest

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}


def pytest_configure() -> None:
    """Before anything heavy is imported, because these are read at import."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    hypothesis.settings.register_profile("palestra", deadline=None)  # a busy machine is no fault of the code
    hypothesis.settings.load_profile("palestra")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests may take what they need on a machine that is not alone."""
    for item in items:
        long = item.get_closest_marker("slow") or item.get_closest_marker("endurance")
        if long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1500))


def pytest_report_header() -> str:
    """Say at the top which services answer, so that a run that skipped them cannot pass for a whole one."""
    from tests_support import missing

    reasons = {service: missing(service) for service in ("docker", "bwrap", "vllm", "ray", "slurm", "data")}
    here = [service for service, reason in reasons.items() if reason is None]
    lines = [f"services here: {', '.join(here) or 'none'}"]
    lines += [f"not here: {service} ({reason})" for service, reason in reasons.items() if reason]
    return "\n".join(lines)
