"""`palestra sandbox`: what we own on this machine."""

from __future__ import annotations

from palestra.envs.errors import ConfigError
from palestra.envs.sandboxes.backends import engine_socket, engine_trouble
from palestra.envs.sandboxes.image import build_image
from palestra.envs.sandboxes.reaper import list_boxes, reap
from palestra.rl.exit_codes import DONE, FAILED


def run_ls() -> int:
    """One line for each container of the project on the engine."""
    trouble = engine_trouble(engine_socket())
    if trouble is not None:
        print(f"{trouble}; boxes made of namespaces end with their owner and are not listed")
        return DONE
    boxes = list_boxes(engine_socket())
    for box in boxes:
        print(f"{box.name:44} {box.state:9} {box.run:24} {box.owner:24} {'abandoned' if box.abandoned else 'in use'}")
    print(f"{len(boxes)} boxes, {sum(box.abandoned for box in boxes)} of them abandoned")
    return DONE


def run_reap() -> int:
    """Remove what dead owners left; exit code 1 when something would not go."""
    path = engine_socket()
    report = reap(path if engine_trouble(path) is None else None)
    for name in report.removed:
        print(f"removed {name}")
    for error in report.errors:
        print(f"not removed: {error}")
    print(f"{len(report.removed)} removed, {report.kept} belong to owners that live, {len(report.errors)} failed")
    return FAILED if report.errors else DONE


def run_build_image(tag: str, mirror: str | None, force: bool) -> int:
    """Make the base image. Raises ConfigError without an engine."""
    path = engine_socket()
    trouble = engine_trouble(path)
    if trouble is not None:
        raise ConfigError(f"an image is made for a Docker engine, but {trouble}")
    build_image(path, tag, mirror=mirror, force=force)
    return DONE
