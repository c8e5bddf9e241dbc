"""Pictures and videos, alone, in conversations and in rows: ids and numbers of the model's processor; refusals."""

import base64
import io
import json
import pickle
import struct
import sys
import zlib
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import torch
from jinja2 import TemplateError
from PIL import Image
from pyarrow import parquet
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from roll.configs.data import DataArguments
from roll.configs.preference import MarginColumns
from roll.data import addresses
from roll.data.columns import Item
from roll.data.conversations import encode_talk, load_conversations
from roll.data.files import DataError, Problems
from roll.data.identity import items_along, vocabulary_ids
from roll.data.pictures import PictureError, Pictures, Reach, Source, Video
from roll.data.preferences import load_preferences
from roll.data.prompts import check_prompts, load_prompts
from roll.data.questions import read_questions
from roll.data.reading import Reading
from roll.data.renderer import ChatRenderer, items_of
from roll.data.row_pictures import read_sources, with_items
from roll.data.tool_messages import text_of
from roll.data.videos import shown as seen_in
from roll.data.videos import video_source
from tests.support.lines import write_lines
from tests.support.picture_models import FAMILIES, IMAGE, PROCESSOR, VIDEO, make_processor, make_tokenizer, png
from tests.support.talks import says, user
from tests.support.web import Reply, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_processor(tmp_path_factory.mktemp("processor"))


@pytest.fixture(scope="module")
def pictures(folder):
    return Pictures.of(folder)


@pytest.fixture(scope="module")
def renderer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return ChatRenderer(tokenizer, pictures=Pictures(folder, tokenizer=tokenizer))


def noise(height, width, channels=3):
    return np.random.default_rng(height * width).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


FRAMES = np.random.default_rng(0).integers(0, 256, (20, 28, 56, 3), dtype=np.uint8)
OWN = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}, **PROCESSOR}


def pillow(frames):
    return [Image.fromarray(pixels) for pixels in frames]


def animation(kind="GIF", frames=FRAMES, duration=100, **options):
    first, *rest = pillow(frames)
    return encoded(first, kind, save_all=True, append_images=rest, duration=duration, **options)


GIF = animation()


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_numbers_are_those_of_the_models_processor(tmp_path, family):
    path = make_processor(tmp_path / family, family)
    pictures, oracle = Pictures.of(path), processor_of(path, family)
    narrow = (1000, 30 if family == "glm4v" else 8)  # GLM would resize a narrower one twice
    originals = [noise(*size) for size in ((28, 28), (1, 1), (56, 300), (77, 131), narrow, (400, 420))]
    if family == "mistral3":
        with pytest.raises(
            PictureError, match=r"1 x 1 pixels: the model's processor refuses it \(it would be one token"
        ):
            pictures.item(originals[1])
        del originals[:2]
    items, images = [pictures.item(pixels) for pixels in originals], [[Image.fromarray(each)] for each in originals]
    renderer = ChatRenderer(make_tokenizer(family), pictures=pictures)
    asked = [[asks(item)] for item in items]
    ids = [renderer.prompt(messages) for messages in asked]
    text = [renderer._try(messages) for messages in asked]
    found, expected = pictures.inputs(items), oracle(text=text, images=images, return_tensors="np", padding=True)
    for name in found:
        assert found[name].dtype == expected[name].dtype and found[name].tobytes() == expected[name].tobytes(), name
    assert found.keys() == expected.keys() - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
    whole = zip(expected["input_ids"], expected["attention_mask"], strict=True)
    assert [vocabulary_ids(row).tolist() for row in ids] == [row[mask == 1].tolist() for row, mask in whole]
    assert [(row < 0).sum() for row in ids] == [len(pictures.content(item)) for item in items]
    assert all((pictures.content(item) < 0).all() for item in items)


def test_a_processor_that_does_not_know_its_patches_is_refused(tmp_path):
    path = make_processor(tmp_path, "llava")
    (path / "processor_config.json").unlink()
    with pytest.raises(PictureError, match=r"cannot write a picture .* expected its entries in processor_config.json"):
        Pictures(path).item(noise(56, 56))
    with pytest.raises(
        PictureError, match=r"its pictures have 56 x 56 pixels each; expected no other bounds \(image_min_"
    ):
        Pictures(make_processor(tmp_path / "bounded", "llava"), max_pixels=500).item(noise(56, 56))
    with pytest.raises(PictureError, match="Gemma3ImageProcessor with do_pan_and_scan, which cuts a picture"):
        Pictures(make_processor(tmp_path / "cut", "gemma3", do_pan_and_scan=True)).item(noise(56, 56))


def processor_of(path, family):
    """Transformers' own, without its part for videos."""
    name = PROCESSOR_MAPPING_NAMES[family]
    if family == "mistral3":  # this module needs of the one for torchvision what that for Pillow has too
        sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
        kind = import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    else:
        kind = processor_class_from_name(name)
    still = type(name, (kind,), {"get_attributes": classmethod(lambda _: ["image_processor", "tokenizer"])})
    chosen = AutoImageProcessor.from_pretrained(path, backend="pil")
    return still(image_processor=chosen, tokenizer=make_tokenizer(family), **FAMILIES[family].processor)


def test_a_picture_that_is_resized_stays_as_it_is(pictures):
    item = pictures.item(noise(77, 131))
    again = pictures.item(item.data)
    assert again.hash == item.hash and pictures.item(item) is item
    assert pictures.inputs([])["pixel_values"].shape == (0, 3 * 2 * 14 * 14)


