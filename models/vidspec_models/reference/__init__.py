"""What the engine is compared with: stock transformers, and what a device can do at best."""
