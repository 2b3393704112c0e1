"""The command line. Heavy packages are imported by the command that needs them, so that `--help` answers at once.

Exit codes: 0 done, 1 the job failed, 2 wrong configuration or usage (before anything has started), 75 interrupted and
resumable.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from palestra.envs.errors import ConfigError, PalestraError
from palestra.rl.exit_codes import FAILED, INTERRUPTED, WRONG

log = logging.getLogger(__name__)
_ROOT = Path(__file__).resolve().parents[1]

app = typer.Typer(
    name="palestra",
    help="Trains tool-using language-model agents by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
sandbox_app = typer.Typer(
    help="The sandboxes that we own on this machine.", no_args_is_help=True, rich_markup_mode=None
)
bench_app = typer.Typer(
    help="Measure against the plain path and the floor.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(bench_app, name="bench")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; `configs/` holds examples.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key.path=value]...", help="Settings to change.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[str, typer.Option(help="auto, never, or the step of a checkpoint to continue from.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings and the plan; stop.")] = False,
) -> None:
    """Train: collect, credit, update, publish, until the last step."""
    from palestra.rl.commands.train import run_train

    raise typer.Exit(run_train(config, overrides or [], resume=resume, dry_run=dry_run))


@app.command(name="eval")
def evaluate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A TOML file, or a run's folder.")],
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="Of a run: the checkpoint's step; default: the newest.")] = None,
    tasks: Annotated[int | None, typer.Option(help="Held-out tasks; default: evaluation.tasks.")] = None,
    samples: Annotated[int | None, typer.Option(help="Episodes of each; default: evaluation.samples.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Success on held-out tasks, with its interval, what it cost and how the others failed."""
    from palestra.rl.commands.evaluate import run_evaluate

    raise typer.Exit(run_evaluate(config, overrides or [], step, tasks, samples, json_file))


@app.command()
def play(
    config: ConfigPath,
    overrides: Overrides = None,
    task: Annotated[str | None, typer.Option(help="A task's id or its place in the split; default: the first.")] = None,
    split: Annotated[str, typer.Option(help="train or test.")] = "test",
    policy: Annotated[str, typer.Option(help="scripted (the environment's expert) or model.")] = "scripted",
) -> None:
    """One episode, shown turn by turn."""
    from palestra.rl.commands.play import run_play

    raise typer.Exit(run_play(config, overrides or [], task, split, policy))


@app.command()
def sft(config: ConfigPath, overrides: Overrides = None) -> None:
    """Imitation of scripted or recorded episodes, with the masks and batches of training."""
    from palestra.rl.commands.sft import run_sft

    raise typer.Exit(run_sft(config, overrides or []))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's folder, or a checkpoint in it.")],
    to: Annotated[Path, typer.Option(help="The folder to make; one that exists is refused.")],
    merged: Annotated[bool, typer.Option("--merged", help="Whole weights instead of the adapter.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Of whole weights; default: the run's model.dtype.")] = None,
) -> None:
    """What a run learned, for others to load: the adapter as a peft folder, or merged weights; with the tokenizer."""
    from palestra.rl.commands.export import run_export

    raise typer.Exit(run_export(source, to, merged=merged, dtype=dtype))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Also check this one.")] = None,
) -> None:
    """What works on this machine, one line each, and what to do about what does not."""
    from palestra.rl.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(config))


@app.command(name="check-env")
def check_env(
    config: ConfigPath,
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(help="How many tasks to try it on.")] = 2,
    json_file: JsonFile = None,
) -> None:
    """Whether an environment may be trained on: gold = 1, nothing = 0, tampering = 0, no answer in reach."""
    from palestra.rl.commands.check_env import run_check_env

    raise typer.Exit(run_check_env(config, overrides or [], tasks, json_file))


@app.command()
def reverify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")], json_file: JsonFile = None
) -> None:
    """Judge the stored artefacts of a run again: the same verdicts, or the differences (exit code 1)."""
    from palestra.rl.commands.reverify import run_reverify

    raise typer.Exit(run_reverify(run, json_file))


@sandbox_app.command(name="ls")
def sandbox_ls() -> None:
    """List the boxes that we own here, and whether their owner lives."""
    from palestra.rl.commands.sandbox import run_ls

    raise typer.Exit(run_ls())


@sandbox_app.command()
def reap() -> None:
    """Remove what dead owners left."""
    from palestra.rl.commands.sandbox import run_reap

    raise typer.Exit(run_reap())


@sandbox_app.command(name="build-image")
def build_image(
    tag: Annotated[str, typer.Option(help="Name of the image.")] = "palestra/base:bookworm",
    mirror: Annotated[str | None, typer.Option(help="Debian mirror; default: the system's.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Build also when the image is there.")] = False,
) -> None:
    """Make the base image from Debian packages, without an image registry (root, about a minute)."""
    from palestra.rl.commands.sandbox import run_build_image

    raise typer.Exit(run_build_image(tag, mirror, force))


@bench_app.command(name="sandbox")
@sandbox_app.command(name="bench")
def bench_sandbox(json_file: JsonFile = None) -> None:
    """What boxes cost: commands, resets, episodes, many at once; beside the plain Docker SDK."""
    from palestra.rl.commands.bench_sandbox import run_bench_sandbox

    raise typer.Exit(run_bench_sandbox(json_file))


@bench_app.command(name="loop")
def bench_loop(json_file: JsonFile = None) -> None:
    """Overhead of the agent loop, the renderer and the record, with the scripted engine."""
    from palestra.rl.commands.bench_loop import run_bench_loop

    raise typer.Exit(run_bench_loop(json_file))


@bench_app.command(name="learner")
def bench_learner(
    size: Annotated[
        str, typer.Option(help="small, long-tail, prompt-heavy, branching, full, peer-small or peer-long-tail.")
    ] = "small",
    threads: Annotated[int, typer.Option(help="0: all cores; one for the batches of peers.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """A step of SmolLM2-135M with LoRA against the plain way of computing it, and against the floor."""
    from palestra.rl.commands.bench_learner import run_bench_learner

    raise typer.Exit(run_bench_learner(size, threads, json_file))


def main() -> None:
    """Entry of the console command: one sentence for what went wrong, and its exit code."""
    sys.path.insert(0, "")  # "my_project.tasks:load" is looked for where the command is given, as `python -m` does
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' progress bars, here and in what is started from here
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("palestra").setLevel(logging.INFO)
    try:
        app()
    except ConfigError as error:
        _say(str(error))
        sys.exit(WRONG)
    except PalestraError as error:
        _say(str(error))
        sys.exit(FAILED)
    except (OSError, sqlite3.Error) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise  # a time-out that nobody caught: ours, and no refusal of the machine
        log.debug("the whole of it", exc_info=True)
        _say(f"{_machine_fault(error)}; when it is mended, the same command goes on from the last checkpoint")
        sys.exit(FAILED)
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(INTERRUPTED)


def _machine_fault(error: OSError | sqlite3.Error) -> str:
    """What a disk or a file system refused, and at which place of ours."""
    last = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(last) if Path(f.filename).is_relative_to(_ROOT)), last[-1] if last else None)
    return f"{type(error).__name__}: {error}" + (f" ({place.name}, {place.filename}:{place.lineno})" if place else "")


def _say(text: str) -> None:
    print(f"palestra: {text}", file=sys.stderr)
