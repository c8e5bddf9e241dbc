"""The demonstration (``pretrain: tiny``): data, scripted play and a warm start. The library itself needs none of it."""
