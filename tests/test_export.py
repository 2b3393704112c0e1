"""What a run learned, exported: peft and transformers load it, and it says what the trainer says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from learning_support import golden, random_groups, tiny_gpt2
from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.batch import pack
from palestra.rl.checkpoints import Checkpoints, base_digest
from palestra.rl.commands.export import run_export
from palestra.rl.config import Config
from palestra.rl.export import add_adapter, find_learned
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.load_config import parse_config, to_toml
from palestra.rl.lora import LoraSettings, read_peft_folder, save_peft_folder
from palestra.rl.model import load_model
from palestra.rl.optimizer import OptimizerSettings
from palestra.rollout.adapters import Adapter, Factors
from tiny_models import make_tinier, random_adapter

LORA = LoraSettings(rank=4, alpha=8.0, rank_stabilised=True)
IDS = [5, 9, 300, 41, 7, 7, 120, 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tinier(tmp_path_factory.mktemp("model"))


def settings(model: Path, folder: Path, dtype: str = "float32") -> Config:
    lora = {"rank": LORA.rank, "alpha": LORA.alpha, "rank_stabilised": True}
    return parse_config(
        {"run": {"name": "run", "folder": str(folder)}, "model": {"path": str(model), "lora": lora, "dtype": dtype}},
        "test",
    )


def trained(folder: Path, model: Path, train: str = "lora", steps: int = 2) -> tuple[Path, Learner]:
    """A run's folder with a checkpoint, and the learner that it is of."""
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(settings(model, folder)))
    how = LearnerSettings(train, LORA, OptimizerSettings(learning_rate=0.05))  # type: ignore[arg-type]
    learner = Learner(load_model(str(model)).model, how)
    groups, algorithm = random_groups(np.random.default_rng(0)), RLOO()
    for _ in range(steps):
        learner.update(pack(groups, algorithm.credit(groups), 4096, algorithm.objective), algorithm)
    Checkpoints(run / "checkpoints", base_digest(model)).save(learner.state(), {})
    return run, learner


@torch.no_grad()
def logprobs(model: PreTrainedModel | PeftModel, ids: list[int] = IDS) -> np.ndarray:
    """log p of each id but the first, by the model itself."""
    rows = torch.log_softmax(model.eval()(input_ids=torch.tensor([ids])).logits[0].float(), -1)
    return rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def test_peft_loads_the_adapter_and_says_what_the_learner_says(tmp_path: Path, model: Path) -> None:
    run, learner = trained(tmp_path, model)
    to = tmp_path / "adapter"
    assert run_export(run, to, merged=False, dtype=None) == 0
    base = AutoModelForCausalLM.from_pretrained(model)
    plain = logprobs(base)
    loaded = PeftModel.from_pretrained(base, to)
    np.testing.assert_allclose(logprobs(loaded), learner.score(IDS), atol=2e-5)
    assert np.abs(plain - learner.score(IDS)).max() > 0.01
    assert json.loads((to / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    again, exact = read_peft_folder(to), learner.adapter()  # as model.lora.initial reads it
    assert again.factors.keys() == exact.factors.keys()
    assert all(np.array_equal(again.factors[name].a, factors.a) for name, factors in exact.factors.items())
    assert all(again.factors[name].scale == pytest.approx(factors.scale) for name, factors in exact.factors.items())
    assert AutoTokenizer.from_pretrained(to).get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()


@pytest.mark.parametrize("train", ["lora", "full"])
def test_merged_weights_say_what_the_learner_says_and_the_base_is_not_touched(
    tmp_path: Path, model: Path, train: str
) -> None:
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in model.iterdir()}
    run, learner = trained(tmp_path, model, train)
    to = tmp_path / "whole"
    assert run_export(run / "checkpoints" / "step_000002", to, merged=True, dtype=None) == 0
    loaded = load_model(str(to))
    np.testing.assert_allclose(logprobs(loaded.model), learner.score(IDS), atol=2e-5)
    assert loaded.tokenizer.chat_template == AutoTokenizer.from_pretrained(model).chat_template
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in model.iterdir()} == before


def test_half_precision_is_one_cast_of_the_float32_sum(tmp_path: Path, model: Path) -> None:
    run, _ = trained(tmp_path, model)
    run_export(run, tmp_path / "exact", merged=True, dtype="float32")
    run_export(run, tmp_path / "half", merged=True, dtype="bfloat16")
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype="auto").state_dict()
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").state_dict()
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert all(torch.equal(half[name], exact[name].bfloat16()) for name in exact)
    # adding in half precision would give other weights: the sum is what must be exact
    adapter = find_learned(run).adapter
    assert adapter is not None
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    add_adapter(rounded, adapter)
    assert any(not torch.equal(half[name], tensor) for name, tensor in rounded.state_dict().items())


