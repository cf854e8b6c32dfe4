"""What is known of each scheduler: directives, commands for jobs, and their output."""
