"""Ray clusters: one actor of ours on each node, with boxes around it, and a channel that leads straight to them."""