def test_one_cast_gives_the_golden_weights_and_tells_what_it_loses() -> None:
    case = golden("logprob")["lora/bf16_merge"]
    layer = torch.nn.Sequential(torch.nn.Linear(6, 1, bias=False))
    base, delta = torch.tensor([case["inputs"]["W"]]), np.array([case["inputs"]["delta"]], np.float32)
    with torch.no_grad():
        layer[0].weight.copy_(base)
    lost = add_adapter(layer, Adapter({"0": Factors(delta, np.ones((1, 1), np.float32), 1.0)}), torch.bfloat16)
    merged = layer[0].weight.detach()
    np.testing.assert_allclose((merged - base).numpy(), delta, rtol=1e-3)  # float32 keeps all of it
    assert merged.bfloat16().float().tolist() == [case["expected"]["merged"]]
    effective = np.array([case["expected"]["effective_delta"]])
    assert lost == pytest.approx(np.linalg.norm(effective - delta) / np.linalg.norm(delta), rel=1e-3)
    assert lost > 0.9  # nearly all of this update is below the grid


def test_layers_that_keep_their_weight_the_other_way_round_are_merged_too() -> None:
    model = tiny_gpt2(dtype=torch.float32)
    rng = np.random.default_rng(0)
    name, weight = "transformer.h.0.attn.c_attn", model.get_parameter("transformer.h.0.attn.c_attn.weight").clone()
    factors = Factors(
        rng.standard_normal((2, weight.shape[0])).astype(np.float32),
        rng.standard_normal((weight.shape[1], 2)).astype(np.float32),
        0.5,
    )
    add_adapter(model, Adapter({name: factors}))
    changed = model.get_parameter(f"{name}.weight") - weight
    np.testing.assert_allclose(changed.detach().numpy(), 0.5 * (factors.b @ factors.a).T, atol=1e-5)


def test_what_imitation_made_is_exported_before_the_first_checkpoint(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(settings(model, tmp_path)))
    with pytest.raises(ConfigError, match="has learned nothing yet"):
        run_export(run, tmp_path / "to", merged=True, dtype=None)
    adapter = random_adapter(model, rank=4, scale=LORA.scale)
    save_peft_folder(adapter, run / "model" / "adapter", LORA, str(model))
    run_export(run, tmp_path / "to", merged=True, dtype=None)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), run / "model" / "adapter")
    np.testing.assert_allclose(logprobs(load_model(str(tmp_path / "to")).model), logprobs(peft), atol=2e-5)


def test_nothing_is_overwritten_and_nothing_half_written_is_left(tmp_path: Path, model: Path) -> None:
    run, _ = trained(tmp_path, model)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="overwrites nothing"):
        run_export(run, tmp_path / "there", merged=False, dtype=None)
    run, _ = trained(tmp_path / "full", model, "full")
    with pytest.raises(ConfigError, match="add --merged"):
        run_export(run, tmp_path / "to", merged=False, dtype=None)
    assert not (tmp_path / "to").exists()
    assert list((tmp_path / "there").iterdir()) == []


def test_what_is_no_run_or_of_another_base_is_told(tmp_path: Path, model: Path) -> None:
    to = tmp_path / "to"
    with pytest.raises(ConfigError, match="expected a run's folder"):
        run_export(tmp_path, to, merged=False, dtype=None)
    with pytest.raises(ConfigError, match="add --merged"):
        run_export(tmp_path, to, merged=False, dtype="bfloat16")
    with pytest.raises(ConfigError, match="use one of float32, bfloat16, float16"):
        run_export(tmp_path, to, merged=True, dtype="int8")
    run, _ = trained(tmp_path, model)
    (run / "config.toml").write_text(to_toml(settings(make_tinier(tmp_path / "other", seed=1), tmp_path)))
    with pytest.raises(ConfigError, match="made on a base model with digest"):
        run_export(run, to, merged=False, dtype=None)
    (run / "checkpoints" / "step_000002" / "learner.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"no complete checkpoint: learner.safetensors is damaged"):
        run_export(run / "checkpoints" / "step_000002", to, merged=False, dtype=None)


def test_an_adapter_of_another_model_is_not_added_halfway(tmp_path: Path, model: Path) -> None:
    base = load_model(str(model)).model
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapter = random_adapter(model)
    first = next(iter(adapter.factors))
    odd = Factors(np.zeros((4, 5), np.float32), np.zeros((6, 4), np.float32), 1.0)
    with pytest.raises(ConfigError, match="the adapter changes a weight of"):
        add_adapter(base, Adapter({**adapter.factors, first: odd}))
    with pytest.raises(ConfigError, match="no such layer"):
        add_adapter(base, Adapter({**adapter.factors, "model.layers.9.mlp": odd}))
    assert all(torch.equal(before[name], tensor) for name, tensor in base.state_dict().items())
