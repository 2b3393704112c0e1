"""Every tamper of the library wins where judging is careless: what it is measured against later is no straw man."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from abuse_support import GRADES, Careless, named
from palestra.envs.admission.library import ELSEWHERE, TAMPERS
from palestra.envs.admission.tamper import Beats, Tamper
from palestra.envs.sandboxes.contract import BoxSpec, Limits
from sandbox_support import Home, backend, home  # noqa: F401 - a fixture

pytestmark = pytest.mark.docker
SPEC = BoxSpec(limits=Limits(memory_bytes=256 * 2**20, scratch_bytes=64 * 2**20, processes=48, output_bytes=1 << 20))


@pytest.fixture(scope="module")
def careless(home: Home) -> Iterator[Careless]:  # noqa: F811
    box = home.do(backend("docker").open(SPEC, episode="careless"))
    yield Careless(box)
    home.do(box.close())


@pytest.mark.parametrize("tamper", [t for t in TAMPERS if t.beats != "answer"], ids=named)
def test_a_tamper_wins_where_judging_is_careless(tamper: Tamper, careless: Careless, home: Home) -> None:  # noqa: F811
    assert home.do(careless.pays(tamper, tamper.beats))


@pytest.mark.parametrize("tamper", [t for t in TAMPERS if t.beats == "answer"], ids=named)
def test_a_tamper_reads_what_lies_open(tamper: Tamper, careless: Careless, home: Home) -> None:  # noqa: F811
    assert home.do(careless.tells(tamper))


@pytest.mark.parametrize("beats", ["status", "reward", "verdict", "nonce", "report", "git"])
def test_careless_judging_still_tells_right_from_wrong(beats: Beats, careless: Careless, home: Home) -> None:  # noqa: F811
    assert not home.do(careless.pays(None, beats))
    assert home.do(careless.pays(None, beats, gold=True))


def test_every_row_of_the_first_three_sections_has_a_tamper_or_a_reason() -> None:
    rows = (
        "A01 A02 A04 A05 A07 A08 A10 A11 A13 A14 A16 A17 A19 A20 A22 A23 "
        "B01 B02 B04 B05 B07 B08 B10 B11 B13 B14 B16 B17 B19 B20 B22 B23 B25 B26 B28 "
        "C01 C02 C04 C05 C07 C08 C10 C11 C13 C14"
    )
    assert {tamper.row for tamper in TAMPERS} | set(ELSEWHERE) == set(rows.split())
    assert not {tamper.row for tamper in TAMPERS} & set(ELSEWHERE)
    assert {tamper.beats for tamper in TAMPERS} == {*GRADES, "answer"}
