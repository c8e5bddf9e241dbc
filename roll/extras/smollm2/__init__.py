"""``pretrain: smollm2``: SmolLM2-135M-Instruct as a model folder, made of a package of PyPI, without a model hub."""
