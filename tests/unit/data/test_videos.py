"""Videos: frames, times, ids and numbers are those of the model's processor; what cannot be used is refused."""

import io
import json
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jinja2 import TemplateError
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from roll.configs.data import DataArguments
from roll.data.columns import Item
from roll.data.conversations import load_conversations
from roll.data.files import DataError, Problems
from roll.data.identity import vocabulary_ids
from roll.data.pictures import PictureError, Pictures, Reach, Source, Video
from roll.data.prompts import check_prompts, load_prompts
from roll.data.questions import read_questions
from roll.data.reading import Reading
from roll.data.renderer import ChatRenderer, items_of
from roll.data.row_pictures import read_sources, with_items
from roll.data.tool_messages import text_of
from roll.data.videos import shown, video_source
from tests.support.lines import write_lines
from tests.support.picture_models import PROCESSOR, VIDEO, make_processor, make_tokenizer, png
from tests.support.talks import says, user

FRAMES = np.random.default_rng(0).integers(0, 256, (20, 28, 56, 3), dtype=np.uint8)
OWN = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}, **PROCESSOR}


def pillow(frames):
    return [Image.fromarray(pixels) for pixels in frames]


def animation(kind="GIF", frames=FRAMES, duration=100, **options):
    file = io.BytesIO()
    first, *rest = map(Image.fromarray, frames)
    first.save(file, kind, save_all=True, append_images=rest, duration=duration, **options)
    return file.getvalue()


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


def of(pictures, value, **options):
    found = shown(pictures, video_source(value, "it", Reach(**{"folder": None, "video_folder": Path("/")} | options)))
    assert isinstance(found, Video)
    return found


def frames_of(video):
    return np.concatenate([item.data for item in video.items])


def shows(video, words):
    return user([{"type": "video", "video": video}, {"type": "text", "text": words}])


def bounded(folder, **rules):
    return Pictures(folder, videos=rules)