def test_the_same_picture_in_every_form_is_the_same_item(pictures, tmp_path):
    pixels = noise(56, 84)
    data = encoded(Image.fromarray(pixels))
    (tmp_path / "a picture.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    forms = [
        Image.fromarray(pixels),
        data,
        memoryview(data),
        tmp_path / "a picture.png",
        text,
        f"data:image/png;base64,{text}",
        {"bytes": data, "path": "elsewhere.png"},
        {"bytes": None, "path": "a picture.png"},
        "a picture.png",
        f"file://{tmp_path}/a picture.png",
        encoded(Image.fromarray(pixels), "WEBP", lossless=True),
        encoded(Image.fromarray(pixels), "BMP"),
        encoded(Image.fromarray(pixels), "TIFF"),
        pickle.loads(pickle.dumps(pictures)).item(pixels),
    ]
    assert len({pictures.item(form, reach=Reach(tmp_path)).hash for form in forms}) == 1


def test_colours_transparency_and_rotation(pictures):
    pixels = noise(56, 84)
    grey, alpha = pixels[:, :, 0], pixels[:, :, 1]
    white = np.round(grey * (alpha / 255) + 255.0 * (1 - alpha / 255))

    def of(source):
        return pictures.item(source).data.astype(int)

    assert (of(grey) == np.stack([grey] * 3, -1)).all() and (of(grey[:, :, None]) == of(grey)).all()
    see_through = np.stack([grey] * 3 + [alpha], -1)
    assert abs(of(see_through) - white[:, :, None]).max() <= 1
    assert (of(encoded(Image.fromarray(see_through))) == of(see_through)).all()
    assert (of(np.dstack([pixels, np.full((56, 84), 255, np.uint8)])) == pixels).all()
    palette = Image.fromarray(pixels).quantize(16)
    assert (of(encoded(palette, "GIF")) == np.asarray(palette.convert("RGB"))).all()
    palette.info["transparency"] = 0
    assert (of(encoded(palette))[np.asarray(palette) == 0] == 255).all()
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter to the right
    assert (of(encoded(Image.fromarray(pixels), "TIFF", exif=turned)) == np.rot90(pixels, -1)).all()


