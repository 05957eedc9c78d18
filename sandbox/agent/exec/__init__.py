"""Commands, shells and the processes that run them."""
