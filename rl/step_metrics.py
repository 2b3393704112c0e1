"""Metrics of a step, of a publish and of an evaluation: names are paths, with the unit where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from palestra.rl.accounting import oldest_version, token_counts
from palestra.rl.counted import Counting, leaves, reductions
from palestra.rl.evaluation import Report, discarded_tokens, flags, no_verdicts, solved
from palestra.rl.gather import Gathered
from palestra.rl.learner import UpdateStats
from palestra.rl.ledger import Consumed
from palestra.rl.publish import Proof
from palestra.rl.step import Learned
from palestra.rollout.second_opinion import gap
from palestra.rollout.types import Trajectory

Metrics = dict[str, float | int | str | None]


def rollout_metrics(gathered: Gathered, counting: Counting, version: int) -> Metrics:
    """What was played, dropped groups included. Rewards and success are of the outcome as it was judged."""
    episodes = [t for group in gathered.groups for t in group.trajectories]
    valid = [t for t in episodes if t.valid]
    return {
        "rollout/reward_mean": _mean([t.reward for t in valid if t.reward is not None]),
        "rollout/success": _mean([solved(t) for t in valid]),
        "rollout/success_all": sum(solved(t) for t in episodes) / max(1, len(episodes)),
        "rollout/episodes": len(episodes),
        "rollout/invalid": len(episodes) - len(valid),
        **{f"rollout/no_verdict/{kind}": count for kind, count in no_verdicts(episodes).items()},
        **integrity_metrics(episodes, "rollout"),
        "rollout/truncated": sum(t.truncated for t in valid) / max(1, len(valid)),
        "rollout/turns_mean": _mean([len(t.turns) for t in valid]),
        "rollout/policy_tokens": sum(t.sampled_tokens for t in episodes),
        "rollout/discarded_tokens": discarded_tokens(episodes),
        "rollout/groups": len(gathered.groups),
        "rollout/groups_filtered": gathered.fates.count("filtered"),
        "rollout/groups_too_small": gathered.fates.count("invalid"),
        "rollout/truncated_out_of_loss": sum(leaves(t, counting) for g in gathered.used for t in g.trajectories),
        **_reduction_metrics(valid, counting),
        "rollout/version": version,
        "rollout/oldest_version": oldest_version(episodes),
    }


def learning_metrics(learned: Learned, rows: Sequence[Consumed]) -> Metrics:
    """What was learned from, each token counted once, and what the updates measured."""
    return {
        "rollout/groups_without_signal": sum(not credit.signal for credit in learned.credits),
        "update/row_tokens": sum(batch.num_tokens for batch in learned.batches),
        **{f"update/tokens_{fate}": count for fate, count in token_counts(rows).items()},
        **(_update_metrics(learned) if learned.updates else {}),
    }


def _update_metrics(learned: Learned) -> Metrics:
    """Of several updates: means by their action tokens, largest values, sums of work; rate and version of the last."""
    updates, last = learned.updates, learned.updates[-1]
    return {
        "update/version": last.step,
        "update/updates": len(updates),
        "update/loss": over_updates(updates, {"": [u.loss for u in updates]})[""],
        "update/grad_norm": max(u.grad_norm for u in updates),
        "update/learning_rate": last.learning_rate,
        "update/action_tokens": learned.action_tokens,
        "update/micro_batches": sum(u.micro_batches for u in updates),
        "time/update_s": sum(u.seconds for u in updates),
        **{
            f"update/{name}": value
            for name, value in over_updates(
                updates, {name: [u.metrics[name] for u in updates] for name in last.metrics}
            ).items()
        },
    }


def over_updates(updates: Sequence[UpdateStats], figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """One figure for each name: the extreme where it ends in _max or _min, else the mean by action tokens."""
    tokens = [update.action_tokens for update in updates]

    def one(name: str, values: Sequence[float]) -> float:
        extremes = {"_max": max, "_min": min}
        return extremes[name[-4:]](values) if name[-4:] in extremes else float(np.average(values, weights=tokens))

    return {name: one(name, values) for name, values in figures.items()}


def publish_metrics(proof: Proof) -> Metrics:
    """What a publish proved."""
    return {
        "publish/gap": proof.gap,
        "publish/gap_mean": proof.gap_mean,
        "publish/moved": proof.moved,
        "publish/matched_modules": proof.matched_modules,
        "publish/digest": proof.digest[:16],
        "time/publish_s": proof.seconds,
    }


def evaluation_metrics(report: Report) -> Metrics:
    """The figures of an evaluation as metrics."""
    return {
        "eval/success": report.success.mean,
        "eval/success_low": report.success.low,
        "eval/success_high": report.success.high,
        "eval/success_valid": None if report.success_valid is None else report.success_valid.mean,
        "eval/validity": report.validity,
        **{f"eval/pass_at_{k}": chance for k, chance in report.pass_at.items() if k > 1},
        "eval/reward_mean": report.reward_mean,
        "eval/invalid": report.invalid,
        "eval/flagged": report.flagged,
        "eval/temperature": report.temperature,
        "eval/tokens_per_episode": report.tokens_per_episode,
        "eval/calls_per_episode": report.calls_per_episode,
        "eval/version": report.versions[-1] if report.versions else None,
    }


def integrity_metrics(episodes: Sequence[Trajectory], where: str) -> Metrics:
    """Episodes with signs of tampering, in all and by sign; and what a second verifier made of a sample of them."""
    counted = flags(episodes)
    metrics: Metrics = {f"{where}/flagged": sum(bool(t.verdict.flags) for t in episodes)}
    metrics |= {f"{where}/flagged/{flag}": count for flag, count in counted.items()}
    found = gap(episodes)
    if found is not None:
        metrics |= {
            f"{where}/second_episodes": found.episodes,
            f"{where}/second_reward_mean": found.second,
            f"{where}/second_gap": found.value,
        }
    return metrics


def _reduction_metrics(valid: Sequence[Trajectory], counting: Counting) -> Metrics:
    """What was taken off the outcomes, by cause, and the reward that was credited."""
    if not counting.shapes or not valid:
        return {}
    parts = [reductions(t, counting) for t in valid]
    means = {f"rollout/{name}_mean": _mean([part[name] for part in parts]) for name in parts[0]}
    credited = [float(t.reward or 0.0) - sum(part.values()) for t, part in zip(valid, parts, strict=True)]
    return {**means, "rollout/credited_reward_mean": _mean(credited)}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
