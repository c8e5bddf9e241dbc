"""Lets torchvision be imported beside a CPU build of PyTorch, for which the package index has none.

    pip install --no-deps --target build/torchvision torchvision==0.28.0
    PYTHONPATH=tests/support/torchvision_alone:build/torchvision python -m pytest -m slow tests/parity/test_pictures.py

Its compiled part cannot be loaded there. Its transforms need none of the operators in it, but importing it fails at
those that it describes to the compiler, so these are declared first: in every process, as vLLM starts some.
"""

import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


class _Declares(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torchvision" or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        sys.meta_path.remove(self)
        import torch

        assert spec.submodule_search_locations
        source = (Path(spec.submodule_search_locations[0]) / "_meta_registrations.py").read_text()
        library = torch.library.Library("torchvision", "DEF")
        for operator in sorted(set(re.findall(r'(?:register_meta\("|torchvision::)(\w+)', source))):
            library.define(f"{operator}(Tensor a) -> Tensor")
        self.library = library  # its operators live as long as it does
        _kept.append(self)
        return spec


_kept: list[_Declares] = []
sys.meta_path.insert(0, _Declares())
