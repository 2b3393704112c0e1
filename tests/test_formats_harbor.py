"""Harbor folders and Dockerfiles: what is read, under older names too, and what is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from harbor_folders import greeting, legacy, repair, totals, write
from palestra.envs.errors import ConfigError
from palestra.envs.formats.dockerfile import read_dockerfile
from palestra.envs.formats.harbor import Artifact, read_task
from palestra.envs.formats.terminal_bench import read_terminal_bench


def minimal(folder: Path, settings: str, **files: str) -> Path:
    return write(folder, {"task.toml": settings, "instruction.md": "Do.", "tests/test.sh": "true", **files})


def test_a_folder_is_read_whole(tmp_path: Path) -> None:
    task = read_task(greeting(tmp_path))
    assert (task.id, task.workdir, task.image) == ("greeting", "/app", None)
    assert task.instruction == "Write 'Hello, world!' into /app/hello.txt."
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (120.0, 30.0)
    assert task.verifier_env == {"WHOM": "world"}
    assert list(task.tests.contents) == ["test.sh"]
    assert task.artifacts == (Artifact("."),)
    assert task.limits.memory_bytes == 256 * 2**20


def test_older_spellings_mean_the_same(tmp_path: Path) -> None:
    task = read_task(totals(tmp_path))
    assert task.limits.memory_bytes == 256 * 2**20
    assert task.network == ()
    assert task.artifacts == (Artifact("out"), Artifact("log", ("*.tmp",)))
    assert task.files.contents["data/table.csv"] == b"1,10\n2,20\n3,30\n"
    assert task.files.executable == {"sum.sh"}
    assert task.env == {"LANG": "C.UTF-8", "COLUMNS_TO_SUM": "2"}
    assert any("storage 1024 MB" in note for note in task.notes)
    assert any("FROM python:3.12-slim: not pulled" in note for note in task.notes)


def test_the_whole_context_is_copied_without_the_dockerfile_itself(tmp_path: Path) -> None:
    task = read_task(repair(tmp_path))
    assert list(task.files.contents) == ["maths.py"]
    assert task.workdir == "/srv/project"
    assert any("no network" in note for note in task.notes)


def test_a_task_of_terminal_bench_becomes_one_whose_status_is_the_reward(tmp_path: Path) -> None:
    task = read_terminal_bench(legacy(tmp_path))
    assert task.instruction == "Create a folder /app/box with a file in it."
    assert sorted(task.tests.contents) == ["check.py", "run-tests.sh", "test.sh"]
    assert list(task.solution.contents) == ["solve.sh"]
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (100.0, 30.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("[environment]\ngpus = 2\n", "gpus"),
        ('[environment]\nos = "windows"\n', "boxes are linux"),
        ('[environment]\nnetwork_mode = "public"\n', "set the option hosts"),
        ("[environment]\nallow_internet = true\n", "set the option hosts"),
        ('[environment]\nnetwork_mode = "vpn"\n', "use public, no-network or allowlist"),
        ('[environment]\nworkdir = "/usr"\n', "no folder of the system"),
        ('[environment]\nworkdir = "/tests/x"\n', "no folder of the system"),
        ('[environment]\nworkdir = "/"\n', "no folder of the system"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a b:x"]\n', "a b:x"),
        ('[environment]\nmcp_servers = [{ name = "x" }]\n', "starts servers"),
        ('[environment.healthcheck]\ncommand = "true"\n', "waits for a service"),
        ('[environment]\nenv = { KEY = "${HOME}" }\n', "nothing of this machine"),
        ('[environment]\nmemory = "lots"\n', "such as '2G'"),
        ("[environment]\nmemory_mb = 16\n", "128 MB or more"),
        ("[agent]\ntimeout_sec = 0\n", "more than 0"),
        ('[agent]\ntimeout_sec = "long"\n', "expected a number"),
        ('[verifier]\nenvironment_mode = "none"\n', "use shared or separate"),
        ("[[verifier.collect]]\ncommand = 'x'\n", "hooks"),
        ('[[steps]]\nname = "s1"\n', "several steps"),
        ('artifacts = ["/etc/passwd"]\n', "only what is below /app"),
        ('artifacts = ["/app/../etc"]\n', "only what is below /app"),
        ("environment = 3\n", "expected a table"),
        ("[environment\n", "no TOML"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_place(settings: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_task(minimal(tmp_path / "task", settings))
    assert words in str(caught.value)


def test_the_whole_network_becomes_the_hosts_that_are_allowed_instead(tmp_path: Path) -> None:
    folder = minimal(tmp_path / "task", '[environment]\nnetwork_mode = "public"\n')
    assert read_task(folder, hosts=["a.example:443"]).network == ("a.example:443",)
    assert read_task(folder, hosts=[]).network == ()
    listed = minimal(
        tmp_path / "listed",
        '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example", "b.example:8080"]\n',
    )
    assert read_task(listed).network == ("a.example:443", "a.example:80", "b.example:8080")


def test_a_folder_that_is_incomplete_or_holds_links_is_refused(tmp_path: Path) -> None:
    folder = minimal(tmp_path / "task", "")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="symbolic link"):
        read_task(tmp_path / "link")
    (folder / "tests" / "secret").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="a link or a special file"):
        read_task(folder)
    (folder / "tests" / "secret").unlink()
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"no tests/test\.sh"):
        read_task(folder)
    with pytest.raises(ConfigError, match=r"task\.toml"):
        read_task(tmp_path)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("FROM a\nRUN apt-get install x", "2: RUN needs a build"),
        ("FROM a\nFROM b", "a second FROM"),
        ("WORKDIR /app", "no FROM"),
        ("FROM a\nWORKDIR /app\nCOPY none .", "no none in the folder"),
        ("FROM a\nWORKDIR /app\nCOPY ../up .", "outside the folder"),
        ("FROM a\nWORKDIR /app\nADD https://x.example/y .", "would be fetched"),
        ("FROM a\nWORKDIR /app\nCOPY --from=b /x .", "--from=b"),
        ("FROM a\nWORKDIR /app\nCOPY f /etc/f", "only what is below the working directory"),
        ("FROM a\nENV A=$B", "a variable in its value"),
        ("FROM a\nWORKDIR /app\nCOPY f", "a source and a target"),
    ],
)
def test_a_dockerfile_that_needs_a_build_is_refused_with_the_line(lines: str, words: str, tmp_path: Path) -> None:
    write(tmp_path, {"Dockerfile": lines, "f": "x"})
    with pytest.raises(ConfigError) as caught:
        read_dockerfile(tmp_path / "Dockerfile")
    assert words in str(caught.value)


def test_copies_go_where_docker_would_put_them(tmp_path: Path) -> None:
    lines = 'FROM a AS b\nWORKDIR /app\nWORKDIR in\nCOPY f g\nCOPY ["f", "d/*.txt", "/app/in/to/"]\nADD d /app/in/e\n'
    write(tmp_path, {"Dockerfile": lines, "f": "1", "d/x.txt": "2", "d/sub/y": "3"})
    recipe = read_dockerfile(tmp_path / "Dockerfile")
    assert (recipe.base, recipe.workdir) == ("a", "/app/in")
    assert recipe.files.contents == {
        "g": b"1",
        "to/f": b"1",
        "to/x.txt": b"2",
        "e/x.txt": b"2",
        "e/sub/y": b"3",
    }
