"""A bound on what the records of a run take on disk."""

from __future__ import annotations

from pathlib import Path


def trim_folder(folder: Path, max_bytes: int) -> list[Path]:
    """Remove the oldest files until the rest takes at most `max_bytes`; the newest always stays. What was removed."""
    files = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    total = sum(path.stat().st_size for path in files)
    removed = []
    for path in files[:-1]:
        if total <= max_bytes:
            break
        total -= path.stat().st_size
        path.unlink()
        removed.append(path)
    return removed
