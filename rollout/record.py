"""The record of episodes on disk: one JSON object a line, written before anything else uses the trajectory.

Version 1 of the schema. Arrays are exact: {"dtype": "float32", "shape": [n], "base64": little-endian bytes}. Arrays of
what the policy sampled (logprobs, temperature, version, turn) hold the sampled positions only, in order.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palestra.envs.types import JSON, CallStatus, Message, NoVerdict, Scored, ToolResult, Verdict
from palestra.rollout.types import Finish, Sample, TerminatedBy, Trajectory, Turn

SCHEMA = "palestra-trajectory-1"


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as plain JSON values. Nothing is lost: `from_json` gives it back."""
    return {
        "schema": SCHEMA,
        "id": trajectory.id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "seed": trajectory.seed,
        "terminated_by": trajectory.terminated_by.value,
        "truncated": trajectory.truncated,
        "valid": trajectory.valid,
        "reward": trajectory.reward,
        "verdict": _verdict_to_json(trajectory.verdict),
        "error": trajectory.error,
        "seconds": round(trajectory.seconds, 6),
        "facts": dict(trajectory.facts),
        "messages": [_message_to_json(m) for m in trajectory.messages],
        "turns": [_turn_to_json(turn) for turn in trajectory.turns],
        "samples": [_sample_to_json(sample) for sample in trajectory.samples],
    }


def from_json(record: dict[str, Any]) -> Trajectory:
    """The trajectory of a record. Raises ValueError for another schema."""
    if record.get("schema") != SCHEMA:
        raise ValueError(f"a record of schema {record.get('schema')!r}; this version reads {SCHEMA!r}")
    return Trajectory(
        id=record["id"],
        task_id=record["task_id"],
        group_id=record["group_id"],
        seed=record["seed"],
        messages=tuple(Message(**message) for message in record["messages"]),
        turns=tuple(_turn_from_json(turn) for turn in record["turns"]),
        samples=tuple(_sample_from_json(sample) for sample in record["samples"]),
        terminated_by=TerminatedBy(record["terminated_by"]),
        verdict=_verdict_from_json(record["verdict"]),
        error=record["error"],
        seconds=record["seconds"],
        facts=record["facts"],
    )


def append(path: Path, trajectories: Sequence[Trajectory]) -> int:
    """Append records and see them on the disk before returning. Returns the bytes written. Raises OSError."""
    data = b"".join(
        json.dumps(to_json(trajectory), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
        for trajectory in trajectories
    )
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data)


def read(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file, in order. A last line that was cut by a crash is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield from_json(json.loads(line))


def _message_to_json(message: Message) -> dict[str, JSON]:
    return {"role": message.role, "content": message.content, "name": message.name, "call_id": message.call_id}


def _verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    flags = list(verdict.flags)
    if isinstance(verdict, Scored):
        return {"scored": verdict.value, "parts": dict(verdict.parts), "failure": verdict.failure, "flags": flags}
    return {"no_verdict": verdict.cause, "flags": flags}


def _verdict_from_json(record: dict[str, Any]) -> Verdict:
    if "scored" in record:
        return Scored(record["scored"], record["parts"], tuple(record.get("flags", ())), record.get("failure"))
    return NoVerdict(record["no_verdict"], tuple(record.get("flags", ())))


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        "sample": turn.sample,
        "prompt_tokens": turn.prompt_tokens,
        "sampled_tokens": turn.sampled_tokens,
        "observation_tokens": turn.observation_tokens,
        "finish": turn.finish.value,
        "text": turn.text,
        "generate_s": round(turn.generate_s, 6),
        "step_s": round(turn.step_s, 6),
        "reward": turn.reward,
        "state": turn.state,
        "results": [
            {
                "status": result.status.value,
                "content": result.content,
                "name": result.name,
                "call_id": result.call_id,
                "arguments": None if result.arguments is None else dict(result.arguments),
                "seconds": round(result.seconds, 6),
                "attempts": result.attempts,
            }
            for result in turn.results
        ],
    }


def _turn_from_json(record: dict[str, Any]) -> Turn:
    results = tuple(ToolResult(**(r | {"status": CallStatus(r["status"])})) for r in record["results"])
    return Turn(**(record | {"finish": Finish(record["finish"]), "results": results}))


def _sample_to_json(sample: Sample) -> dict[str, Any]:
    kept = sample.sampled
    return {
        "ids": _pack(sample.ids),
        "sampled": _pack(np.packbits(kept)),
        "logprobs": _pack(sample.logprobs[kept]),
        "temperature": _pack(sample.temperature[kept]),
        "version": _pack(sample.version[kept]),
        "turn": _pack(sample.turn[kept]),
    }


def _sample_from_json(record: dict[str, Any]) -> Sample:
    ids = _unpack(record["ids"])
    sampled = np.unpackbits(_unpack(record["sampled"]), count=len(ids)).astype(np.bool_)

    def spread(name: str, elsewhere: float, dtype: type) -> Any:
        row: Any = np.full(len(ids), elsewhere, dtype)
        row[sampled] = _unpack(record[name])
        return row

    return Sample(
        ids=ids,
        sampled=sampled,
        logprobs=spread("logprobs", np.nan, np.float32),
        temperature=spread("temperature", np.nan, np.float32),
        version=spread("version", -1, np.int32),
        turn=spread("turn", -1, np.int16),
    )


def _pack(array: np.ndarray) -> dict[str, Any]:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "base64": base64.b64encode(little.tobytes()).decode("ascii"),
    }


def _unpack(record: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(record["dtype"]).newbyteorder("<")
    flat = np.frombuffer(base64.b64decode(record["base64"]), dtype=dtype)
    return flat.reshape(record["shape"]).astype(np.dtype(record["dtype"]))