class TestNumbers:
    @pytest.mark.parametrize("count", [2, 5])
    def test_ids_and_numbers_are_those_of_the_models_processor(self, pictures, renderer, count):
        """Transformers' own code but for resizing, which needs torchvision, of frames that have their size."""
        own = Qwen3VLVideoProcessor(**OWN)
        processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
        processor.video_processor, processor.video_token = own, VIDEO
        processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
        values = torch.from_numpy(FRAMES[:count]).permute(0, 3, 1, 2).float()[None]
        patches, *grid = own.patchify((values / 255 - 0.5) / 0.5, 14, 2, 2)
        told = SimpleNamespace(fps=2, frames_indices=[*range(count)])
        words = processor.replace_video_token({"video_grid_thw": np.array([grid]), "video_metadata": [told]}, 0)

        video = of(pictures, pillow(FRAMES[:count]))
        assert [item.data.shape for item in video.items] == [(2, 28, 56, 3)] * -(-count // 2)
        assert (frames_of(video)[:count] == FRAMES[:count]).all() and (frames_of(video)[-1] == FRAMES[count - 1]).all()
        found = pictures.inputs(video.items)
        np.testing.assert_allclose(found["pixel_values"], patches[0], atol=1e-6)
        assert found["image_grid_thw"].tolist() == [[1, 2, 4]] * len(video.items)
        again = pictures.inputs_by_processor(video.items)
        assert all(found[name].tobytes() == again[name].tobytes() for name in found)
        messages = [shows(video, "<0")]
        text = renderer.text(messages, open_assistant=True)
        assert text.count(VIDEO) == 1
        ids = renderer.prompt(messages)
        assert vocabulary_ids(ids).tolist() == make_tokenizer().encode(text.replace(VIDEO, words))
        assert (ids < 0).sum() == sum(len(pictures.content(item)) for item in video.items) == 2 * len(video.items)
        assert items_of(messages) == video.items

    @pytest.mark.slow
    @pytest.mark.skipif(find_spec("torchvision") is None, reason="tests/support/torchvision_alone")
    @pytest.mark.parametrize("kind", ["gif", "mp4"])
    def test_a_file_is_what_the_unmodified_processor_makes_of_its_frames(self, folder, renderer, kind):
        """Which frames, their times, ids, and numbers where nothing is resized."""
        data = animation() if kind == "gif" else film()
        video = of(Pictures(folder), data)
        processor = Qwen3VLProcessor(
            image_processor=renderer.pictures._processor.image_processor,
            tokenizer=renderer.tokenizer,
            video_processor=Qwen3VLVideoProcessor(**OWN),
        )
        whole = frames_of(of(bounded(folder, fps=1e3, max_frames=100), data))
        metadata = {"fps": 10, "total_num_frames": 20, "frames_indices": None, "duration": 2.0}
        messages = [shows(video, "?")]
        expected = processor(
            text=renderer.text(messages, open_assistant=True),
            videos=[torch.from_numpy(whole).permute(0, 3, 1, 2)],
            video_metadata=[metadata],
            return_tensors="pt",
        )
        assert expected["input_ids"][0].tolist() == vocabulary_ids(renderer.prompt(messages)).tolist()
        values = renderer.pictures.inputs(video.items)["pixel_values"]
        np.testing.assert_allclose(values, expected["pixel_values_videos"], atol=1e-6)

    def test_the_numbers_differ_from_a_pictures_where_the_processor_says_so(self, pictures):
        video = of(pictures, pillow(FRAMES[:1]) * 2)
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
    def test_bounds(self, folder, rules, size):
        """As Transformers has them: of a frame, or of all."""
        large = np.random.default_rng(1).integers(0, 256, (4, 280, 392, 3), dtype=np.uint8)
        own = json.loads((folder / "video_preprocessor_config.json").read_text())
        assert own["size"]["longest_edge"] == 28 * 28 * 64
        video = of(bounded(folder, **rules), pillow(large))
        high, wide = video.items[0].data.shape[1:3]
        assert (high % 28, wide % 28) == (0, 0)
        if not rules:
            assert 4 * high * wide <= 28 * 28 * 64
        else:
            assert abs(high - size[0]) <= 28 and abs(wide - size[1]) <= 28
        blank = shown(bounded(folder, **rules), video_source(pillow(large), "", REACH), blank=True)
        assert [each.data.shape for each in blank.items] == [each.data.shape for each in video.items]
        assert not blank.items[0].data.any() and blank.times == video.times


REACH = Reach(Path("/"), video_folder=Path("/"))


class TestForms:
    def test_frames_in_a_list_are_all_taken(self, folder):
        video = of(bounded(folder, fps=4.0), [png(each) for each in FRAMES[:7]])
        assert video.times == (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5)
        assert (frames_of(video)[:7] == FRAMES[:7]).all()
        assert of(bounded(folder, fps=4.0), {"frames": [{"bytes": png(each)} for each in FRAMES[:7]]}) == video

    @pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
    def test_an_animation_has_its_frames_taken_by_its_times(self, folder, kind):
        data = animation(kind, **({"lossless": True} if kind == "WEBP" else {}))
        whole = of(bounded(folder, fps=100.0), data)
        assert whole.times == tuple(number / 10 for number in range(20))
        if kind != "GIF":  # of 256 colours
            assert (frames_of(whole) == FRAMES).all()
        two = of(bounded(folder, fps=4.0), data)  # 8 of 2 seconds
        numbers = np.linspace(0, 19, 8).round().astype(int)
        assert (frames_of(two) == frames_of(whole)[numbers]).all()
        np.testing.assert_allclose(two.times, numbers / 10)
        assert len(of(bounded(folder, fps=4.0, max_frames=6), data).times) == 6

    def test_times_of_an_animation_may_differ(self, folder):
        data = animation(frames=FRAMES[:4], duration=[100, 500, 200, 50])
        np.testing.assert_allclose(of(bounded(folder, fps=100.0), data).times, [0, 0.1, 0.6, 0.8])
        assert of(bounded(folder, fps=4.0), animation(frames=FRAMES[:4], duration=0)).times == (0, 0.25, 0.5, 0.75)

    @pytest.mark.parametrize(("kind", "codec"), [("mp4", "mpeg4"), ("matroska", "ffv1"), ("avi", "mpeg4")])
    def test_a_film(self, folder, kind, codec):
        data = film(kind=kind, codec=codec)
        video = of(bounded(folder, fps=3.0), data)  # 6 of 2 seconds
        numbers = np.linspace(0, 19, 6).round().astype(int)
        np.testing.assert_allclose(video.times, numbers / 10, atol=1e-3)
        if codec == "ffv1":
            away = np.abs(frames_of(video).astype(int) - FRAMES[numbers].astype(int))
            assert np.median(away) < 40, "its colours are coded at half the size"
        with pytest.raises(PictureError, match=r"unreadable|cut off: frames of 0.[0-9] of [12].0 seconds"):
            of(bounded(folder), data[: len(data) // 2])

    def test_a_film_needs_a_package(self, pictures, monkeypatch):
        monkeypatch.setattr("roll.data.videos.find_spec", lambda _: None)
        with pytest.raises(
            PictureError, match=r"it: a film, which the package av reads: pip install 'roll-rl\[video\]'"
        ):
            of(pictures, b"\0\0\0\x18ftypmp42" + bytes(20))

    def test_a_folder_of_numbered_frames(self, pictures, tmp_path):
        for number in range(8, 12):
            (tmp_path / f"shot 2 frame{number}.png").write_bytes(png(FRAMES[number]))
        video = of(pictures, tmp_path.name, video_folder=tmp_path.parent)
        assert (frames_of(video) == FRAMES[8:12]).all() and video.times == (0, 0.5, 1, 1.5)
        (tmp_path / "shot 2 frame13.png").write_bytes(png(FRAMES[0]))
        with pytest.raises(PictureError, match="frame 11 is followed by 13, expected numbers at equal distances"):
            of(pictures, tmp_path.name, video_folder=tmp_path.parent)
        (tmp_path / "note.txt").write_text("x")
        with pytest.raises(PictureError, match=r"'note.txt' has no number"):
            of(pictures, tmp_path.name, video_folder=tmp_path.parent)
        with pytest.raises(PictureError, match="outside of"):
            of(pictures, "..", video_folder=tmp_path)

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ([], "0 frames, expected at least 2"),
            ([png(FRAMES[0])], "1 frames, expected at least 2"),
            ([png(FRAMES[0])] * 9, r"9 frames, expected at most 8 \(data_args.video_max_frames\)"),
            ([png(FRAMES[0]), png(FRAMES[0])[:60]], "frame 1: unreadable"),
            ([png(FRAMES[0]), png(FRAMES[0, :14])], "frame 1 has 56 x 14 pixels, the first one 56 x 28; expected one"),
            ([png(FRAMES[0]), "https://example.org/a.png"], "frame 1: .*not fetched from addresses"),
            ([png(FRAMES[0]), animation()], "frame 1: 20 frames, expected one picture"),
            (png(FRAMES[0]), "1 frames in a PNG, expected a video"),
            (animation()[:3000], "frame [0-9]+: unreadable|unreadable"),
            (b"nonsense", "no picture"),
            ("https://example.org/a.mp4", "not fetched from addresses"),
            ("nothing.mp4", "no such file"),
            (pillow(np.zeros((2, 28, 28 * 300, 3), np.uint8)), "processor refuses it .*aspect ratio"),
            (None, "null, expected a video"),
        ],
    )
    def test_what_cannot_be_used_is_refused(self, folder, value, reason):
        with pytest.raises(PictureError, match=f"^it.*(?:{reason})"):
            of(bounded(folder, max_frames=8), value)

    def test_models_and_processors_that_are_known_otherwise_are_refused(self, tmp_path):
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
                of(Pictures(path), pillow(FRAMES[:2]))


class TestRows:
    def load(self, folder, renderer, *rows, **keys):
        for number in range(4):
            (folder / f"{number}.png").write_bytes(png(FRAMES[number]))
        (folder / "a.gif").write_bytes(animation())
        path = write_lines(folder / "rows.jsonl", rows)
        options = {"refused": keys.pop("refused", {})}
        args = DataArguments(file_name=str(path), messages="m", response=None, default_tag="t", shuffle=False, **keys)
        check_prompts(Reading(args, 0, head=10, **options), None, renderer)
        return load_prompts(args, renderer=renderer, prompt_length=500, allowed_tags=None, seed=0, **options)

    def test_columns_marks_and_parts(self, renderer, tmp_path):
        frames = ["0.png", "1.png", "2.png"]
        rows = [
            row("a <video> b <image> c <video>", videos=[frames, "a.gif"], images=["3.png"]),
            row([{"type": "video", "video": frames}, {"type": "text", "text": "?"}]),
            row([{"type": "video"}, {"type": "text", "text": "<video>"}], videos=[frames, frames]),
            row("?", videos="a.gif"),
            row("a literal <video>"),
        ]
        data = self.load(tmp_path, renderer, *rows)
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

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            (("<video>", [["0.png", "1.png"]] * 2), "1 places for videos .* but 2 videos"),
            (("<video>", [["0.png", "nothing.png"]]), r"videos\[0\]: frame 1: '.*nothing.png': no such file"),
            (("<video>", ["rows.jsonl"]), r"videos\[0\]: no picture"),
            (("<video>", ["../rows.jsonl"]), "outside of"),
            (("<video>", [["0.png", "/etc/passwd"]]), "outside of"),
            (([{"type": "video", "video": "a.gif", "fps": 1.0}], None), r"content\[0\].fps: got 1.0, expected no such"),
            (([{"type": "audio", "audio": "a.wav"}], None), "text, pictures and videos: sound is not supported"),
            (([{"type": "video"}], None), r"1 places for videos .* but 0 videos \(no column 'videos'\)"),
        ],
    )
    def test_what_is_wrong_is_told_by_file_line_and_column(self, renderer, tmp_path, given, reason):
        with pytest.raises(DataError, match=rf"(?s)1 problem.*rows.jsonl:2: .*(?:{reason})"):
            self.load(tmp_path, renderer, row("fine"), row(given[0], videos=given[1]))

    def test_a_column_of_another_name(self, renderer, tmp_path):
        with pytest.raises(DataError, match=r"<video> in its words and a column 'video', but no column 'videos'"):
            self.load(tmp_path, renderer, row("<video>", video="a.gif"))
        (prompt,) = self.load(tmp_path, renderer, row("<video>", video="a.gif"), video="video")
        assert prompt.has_pictures
        with pytest.raises(DataError, match=r"a part of type 'video', expected only text and pictures: videos are not"):
            self.load(tmp_path, renderer, row([{"type": "video", "video": "a.gif"}]), video=None)

    def test_conversations_and_commands(self, renderer, tmp_path):
        """Rows to imitate have videos; those of a command that answers questions are refused."""
        asked = row("<video>?", videos="a.gif")
        (tmp_path / "a.gif").write_bytes(animation())
        path = write_lines(tmp_path / "talks.jsonl", [asked | {"m": [*asked["m"], says("this")]}])
        args = DataArguments(file_name=str(path), messages="m", response=None)
        talks = load_conversations(args, renderer=renderer, max_tokens=300)
        assert talks.has_pictures and all(item.data.ndim == 4 for item in talks.batch.items_I[0])
        problems = Problems()
        write_lines(path, [{"messages": asked["m"], "videos": "a.gif"}])
        assert not list(read_questions([str(path)], None, problems))
        with pytest.raises(DataError, match=r"talks.jsonl:1: column 'videos': videos are not read here"):
            problems.raise_any()

    def test_rows_that_must_have_no_videos(self, renderer, tmp_path):
        with pytest.raises(DataError, match=r"rows.jsonl:1: 1 videos, but it is blind \(data_args.video: null"):
            self.load(tmp_path, renderer, row("?", videos="a.gif", images="1.png"), refused={"video": "it is blind"})
        with pytest.raises(DataError, match=r"1 pictures and 1 videos, but the model has no processor"):
            self.load(tmp_path, ChatRenderer(renderer.tokenizer), row("?", videos="a.gif", images="1.png"))

    def test_a_template_that_writes_no_video(self, renderer):
        video = Video((Item(np.zeros((2, 28, 28, 3), np.uint8)),), (0.0, 0.5))
        plain = ChatRenderer(renderer.tokenizer, "{% for m in messages %}x{% endfor %}", renderer.pictures)
        with pytest.raises(TemplateError, match=r"it writes <\|video_pad\|> 0 times for 1 videos"):
            plain.prompt([user([{"type": "video", "video": video}])])


def row(content, **columns):
    return {"m": [user(content)]} | {name: value for name, value in columns.items() if value is not None}


def test_the_processors_rule_for_frames_and_a_source_is_a_picture_unless_it_says_otherwise(pictures):
    assert Source(1, "x") == Source(1, "x", is_video=False)
    own = Qwen3VLVideoProcessor(**OWN)
    for total, rate in ((20, 10), (3, 25), (300, 30), (4000, 24), (61, 30)):
        expected = own.sample_frames(SimpleNamespace(total_num_frames=total, fps=rate))
        assert pictures.videos.chosen(total, Fraction(total, rate)) == expected.tolist()