def bomb():
    """A PNG of a few bytes that says it has a billion pixels."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 10**5, 10**4, 8, 2, 0, 0, 0))
        + chunk(b"IEND", b"")
    )


WHOLE = encoded(Image.fromarray(noise(56, 84)))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (WHOLE[:2000], "unreadable"),
        (encoded(Image.fromarray(noise(56, 84)), "JPEG")[:900], "unreadable"),
        (b"", "no bytes"),
        (b"hello", "no picture"),
        (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\0\0\0\x20ftypheic", "heic"),
        *((animation(kind, FRAMES[:4]), "4 frames") for kind in ("GIF", "PNG", "WEBP", "TIFF")),
        (bomb(), "pixels"),
        (noise(1, 400), "aspect ratio"),
        (noise(56, 84).astype(np.float32), "float32"),
        (np.zeros((0, 4, 3), np.uint8), "no pixels"),
        (Image.fromarray(noise(56, 84, 1)[:, :, 0].astype(np.uint16)), "mode I;16"),
        (None, "null"),
        ("", "empty"),
        (7, "int"),
        ("https://example.org/a.png", "not fetched"),
        ("data:image/png;base64,????", "base64"),
        ("data:text/plain,hello", "data URI"),
        ("there is no such.png", "no such file"),
        ("..", "outside"),
        ("/etc/passwd", "outside"),
        ("link.png", "outside"),
        ("a\0b", "no path"),
        (".", "not a file"),
    ],
)
def test_what_cannot_be_used_is_refused_with_place_and_reason(pictures, tmp_path, source, reason):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "outside.png").write_bytes(WHOLE)
    (inside / "link.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(PictureError, match=rf"(?s)^rows.jsonl:3: .*{reason}"):
        pictures.item(source, "rows.jsonl:3", Reach(inside))
    if reason == "outside" and source == "link.png":
        assert pictures.item(source, reach=Reach(inside, outside=True)).data.size
        with pytest.raises(PictureError, match="no folder"):
            pictures.item(source)  # a text is a path only where a folder is given


def test_bounds_on_pixels(folder):
    few = Pictures(folder, min_pixels=28 * 28 * 9, max_pixels=28 * 28 * 16, decode_limit=100_000)
    assert few.item(noise(28, 28)).data.shape == (84, 84, 3)
    assert few.item(noise(310, 300)).data.shape == (112, 84, 3)
    with pytest.raises(PictureError, match="100,000"):
        few.item(noise(400, 300))
    with pytest.raises(PictureError, match="image_max_pixels"):
        Pictures(folder, min_pixels=10**9).item(noise(28, 28))


def test_models_without_pictures_and_with_another_processor(tmp_path, folder):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert Pictures.of(tmp_path) is None and Pictures.of(tmp_path / "nothing") is None
    other = make_processor(tmp_path / "tiles", image_processor_type="SmolVLMImageProcessor")
    with pytest.raises(PictureError, match="SmolVLMImageProcessor"):
        Pictures.of(other).item(noise(28, 28))
    (other / "preprocessor_config.json").unlink()
    with pytest.raises(PictureError, match="no picture processor"):
        Pictures.of(other).item(noise(28, 28))


def test_content_ids_are_kept_no_longer_than_their_picture(folder):
    pictures = Pictures(folder)
    item = Item(noise(56, 56))
    assert pictures.content(item) is pictures.content(Item(item.data.copy()))
    del item
    assert not pictures._contents


# --- in conversations


def asks(*parts):
    """A message of texts, pictures and videos."""
    kinds = {str: "text", Video: "video"}
    return user([{"type": (kind := kinds.get(type(part), "image")), kind: part} for part in parts])


@pytest.mark.parametrize("template", ["native", "tests/support/chat_templates/qwen3_5.jinja"])
def test_a_conversation_has_the_ids_of_the_models_processor(renderer, template):
    renderer = ChatRenderer(renderer.tokenizer, template, renderer.pictures)
    originals = [noise(56, 84), noise(200, 100), noise(30, 30)]
    small, tall, tiny = (renderer.pictures.item(pixels) for pixels in originals)
    messages = [asks(small, "which?", tall), says("none"), asks("Wörter"), says("2"), asks(tiny)]
    ids = renderer.prompt(messages)
    text = renderer.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, chat_template=renderer.source
    )
    whole = renderer.pictures._processor(text=[text], images=[*map(Image.fromarray, originals)])
    assert vocabulary_ids(ids).tolist() == whole["input_ids"][0]
    assert [item for _, item in items_along(ids, items_of(messages))] == [small, tall, tiny] == [*items_of(messages)]
    assert (renderer.prompts([messages, messages[:1], messages[2:3]])[0] == ids).all()
    assert (renderer.prompt([asks("no ", "picture")]) == renderer.prompt([user("no picture")])).all()


def test_a_mark_in_somebodys_words_stays_text(renderer):
    item = renderer.pictures.item(noise(56, 84))
    ids = renderer.prompt([asks(f"{IMAGE}<image>", item, "<|vision_end|>")])
    assert (vocabulary_ids(ids) == renderer.pictures.token).sum() == (ids < 0).sum() == 6
    assert f"{IMAGE}<image>" in renderer.tokenizer.decode(vocabulary_ids(ids))


def test_a_later_turn_with_a_picture_continues_what_was_sampled_and_words_alone_are_learned(renderer):
    first, second = (renderer.pictures.item(noise(*size)) for size in ((56, 84), (28, 28)))
    messages = [asks(first, "where?"), says("left"), asks("and ", second, " now?")]
    prompt = renderer.prompt(messages[:1])
    sampled = np.array(renderer.tokenizer.encode("left<|im_end|>"))
    grown = np.concatenate([prompt, sampled, renderer.continuation(messages[2:], sampled)])
    assert (grown == renderer.prompt(messages)).all()
    result = [{"role": "tool", "content": asks(second, "seen")["content"], "tool_call_id": "call00000"}]
    assert (renderer.continuation(result, sampled) < 0).sum() == 1
    messages.append(says("up"))
    ((ids, mask),) = renderer.rows(messages)
    assert (ids == renderer.history(messages)[: len(ids)]).all()
    assert renderer.tokenizer.decode(ids[mask]) == "left<|im_end|>up<|im_end|>"
    assert [at for at, _ in items_along(ids, [first, second])] == [*np.flatnonzero(ids < 0)[[0, 6]]]


def test_pictures_that_a_model_or_template_does_not_take_are_refused(folder, renderer):
    messages = [asks(renderer.pictures.item(noise(28, 28)))]
    with pytest.raises(TemplateError, match="model takes none"):
        ChatRenderer(renderer.tokenizer).prompt(messages)
    with pytest.raises(TemplateError, match="a content with pictures is a list"):
        ChatRenderer(renderer.tokenizer, "chatml", renderer.pictures).prompt(messages)
    with pytest.raises(TemplateError, match="0 times for 1 pictures"):
        ChatRenderer(renderer.tokenizer, "{{ messages[0].content | string }}", renderer.pictures).prompt(messages)


# --- in rows


def even(number, height=28, width=28):
    return png(np.full((height, width, 3), number, np.uint8))


ONE, TWO = even(1), even(2, 56, 84)
URI = "data:image/png;base64," + base64.b64encode(ONE).decode()
BASE64 = URI.partition(",")[2]
SOURCE = {"type": "base64", "media_type": "image/png", "data": BASE64}


def write(folder, *rows, name="rows.jsonl"):
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "one.png").write_bytes(ONE)
    (folder / "sub/two.png").write_bytes(TWO)
    for number in range(4):
        (folder / f"{number}.png").write_bytes(png(FRAMES[number]))
    (folder / "a.gif").write_bytes(GIF)
    if name.endswith("parquet"):
        parquet.write_table(pyarrow.Table.from_pylist([*rows]), folder / name)
        return folder / name
    return write_lines(folder / name, rows)


def arguments(path, **keys):
    talks = {} if "prompt" in keys else {"messages": "messages"}
    return DataArguments(file_name=str(path), response=None, default_tag="t", shuffle=False, **talks, **keys)


def load(path, renderer, refused=None, prompt_length=500, tag_renderers=None, **keys):
    return load_prompts(
        arguments(path, **keys),
        renderer=renderer,
        prompt_length=prompt_length if renderer else None,
        allowed_tags=None,
        seed=0,
        refused=refused or {},
        tag_renderers=tag_renderers,
    )


def row(content="<image>?", images=None, **more):
    talk = content if isinstance(content, list) and "role" in content[0] else [user(content)]
    return {"messages": talk, **({} if images is None else {"images": images}), **more}


def text(words):
    return {"type": "text", "text": words}


def part(**keys):
    return [text("see "), keys]


@pytest.mark.parametrize(
    ("given", "words", "sizes"),
    [
        (row("a <image> b", "one.png"), "a <image> b", [(28, 28)]),
        (row("<image><image>", ["one.png", "sub/two.png"]), "<image><image>", [(28, 28), (56, 84)]),
        (row("<image><image>", ["sub/two.png", "sub/../one.png"]), "<image><image>", [(56, 84), (28, 28)]),
        (row("<image>", [URI]), "<image>", [(28, 28)]),
        (row("<image>", BASE64), "<image>", [(28, 28)]),
        (row("<image>", json.dumps(["one.png"])), "<image>", [(28, 28)]),
        (row("<image>", {"path": "one.png"}), "<image>", [(28, 28)]),
        (row("no mark", ["one.png"]), "<image>no mark", [(28, 28)]),
        (row([{"type": "image"}, text("?")], ["one.png"]), "<image>?", [(28, 28)]),
        (row(part(type="image", image="one.png")), "see <image>", [(28, 28)]),
        (row(part(type="image", path="one.png")), "see <image>", [(28, 28)]),
        (row(part(type="image_url", image_url={"url": URI})), "see <image>", [(28, 28)]),
        (row(part(type="input_image", image_url=URI)), "see <image>", [(28, 28)]),
        (row(part(type="image", source=SOURCE)), "see <image>", [(28, 28)]),
        (row("a literal <image> is text"), "a literal <image> is text", []),
        (row("<image>", []), "<image>", []),
        (row("<image>", None), "<image>", []),
        (row([*part(type="image", image="one.png"), text("<image>")]), "see <image><image>", [(28, 28)]),
    ],
)
def test_forms_of_pictures(renderer, tmp_path, given, words, sizes):
    (prompt,) = load(write(tmp_path, given), renderer)
    assert text_of(prompt.messages[-1]["content"]) == words and prompt.has_pictures == bool(sizes)
    assert "images" not in prompt.extra_info
    shown = with_items(read_sources(prompt.messages), renderer.pictures)
    assert [item.data.shape[:2] for item in items_of(shown)] == sizes
    assert renderer.prompt(shown).min() < 0 or not sizes


MOVED = {"/moved": "/one", "/loop": "/loop"}


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A server that has a picture, and what may be wrong with one."""

    def answer(path, _):
        path = path.partition("?")[0]
        if path == "/busy" and server.paths.count(path) == 1:
            return Reply(503)
        moved = MOVED | {"/away": f"http://localhost:{server.server_port}/one"}
        if path in moved:
            return Reply(302, headers={"Location": moved[path]})
        body = {"/html": b"<html>", "/huge": bytes(5000), "/two": TWO}.get(path, ONE)
        return Reply(404 if path == "/absent" else 200, body, piece=20 if path == "/slow" else 0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(addresses, "MOST_BYTES", 4000)
    with serving(answer) as server:
        yield server


def test_pictures_at_addresses_are_fetched_once(renderer, tmp_path, web):
    shown = [f"{web.url}/one?token=secret", f"{web.url}/moved", f"{web.url}/two", f"{web.url}/busy", "one.png"]
    path = write(
        tmp_path, *(row(images=[url]) for url in shown), row(part(type="image_url", image_url=f"{web.url}/two"))
    )
    keys = {"image_urls": ["127.0.0.1"]}
    head = Reading(arguments(path, **keys), 0, 9)
    assert check_prompts(head, None, renderer)[0].total() == 6 and not web.paths, "a check asks nobody"
    prompts = load(path, renderer, **keys)
    assert sorted(web.paths) == ["/busy", "/busy", "/moved", "/one", "/one?token=secret", "/two"]
    shapes = [items_of(with_items(read_sources(one.messages), renderer.pictures))[0].data.shape for one in prompts]
    assert shapes == [(28, 28, 3), (28, 28, 3), (56, 84, 3), (28, 28, 3), (28, 28, 3), (56, 84, 3)]
    again = load(path, renderer, **keys)
    assert len(web.paths) == 6 and again.report.identity == prompts.report.identity
    for file in (tmp_path / "cache/roll/pictures").iterdir():
        if file.suffix != ".address" and file.read_bytes() == TWO:
            file.write_bytes(ONE)
    with pytest.raises(DataError, match=r"rows.jsonl:3: .*/two: its file .* has been changed since it was fetched"):
        load(path, renderer, **keys)
    web.paths.clear()
    with pytest.raises(DataError, match=r"not fetched from addresses.*image_urls") as refused:
        load(path, renderer)
    assert "secret" not in str(refused.value) and not web.paths


@pytest.mark.parametrize(
    ("path", "hosts", "reason"),
    [
        ("{web}/absent", ["127.0.0.1"], "/absent: the server answers 404"),
        ("{web}/huge", ["127.0.0.1"], "/huge: more than 4,000 bytes"),
        ("{web}/slow", ["127.0.0.1"], r"/slow: not there within 0.3 s"),
        ("{web}/loop", ["127.0.0.1"], "/loop: more than 5 redirects"),
        ("{web}/away", ["127.0.0.1"], "//localhost.*/one: expected https://, or http:// of a host that"),
        ("{web}/html", ["127.0.0.1"], "no picture .it begins with"),
        ("{web}/one", True, "/one: expected https://, or http:// of a host that"),
        ("https://localhost:1/a", True, "(127.0.0.1|::1) is not public"),
        ("https://[::ffff:10.0.0.1]/a", True, "10.0.0.1|::ffff:a00:1 is not public"),
        ("https://example.org/a", ["127.0.0.1"], "expected one of the hosts in image_urls: 127.0.0.1"),
        ("https://me:word@example.org/a", True, r"https://example.org/a: a login in the address"),
    ],
)
def test_what_may_not_be_fetched_is_told_by_row(renderer, tmp_path, web, monkeypatch, path, hosts, reason):
    monkeypatch.setattr(addresses, "_ATTEMPTS", 1)
    if "slow" in path:
        monkeypatch.setattr(addresses, "SECONDS", 0.3)
    file = write(tmp_path, row(images=["one.png"]), row(images=[path.format(web=web.url)]))
    with pytest.raises(DataError, match=rf"rows.jsonl:2: images\[0\]: .*{reason}"):
        load(file, renderer, image_urls=hosts)


def test_a_host_that_turns_out_to_be_private_is_not_read(web, monkeypatch):
    monkeypatch.setattr(addresses, "_check", lambda url, hosts: None)
    public = SimpleNamespace(getaddrinfo=lambda *_, **__: [(0, 0, 0, "", ("9.9.9.9", 443))], SOCK_STREAM=1)
    monkeypatch.setattr(addresses, "socket", public)
    with pytest.raises(addresses.PictureError, match=r"127.0.0.1 is not public"):
        addresses.Address(f"{web.url}/one", ()).read()


def test_parquet_of_the_datasets_library(renderer, tmp_path):
    rows = [
        {"prompt": "<image> or <image>?", "pictures": [{"bytes": ONE, "path": None}, {"bytes": TWO, "path": "x"}]},
        {"prompt": "text", "pictures": []},
    ]
    first, second = load(write(tmp_path, *rows, name="rows.parquet"), renderer, prompt="prompt", image="pictures")
    shapes = [item.data.shape for item in items_of(with_items(first.messages, renderer.pictures))]
    assert shapes == [(28, 28, 3), (56, 84, 3)] and not second.has_pictures
    changed = [rows[0] | {"pictures": [{"bytes": ONE, "path": None}, {"bytes": even(3, 56, 84), "path": "x"}]}, rows[1]]
    write(tmp_path, *changed, name="others.parquet")
    write(tmp_path, *rows, name="same.parquet")
    names = ("rows.parquet", "same.parquet", "others.parquet")
    mine, same, others = (
        load(tmp_path / name, None, prompt="prompt", image="pictures").report.identity for name in names
    )
    assert mine == same != others


def test_a_picture_counts_as_many_tokens_as_it_has(renderer, tmp_path):
    path = write(tmp_path, row("<image>", ["sub/two.png"]), row("<image>", ["one.png"]))
    longest = len(renderer.prompt([user("")])) + 2 + 6
    assert load(path, renderer).report.longest == longest
    assert len(load(path, renderer, prompt_length=longest - 1, prompt_overflow="drop")) == 1
    with pytest.raises(DataError, match=rf"rows.jsonl:1: {longest} tokens.*not cut"):
        load(path, renderer, prompt_length=longest - 1, prompt_overflow="left")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (row("<image>", ["one.png", "one.png"]), "1 places for pictures .* 2 pictures"),
        (row("<image><image>", ["one.png"]), "2 places"),
        (row([{"type": "image"}]), "1 places .* 0 pictures"),
        (row("<image>", ["nothing.png"]), r"images\[0\]: 'nothing.png'|no such file"),
        (row("<image>", ["../rows.jsonl"]), "outside"),
        (row("<image>", ["rows.jsonl"]), r"images\[0\]: no picture"),
        (row("<image>", ["broken.png"]), r"images\[0\]: unreadable"),
        (row("<image>", ["http://example.org/a.png"]), "not fetched"),
        (row("<image>", "[1"), "not a JSON list"),
        (row(part(type="image", image="nothing.png")), r"messages\[0\].content\[1\].image: .*no such file"),
        (row(part(type="video", video="a.mp4")), r"messages\[0\].content\[1\].video: 'a.mp4'|no such file"),
        (row(part(type="input_audio", input_audio={})), "sound is not supported"),
        (row([says(part(type="image", image="one.png"))]), "not supported here"),
        (row("<image>", None, image="one.png"), "data_args.image: image"),
        (row("<video>", videos=[["0.png", "1.png"]] * 2), "1 places for videos .* but 2 videos"),
        (row("<video>", videos=[["0.png", "nothing.png"]]), r"videos\[0\]: frame 1: '.*nothing.png': no such file"),
        (row("<video>", videos=["rows.jsonl"]), r"videos\[0\]: no picture"),
        (row("<video>", videos=["../rows.jsonl"]), "outside of"),
        (row("<video>", videos=[["0.png", "/etc/passwd"]]), "outside of"),
        (row([{"type": "video", "video": "a.gif", "fps": 1.0}]), r"content\[0\].fps: got 1.0, expected no such"),
        (row([{"type": "audio", "audio": "a.wav"}]), "text, pictures and videos: sound is not supported"),
        (row([{"type": "video"}]), r"1 places for videos .* but 0 videos \(no column 'videos'\)"),
    ],
)
def test_what_is_wrong_is_told_by_file_line_and_column(renderer, tmp_path, given, reason):
    (tmp_path / "broken.png").write_bytes(TWO[:60])
    path = write(tmp_path, row("fine"), given)
    with pytest.raises(DataError, match=rf"(?s)1 problem.*rows.jsonl:2: .*(?:{reason})"):
        load(path, renderer)
    with pytest.raises(DataError, match=rf"rows.jsonl:2: .*(?:{reason})"):
        check_prompts(Reading(arguments(path), 0, head=10), None, renderer)


def test_rows_that_must_have_no_pictures(renderer, tmp_path):
    path = write(tmp_path, row("<image>", ["one.png"]), row("text"))
    with pytest.raises(DataError, match=r"rows.jsonl:1: 1 pictures, but the engine is blind"):
        load(path, renderer, refused={"image": "the engine is blind"})
    with pytest.raises(DataError, match=r"rows.jsonl:1: 1 pictures, but the model has no processor"):
        load(path, ChatRenderer(renderer.tokenizer))
    first, _ = load(path, ChatRenderer(renderer.tokenizer), image=None)
    assert first.messages == (user("<image>"),)
    with pytest.raises(DataError, match="tag_templates"):
        load(path, renderer, prompt_length=None, tag_renderers={"t": renderer})


def talk(question, answer="yes"):
    return [user(question), says(answer)]


def load_talks(path, renderer, overflow="error", max_tokens=200):
    args = DataArguments(file_name=str(path), messages="messages")
    return load_conversations(args, renderer=renderer, max_tokens=max_tokens, overflow=overflow)


def test_conversations_keep_the_pixels_of_their_pictures_on_disk(renderer, tmp_path):
    rows = [row(talk("<image>?"), ["sub/two.png"]), row(talk("text")), row(talk("<image>!<image>"), ["one.png"] * 2)]
    batch = load_talks(write(tmp_path, *rows), renderer).batch
    assert [[item.data.shape[:2] for item in items] for items in batch.items_I] == [[(56, 84)], [], [(28, 28)]]
    ids, _, last = batch.tokens_T.split(batch.lengths_B.tolist())
    assert [at for at, _ in items_along(last, batch.items_I[2])] == [*np.flatnonzero(last < 0)]
    item = batch.items_I[0][0]
    assert (item.data == 2).all() and not item.data.flags.writeable and not item.data.flags.owndata
    assert Item(item.data.copy()) == item == pickle.loads(pickle.dumps(item))
    learned = batch.loss_mask_T.split(batch.lengths_B.tolist())[0]
    assert renderer.tokenizer.decode(ids[learned.bool()]) == "yes<|im_end|>"
    assert load_talks(write(tmp_path, row(talk("<image>"))), renderer).batch.items_I is None


def test_a_conversation_with_pictures_is_not_cut(renderer, tmp_path):
    path = write(tmp_path, row(talk("<image>?"), ["sub/two.png"]), row(talk("a" * 100)))
    with pytest.raises(DataError, match=r"1 problem.*\n.*rows.jsonl:1: .*not cut"):
        load_talks(path, renderer, "truncate", max_tokens=30)
    with pytest.raises(DataError, match=r"rows.jsonl:2: images\[0\]: unreadable"):
        (tmp_path / "broken.png").write_bytes(TWO[:60])
        load_talks(write(tmp_path, row(talk("text")), row(talk("<image>"), ["broken.png"])), renderer)


def test_both_sides_of_a_pair_have_the_pictures(renderer, tmp_path):
    pair = {"prompt": "<image>?", "images": ["one.png"], "chosen": "yes", "rejected": "no"}
    talks = {"chosen": talk("<image>?"), "rejected": talk("<image>?", "no"), "images": ["one.png"]}
    for given, keys in ((pair, {"prompt": "prompt"}), (talks, {"messages": "chosen"})):
        args = DataArguments(file_name=str(write(tmp_path, given)), **keys)
        columns = MarginColumns()
        loaded = load_preferences(args, columns, label=None, encode=encode_talk(renderer), max_tokens=200)
        (chosen,), (rejected,) = loaded.batch.items_I
        assert chosen is rejected and chosen.data.shape == (28, 28, 3)
        assert loaded.questions[0].has_pictures


# --- videos


def film(frames=FRAMES, rate=10, kind="mp4", codec="mpeg4"):
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())
    return file.getvalue()


def video_of(pictures, value, *, blank=False, video_folder=Path("/")):
    found = seen_in(pictures, video_source(value, "it", Reach(None, video_folder=video_folder)), blank=blank)
    assert isinstance(found, Video)
    return found


def frames_of(video):
    return np.concatenate([item.data for item in video.items])


def bounded(folder, **rules):
    return Pictures(folder, videos=rules)


@pytest.mark.parametrize("count", [2, 5])
def test_ids_and_numbers_of_a_video_are_those_of_the_models_processor(pictures, renderer, count):
    """Transformers' own code but for resizing, which needs torchvision, of frames that have their size."""
    own = Qwen3VLVideoProcessor(**OWN)
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.video_processor, processor.video_token = own, VIDEO
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    values = torch.from_numpy(FRAMES[:count]).permute(0, 3, 1, 2).float()[None]
    patches, *grid = own.patchify((values / 255 - 0.5) / 0.5, 14, 2, 2)
    told = SimpleNamespace(fps=2, frames_indices=[*range(count)])
    words = processor.replace_video_token({"video_grid_thw": np.array([grid]), "video_metadata": [told]}, 0)

    video = video_of(pictures, pillow(FRAMES[:count]))
    assert [item.data.shape for item in video.items] == [(2, 28, 56, 3)] * -(-count // 2)
    assert (frames_of(video)[:count] == FRAMES[:count]).all() and (frames_of(video)[-1] == FRAMES[count - 1]).all()
    found = pictures.inputs(video.items)
    np.testing.assert_allclose(found["pixel_values"], patches[0], atol=1e-6)
    assert found["image_grid_thw"].tolist() == [[1, 2, 4]] * len(video.items)
    again = pictures.inputs_by_processor(video.items)
    assert all(found[name].tobytes() == again[name].tobytes() for name in found)
    messages = [asks(video, "<0")]
    text = renderer.text(messages, open_assistant=True)
    assert text.count(VIDEO) == 1
    ids = renderer.prompt(messages)
    assert vocabulary_ids(ids).tolist() == make_tokenizer().encode(text.replace(VIDEO, words))
    assert (ids < 0).sum() == sum(len(pictures.content(item)) for item in video.items) == 2 * len(video.items)
    assert items_of(messages) == video.items


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is None, reason="tests/support/torchvision_alone")
@pytest.mark.parametrize("kind", ["gif", "mp4"])
def test_a_file_is_what_the_unmodified_processor_makes_of_its_frames(folder, renderer, kind):
    """Which frames, their times, ids, and numbers where nothing is resized."""
    data = GIF if kind == "gif" else film()
    video = video_of(Pictures(folder), data)
    processor = Qwen3VLProcessor(
        image_processor=renderer.pictures._processor.image_processor,
        tokenizer=renderer.tokenizer,
        video_processor=Qwen3VLVideoProcessor(**OWN),
    )
    whole = frames_of(video_of(bounded(folder, fps=1e3, max_frames=100), data))
    metadata = {"fps": 10, "total_num_frames": 20, "frames_indices": None, "duration": 2.0}
    messages = [asks(video, "?")]
    expected = processor(
        text=renderer.text(messages, open_assistant=True),
        videos=[torch.from_numpy(whole).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        return_tensors="pt",
    )
    assert expected["input_ids"][0].tolist() == vocabulary_ids(renderer.prompt(messages)).tolist()
    values = renderer.pictures.inputs(video.items)["pixel_values"]
    np.testing.assert_allclose(values, expected["pixel_values_videos"], atol=1e-6)


def test_the_numbers_differ_from_a_pictures_where_the_processor_says_so(pictures):
    video = video_of(pictures, pillow(FRAMES[:1]) * 2)
    values = pictures.inputs([Item(FRAMES[0]), video.items[0]])["pixel_values"]
    assert values.shape[0] == 16 and abs(values[:8] - values[8:]).max() > 0.1


@pytest.mark.parametrize(
    ("rules", "size"),
    [
        ({}, (280, 392)),
        ({"max_pixels": 28 * 28 * 4}, (28, 84)),
        ({"total_pixels": 28 * 28 * 8}, (28, 84)),
        ({"min_pixels": 28 * 28 * 6, "total_pixels": 1}, (56, 84)),
    ],
)
def test_bounds_on_the_pixels_of_videos(folder, rules, size):
    """As Transformers has them: of a frame, or of all."""
    large = np.random.default_rng(1).integers(0, 256, (4, 280, 392, 3), dtype=np.uint8)
    own = json.loads((folder / "video_preprocessor_config.json").read_text())
    assert own["size"]["longest_edge"] == 28 * 28 * 64
    video = video_of(bounded(folder, **rules), pillow(large))
    high, wide = video.items[0].data.shape[1:3]
    assert (high % 28, wide % 28) == (0, 0)
    if not rules:
        assert 4 * high * wide <= 28 * 28 * 64
    else:
        assert abs(high - size[0]) <= 28 and abs(wide - size[1]) <= 28
    blank = video_of(bounded(folder, **rules), pillow(large), blank=True)
    assert [each.data.shape for each in blank.items] == [each.data.shape for each in video.items]
    assert not blank.items[0].data.any() and blank.times == video.times


def test_frames_in_a_list_are_all_taken(folder):
    video = video_of(bounded(folder, fps=4.0), [png(each) for each in FRAMES[:7]])
    assert video.times == (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5)
    assert (frames_of(video)[:7] == FRAMES[:7]).all()
    assert video_of(bounded(folder, fps=4.0), {"frames": [{"bytes": png(each)} for each in FRAMES[:7]]}) == video


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_has_its_frames_taken_by_its_times(folder, kind):
    data = animation(kind, **({"lossless": True} if kind == "WEBP" else {}))
    whole = video_of(bounded(folder, fps=100.0), data)
    assert whole.times == tuple(number / 10 for number in range(20))
    if kind != "GIF":  # of 256 colours
        assert (frames_of(whole) == FRAMES).all()
    two = video_of(bounded(folder, fps=4.0), data)  # 8 of 2 seconds
    numbers = np.linspace(0, 19, 8).round().astype(int)
    assert (frames_of(two) == frames_of(whole)[numbers]).all()
    np.testing.assert_allclose(two.times, numbers / 10)
    assert len(video_of(bounded(folder, fps=4.0, max_frames=6), data).times) == 6


def test_times_of_an_animation_may_differ(folder):
    data = animation(frames=FRAMES[:4], duration=[100, 500, 200, 50])
    np.testing.assert_allclose(video_of(bounded(folder, fps=100.0), data).times, [0, 0.1, 0.6, 0.8])
    assert video_of(bounded(folder, fps=4.0), animation(frames=FRAMES[:4], duration=0)).times == (0, 0.25, 0.5, 0.75)


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "mpeg4"), ("matroska", "ffv1"), ("avi", "mpeg4")])
def test_a_film(folder, kind, codec):
    data = film(kind=kind, codec=codec)
    video = video_of(bounded(folder, fps=3.0), data)  # 6 of 2 seconds
    numbers = np.linspace(0, 19, 6).round().astype(int)
    np.testing.assert_allclose(video.times, numbers / 10, atol=1e-3)
    if codec == "ffv1":
        away = np.abs(frames_of(video).astype(int) - FRAMES[numbers].astype(int))
        assert np.median(away) < 40, "its colours are coded at half the size"
    with pytest.raises(PictureError, match=r"unreadable|cut off: frames of 0.[0-9] of [12].0 seconds"):
        video_of(bounded(folder), data[: len(data) // 2])


def test_a_film_needs_a_package(pictures, monkeypatch):
    monkeypatch.setattr("roll.data.videos.find_spec", lambda _: None)
    with pytest.raises(PictureError, match=r"it: a film, which the package av reads: pip install 'roll-rl\[video\]'"):
        video_of(pictures, b"\0\0\0\x18ftypmp42" + bytes(20))


def test_a_folder_of_numbered_frames(pictures, tmp_path):
    for number in range(8, 12):
        (tmp_path / f"shot 2 frame{number}.png").write_bytes(png(FRAMES[number]))
    video = video_of(pictures, tmp_path.name, video_folder=tmp_path.parent)
    assert (frames_of(video) == FRAMES[8:12]).all() and video.times == (0, 0.5, 1, 1.5)
    (tmp_path / "shot 2 frame13.png").write_bytes(png(FRAMES[0]))
    with pytest.raises(PictureError, match="frame 11 is followed by 13, expected numbers at equal distances"):
        video_of(pictures, tmp_path.name, video_folder=tmp_path.parent)
    (tmp_path / "note.txt").write_text("x")
    with pytest.raises(PictureError, match=r"'note.txt' has no number"):
        video_of(pictures, tmp_path.name, video_folder=tmp_path.parent)
    with pytest.raises(PictureError, match="outside of"):
        video_of(pictures, "..", video_folder=tmp_path)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "0 frames, expected at least 2"),
        ([png(FRAMES[0])], "1 frames, expected at least 2"),
        ([png(FRAMES[0])] * 9, r"9 frames, expected at most 8 \(data_args.video_max_frames\)"),
        ([png(FRAMES[0]), png(FRAMES[0])[:60]], "frame 1: unreadable"),
        ([png(FRAMES[0]), png(FRAMES[0, :14])], "frame 1 has 56 x 14 pixels, the first one 56 x 28; expected one"),
        ([png(FRAMES[0]), "https://example.org/a.png"], "frame 1: .*not fetched from addresses"),
        ([png(FRAMES[0]), GIF], "frame 1: 20 frames, expected one picture"),
        (png(FRAMES[0]), "1 frames in a PNG, expected a video"),
        (GIF[:3000], "frame [0-9]+: unreadable|unreadable"),
        (b"nonsense", "no picture"),
        ("https://example.org/a.mp4", "not fetched from addresses"),
        ("nothing.mp4", "no such file"),
        (pillow(np.zeros((2, 28, 28 * 300, 3), np.uint8)), "processor refuses it .*aspect ratio"),
        (None, "null, expected a video"),
    ],
)
def test_a_video_that_cannot_be_used_is_refused(folder, value, reason):
    with pytest.raises(PictureError, match=f"^it.*(?:{reason})"):
        video_of(bounded(folder, max_frames=8), value)


