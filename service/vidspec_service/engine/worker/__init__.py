"""What both workers share: the loop, prompts prepared in a thread beside it, measurements, the outbox."""
