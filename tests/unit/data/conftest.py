"""What tests of data share: a processor of pictures and videos, and a renderer that sees."""

import pytest
from transformers import AutoTokenizer

from roll.data.pictures import Pictures
from roll.data.renderer import ChatRenderer
from tests.support.picture_models import make_processor


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
