"""What a step of a layout takes and holds: time and memory, for many candidate layouts at once."""
