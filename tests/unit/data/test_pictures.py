"""Pictures: the model's processor on the original gives the same ids and numbers; what cannot be used is refused."""

import base64
import io
import pickle
import struct
import sys
import zlib
from importlib import import_module

import numpy as np
import pytest
from jinja2 import TemplateError
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.models.pixtral import image_processing_pil_pixtral

from roll.data.columns import Item
from roll.data.identity import items_along, vocabulary_ids
from roll.data.pictures import PictureError, Pictures, Reach
from roll.data.renderer import ChatRenderer, items_of
from tests.support.picture_models import FAMILIES, IMAGE, make_processor, make_tokenizer
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
