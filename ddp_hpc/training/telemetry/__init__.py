"""What a training reports: metrics, progress, traces, a summary."""
