"""Ray clusters: one actor of ours per node starts sandboxes there, and a direct channel leads to each sandbox."""
