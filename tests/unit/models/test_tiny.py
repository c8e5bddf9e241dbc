"""The embedded model: its tokenizer on any text, its files, its seed."""

import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import roll.agentic.env as envs
from roll.data.pictures import Pictures
from roll.data.renderer import ChatRenderer
from roll.models.tiny import END, PAD, TURN_END, TURN_START, domain_tokens, make_tiny_model, make_tokenizer, tiny_config
from roll.models.tokenizer import load_tokenizer

TOKENIZER = make_tokenizer()

# Any text that UTF-8 can write, with the tokens of the games and the chat markers thrown in.
pieces = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from([*domain_tokens(), PAD, END, TURN_START, TURN_END, "√", " ", "\n"]),
)


@given(st.lists(pieces, max_size=8).map("".join))
def test_any_text_comes_back(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == unicodedata.normalize("NFC", text)
    assert all(0 <= index < len(TOKENIZER) for index in ids)


@given(st.lists(pieces, max_size=8).map("".join))
@example("\uf900")  # a character that composition replaces
def test_the_plain_class_reads_a_folder_as_transformers_own_choice_does(read, text):
    plain, chosen = read
    ids = plain.encode(text)
    assert ids == chosen.encode(text)
    assert plain.decode(ids) == chosen.decode(ids)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The tokenizer of a model folder as it is loaded here, and by transformers alone."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(path, seed=0)
    plain, chosen = load_tokenizer(str(path)), AutoTokenizer.from_pretrained(path)
    assert type(plain) is not type(chosen)
    for name in ("chat_template", "eos_token", "pad_token", "padding_side", "model_max_length", "all_special_tokens"):
        assert getattr(plain, name) == getattr(chosen, name)
    return plain, chosen


def modules_of(code: str, path: Path) -> set[str]:
    """What a process of its own has imported when it has run the code with a folder as ``path``."""
    code = f"import sys; from pathlib import Path; path = Path(sys.argv[1]); {code}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    return {*done.stdout.split()}


def test_what_games_say_often_is_one_token_each_and_chat_markers_are_special():
    for text in domain_tokens():
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        assert (len(ids), TOKENIZER.decode(ids, skip_special_tokens=True)) == (1, text)
    assert len(domain_tokens()) == len(set(domain_tokens()))
    assert len(TOKENIZER) == len(TOKENIZER.get_vocab()) == 256 + 4 + len(domain_tokens())
    assert TOKENIZER.decode(TOKENIZER.encode(f"{TURN_START}a{TURN_END}{END}{PAD}"), skip_special_tokens=True) == "a"
    assert TOKENIZER.eos_token == TURN_END
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id  # else the end of a turn would count as padding


@pytest.mark.parametrize("seed", range(20))
def test_a_sokoban_turn_costs_23_prompt_and_4_answer_tokens(seed):
    env = envs.make("sokoban", min_solution=1, max_solution=4, num_walls=4, show_coordinates=True)
    observation, _ = env.reset(seed=seed)
    renderer = ChatRenderer(TOKENIZER)
    assert len(_opening(renderer, observation)) == 23
    answer = TOKENIZER.encode(f"<answer>Up</answer>{TURN_END}", add_special_tokens=False)
    assert len(answer) == 4
    # The longest board text: every glyph of another kind, whatever is played.
    for name in ("Up", "Left", "Left", "Down", "Right", "Up", "Right", "Down"):
        observation, _, terminated, truncated, _ = env.step(f"<answer>{name}</answer>")
        assert len(_opening(renderer, observation)) <= 23
        if terminated or truncated:
            break


def _opening(renderer: ChatRenderer, observation: str) -> Any:
    return renderer.prompt([{"role": "system", "content": "Sokoban"}, {"role": "user", "content": observation}])


def test_the_model_loads_as_any_other_and_keeps_its_tokenizer(tmp_path):
    path = tmp_path / "tiny"
    make_tiny_model(path, seed=3)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    text = f"{TURN_START}user\n##P_X#\n(3,4) é√{TURN_END}"
    assert tokenizer.encode(text) == TOKENIZER.encode(text)
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    logits = model(torch.tensor([tokenizer.encode(text)])).logits
    assert logits.isfinite().all()
    assert [child.name for child in tmp_path.iterdir()] == ["tiny"]  # nothing half-built is left


def test_the_seed_decides_the_weights_and_disturbs_nobody(tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(tmp_path / name, seed)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert torch.equal(torch.rand(3), expected)
    assert weights[0] == weights[1] != weights[2]
    make_tiny_model(tmp_path / "a", 2)  # replaced
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == weights[2]


def test_the_model_is_what_transformers_itself_would_make_without_importing_its_models(tmp_path):
    make = "make_tiny_model(path, seed=5, num_heads=2, hidden_size=32, num_layers=1)"
    loaded = modules_of(f"from roll.models.tiny import make_tiny_model; {make}", path := tmp_path / "tiny")
    assert not {"transformers.modeling_utils", "transformers.generation", "torch._dynamo"} & loaded
    torch.manual_seed(5)
    expected = Qwen2ForCausalLM(Qwen2Config(**tiny_config(num_heads=2, hidden_size=32, num_layers=1)))
    made = AutoModelForCausalLM.from_pretrained(path)
    assert made.config.to_diff_dict() == expected.config.to_diff_dict()
    for end in ("eos_token_id", "pad_token_id"):
        assert getattr(made.generation_config, end) == getattr(expected.generation_config, end)
    weights = expected.state_dict()
    assert made.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in made.state_dict().items())


def test_the_model_with_pictures_sees_a_board_as_nine_tokens(tmp_path):
    """A patch for each cell, four patches for each token, pixels as they were drawn; the seed decides the weights."""
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        make_tiny_model(tmp_path / name, seed, pictures=True)
    one, same, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "same", "other"))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    pictures = Pictures.of(tmp_path / "one")
    ((part,), _info) = envs.make("sokoban", render_mode="rgb_array", tile_size=8).reset(seed=1)
    item = pictures.item(part["image"])
    assert (item.data == part["image"]).all() and pictures.inputs([item])["image_grid_thw"].tolist() == [[1, 6, 6]]
    tokenizer = load_tokenizer(str(tmp_path / "one"))
    content = [{"type": "image", "image": item}, {"type": "text", "text": "6"}]
    ids = ChatRenderer(tokenizer, "native", pictures).prompt([{"role": "user", "content": content}])
    assert (ids < 0).sum() == 9 and tokenizer.decode(ids[ids >= 0]).count("<|vision_start|><|vision_end|>6") == 1
