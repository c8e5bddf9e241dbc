"""A model folder that comes with code of its own: without this code nothing in it can be read."""

import json
from pathlib import Path
from typing import Any

import transformers

from roll.models.tiny import make_tokenizer
from tests.support.contract import random_model

CONFIGURATION = """
from transformers import Qwen2Config

class OwnConfig(Qwen2Config):
    model_type = "own_model_of_a_test"
"""
MODELING = """
from torch import nn
from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen2Model, Qwen2PreTrainedModel
from .configuration_own import OwnConfig

class OwnModel(Qwen2Model):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = -output.last_hidden_state  # what Qwen2's own code would not do
        return output

class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = LOGIT_FACTOR * output.logits
        return output

class OwnForSequenceClassification(Qwen2ForSequenceClassification):
    config_class = OwnConfig

    def __init__(self, config):
        Qwen2PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = OwnModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
"""
TOKENIZATION = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
FILES = {"configuration_own.py": CONFIGURATION, "modeling_own.py": MODELING, "tokenization_own.py": TOKENIZATION}


def make_model(folder: Path, kind: str = "CausalLM", logit_factor: float = 1, **config: Any) -> Path:
    """Writes such a folder, with random weights.

    Args:
        folder: for it.
        kind: may be ``SequenceClassification``.
        logit_factor: what its code multiplies the output layer's result by, besides the minus before its input.
        config: entries of the model's configuration.
    """
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model_class = getattr(transformers, f"Qwen2For{kind}")
    random_model(transformers.Qwen2Config, model_class, 0, **heads, **config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    for name, text in FILES.items():
        (folder / name).write_text(text.replace("LOGIT_FACTOR", str(logit_factor)))
    own = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModel": "modeling_own.OwnModel",
        f"AutoModelFor{kind}": f"modeling_own.OwnFor{kind}",
    }
    _change(folder / "config.json", model_type="own_model_of_a_test", architectures=[f"OwnFor{kind}"], auto_map=own)
    named = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", "tokenization_own.OwnTokenizer"]}
    _change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=named)
    return folder


def _change(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
