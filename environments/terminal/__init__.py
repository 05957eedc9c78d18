"""Terminal: work in a shell of a sandbox on a task, whose tests then verify the result."""
