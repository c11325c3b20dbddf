"""What happens in a training step and between steps: schedule, optimizer, loss, random state, signals, precision."""
