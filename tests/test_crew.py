"""Processes that work together: all of them or none, deadlines, and the death that explains the others' complaints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from palestra.envs.errors import InfrastructureError, IntegrityError
from palestra.rollout.crew import Crew, CrewLimits
from palestra.rollout.replicas import ReplicaDied

QUICK = CrewLimits(start_s=1, call_s=1, grace_s=0.3, close_s=0.3)


class Hand:
    """A member in this process that does as it is told: one word for each member."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.closed = 0

    @property
    def where(self) -> str:
        return f"hand {self.number} on n1, pid 7"

    @property
    def address(self) -> str:
        return "127.0.0.1"

    async def start(self) -> object:
        return self.number

    async def run(self, request: str) -> str:
        word = request.split()[self.number] if " " in request else request
        if word == "die":
            await asyncio.sleep(0.1)
            raise ReplicaDied(f"{self.where}: its process is dead")
        if word == "wait":
            await asyncio.sleep(60)
        if word == "refuse":
            raise IntegrityError("numbers that must agree do not")
        if word == "break":
            raise RuntimeError("connection closed by peer\nand a long trace")
        return f"{self.number} {word}"

    async def close(self) -> object:
        self.closed += 1
        return 0

    async def last_words(self) -> str:
        return "resident when last seen: 5 MiB"


def crew_of(count: int = 3, limits: CrewLimits = QUICK) -> tuple[Crew[str, str], list[Hand]]:
    hands = [Hand(number) for number in range(count)]
    return Crew(hands, limits), hands


def perform(body: Callable[[Crew[str, str], list[Hand]], Awaitable[None]]) -> None:
    asyncio.run(body(*crew_of()))  # type: ignore[arg-type]


def test_every_member_answers_in_the_order_of_their_numbers() -> None:
    async def body(crew: Crew[str, str], hands: list[Hand]) -> None:
        assert await crew.start() == [0, 1, 2]
        assert await crew.all("pull") == ["0 pull", "1 pull", "2 pull"]

    perform(body)


def test_what_all_refuse_is_raised_and_they_go_on() -> None:
    async def body(crew: Crew[str, str], hands: list[Hand]) -> None:
        with pytest.raises(IntegrityError, match="must agree"):
            await crew.all("refuse")
        assert await crew.all("pull") == ["0 pull", "1 pull", "2 pull"]
        assert [hand.closed for hand in hands] == [0, 0, 0]

    perform(body)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("wait die break", "hand 1 on n1, pid 7: its process is dead. All of them were ended"),
        ("break pull wait", "hand 0 on n1, pid 7: RuntimeError: connection closed by peer. All of them were ended"),
        ("pull wait wait", "hand 1 on n1, pid 7, hand 2 on n1, pid 7: no answer to a call within 1 s"),
    ],
)
def test_a_member_that_is_lost_ends_all_and_the_cause_is_told(words: str, told: str) -> None:
    async def body(crew: Crew[str, str], hands: list[Hand]) -> None:
        with pytest.raises(InfrastructureError) as caught:
            await asyncio.wait_for(crew.all(words), 3)
        assert told in str(caught.value)
        assert ("resident when last seen: 5 MiB" in str(caught.value)) == ("die" in words)
        assert [hand.closed for hand in hands] == [1, 1, 1]
        with pytest.raises(InfrastructureError) as again:
            await crew.all("pull")
        assert str(again.value) == str(caught.value)

    perform(body)


def test_what_one_alone_refuses_is_raised_and_ends_all() -> None:
    async def body(crew: Crew[str, str], hands: list[Hand]) -> None:
        with pytest.raises(IntegrityError, match="must agree"):
            await crew.all("refuse wait pull")
        assert [hand.closed for hand in hands] == [1, 1, 1]

    perform(body)
