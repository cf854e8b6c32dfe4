"""The outputs of a training: metrics, progress, traces and a summary."""
