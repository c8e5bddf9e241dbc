"""Common parts of the pipelines that train on a fixed set of samples."""
