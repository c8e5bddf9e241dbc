"""What the pipelines share that train on a fixed set of samples."""
