"""A model folder's weights, memory-mapped and only read: the base that no merge can wear out."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import Tensor


class Checkpoint:
    """Weights by the name of their module. Use it as a context: files close with it."""

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
        self._where = {key: file for file in self._files for key in file.keys()}  # noqa: SIM118  (not a mapping)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._where.clear()
        self._files.clear()

    def shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of every matrix, by module name; embeddings are among them."""
        found = {key: size for key, size in self.sizes().items() if key.endswith(".weight")}
        return {key.removesuffix(".weight"): (size[0], size[1]) for key, size in found.items() if len(size) == 2}

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shape of everything stored, by its name."""
        return {key: tuple(file.get_slice(key).get_shape()) for key, file in self._where.items()}

    def tensor(self, name: str) -> Tensor:
        """A parameter as stored."""
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor
