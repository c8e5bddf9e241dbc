"""Pictures, alone, in conversations and in rows: ids and numbers of the model's processor; refusals in words."""

import base64
import io
import json
import pickle
import struct
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pyarrow
import pytest
from jinja2 import TemplateError
from PIL import Image
from pyarrow import parquet
from transformers import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.models.pixtral import image_processing_pil_pixtral

from roll.configs.data import DataArguments
from roll.configs.preference import MarginColumns
from roll.data import addresses
from roll.data.columns import Item
from roll.data.conversations import encode_talk, load_conversations
from roll.data.files import DataError
from roll.data.identity import items_along, vocabulary_ids
from roll.data.pictures import PictureError, Pictures, Reach
from roll.data.preferences import load_preferences
from roll.data.prompts import check_prompts, load_prompts
from roll.data.reading import Reading
from roll.data.renderer import ChatRenderer, items_of
from roll.data.row_pictures import read_sources, with_items
from roll.data.tool_messages import text_of
from tests.support.lines import write_lines
from tests.support.picture_models import FAMILIES, IMAGE, make_processor, make_tokenizer, png
from tests.support.talks import says, user


def noise(height, width, channels=3):
    return np.random.default_rng(height * width).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


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


def frames(kind):
    first, *others = [Image.fromarray(noise(56, 84) // part) for part in (1, 2, 3, 4)]
    return encoded(first, kind, save_all=True, append_images=others)


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
        *((frames(kind), "4 frames") for kind in ("GIF", "PNG", "WEBP", "TIFF")),
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
    """A message of texts and pictures."""
    shown = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return user(shown)


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


class Web(BaseHTTPRequestHandler):
    """A picture, and what may be wrong with one."""

    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        kind = self.path.partition("?")[0][1:]
        first = self.asked.count(self.path) == 1
        body = {"html": b"<html>", "huge": bytes(5000), "two": TWO}.get(kind, ONE)
        status = {"moved": 302, "loop": 302, "away": 302, "absent": 404}.get(
            kind, 503 if kind == "busy" and first else 200
        )
        self.send_response(status)
        place = {"moved": "/one", "loop": "/loop", "away": f"http://localhost:{self.server.server_port}/one"}.get(kind)
        if place:
            self.send_header("Location", place)
        self.end_headers()
        for start in range(0, len(body), 20 if kind == "slow" else len(body)):
            self.wfile.write(body[start : start + 20] if kind == "slow" else body)
            time.sleep(0.1 * (kind == "slow"))

    def log_message(self, *args):
        """Keeps the test's output clean."""


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(addresses, "MOST_BYTES", 4000)
    monkeypatch.setattr(Web, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_pictures_at_addresses_are_fetched_once(renderer, tmp_path, web):
    shown = [f"{web}/one?token=secret", f"{web}/moved", f"{web}/two", f"{web}/busy", "one.png"]
    path = write(tmp_path, *(row(images=[url]) for url in shown), row(part(type="image_url", image_url=f"{web}/two")))
    keys = {"image_urls": ["127.0.0.1"]}
    head = Reading(arguments(path, **keys), 0, 9)
    assert check_prompts(head, None, renderer)[0].total() == 6 and not Web.asked, "a check asks nobody"
    prompts = load(path, renderer, **keys)
    assert sorted(Web.asked) == ["/busy", "/busy", "/moved", "/one", "/one?token=secret", "/two"]
    shapes = [items_of(with_items(read_sources(one.messages), renderer.pictures))[0].data.shape for one in prompts]
    assert shapes == [(28, 28, 3), (28, 28, 3), (56, 84, 3), (28, 28, 3), (28, 28, 3), (56, 84, 3)]
    again = load(path, renderer, **keys)
    assert len(Web.asked) == 6 and again.report.identity == prompts.report.identity
    for file in (tmp_path / "cache/roll/pictures").iterdir():
        if file.suffix != ".address" and file.read_bytes() == TWO:
            file.write_bytes(ONE)
    with pytest.raises(DataError, match=r"rows.jsonl:3: .*/two: its file .* has been changed since it was fetched"):
        load(path, renderer, **keys)
    Web.asked.clear()
    with pytest.raises(DataError, match=r"not fetched from addresses.*image_urls") as refused:
        load(path, renderer)
    assert "secret" not in str(refused.value) and not Web.asked


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
    file = write(tmp_path, row(images=["one.png"]), row(images=[path.format(web=web)]))
    with pytest.raises(DataError, match=rf"rows.jsonl:2: images\[0\]: .*{reason}"):
        load(file, renderer, image_urls=hosts)


def test_a_host_that_turns_out_to_be_private_is_not_read(web, monkeypatch):
    monkeypatch.setattr(addresses, "_check", lambda url, hosts: None)
    public = SimpleNamespace(getaddrinfo=lambda *_, **__: [(0, 0, 0, "", ("9.9.9.9", 443))], SOCK_STREAM=1)
    monkeypatch.setattr(addresses, "socket", public)
    with pytest.raises(addresses.PictureError, match=r"127.0.0.1 is not public"):
        addresses.Address(f"{web}/one", ()).read()


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
