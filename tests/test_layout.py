"""The shape of the repository: which way imports point, where heavy packages live, how long things may get."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("envs", "rollout", "rl")  # each may import from itself and from what stands to its left

HOMES = {
    "docker": "envs/sandboxes/docker.py",
    "vllm": "rollout/engines/vllm.py",
    "ray": "rollout/cluster.py",
    "peft": "rl/lora.py",
    "wandb": "rl/tracking.py",
    "accelerate": "rl/",
}
"""The one file that may import each heavy package, or the room where any one file may."""

# written so that this file does not match itself
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:wor[k]\b|opt/p[v]\b|far[m]/|roo[t]/\w|home/\w)")
REGISTRY = re.compile(
    r"pypi[.]org|pythonhosted[.]org|(?:deb|security)[.]debian[.]org|(?:archive|ports)[.]ubuntu[.]com"
    r"|registry[.]npmjs|registry-1[.]docker|index[.]docker|hub[.]docker|ghcr[.]io|quay[.]io|download[.]pytorch"
)
UNFINISHED = re.compile(r"\b(?:TOD[O]|FIXM[E]|XX[X]|NotImplementedErro[r])\b")
TEXT = {".py", ".md", ".toml", ".sh", ".sbatch", ".lock", ".txt", ".json", ".html", ".js", ".css", ""}


@cache
def tracked() -> tuple[Path, ...]:
    """Every text file of the repository: what git tracks or would, else what is not hidden or built."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode == 0:
        found = [ROOT / name for name in listing.stdout.splitlines()]
    else:
        found = [p for p in ROOT.rglob("*") if not any(map(_made_here, p.relative_to(ROOT).parts))]
    return tuple(sorted(p for p in found if p.is_file() and p.suffix in TEXT and not p.name.startswith(".git")))


def _made_here(part: str) -> bool:
    """Whether a name in a path says: not from the repository, but from building or running it."""
    return part in {"build", "runs", "wandb", "__pycache__"} or (part.startswith(".") and part != ".ci")


@cache
def modules() -> dict[str, ast.Module]:
    """Every source file of the three rooms, parsed. {"envs/types.py": Module(...)}"""
    paths = [p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))]
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text(), filename=str(p)) for p in paths}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported anywhere in the tree, `import_module("name")` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, word) for word in words[:1])


def test_imports_point_one_way_and_are_absolute() -> None:
    wrong = []
    for path, tree in modules().items():
        allowed = ROOMS[: ROOMS.index(path.split("/")[0]) + 1]
        for line, name in imports(tree):
            parts = name.split(".")
            if name.startswith(".") or parts[0] in ROOMS:
                wrong.append(f"{path}:{line}: {name}: write palestra.<room>...")
            elif parts[0] == "palestra" and (len(parts) < 2 or parts[1] not in allowed):
                wrong.append(f"{path}:{line}: {name}: {allowed[-1]} may import from {', '.join(allowed)} only")
    assert wrong == []


def test_no_two_files_import_each_other_in_a_circle() -> None:
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in modules()}
    edges: dict[str, set[str]] = {}
    for path, tree in modules().items():
        top = ast.Module([n for n in tree.body if not isinstance(n, ast.If)], [])  # TYPE_CHECKING blocks never run
        found = {name.removeprefix("palestra.") for _, name in imports(top)}
        edges[path] = {names[n] for f in found for n in (f, f.rpartition(".")[0]) if n in names} - {path}
    settled: set[str] = set()
    while ready := {p for p, needs in edges.items() if p not in settled and needs <= settled}:
        settled |= ready
    assert sorted(set(edges) - settled) == []


@pytest.mark.parametrize("package", HOMES)
def test_a_heavy_package_is_imported_in_its_home_only(package: str) -> None:
    users = {path for path, tree in modules().items() for _, name in imports(tree) if name.split(".")[0] == package}
    assert len(users) <= 1
    assert [path for path in users if not path.startswith(HOMES[package])] == []


def test_environments_know_no_tensors() -> None:
    tensors = {"torch", "transformers", "tokenizers", "safetensors"}
    users = [
        f"{path}:{line}: {name}"
        for path, tree in modules().items()
        if path.startswith("envs/")
        for line, name in imports(tree)
        if name.split(".")[0] in tensors
    ]
    assert users == []


def test_every_source_file_says_what_it_is() -> None:
    assert [path for path, tree in modules().items() if not ast.get_docstring(tree)] == []


def test_files_and_functions_stay_short() -> None:
    lines = {path: (ROOT / path).read_text().count("\n") for path in modules() if not path.endswith("__init__.py")}
    assert {path: n for path, n in lines.items() if n > 450} == {}
    assert statistics.median(lines.values()) < 150
    functions = {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {where: n for where, n in functions.items() if n > 70} == {}


FORBIDDEN = {"a path of one machine": MACHINE_PATH, "a package registry": REGISTRY, "something unfinished": UNFINISHED}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_text_names(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN[what].search(line)
    ]
    assert found == []


def test_every_room_carries_types_and_every_script_runs() -> None:
    assert [room for room in ROOMS if not (ROOT / room / "py.typed").is_file()] == []
    scripts = [p for p in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"] if p.read_text().startswith("#!")]
    assert [p.name for p in scripts if not p.stat().st_mode & 0o111] == []
    for script in (p for p in scripts if "bash" in p.read_text().splitlines()[0]):
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
