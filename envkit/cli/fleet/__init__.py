"""Commands about sandboxes and servers of them."""
