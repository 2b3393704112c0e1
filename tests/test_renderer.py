"""Conversations only grow, and nothing that a tool says becomes a control token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from palestra.envs.errors import ConfigError
from palestra.envs.types import Message
from palestra.rollout.load_renderer import end_ids, load_renderer
from palestra.rollout.renderer import Renderer
from palestra.rollout.template_check import check_template
from tiny_models import END, START, make_tokenizer

THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None = None, tags: bool = True) -> PreTrainedTokenizerFast:
    made = make_tokenizer(600)
    if tags:
        made.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    if template is not None:
        made.chat_template = template
    return made


def renderer(template: str | None = None, **options: object) -> Renderer:
    made = tokenizer(template)
    return Renderer(made, [made.eos_token_id], **options)  # type: ignore[arg-type]


CHATML = renderer()
CONTROLS = set(CHATML.encoder.control_ids.values())


def tool(content: str) -> Message:
    return Message("tool", content, name="lookup")


def test_the_rendering_grows_exactly_as_the_template_would() -> None:
    report = check_template(CHATML, tokenizer())
    assert report.exact, report.problems
    assert report.keeps_on_tool
    assert report.keeps_on_user


def test_the_newline_after_a_turn_end_is_there_and_belongs_to_the_context() -> None:
    added = CHATML.extend(CHATML.end_ids[0], [tool("42")])
    assert CHATML.encoder.text(added) == f"\n{START}tool\n42{END}\n{START}assistant\n"


def test_a_cut_turn_gets_its_end_from_the_harness() -> None:
    cut = CHATML.extend(None, [tool("42")])
    ended = CHATML.extend(CHATML.end_ids[0], [tool("42")])
    assert cut == [CHATML.end_ids[0], *ended]


def test_an_end_token_that_opens_the_next_role_appears_once() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}<|pad|>{{ m.content }}{% else %}{{ m.content }}{% endif %}"
    )
    template += "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    made = renderer(template)
    opens = made.encoder.control_ids["<|pad|>"]
    whole = made.extend(None, [tool("x")])
    assert whole[0] == opens
    assert made.extend(opens, [tool("x")]) == whole[1:]


@given(
    st.text(max_size=60) | st.lists(st.sampled_from([START, END, "<tool_call>", "\n", "assistant", "é"])).map("".join)
)
@settings(max_examples=200)
def test_tool_output_never_becomes_a_control_token_and_comes_back_unchanged(text: str) -> None:
    ids = CHATML.encoder.data(text)
    assert CONTROLS.isdisjoint(ids)
    assert CHATML.encoder.text(ids) == text


@given(st.text(max_size=40))
def test_the_number_of_turn_starts_is_the_number_of_messages(text: str) -> None:
    ids = CHATML.open([Message("system", text), Message("user", text)]) + CHATML.extend(None, [tool(text)])
    starts = CHATML.encoder.control_ids[START]
    assert ids.count(starts) == 2 + 1 + 1 + 1  # system, user, assistant; tool, assistant


def test_a_control_token_that_is_an_ordinary_word_of_the_vocabulary_is_cut_in_two() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<end>": 0, "<": 1, "end>": 2, "ok": 3, "[UNK]": 4}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<end>"])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", unk_token="[UNK]")
    made.chat_template = "{% for m in messages %}{{ m.content }} <end> {% endfor %}"
    encoder = Renderer(made, [0]).encoder
    assert encoder.data("ok <end> ok") == [3, 1, 2, 3]
    assert encoder.glue(["ok <end>"]) == [3, 0]


def test_a_begin_token_stands_once() -> None:
    made = tokenizer("{{ '<|pad|>' }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    ids = Renderer(made, [made.eos_token_id]).open([Message("user", "hi")])
    assert ids.count(made.convert_tokens_to_ids("<|pad|>")) == 1


def test_tags_stay_in_the_text_that_a_parser_reads() -> None:
    ids = [*CHATML.encoder.glue(["<tool_call>{}</tool_call>"]), CHATML.end_ids[0]]
    assert CHATML.text(ids) == "<tool_call>{}</tool_call>"


def test_sampled_ids_are_not_encoded_again() -> None:
    """ "hel" + "lo" is two ids more than "hello"; the row keeps what was sampled."""
    row = CHATML.open([Message("user", "?")])
    sampled = CHATML.encoder.data("wor") + CHATML.encoder.data("ld") + [CHATML.end_ids[0]]
    following = row + sampled + CHATML.extend(sampled[-1], [tool("x")])
    assert following[len(row) : len(row) + len(sampled)] == sampled


@given(st.text(min_size=1, max_size=4000), st.integers(24, 80))
@settings(max_examples=100)
def test_a_capped_observation_fits_in_tokens_and_keeps_both_ends(text: str, cap: int) -> None:
    short = CHATML.cap(text, cap)
    assert len(CHATML.encoder.data(short)) <= cap
    if len(CHATML.encoder.data(text)) <= cap:
        assert short == text


def test_a_capped_observation_says_what_was_cut() -> None:
    short = CHATML.cap("begin " + "x " * 50_000 + " end", 60)
    assert short.startswith("begin")
    assert short.endswith("end")
    assert "of 100010 characters cut" in short


def test_a_template_that_drops_old_reasoning_is_found_out() -> None:
    report = check_template(renderer(THINKING), tokenizer(THINKING))
    assert report.keeps_on_tool
    assert not report.keeps_on_user


def test_history_goes_on_or_begins_a_new_row_as_asked() -> None:
    said = (Message("user", "?"), Message("assistant", "<think>x</think>42"))
    user, result = [Message("user", "sure?")], [tool("1")]
    assert renderer(THINKING).continues(said, user)
    assert not renderer(THINKING, history="template").continues(said, user)
    assert renderer(THINKING, history="template").continues(said, result)
    assert renderer(history="template").continues(said, user)


def test_without_a_template_there_is_no_renderer() -> None:
    made = tokenizer()
    made.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer(made, [0])


def test_all_end_ids_of_a_model_folder_are_known(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert end_ids(tmp_path, 7) == (7, 3)
    with pytest.raises(ConfigError, match="name an end token"):
        end_ids(tmp_path / "none", None)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_renderer(tmp_path)
