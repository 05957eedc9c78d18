"""Creates objects from configuration. Only this package combines environments, sandboxes and training."""