def test_models_and_processors_that_are_known_otherwise_are_refused(tmp_path):
    for family, changed, reason in (
        ("llava", {}, "no video_preprocessor_config.json; expected Qwen3VLVideoProcessor"),
        ("qwen3_vl", {"video_processor_type": "Other"}, "its video processor is Other; expected Qwen3"),
        ("qwen3_vl", {"patch_size": 16}, "different {'patch_size': \\(16, 14\\)}"),
        ("qwen3_vl", {"cap_pixels_per_frame": True}, "has cap_pixels_per_frame"),
    ):
        path = make_processor(tmp_path / f"{family} {sorted(changed)}", family)
        if changed:
            file = path / "video_preprocessor_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | changed))
        with pytest.raises(PictureError, match=reason):
            video_of(Pictures(path), pillow(FRAMES[:2]))


def load_checked(folder, renderer, *rows, refused=None, **keys):
    path = write(folder, *rows)
    check_prompts(Reading(arguments(path, **keys), 0, head=10, refused=refused or {}), None, renderer)
    return load(path, renderer, refused, **keys)


def test_videos_in_columns_marks_and_parts(renderer, tmp_path):
    frames = ["0.png", "1.png", "2.png"]
    rows = [
        row("a <video> b <image> c <video>", videos=[frames, "a.gif"], images=["3.png"]),
        row([{"type": "video", "video": frames}, text("?")]),
        row([{"type": "video"}, text("<video>")], videos=[frames, frames]),
        row("?", videos="a.gif"),
        row("a literal <video>"),
    ]
    data = load_checked(tmp_path, renderer, *rows)
    words = [text_of(prompt.messages[0]["content"]) for prompt in data]
    assert words == ["a <video> b <image> c <video>", "<video>?", "<video><video>", "<video>?", "a literal <video>"]
    assert [prompt.has_pictures for prompt in data] == [True] * 4 + [False]
    sent = [read_sources(prompt.messages) for prompt in data]
    made = [with_items(messages, renderer.pictures) for messages in sent]
    assert [len(items_of(messages)) for messages in made] == [2 + 2 + 1, 2, 2, 2, 0]
    ids = [renderer.prompt(messages) for messages in made]
    blank = [renderer.prompt(with_items(m.messages, renderer.pictures, blank=True)) for m in data]
    assert [len(each) for each in ids] == [len(each) for each in blank]
    assert [(each < 0).sum() for each in ids] == [4 + 4 + 2, 4, 8, 4, 0]


