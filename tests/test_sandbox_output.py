"""The whole of what a command wrote, beyond what its result holds; kept where the policy cannot reach it."""

from __future__ import annotations

import pytest

from palestra.envs.sandboxes.contract import Exec
from palestra.envs.sandboxes.spool import COMMANDS, STREAM_BYTES
from sandbox_support import DOCKER, GVISOR, NAMESPACE, SCRIPTED, SPEC, Box
from sandbox_support import box as box
from sandbox_support import home as home
from sandbox_support import kept as kept

LIMIT = SPEC.limits.output_bytes
every_kind = pytest.mark.parametrize("box", [SCRIPTED, NAMESPACE, DOCKER, GVISOR], indirect=True)
real_kinds = pytest.mark.parametrize("box", [NAMESPACE, DOCKER, GVISOR], indirect=True)


def long_cat(box: Box, seed: int) -> tuple[bytes, Exec]:
    data = (b"%d " % seed) * (LIMIT + seed)
    return data, box.run("cat", stdin=data)


@every_kind
def test_what_was_cut_can_be_read_in_pieces(box: Box) -> None:
    """K08: large but legal output."""
    data, done = long_cat(box, 7)
    assert done.stdout_cut is not None
    assert done.stdout == data[: done.stdout_cut[0]] + data[done.stdout_cut[1] :]
    assert box.output(done.handle, 0, len(data)) == data
    assert box.output(done.handle, *done.stdout_cut) == data[done.stdout_cut[0] : done.stdout_cut[1]]
    assert box.output(done.handle, 5, 9) == data[5:9]
    assert box.output(done.handle, len(data) - 3, len(data) + 100) == data[-3:]
    assert box.output(done.handle, len(data), len(data) + 100) == b""
    assert box.output(done.handle, 9, 5) == b""
    assert box.output(done.handle, 0, 100, "stderr") == b""


@every_kind
def test_a_result_that_holds_everything_has_no_handle(box: Box) -> None:
    assert box.run("cat", stdin=b"x" * LIMIT).handle is None
    assert box.run("cat", stdin=b"x" * (LIMIT + 1)).handle is not None


@every_kind
def test_the_oldest_outputs_make_room_and_none_outlives_a_reset(box: Box) -> None:
    made = [long_cat(box, seed) for seed in range(1, COMMANDS + 3)]
    assert len({done.handle for _, done in made}) == len(made)
    for data, done in made[-COMMANDS:]:
        assert box.output(done.handle, 0, len(data)) == data
    for _, done in made[:-COMMANDS]:
        with pytest.raises(KeyError):
            box.output(done.handle, 0, 1)
    box.reset()
    for handle in [done.handle for _, done in made] + ["0", ""]:
        with pytest.raises(KeyError):
            box.output(handle, 0, 1)
    _, after = long_cat(box, 1)
    assert after.handle not in {done.handle for _, done in made}


@real_kinds
def test_both_streams_are_kept_up_to_the_bound_and_in_order(box: Box) -> None:
    script = "import sys\nfor n in range(600_000):\n  sys.stdout.write('%09d\\n' % n)\n"
    script += "  n % 6 or sys.stderr.write('%09d\\n' % n)"
    done = box.python(script, timeout_s=60)
    assert (done.stdout_total, done.stderr_total) == (6_000_000, 1_000_000)
    assert box.output(done.handle, 0, 10**7) == b"".join(b"%09d\n" % n for n in range(600_000))[:STREAM_BYTES]
    assert box.output(done.handle, 0, 10**7, "stderr") == b"".join(b"%09d\n" % n for n in range(0, 600_000, 6))


@real_kinds
def test_a_command_that_ends_by_its_limit_or_a_signal_keeps_its_output(box: Box) -> None:
    for end in ("sleep 60", "kill -9 $$"):
        done = box.sh(f"head -c 200000 /dev/zero | tr '\\0' x; {end}", timeout_s=1)
        assert done.exit_code is None
        assert box.output(done.handle, 0, 10**6) == b"x" * 200_000