def test_a_column_of_videos_of_another_name(renderer, tmp_path):
    with pytest.raises(DataError, match=r"<video> in its words and a column 'video', but no column 'videos'"):
        load_checked(tmp_path, renderer, row("<video>", video="a.gif"))
    (prompt,) = load_checked(tmp_path, renderer, row("<video>", video="a.gif"), video="video")
    assert prompt.has_pictures
    with pytest.raises(DataError, match=r"a part of type 'video', expected only text and pictures: videos are not"):
        load_checked(tmp_path, renderer, row([{"type": "video", "video": "a.gif"}]), video=None)


def test_videos_in_conversations_and_commands(renderer, tmp_path):
    """Rows to imitate have videos; those of a command that answers questions are refused."""
    talks = load_talks(write(tmp_path, row(talk("<video>?"), videos="a.gif")), renderer)
    assert talks.has_pictures and all(item.data.ndim == 4 for item in talks.batch.items_I[0])
    problems = Problems()
    path = write(tmp_path, row("<video>?", videos="a.gif"))
    assert not list(read_questions([str(path)], None, problems))
    with pytest.raises(DataError, match=r"rows.jsonl:1: column 'videos': videos are not read here"):
        problems.raise_any()


def test_rows_that_must_have_no_videos(renderer, tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl:1: 1 videos, but it is blind \(data_args.video: null"):
        load_checked(tmp_path, renderer, row("?", videos="a.gif", images="1.png"), refused={"video": "it is blind"})
    with pytest.raises(DataError, match=r"1 pictures and 1 videos, but the model has no processor"):
        load_checked(tmp_path, ChatRenderer(renderer.tokenizer), row("?", videos="a.gif", images="1.png"))


def test_a_template_that_writes_no_video(renderer):
    video = Video((Item(np.zeros((2, 28, 28, 3), np.uint8)),), (0.0, 0.5))
    plain = ChatRenderer(renderer.tokenizer, "{% for m in messages %}x{% endfor %}", renderer.pictures)
    with pytest.raises(TemplateError, match=r"it writes <\|video_pad\|> 0 times for 1 videos"):
        plain.prompt([asks(video)])


def test_the_processors_rule_for_frames_and_a_source_is_a_picture_unless_it_says_otherwise(pictures):
    assert Source(1, "x") == Source(1, "x", is_video=False)
    own = Qwen3VLVideoProcessor(**OWN)
    for total, rate in ((20, 10), (3, 25), (300, 30), (4000, 24), (61, 30)):
        expected = own.sample_frames(SimpleNamespace(total_num_frames=total, fps=rate))
        assert pictures.videos.chosen(total, Fraction(total, rate)) == expected.tolist()
